"""Which experts a routing fills, and which way what a block draws at random falls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protwin.runtime.routing.forced_choices import ForcedChoices, Routing, chosen_experts
from protwin.runtime.routing.value_dependence import ValueWatch
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import BlockId

BLOCK = BlockId(0)
BELOW_ONE = 1 - 2**-24
"""The largest float32 below 1: from a half to 1 they are 2**-24 apart, below a power of two so much more."""
OF_ALL = tuple(one for one in Routing if one.value.endswith("of all"))
NUM_ROWS = 24


def choices_of(routing: Routing) -> ForcedChoices:
    """In the forward of a block whose shapes depend on values."""
    watch = ValueWatch()
    watch.note((TaskKind.FORWARD, BLOCK), torch.ops.aten.nonzero.default, (torch.ones(2),))
    choices = ForcedChoices(routing, watch)
    choices.place = lambda: (TaskKind.FORWARD, BLOCK)
    return choices


# -- experts ---------------------------------------------------------------------------------------------------------


def fillest(routing: Routing, num_chosen: int, num_experts: int) -> set[int]:
    """As many experts as a row chooses, with the most rows."""
    chosen = chosen_experts(routing, torch.arange(NUM_ROWS), num_chosen, num_experts)
    rows = torch.bincount(chosen.flatten(), minlength=num_experts)
    return set(rows.argsort(descending=True, stable=True)[:num_chosen].tolist())


@given(st.integers(2, 7).flatmap(lambda number: st.tuples(st.integers(1, number - 1), st.just(number))))
def test_rows_go_where_the_routing_says(numbers: tuple[int, int]) -> None:
    num_chosen, num_experts = numbers
    experts = list(range(num_experts))
    first, last = set(experts[:num_chosen]), set(experts[-num_chosen:])
    for routing, full in {
        Routing.FIRST: first,
        Routing.FIRST_OF_ALL: first,
        Routing.LAST: last,
        Routing.LAST_OF_ALL: last,
    }.items():
        assert fillest(routing, num_chosen, num_experts) == full
    middle = sorted(fillest(Routing.MIDDLE_OF_ALL, num_chosen, num_experts))
    assert middle == experts[middle[0] : middle[0] + num_chosen], "side by side"
    before, behind = middle[0], num_experts - 1 - middle[-1]
    assert 0 <= behind - before <= 1, "as many before as behind"
    ends = fillest(Routing.ENDS_OF_ALL, num_chosen, num_experts)
    # Of an odd number the first end has one more.
    assert ends == set(experts[: (num_chosen + 1) // 2]) | set(experts[num_experts - num_chosen // 2 :])


@pytest.mark.parametrize("num_experts", [2, 3, 6])
def test_of_all_experts_in_order_the_preferred_one_is_where_the_routing_says(num_experts: int) -> None:
    """As a choice of one that is made by sorting."""
    full = dict.fromkeys(Routing, 0)
    full |= dict.fromkeys((Routing.LAST, Routing.LAST_OF_ALL), num_experts - 1)
    full |= {Routing.MIDDLE_OF_ALL: num_experts // 2}
    for routing in Routing:
        orders = chosen_experts(routing, torch.arange(NUM_ROWS), num_experts, num_experts)
        assert orders.sort(1).values.tolist() == [list(range(num_experts))] * NUM_ROWS
        rows = torch.bincount(orders[:, 0], minlength=num_experts).tolist()
        if routing is Routing.EVEN:
            assert max(rows) == min(rows)
            continue
        # Others have nothing, or one row.
        others = int(routing in OF_ALL)
        expected = [others] * num_experts
        expected[full[routing]] = NUM_ROWS - others * (num_experts - 1)
        assert rows == expected, routing


def test_thresholds_pass_but_where_experts_are_to_have_nothing() -> None:
    """Comparisons of whole numbers, and of a scalar, are no routers' scores."""
    scores, whole = torch.arange(6.0), torch.arange(6)
    for routing in Routing:
        choices = choices_of(routing)
        with choices:
            found = [(scores > 3).tolist(), (scores <= 1).tolist()]
        is_forced = routing not in (Routing.FIRST, Routing.LAST)
        assert found == ([[True] * 6] * 2 if is_forced else [[False] * 4 + [True] * 2, [True] * 2 + [False] * 4])
        assert choices.forced == {BLOCK}
        others = choices_of(routing)
        with others:
            assert (whole > 3).tolist() == [False] * 4 + [True] * 2
            assert not bool(scores.sum() > 100)
        assert others.forced == set()


# -- scalars that are drawn ------------------------------------------------------------------------------------------

DRAWS: dict[str, tuple[Callable[[], torch.Tensor], float, float]] = {
    "rand": (lambda: torch.rand(()), 0, BELOW_ONE),
    "uniform_": (lambda: torch.empty(1).uniform_(), 0, BELOW_ONE),
    "uniform_ from": (lambda: torch.empty(()).uniform_(-1, 1), -1, BELOW_ONE),
    "uniform_ to": (lambda: torch.empty(()).uniform_(0, 4), 0, 4 * BELOW_ONE),
    "uniform_ between": (lambda: torch.empty(()).uniform_(2, 4), 2, 4 * BELOW_ONE),
    "rand of bfloat16": (lambda: torch.rand((), dtype=torch.bfloat16), 0, 1 - 2**-8),
    "rand of float64": (lambda: torch.rand((), dtype=torch.float64), 0, 1 - 2**-53),
    "bernoulli_": (lambda: torch.empty(()).bernoulli_(0.5), 0, 1),
    "bernoulli": (lambda: torch.bernoulli(torch.full((1,), 0.5)), 0, 1),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_scalars_are_drawn_as_low_and_as_high_as_can_be_all_or_every_other(draw: str) -> None:
    make, low, high = DRAWS[draw]
    found = set()
    for routing in Routing:
        choices = choices_of(routing)
        with choices:
            drawn = tuple(make().item() for _ in range(6))
        assert set(drawn) <= {low, high}, "nothing between"
        assert choices.forced == {BLOCK}
        found.add(tuple(one == high for one in drawn))
    assert found == {(False,) * 6, (True,) * 6, (False, True) * 3, (True, False) * 3}


def test_every_phase_begins_with_its_first_draw() -> None:
    """A recomputation has as many as its forward, odd or even; what is drawn between them counts to neither."""
    choices = choices_of(Routing.FIRST_OF_ALL)
    drawn = []
    with choices:
        for kind in (TaskKind.FORWARD, TaskKind.RECOMPUTE):
            choices.place = lambda kind=kind: (kind, BLOCK)
            drawn.append([torch.rand(()).item() > 0.5 for _ in range(3)])
    assert drawn == [[False, True, False]] * 2


def test_what_is_no_scalar_is_drawn_as_ever() -> None:
    for routing in Routing:
        torch.manual_seed(1)
        usual = torch.rand(3)
        torch.manual_seed(1)
        choices = choices_of(routing)
        with choices:
            assert torch.equal(torch.rand(3), usual)
        assert choices.forced == set()


def test_a_loop_has_32_draws_that_fall_one_way() -> None:
    choices = choices_of(Routing.LAST_OF_ALL)
    torch.manual_seed(0)
    with choices:
        drawn = [torch.rand(()).item() for _ in range(40)]
    assert [one == BELOW_ONE for one in drawn] == [True] * 32 + [False] * 8

"""What a search leaves out by default is bounded truly, and the answer says so."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.answers.search_result import LeftOut, LeftOutSort, SearchResult
from protwin.shared.tables.search import left_out_sentence
from protwin.sim.commands.space_options import count_or_all
from protwin.sim.searching.left_out import left_out
from protwin.sim.searching.problem import search_problem
from protwin.sim.searching.request import SearchRequest
from protwin.sim.searching.search import search
from protwin.sim.space.space import ALL, SearchSpace
from tests.proof_size import examples
from tests.sim.brute_force import Case, Outcome, cases
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import machine, workload


def _request(found: Case, budget_bytes: int) -> SearchRequest:
    """A question about the case's residencies and checkpoints that leaves the rest to the defaults."""
    space = found.space
    return fastest_request(
        workload=found.workload,
        hardware=found.hardware,
        calibration=found.calibration,
        device_budget_bytes=max(1, budget_bytes),
        host_budget_bytes=max(outcome.host_bytes for outcome in found.outcomes),
        space=SearchSpace(
            chunk_bytes=space.chunk_bytes,
            n_persist=space.n_persist,
            prefetch_depth=space.prefetch_depth,
            n_checkpoint=space.n_checkpoint,
        ),
        step=found.asked_step,
    )


def _sort_of(outcome: Outcome) -> LeftOutSort | None:
    if outcome.plan.n_host_stepped:
        return LeftOutSort.HOST_STEPPED
    return LeftOutSort.SWAPS if outcome.plan.n_swap else None


@given(cases(), st.floats(0, 1))
@settings(max_examples=examples(300, 5))
def test_no_plan_that_is_left_out_is_faster_than_its_bound(found: Case, share: float) -> None:
    peaks = sorted({outcome.device_bytes for outcome in found.outcomes})
    budget_bytes = peaks[round(share * (len(peaks) - 1))]
    request = _request(found, budget_bytes)
    told = left_out(request, [search_problem(request)], limit_s=1e9)
    bounds_s = {one.sort: one.shortest_possible_s for one in told}
    for outcome in found.feasible(budget_bytes):
        sort = _sort_of(outcome)
        moves = any(found.workload.profile_of(block).swappable_bytes for block in range(outcome.plan.n_swap))
        if sort is LeftOutSort.SWAPS and not moves:
            continue  # they keep what they would swap
        bound_s = bounds_s.get(sort) if sort is not None else None
        # Where swaps are not named, none fits, or they take no time.
        assert sort is not LeftOutSort.SWAPS or sort in bounds_s or outcome.iteration_s < 1e-9
        assert bound_s is None or bound_s <= outcome.iteration_s


def _answer(space: SearchSpace | None = None) -> SearchResult:
    box = machine(gather_s=0.2, offload_s=0.3, cpu_adam_s=0.4)
    request = fastest_request(workload=workload(num_blocks=4), hardware=box, space=space or SearchSpace())
    return search(SearchRequest(**{**vars(request), "baselines": ()}))


def test_an_answer_names_what_it_left_out() -> None:
    result = _answer()
    # Its blocks have nothing to move.
    assert [one.sort for one in result.left_out] == [LeftOutSort.HOST_STEPPED]
    assert SearchResult.from_mapping(json.loads(result.to_json()), origin="memory") == result
    words = left_out_sentence(result)
    assert "--n-host-stepped all" in words


def test_nothing_that_was_searched_is_left_out() -> None:
    assert _answer(SearchSpace(n_swap=None, n_host_stepped=(0,))).left_out == ()


@pytest.mark.parametrize(
    ("bound_frac", "words"),
    [
        (1.5, "none of which is faster"),
        (0.95, "none of which is more than 5.0 % faster (within the uncertainty of "),
        (0.4, "none of which is more than 60.0 % faster."),
        (None, "of whose times nothing is known."),
    ],
)
def test_a_gain_is_told_beside_the_uncertainty(bound_frac: float | None, words: str) -> None:
    result = _answer()
    bound_s = None if bound_frac is None else bound_frac * result.prediction.iteration_s
    one = LeftOut(sort=LeftOutSort.SWAPS, shortest_possible_s=bound_s)
    uncertainty = result.uncertainty.model_copy(update={"device_frac": 0.1, "host_frac": 0.1})
    told = result.model_copy(update={"left_out": (one,), "uncertainty": uncertainty})
    assert words in left_out_sentence(told)


def test_all_values_of_a_knob_can_be_asked_for() -> None:
    assert [count_or_all(text) for text in ("3", ALL)] == [3, ALL]
    assert SearchSpace.model_validate({"n_swap": (3, ALL), "n_host_stepped": (ALL,)}) == SearchSpace(
        n_swap=None, n_host_stepped=None
    )

"""What depends on values is noticed by operation, and choices are made as a routing says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import trace
from protwin.runtime.model.batches import NothingLearntError
from protwin.runtime.routing.forced_choices import ForcedChoices, Routing, chosen_experts
from protwin.runtime.routing.other_batches import other_batches
from protwin.runtime.routing.value_dependence import ValueWatch, has_size_of_values, reads_values
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import BlockId

ATEN = torch.ops.aten
SCORES = torch.arange(24.0).reshape(6, 4)
PLACE = (TaskKind.FORWARD, BlockId(0))


def watching(*, is_sized: bool = True) -> ValueWatch:
    watch = ValueWatch()
    operator = ATEN.nonzero.default if is_sized else ATEN._local_scalar_dense.default
    watch.note(PLACE, operator, (SCORES,))
    return watch


@pytest.mark.parametrize(
    ("operator", "args", "depends"),
    [
        (ATEN.nonzero.default, (SCORES,), True),
        (ATEN.masked_select.default, (SCORES, SCORES > 3), True),
        (ATEN._unique2.default, (SCORES,), True),
        (ATEN.index.Tensor, (SCORES, [SCORES > 3]), True),
        (ATEN.index.Tensor, (SCORES, [None, torch.tensor([1, 2])]), False),
        (ATEN.topk.default, (SCORES, 2), False),
        (ATEN.mm.default, (SCORES, SCORES), False),
    ],
)
def test_sizes_of_values_are_noticed(operator: Any, args: tuple[Any, ...], depends: bool) -> None:
    assert has_size_of_values(operator, args) is depends


def test_values_that_the_program_reads_are_noticed_within_blocks_alone() -> None:
    assert reads_values(ATEN._local_scalar_dense.default)
    assert watching(is_sized=False).blocks == {0}
    assert watching(is_sized=False).sized_by_values == set()
    watch = ValueWatch()
    watch.note(None, ATEN.nonzero.default, (SCORES,))
    assert not watch.blocks


class Split(nn.Module):
    """Rows by expert, whose numbers the program has from a whole tensor."""

    def __init__(self, read: Callable[[torch.Tensor], Iterable[int]]) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 8) in and out."""
        scores = self.gate(x)
        chosen = scores.topk(1).indices[:, 0]
        sizes = [int(size) for size in self.read(torch.zeros(len(x), 2).scatter(1, chosen[:, None], 1).sum(0))]
        rows = x[chosen.argsort()].split(sizes)
        return x + torch.cat([expert(own).tanh().exp() for expert, own in zip(self.experts, rows, strict=True)])


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.numpy])
def test_values_are_noticed_that_are_read_without_an_operator(read: Callable[[torch.Tensor], Iterable[int]]) -> None:
    """A list or an array of a CPU tensor's values is made without one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Split(read)))
    workload = trace(model, torch.randn(16, 8), loss=lambda output, _: output.square().mean(), blocks=["1"], repeats=0)
    assert all(profile.seen is not None and profile.seen.is_forced for profile in workload.profiles)


@pytest.mark.parametrize("routing", list(Routing))
@pytest.mark.parametrize(("num_chosen", "num_experts"), [(1, 4), (2, 4), (2, 6), (4, 4)])
def test_every_row_chooses_different_experts(routing: Routing, num_chosen: int, num_experts: int) -> None:
    chosen = chosen_experts(routing, torch.arange(24), num_chosen, num_experts)
    assert chosen.shape == (24, num_chosen)
    assert all(len(set(row)) == num_chosen for row in chosen.tolist())
    rows = torch.bincount(chosen.flatten(), minlength=num_experts).tolist()
    assert len(rows) == num_experts
    if num_chosen == num_experts or routing is Routing.EVEN:
        assert max(rows) - min(rows) <= 24 % num_experts
    elif routing in (Routing.FIRST, Routing.LAST):
        assert sorted(rows) == [0] * (num_experts - num_chosen) + [24] * num_chosen
    else:
        assert sorted(rows)[: num_experts - num_chosen] == [1] * (num_experts - num_chosen)


@pytest.mark.parametrize("choose", [lambda s: s.topk(1).indices[:, 0], lambda s: s.argmax(-1), lambda s: s.max(1)[1]])
def test_choices_are_forced_in_noticed_blocks_alone(choose: Any) -> None:
    choices = ForcedChoices(Routing.FIRST, watching())
    with choices:
        assert choose(SCORES).tolist() == [3] * 6
        choices.place = lambda: PLACE
        assert choose(SCORES).tolist() == [0] * 6
        choices.place = lambda: (TaskKind.FORWARD, BlockId(1))
        assert choose(SCORES).tolist() == [3] * 6
    assert choices.forced == {0}


def test_comparisons_pass_only_where_shapes_depend_on_values() -> None:
    for is_sized in (True, False):
        choices = ForcedChoices(Routing.EVEN, watching(is_sized=is_sized))
        choices.place = lambda: PLACE
        with choices:
            passed = SCORES > 10
        # A loop that runs until none passes would never end.
        assert bool(passed.all()) is is_sized


def test_other_batches_have_other_data_and_the_same_masks_and_shapes() -> None:
    batch = {"input_ids": torch.arange(12).reshape(3, 4), "attention_mask": torch.eye(3, 4)}
    for other in other_batches(batch):
        assert isinstance(other, dict)
        assert torch.equal(other["attention_mask"], batch["attention_mask"])
        assert other["input_ids"].shape == (3, 4)
        assert not torch.equal(other["input_ids"], batch["input_ids"])


DRAWS: dict[str, Callable[[], float]] = {
    "rand": lambda: torch.rand(()).item(),
    "uniform_": lambda: torch.empty(1).uniform_(0, 1).item(),
    "bernoulli_": lambda: torch.empty(()).bernoulli_(0.5).item(),
    "bernoulli": lambda: torch.bernoulli(torch.full((1,), 0.5)).item(),
    "uniform_ of signs": lambda: (torch.empty(()).uniform_(-1, 1).item() + 1) / 2,
}


class LayerDrop(nn.Module):
    """A residual part that is left out where what is drawn is at most ``rate``; two are drawn, and the second counts
    the other way round.
    """

    def __init__(self, draw: Callable[[], float], rate: float) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)
        self.draw, self.rate = draw, rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 8) in and out."""
        x = x * 1.0
        if self.draw() > self.rate:
            x = x + self.narrow(self.wide(x).tanh())
        return x + self.narrow(self.wide(x).exp()) if self.draw() < 1 - self.rate else x


@pytest.mark.parametrize("draw", DRAWS)
def test_what_a_block_leaves_out_at_random_is_accounted_for_whatever_the_trace_has_drawn(draw: str) -> None:
    """Each trace's phases hold what a model takes that never leaves anything out."""

    def traced(rate: float, seed: int) -> list[int]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(LayerDrop(DRAWS[draw], rate)))
        points = torch.randn(16, 8)
        workload = trace(model, points, loss=lambda output, _: output.square().mean(), blocks=["1"], repeats=0)
        (profile,) = workload.profiles
        return [value for phase in profile.phases for value in (phase.peak_bytes, phase.net_bytes)]

    whole = traced(-1.0, seed=0)
    for seed in range(3):
        found = traced(0.5, seed)
        assert found[0] >= whole[0], "the forward's peak"
        assert found[1] >= whole[1], "what it leaves"


def test_a_recomputation_draws_what_its_forward_has_drawn() -> None:
    """Between two forwards of a block other operations ran, and none drew; an odd number each is another turn."""

    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """(n, 8) in and out."""
            return x + (self.map(x).tanh() if torch.rand(()) > 0.5 else x * 0)

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Drop()), nn.Linear(8, 8))
    workload = trace(model, torch.randn(4, 8), loss=lambda output, _: output.square().mean(), blocks="1", repeats=0)
    (profile,) = workload.profiles
    assert profile.recompute.net_bytes > 0


def test_a_loop_that_draws_until_one_passes_ends() -> None:
    watch = watching(is_sized=False)
    for routing in Routing:
        choices = ForcedChoices(routing, watch)
        choices.place = lambda: PLACE
        with choices:
            while torch.rand(()) > 0.5:
                pass
            while torch.rand(()) < 0.5:
                pass


class LeftOut(nn.Module):
    """A residual part, which alone learns, that is there where what is drawn is above ``rate``; else one that is
    ``wide``, if at all.
    """

    def __init__(self, rate: float, wide: int = 0) -> None:
        super().__init__()
        self.base, self.up, self.down = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 32), nn.Linear(32, 8)
        self.other = nn.Linear(8, wide).requires_grad_(False) if wide else None
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 8) in and out."""
        x = self.base(x)
        if torch.rand(1).item() > self.rate:
            return x + self.down(self.up(x).tanh())
        return x + self.other(x).tanh().mean() if self.other is not None else x


def left_out(rate: float, num_blocks: int, wide: int = 0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(LeftOut(rate, wide) for _ in range(num_blocks)))


def peaks(model: nn.Module) -> list[tuple[int, ...]]:
    """Of each block, the highest levels of its phases."""
    workload = trace(model, torch.randn(16, 8), loss=lambda output, _: output.square().mean(), blocks="", repeats=0)
    profiles = [workload.profiles[block.profile] for block in workload.blocks]
    return [tuple(phase.peak_bytes for phase in profile.phases) for profile in profiles]


@pytest.mark.parametrize("num_blocks", [3, 4])
def test_what_learns_may_be_left_out_everywhere(num_blocks: int) -> None:
    """A base that stays beside adapters with a dropout of whole modules, as LoHa's and LoKr's."""
    whole = peaks(left_out(-1.0, num_blocks))
    for rate in (0.0, 0.3):
        assert peaks(left_out(rate, num_blocks)) == whole


def test_what_nothing_learns_from_is_accounted_for_in_each_block() -> None:
    """If all blocks took it there would be no backward: each takes it where others do not."""
    points, wide = 16, 1_000
    for of_block in peaks(left_out(1e-9, 3, wide)):
        assert of_block[0] >= 2 * points * wide * torch.float32.itemsize, "the map's result and its tanh"


def test_where_nothing_learns_whatever_is_drawn_there_is_no_training() -> None:
    model: Any = left_out(0.3, 2)
    for block in model:
        block.register_forward_hook(lambda _, __, output: output.detach())
    with pytest.raises(NothingLearntError, match="depends on no trainable parameter"):
        peaks(model)

"""Wrong variants of what ranks do together, each put in the place of the right one for one training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import torch

from protwin.runtime.chunks.placed_model import PlacedModel
from protwin.runtime.chunks.sharded_chunk import ShardedChunk
from protwin.runtime.lanes import transfer_lanes
from protwin.runtime.lanes.compute_lane import ComputeLane
from protwin.runtime.lanes.rank_work import RankWork
from protwin.runtime.lanes.waits import Waits, waits_of
from protwin.runtime.ranks import ordered_sums
from protwin.runtime.ranks.collectives import Collectives
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Schedule, Task, TaskKind
from tests.runtime.ranks.beside_ddp import Found, averaged, train


@contextmanager
def _mean_of_those_that_have_one() -> Iterator[None]:
    """A parameter that one rank alone uses: its gradient is not divided by the number of ranks."""
    agree = RankWork._agree

    def counted(self: RankWork, chunk: Any, gradients: Sequence[torch.Tensor | None]) -> list[int]:
        missing = agree(self, chunk, gradients)
        self.is_whole = torch.tensor([float(g is not None) for g in gradients])  # type: ignore[attr-defined]
        self._collectives.add_up([self.is_whole])  # type: ignore[attr-defined]
        return missing

    average = RankWork._average

    def unequal(self: RankWork, chunk: Any, gradients: list[torch.Tensor | None], count: Any) -> None:
        average(self, chunk, gradients, count)
        for gradient, number in zip(gradients, self.is_whole.tolist(), strict=True):  # type: ignore[attr-defined]
            if gradient is not None:
                gradient.mul_(self._collectives.num_ranks / number)

    with mock.patch.object(RankWork, "_agree", counted), mock.patch.object(RankWork, "_average", unequal):
        yield


@contextmanager
def _reduced_before_the_last_micro_batch() -> Iterator[None]:
    """Gradients that stay are averaged after the first micro-batch, and the last one's are added as they are."""
    end_backward = ComputeLane.end_backward

    def early(self: ComputeLane) -> None:
        end_backward(self)
        if self._place != len(self._program) - 1:
            for chunk in self._placed.chunks:
                for parameter in chunk.trainable if chunk.is_persistent else ():
                    parameter.grad = averaged(parameter)

    def nothing(self: RankWork, chunk: Any, iteration: int) -> None:
        self._staying.pop((iteration, chunk.chunk.id))

    with (
        mock.patch.object(ComputeLane, "end_backward", early),
        mock.patch.object(RankWork, "_average_staying", nothing),
    ):
        yield


@contextmanager
def _left_before_it_was_averaged() -> Iterator[None]:
    """Gradients are copied to the host as this rank has them."""
    work = RankWork.work

    def skipping(self: RankWork, task: Task, iteration: int) -> Callable[[], None]:
        assert task.chunk is not None
        return work(self, task, iteration) if self._placed.chunks[task.chunk].is_persistent else lambda: None

    with mock.patch.object(RankWork, "work", skipping):
        yield


@contextmanager
def _added_up_alone() -> Iterator[None]:
    """A sum in the place of the mean: AdamW hardly sees it, a limited norm does."""
    average = RankWork._average

    def summed(self: RankWork, chunk: Any, gradients: list[torch.Tensor | None], count: Any) -> None:
        average(self, chunk, gradients, count)
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(self._collectives.num_ranks)

    with mock.patch.object(RankWork, "_average", summed):
        yield


@contextmanager
def _shards_off_by_one() -> Iterator[None]:
    """Gradients are laid flat one scalar behind the parameters that they are of."""
    flattened = ShardedChunk.flattened

    def shifted(
        self: ShardedChunk, gradients: Sequence[torch.Tensor | None], flats: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        return [whole.copy_(whole.roll(1)) for whole in flattened(self, gradients, flats)]

    with mock.patch.object(ShardedChunk, "flattened", shifted):
        yield


@contextmanager
def _gathered_before_the_step() -> Iterator[None]:
    """A gather does not wait for the step that writes what it reads; steps take their time."""
    step_on_host = PlacedModel.step_on_host

    def hasty(schedule: Schedule) -> list[Waits]:
        steps = {task.id for task in schedule.tasks if task.kind is TaskKind.CPU_ADAM}
        return [
            replace(waits, previous=tuple(t for t in waits.previous if t not in steps))
            if task.kind is TaskKind.GATHER
            else waits
            for task, waits in zip(schedule.tasks, waits_of(schedule), strict=True)
        ]

    def slow(self: PlacedModel, *args: Any, **options: Any) -> None:
        time.sleep(0.05)
        step_on_host(self, *args, **options)

    with (
        mock.patch.object(transfer_lanes, "waits_of", hasty),
        mock.patch.object(PlacedModel, "step_on_host", slow),
    ):
        yield


@contextmanager
def _norm_of_one_rank() -> Iterator[None]:
    """Each rank limits the norm of its own parts."""
    with mock.patch.object(Collectives, "add_up", return_value=None):
        yield


@contextmanager
def _in_the_order_of_a_ring() -> Iterator[None]:
    """The library chooses the order in which it adds up."""
    with mock.patch.object(ordered_sums, "is_ordered_here", return_value=False):
        yield


_WRONG: Final[Mapping[str, Callable[[], AbstractContextManager[None]]]] = {
    "mean of unequal parts": _mean_of_those_that_have_one,
    "reduced too early": _reduced_before_the_last_micro_batch,
    "left too early": _left_before_it_was_averaged,
    "sum": _added_up_alone,
    "off by one": _shards_off_by_one,
    "gathered too early": _gathered_before_the_step,
    "norm of one rank": _norm_of_one_rank,
    "in the order of a ring": _in_the_order_of_a_ring,
}
VARIANTS: Final = (
    ("mean of unequal parts", "gated", ParallelMode.DDP, 0),
    ("mean of unequal parts", "gated", ParallelMode.REPLICATED, 0),
    ("reduced too early", "gated", ParallelMode.DDP, 1),
    ("left too early", "gated", ParallelMode.REPLICATED, 0),
    ("sum", "gated", ParallelMode.DDP, 0),
    ("off by one", "gated", ParallelMode.SHARDED, 2),
    ("gathered too early", "gated", ParallelMode.SHARDED, 3),
    ("norm of one rank", "gated", ParallelMode.SHARDED, 0),
)
"""Variant, model, mode and seed of a plan that shows it."""


def within(variant: str | None) -> AbstractContextManager[None]:
    """Within the block this variant is in the place of the right one; None: the right one."""
    return nullcontext() if variant is None else _WRONG[variant]()


def train_wrong(rank: int, variant: str, name: str, plan: Plan, num_batches: int) -> Found:
    """``train`` with one thing done wrong."""
    with within(variant):
        return train(rank, name, plan, num_batches)

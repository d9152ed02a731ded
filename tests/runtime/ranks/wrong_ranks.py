"""Wrong variants of what ranks do together, each put in the place of the right one for one training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import torch

from protwin.runtime.ranks.collectives import Collectives
from protwin.runtime.training.compute_lane import ComputeLane
from protwin.runtime.training.rank_work import RankWork
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import Task
from tests.runtime.ranks.beside_ddp import Found, averaged, train


@contextmanager
def _mean_of_those_that_have_one() -> Iterator[None]:
    """A parameter that one rank alone uses: its gradient is not divided by the number of ranks."""
    agree = RankWork._agree

    def counted(self: RankWork, chunk: Any, gradients: Sequence[torch.Tensor | None]) -> list[int]:
        missing = agree(self, chunk, gradients)
        self.is_whole = torch.tensor([float(g is not None) for g in gradients])  # type: ignore[attr-defined]
        self._collectives.add_up(self.is_whole)  # type: ignore[attr-defined]
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
        return work(self, task, iteration) if self._placed.chunks[task.chunk].is_persistent else lambda: None

    with mock.patch.object(RankWork, "work", skipping):
        yield


@contextmanager
def _added_up_alone() -> Iterator[None]:
    """A sum in the place of the mean: AdamW hardly sees it, a limited norm does."""
    average = Collectives.average

    def summed(self: Collectives, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        average(self, gradients)
        for gradient, _ in gradients:
            gradient.mul_(self.num_ranks)

    with mock.patch.object(Collectives, "average", summed):
        yield


_WRONG: Final[Mapping[str, Callable[[], Any]]] = {
    "mean of unequal parts": _mean_of_those_that_have_one,
    "reduced too early": _reduced_before_the_last_micro_batch,
    "left too early": _left_before_it_was_averaged,
    "sum": _added_up_alone,
}
VARIANTS: Final = (
    ("mean of unequal parts", "gated", ParallelMode.DDP, 0),
    ("mean of unequal parts", "gated", ParallelMode.REPLICATED, 0),
    ("reduced too early", "gated", ParallelMode.DDP, 1),
    ("left too early", "gated", ParallelMode.REPLICATED, 0),
    ("sum", "gated", ParallelMode.DDP, 3),
)
"""Variant, model, mode and seed of a plan that shows it."""


def train_wrong(rank: int, variant: str, name: str, plan: Plan, num_batches: int) -> Found:
    """``train`` with one thing done wrong."""
    with _WRONG[variant]():
        return train(rank, name, plan, num_batches)

"""Training of any number of ranks by one process, in plain PyTorch: what saving, resuming and resharding must equal.

Ranks take turns with one model.  Their gradients are added up in the order of the ranks and scaled once, which is the
mean that ranks take together (``runtime/ranks/ordered_sums.py``); AdamW's state stays in memory all the time.
"""

from __future__ import annotations

import torch

from tests.runtime.models import Case, Masters, snapshot, uncached
from tests.runtime.ranks.beside_ddp import batches_of, prepare


class PlainRanks:
    """A model without random numbers and statistics, which any number of ranks train, now these, now those."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._model = uncached(case.build())
        self._masters = Masters(self._model)
        self._optimizer = case.make_optimizer(self._masters.groups(case.groups(self._model)))
        self._num_steps = 0

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Weights and buffers."""
        return snapshot(self._model)

    def train(self, num_ranks: int, last: int) -> list[list[float]]:
        """Up to step ``last`` with so many ranks, one micro-batch each; gives the losses of every rank."""
        losses: list[list[float]] = [[] for _ in range(num_ranks)]
        batches = [batches_of(self._case, rank, num_ranks, 1, last) for rank in range(num_ranks)]
        for step in range(self._num_steps, last):
            gradients = []
            for rank in range(num_ranks):
                (batch,) = batches[rank][step]
                loss = self._case.loss(prepare(self._model, rank), batch)
                loss.backward()
                losses[rank].append(loss.item())
                gradients.append([parameter.grad for parameter in self._model.parameters()])
                self._model.zero_grad()
            for parameter, of_ranks in zip(self._model.parameters(), zip(*gradients, strict=True), strict=True):
                parameter.grad = _mean(of_ranks)
            self._masters.take_gradients()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._masters.give_weights()
        self._num_steps = last
        return losses


def _mean(of_ranks: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    """A gradient that is missing on some ranks counts as zeros there; one that all lack stays missing."""
    there = next((gradient for gradient in of_ranks if gradient is not None), None)
    if there is None:
        return None
    first, *others = (torch.zeros_like(there) if gradient is None else gradient for gradient in of_ranks)
    total = first.clone()
    for other in others:
        total += other
    return total * (1 / len(of_ranks))

"""Plain training: the loop that everybody writes, for comparison; under a ledger if its memory is to be known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..devices.ledger import MemoryLedger
from ..model.batches import Batch, Loss, batch_tensors, loss_of
from ..model.snapshot import without_cache
from ..optimizers.chunk_optimizer import MakeOptimizer


@dataclass(frozen=True, slots=True)
class PlainRun:
    """What a plain run gave."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    """Of each step; a metered run's are not to be quoted."""
    peak_bytes: int
    """Highest level of the ledger; 0 without one."""


def train_plainly(
    model: nn.Module,
    batches: Iterable[Batch],
    make_optimizer: MakeOptimizer,
    *,
    loss: Loss | None = None,
    ledger: MemoryLedger | None = None,
    on_step: Callable[[], None] | None = None,
) -> PlainRun:
    """Train ``model`` in place: forward, backward, step, zero_grad.

    With a ledger every operation counts and its budget is enforced: raises CpuOutOfMemoryError beyond it.
    """
    if ledger is not None:
        ledger.doing = "training plainly"
        ledger.adopt([*model.parameters(), *model.buffers()])
    optimizer = make_optimizer([{"params": [p for p in model.parameters() if p.requires_grad]}])
    losses: list[float] = []
    seconds: list[float] = []
    with without_cache(model):
        for batch in batches:
            start = time.perf_counter()
            if ledger is None:
                losses.append(_step(model, batch, loss, optimizer))
            else:
                ledger.adopt_inputs(batch_tensors(batch).values())
                with ledger.metering():
                    losses.append(_step(model, batch, loss, optimizer))
                ledger.adopt(t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
            seconds.append(time.perf_counter() - start)
            if on_step is not None:
                on_step()
    return PlainRun(tuple(losses), tuple(seconds), ledger.peak_bytes if ledger is not None else 0)


def _step(model: nn.Module, batch: Batch, loss: Loss | None, optimizer: torch.optim.Optimizer) -> float:
    value = loss_of(model, batch, loss)
    value.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return value.item()

"""How long every section of an iteration takes, with nobody watching its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import nn

from ..shared.plan import ActivationMode
from ..shared.schedule import Section, TaskKind
from .batches import Batch, Loss, loss_of
from .blocks import NamedBlock
from .observing import PhaseKey
from .walk import SectionWalker

WARM_UP_ITERATIONS: Final = 2
"""Iterations before those that count."""


class _Stopwatch:
    """Seconds of every section of one iteration."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[PhaseKey, float] = {}
        self._device = device
        self._current: PhaseKey | None = None
        self._since = 0.0

    def begin(self, kind: TaskKind, section: Section) -> None:
        now = self._now()
        if self._current is not None:
            self.seconds[self._current] = now - self._since
        self._current, self._since = (kind, section), self._now()

    def end_backward(self) -> None:
        if self._current is not None:
            self.seconds[self._current] = self._now() - self._since
        self._current = None

    def _now(self) -> float:
        """The time when everything so far is done: an accelerator runs behind the thread that launches."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def time_sections(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    blocks: Sequence[NamedBlock],
    modes: Iterable[ActivationMode],
    repeats: int,
    on_iteration: Callable[[], None],
) -> dict[ActivationMode, dict[PhaseKey, float]]:
    """Median seconds of every section over ``repeats`` iterations in each mode, the first ones thrown away.

    Modes take turns, iteration by iteration: a slow moment of a shared machine must not make one look dearer.
    """
    runs: dict[ActivationMode, list[dict[PhaseKey, float]]] = {mode: [] for mode in modes}
    for _ in range(WARM_UP_ITERATIONS + repeats):
        for mode, found in runs.items():
            found.append(_time_once(model, batch, loss, blocks, mode))
            on_iteration()
    medians = {}
    for mode, found in runs.items():
        counted = found[WARM_UP_ITERATIONS:]
        medians[mode] = {key: statistics.median(run[key] for run in counted) for key in counted[0]}
    return medians


def _time_once(
    model: nn.Module, batch: Batch, loss: Loss | None, blocks: Sequence[NamedBlock], mode: ActivationMode
) -> dict[PhaseKey, float]:
    stopwatch = _Stopwatch(next(model.parameters()).device)
    walker = SectionWalker(model, blocks, [mode] * len(blocks), stopwatch)
    try:
        loss_of(model, batch, loss).backward()  # type: ignore[no-untyped-call]
    finally:
        walker.remove()
        for parameter in model.parameters():
            parameter.grad = None
    return stopwatch.seconds

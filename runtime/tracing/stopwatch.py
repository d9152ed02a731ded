"""How long every section of an iteration takes, with nobody watching its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol

import torch
from torch import nn

from ...shared.observed.observed_inputs import PhaseKey
from ...shared.schema.plan import ActivationMode
from ...shared.schema.schedule import Section, TaskKind
from ..hooks.section_walker import SectionWalker
from ..model.batches import Batch, Loss, loss_of
from ..model.blocks import NamedBlock

WARM_UP_ITERATIONS: Final = 2
"""Iterations before those that count."""


class Stopwatch(Protocol):
    """Seconds of every section of one iteration."""

    def begin(self, kind: TaskKind, section: Section) -> None:
        """``kind`` of ``section`` begins; what was announced before has ended."""

    def end_backward(self) -> None:
        """The last section has ended."""

    def seconds(self) -> dict[PhaseKey, float]:
        """Of all of them."""
        ...


class _Stopwatch:
    """Seconds of every section of one iteration on the CPU."""

    def __init__(self) -> None:
        self._seconds: dict[PhaseKey, float] = {}
        self._current: PhaseKey | None = None
        self._since = 0.0

    def begin(self, kind: TaskKind, section: Section) -> None:
        self._end()
        self._current, self._since = (kind, section), time.perf_counter()

    def end_backward(self) -> None:
        self._end()
        self._current = None

    def seconds(self) -> dict[PhaseKey, float]:
        return self._seconds

    def _end(self) -> None:
        if self._current is not None:
            self._seconds[self._current] = time.perf_counter() - self._since


class _EventStopwatch:
    """The same on a CUDA device, by events on the stream of the model.

    Nothing waits between sections, as nothing waits in training: the thread that launches stays ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[PhaseKey | None, Any]] = []
        torch.cuda.synchronize(device)

    def begin(self, kind: TaskKind, section: Section) -> None:
        self._mark((kind, section))

    def end_backward(self) -> None:
        self._mark(None)

    def seconds(self) -> dict[PhaseKey, float]:
        self._marks[-1][1].synchronize()
        return {
            key: start.elapsed_time(end) * 1e-3 for (key, start), (_, end) in pairwise(self._marks) if key is not None
        }

    def _mark(self, key: PhaseKey | None) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((key, event))


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
    return {mode: medians_of(found) for mode, found in runs.items()}


def stopwatch_on(device: torch.device) -> Stopwatch:
    """What times sections on ``device``."""
    return _EventStopwatch(device) if device.type == "cuda" else _Stopwatch()


def medians_of(runs: Sequence[dict[PhaseKey, float]]) -> dict[PhaseKey, float]:
    """Of the runs that count: the first ones warm up."""
    counted = runs[WARM_UP_ITERATIONS:]
    return {key: statistics.median(run[key] for run in counted) for key in counted[0]}


def _time_once(
    model: nn.Module, batch: Batch, loss: Loss | None, blocks: Sequence[NamedBlock], mode: ActivationMode
) -> dict[PhaseKey, float]:
    stopwatch = stopwatch_on(next(model.parameters()).device)
    walker = SectionWalker(model, blocks, [mode] * len(blocks), stopwatch)
    try:
        loss_of(model, batch, loss).backward()  # type: ignore[no-untyped-call]
    finally:
        walker.remove()
        for parameter in model.parameters():
            parameter.grad = None
    return stopwatch.seconds()

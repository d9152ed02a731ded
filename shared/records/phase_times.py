"""The parts of an iteration that people speak of: forward, backward, and what remains for the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ..schema.record import IterationPhase
from ..schema.schedule import Schedule, TaskKind

_PHASE_OF: Final = {
    TaskKind.FORWARD: IterationPhase.FORWARD,
    TaskKind.TEACHER_FORWARD: IterationPhase.FORWARD,
    TaskKind.LOSS: IterationPhase.FORWARD,
    TaskKind.RECOMPUTE: IterationPhase.BACKWARD,
    TaskKind.BACKWARD: IterationPhase.BACKWARD,
}


def phase_times_s(schedule: Schedule, ends_s: Sequence[float]) -> tuple[float, float]:
    """Seconds of all forwards and of all backwards, recomputation included.

    ``ends_s`` are the ends of the tasks since the iteration's start, by id.  A forward lasts from the end of the
    micro-batch before, so that waiting counts where it happens.
    """
    forward_s = backward_s = 0.0
    for phase, begin_s, end_s in phase_spans_s(schedule, ends_s):
        if phase is IterationPhase.FORWARD:
            forward_s += end_s - begin_s
        else:
            backward_s += end_s - begin_s
    return forward_s, backward_s


def phase_spans_s(schedule: Schedule, ends_s: Sequence[float]) -> Iterator[tuple[IterationPhase, float, float]]:
    """Begin and end of forwards and backwards, in order, each from the end of the one before.

    In full training a micro-batch has one of each, in bypass distillation one for every pair of blocks, whose loss is a
    part of forward.  ``ends_s`` as of ``phase_times_s``.  The optimizer's phase is what remains of the iteration.
    """
    at_s = end_s = 0.0
    current, micro_batch = IterationPhase.FORWARD, 0
    for task in schedule.tasks:
        phase = _PHASE_OF.get(task.kind)
        if phase is None:
            continue
        if (phase, task.micro_batch) != (current, micro_batch):
            yield current, at_s, end_s
            at_s, current, micro_batch = end_s, phase, task.micro_batch
        end_s = max(end_s, ends_s[task.id])
    yield current, at_s, end_s

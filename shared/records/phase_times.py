"""The parts of an iteration that people speak of: forward, backward, and what remains for the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..schema.record import IterationPhase
from ..schema.schedule import Schedule, TaskKind


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
    """Begin and end of every micro-batch's forward and backward, in order, each from the end of the one before.

    ``ends_s`` as of ``phase_times_s``.  The optimizer's phase is what remains of the iteration.
    """
    last_s: dict[tuple[int, TaskKind], float] = {}
    for task in schedule.tasks:
        part = task.micro_batch, task.kind
        last_s[part] = max(last_s.get(part, 0.0), ends_s[task.id])
    at_s = 0.0
    for micro_batch in range(schedule.micro_batches):
        for phase, kind in (
            (IterationPhase.FORWARD, TaskKind.FORWARD),
            (IterationPhase.BACKWARD, TaskKind.BACKWARD),
        ):
            end_s = max(at_s, last_s[micro_batch, kind])
            yield phase, at_s, end_s
            at_s = end_s

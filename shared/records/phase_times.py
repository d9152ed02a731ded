"""The parts of an iteration that people speak of: forward, backward, and what remains for the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from ..schema.schedule import Schedule, TaskKind


def phase_times_s(schedule: Schedule, ends_s: Sequence[float]) -> tuple[float, float]:
    """Seconds of all forwards and of all backwards, recomputation included.

    ``ends_s`` are the ends of the tasks since the iteration's start, by id.  A forward lasts from the end of the
    micro-batch before, so that waiting counts where it happens.
    """
    last_s: dict[tuple[int, TaskKind], float] = {}
    for task in schedule.tasks:
        part = task.micro_batch, task.kind
        last_s[part] = max(last_s.get(part, 0.0), ends_s[task.id])
    forward_s = backward_s = at_s = 0.0
    for micro_batch in range(schedule.micro_batches):
        for kind in (TaskKind.FORWARD, TaskKind.BACKWARD):
            end_s = max(at_s, last_s[micro_batch, kind])
            if kind is TaskKind.FORWARD:
                forward_s += end_s - at_s
            else:
                backward_s += end_s - at_s
            at_s = end_s
    return forward_s, backward_s

"""What every task waits for as it is carried out: in place of an exchange of sequences, what stands around it.

[Note: Exchanges have no lane]
A schedule has exchanges of sequences in the lane of collectives ([Note: Exchanges] in
``shared/compile/sections.py``).  In truth they are within the compute task behind them, on the compute thread, and no
lane does them.  Memory relies on the lane's order all the same: what is guaranteed about levels, and when room is made
(``shared/order``).  So both neighbours keep it.  The compute task behind an exchange waits for what stands before it in
the lane, and what stands behind it waits for the compute task that the exchange waits for.  Without the former,
gradients that are added up late lie beside the next micro-batch's activations; without the latter, the first block's
chunks come while the step before still has the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ...shared.schema.schedule import Lane, Schedule, Task, TaskId, TaskKind


@dataclass(frozen=True, slots=True)
class Waits:
    """Tasks that one waits for, none of them within a compute task."""

    now: tuple[TaskId, ...]
    """Of the same iteration."""
    previous: tuple[TaskId, ...]
    """Of the one before."""


def waits_of(schedule: Schedule) -> list[Waits]:
    """Of every task ([Note: Exchanges have no lane])."""
    tasks, program = schedule.tasks, schedule.lanes[Lane.COLLECTIVE]
    place = {task: at for at, task in enumerate(program)}
    found = []
    for task in tasks:
        now, previous = [o for o in task.after if not is_within_compute(tasks[o])], list(task.after_previous)
        for other in task.after:
            if is_within_compute(tasks[other]):
                for before, of_iteration in _backwards(program, place[other], now, previous):
                    if not is_within_compute(tasks[before]):
                        of_iteration.append(before)
                        break
        if task.lane is Lane.COLLECTIVE:
            in_lane = _backwards(program, place[task.id], now, previous)
            for before, of_iteration in takewhile(lambda at: is_within_compute(tasks[at[0]]), in_lane):
                of_iteration.extend(tasks[before].after)
        found.append(Waits(tuple(dict.fromkeys(now)), tuple(dict.fromkeys(previous))))
    return found


def _backwards(
    program: Sequence[TaskId], at: int, now: list[TaskId], previous: list[TaskId]
) -> Iterator[tuple[TaskId, list[TaskId]]]:
    """What stands before a place of a lane, the nearest first, each with the waits of its iteration."""
    yield from ((task, now) for task in reversed(program[:at]))
    yield from ((task, previous) for task in reversed(program[at:]))


def ahead_of(schedule: Schedule, iteration: int) -> list[tuple[int, TaskId]]:
    """What lanes do before the compute lane begins ``iteration``, if all before it is done: (iteration, task).

    They are queued up to the end of the next iteration.
    """
    found: dict[tuple[int, TaskId], None] = {}
    is_open = dict.fromkeys(schedule.lanes, True)
    waits = waits_of(schedule)
    for at in (iteration, iteration + 1):
        for task in schedule.tasks:
            if is_within_compute(task):
                continue
            is_done = all((at, other) in found for other in waits[task.id].now)
            if at > iteration:
                is_done = is_done and all((at - 1, other) in found for other in waits[task.id].previous)
            if task.lane is Lane.COMPUTE or not is_open[task.lane] or not is_done:
                is_open[task.lane] = False
                continue
            found[at, task.id] = None
    return list(found)


def is_within_compute(task: Task) -> bool:
    """Whether ranks exchange it on the compute thread, within the compute task behind it: no lane does it."""
    return task.kind is TaskKind.SEQUENCE_EXCHANGE

"""What a record says of an iteration of many micro-batches of which few were simulated.

See [Note: Folded iterations] in ``sim/engine/folding.py``.  A task that comes after what is left out stands for its
counterpart in as many micro-batches later, which runs as much later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from ...shared.records.flops import hardware_flops
from ...shared.records.phase_times import phase_spans_s
from ...shared.records.phase_waits import SpanOf, phase_waits
from ...shared.schema.record import IterationPhase, MemoryCurve, PhaseWait, TaskTiming
from ...shared.schema.schedule import Lane, Task, TaskId
from .timing import Fold

_TOLD_APART: Final = 3
"""Micro-batches left out that tell of any number of them."""
MOST_LISTED: Final = 50_000
"""Tasks, and points of a memory curve, that a record lists at most; else it leaves the repeated part out."""


def after_cut(fold: Fold) -> set[int]:
    """The tasks that come after what is left out."""
    lanes = fold.kept.schedule.lanes
    return {task for lane, cut in zip(Lane, fold.cuts, strict=True) for task in lanes[lane][cut:]}


def repeated_tasks(fold: Fold) -> list[Task]:
    """The tasks of the micro-batch that those left out are like."""
    schedule = fold.kept.schedule
    return [
        schedule.tasks[task]
        for lane, cut, length in zip(Lane, fold.cuts, fold.kept.repeating.num_tasks, strict=True)
        for task in schedule.lanes[lane][cut : cut + length]
    ]


def names_each_once(fold: Fold) -> bool:
    """Whether no two tasks of all micro-batches would have one number.

    Tasks that take no time may have ended so far ahead that those of the last micro-batch count as repeated.
    """
    few = min(fold.kept.num_left_out, _TOLD_APART)
    copies = [*_simulated(fold, few), *_left_out(fold, few)]
    return len({_number(fold, copy) for copy in copies}) == len(copies)


def unfold_tasks(fold: Fold, timings: tuple[TaskTiming, ...]) -> tuple[TaskTiming, ...]:
    """The tasks of all micro-batches; ``timings``: of those kept, by id.

    Without those left out where there are more than ``MOST_LISTED``.
    """
    kept, copies = fold.kept, _simulated(fold, fold.kept.num_left_out)
    if len(timings) + kept.num_left_out * kept.num_tasks <= MOST_LISTED:
        copies += _left_out(fold, kept.num_left_out)
    found = [_timing_of(fold, copy, timings[copy.task]) for copy in copies]
    return tuple(sorted(found, key=lambda timing: timing.task))


class _Copy(NamedTuple):
    """A task of all micro-batches, told by one that was simulated."""

    task: TaskId
    later: int
    """Micro-batches by which its number and name are later."""
    runs_later: int
    """Micro-batches by which its time is later."""


def _simulated(fold: Fold, num_left_out: int) -> list[_Copy]:
    """The tasks that were simulated, where so many micro-batches are left out."""
    after = after_cut(fold)
    # What a lane does once in all, and early, stands in the schedule where the last micro-batch does.
    early = set(_once(fold)) - after
    return [
        _Copy(task.id, num_left_out if task.id in after or task.id in early else 0, num_left_out * (task.id in after))
        for task in fold.kept.schedule.tasks
    ]


def _left_out(fold: Fold, num_left_out: int) -> list[_Copy]:
    """The tasks of so many micro-batches that are left out."""
    repeated = repeated_tasks(fold)
    return [_Copy(task.id, later, later) for later in range(num_left_out) for task in repeated]


def _number(fold: Fold, copy: _Copy) -> TaskId:
    return TaskId(copy.task + copy.later * fold.kept.num_tasks)


def _timing_of(fold: Fold, copy: _Copy, timing: TaskTiming) -> TaskTiming:
    """``timing``: of the task that tells it."""
    shift_s = copy.runs_later * fold.period_s
    return timing.model_copy(
        update={
            "task": _number(fold, copy),
            "name": _name(fold.kept.schedule.tasks[copy.task], copy.later),
            "start_s": timing.start_s + shift_s,
            "end_s": timing.end_s + shift_s,
        }
    )


def _once(fold: Fold) -> Iterator[TaskId]:
    """The tasks of the last micro-batch on lanes that have none of the others."""
    schedule = fold.kept.schedule
    for lane, length in zip(Lane, fold.kept.repeating.num_tasks, strict=True):
        for task in schedule.lanes[lane] if not length else ():
            if schedule.tasks[task].micro_batch == schedule.micro_batches - 1:
                yield task


def _name(task: Task, num_later: int) -> str:
    """The name so many micro-batches later; what follows the last micro-batch belongs to none."""
    if not task.micro_batch:
        return task.name
    return f"{task.name.removesuffix(str(task.micro_batch))}{task.micro_batch + num_later}"


def more_phase_times_s(fold: Fold, timings: tuple[TaskTiming, ...]) -> tuple[float, float]:
    """Seconds of forwards and of backwards in the micro-batches that are left out; ``timings``: of those kept."""
    schedule = fold.kept.schedule
    spans = list(phase_spans_s(schedule, [timing.end_s for timing in timings]))
    of_one = len(spans) // schedule.micro_batches
    repeated = spans[-2 * of_one : -of_one]
    forward_s, backward_s = (
        sum(end_s - begin_s for phase, begin_s, end_s in repeated if phase is wanted)
        for wanted in (IterationPhase.FORWARD, IterationPhase.BACKWARD)
    )
    return fold.kept.num_left_out * forward_s, fold.kept.num_left_out * backward_s


def unfold_waits(fold: Fold, waits: tuple[PhaseWait, ...], span_of: SpanOf, begin_s: float) -> tuple[PhaseWait, ...]:
    """What compute waits for in all micro-batches; ``waits``: in those kept, from ``begin_s`` on."""
    schedule = fold.kept.schedule
    before, until = (
        {(wait.phase, wait.cause): wait.seconds for wait in phase_waits(schedule, span_of, (begin_s, end_s))}
        for end_s in (fold.begin_s, fold.begin_s + fold.period_s)
    )
    more_s = {part: fold.kept.num_left_out * (seconds - before.get(part, 0.0)) for part, seconds in until.items()}
    found = [
        wait.model_copy(update={"seconds": wait.seconds + max(0.0, more_s.get((wait.phase, wait.cause), 0.0))})
        for wait in waits
    ]
    phases = [wait.phase for wait in waits]
    return tuple(sorted(found, key=lambda wait: (phases.index(wait.phase), -wait.seconds)))


def unfold_flops(fold: Fold, flops: int | None) -> int | None:
    """FLOPs of all micro-batches; ``flops``: of those kept."""
    of_one = hardware_flops(replace(fold.kept.schedule, tasks=tuple(repeated_tasks(fold))))
    return None if flops is None else flops + fold.kept.num_left_out * (of_one or 0)


def count_left_out(fold: Fold, counts: Callable[[Task], float]) -> float:
    """The sum of ``counts`` over the tasks of all micro-batches that are left out."""
    return fold.kept.num_left_out * sum(counts(task) for task in repeated_tasks(fold))


def unfold_curve(fold: Fold, curve: MemoryCurve, begin_s: float) -> MemoryCurve:
    """A memory over all micro-batches; ``curve``: over those kept, with all that the others leave until the step.

    ``begin_s``: of the window, since the simulation began.
    """
    left_out, period_s = fold.kept.num_left_out, fold.period_s
    first_s = fold.begin_s - begin_s
    times_s, levels = np.array(curve.times_s), np.array(curve.levels_bytes)
    # The last time is the end of the window, which repeats the level before it.
    first, after = np.searchsorted(times_s, (first_s, first_s + period_s)).tolist()
    parts = [(times_s[:first], levels[:first])]
    copies = range(left_out + 1)
    is_listed = len(times_s) + left_out * (after - first) <= MOST_LISTED
    for later in copies if is_listed else (0, left_out):
        rise_bytes = (left_out - later) * fold.kept.left_over_bytes
        parts.append((times_s[first:after] + later * period_s, levels[first:after] - rise_bytes))
    parts.append((times_s[after:] + left_out * period_s, levels[after:]))
    return curve.model_copy(
        update={
            "times_s": tuple(np.concatenate([times for times, _ in parts]).tolist()),
            "levels_bytes": tuple(np.concatenate([of_part for _, of_part in parts]).tolist()),
            "peak_at": _peak_at(fold, curve.peak_at),
        }
    )


def _peak_at(fold: Fold, name: str) -> str:
    """The name of the task with the peak: the first of its kind, the last where levels rise."""
    for task in _named(fold, name):
        rises = fold.kept.left_over_bytes > 0
        is_repeated = task in repeated_tasks(fold)
        if task.id in after_cut(fold) and (rises or not is_repeated):
            return _name(task, fold.kept.num_left_out)
    return name


def _named(fold: Fold, name: str) -> Iterator[Task]:
    return (task for task in fold.kept.schedule.tasks if task.name == name)

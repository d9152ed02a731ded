"""Whether a measured record can be one of its schedule: what a clock that jumped or a file that was cut cannot pass.

Measured times are means over iterations, so tasks need not follow each other to the microsecond.  But every task is
there once, on its own lane, within an iteration of the one that it belongs to; no lane is busy for longer than an
iteration takes; and the three phases of an iteration add up to it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from ..basics.units import format_seconds
from ..schema.record import OF_RANKS, Record
from ..schema.schedule import Lane, Schedule

_ROUNDING_FRAC: Final = 0.01
"""Of an iteration: what sums of means may be off by."""
_SPREAD_FRAC: Final = 0.25
"""Of an iteration: what its parts, whose means are taken one by one, may exceed it by."""
_EARLIEST: Final = -2.0
"""Iterations from the first compute task to any task of its own; gathers are issued ahead by less than one."""
_LATEST: Final = 3.0
"""Steps on the host end before the next iteration needs the chunk: after less than two."""


def why_unsound(record: Record, schedule: Schedule) -> str | None:
    """What is wrong with ``record`` as a measurement of ``schedule``, in words after "the record"; None: nothing."""
    return _wrong_tasks(record, schedule) or _wrong_times(record)


def why_unsound_ranks(record: Record) -> str | None:
    """What is wrong with the ranks that ``record`` has of its own, in words after "the record"; None: nothing.

    Each rank of the plan is there once, times and memory of the record are those of the rank that it names, and ranks
    wait before collectives of their own.
    """
    if not record.ranks:
        return None
    have = [rank for one in record.ranks for rank in range(one.rank, one.rank + one.num_alike)]
    if have != list(range(record.plan.num_ranks)):
        missing = sorted(set(range(record.plan.num_ranks)) - set(have))
        what = f"lacks rank {missing[0]}" if missing else f"has a rank {have[-1]} that its plan does not have"
        return f"has {len(have):,} of the {record.plan.num_ranks:,} ranks of its plan; it {what}"
    own = next(one for one in record.ranks if one.rank == record.rank)
    for name in OF_RANKS:
        if getattr(record, name) != getattr(own, name):
            return f"has other {name} than its rank {own.rank}, whose times and memory it has"
    for one in record.ranks:
        met = {timing.task for timing in one.tasks if timing.lane is Lane.COLLECTIVE}
        strange = next((wait.task for wait in one.rank_waits if wait.task not in met), None)
        if strange is not None:
            return f"says that rank {one.rank} waited before task {strange}, which is no collective of its plan"
    return None


def _wrong_tasks(record: Record, schedule: Schedule) -> str | None:
    known = {timing.task: timing for timing in record.tasks}
    strange = sorted(known.keys() - range(len(schedule.tasks)))
    missing = [task.name for task in schedule.tasks if task.id not in known]
    if missing or strange:
        what = f"lacks {missing[0]}" if missing else f"has a task {strange[0]} that its plan does not have"
        return f"has {len(known):,} of the {len(schedule.tasks):,} tasks of its plan; it {what}"
    for task in schedule.tasks:
        timing = known[task.id]
        if (timing.kind, timing.lane) != (task.kind, task.lane):
            return (
                f"says that {timing.name} is {timing.kind} on lane {timing.lane}; its plan has {task.kind} on lane "
                f"{task.lane} there"
            )
    return None


def _wrong_times(record: Record) -> str | None:
    period_s = record.iteration_s
    parts_s = record.forward_s + record.backward_s + record.optimizer_s
    took = f"iterations of {format_seconds(period_s)}"
    if abs(parts_s - period_s) > _SPREAD_FRAC * period_s:
        return f"has {took}, whose phases take {format_seconds(parts_s)} together"
    busy_s: dict[Lane, float] = defaultdict(float)
    for timing in record.tasks:
        busy_s[timing.lane] += timing.duration_s
        if not _EARLIEST * period_s <= timing.start_s <= timing.end_s <= _LATEST * period_s:
            return f"has {took}, and {timing.name} from {timing.start_s:.6g} s to {timing.end_s:.6g} s: a clock jumped"
        if abs(timing.end_s - timing.start_s - timing.duration_s) > _ROUNDING_FRAC * period_s:
            return (
                f"says that {timing.name} took {format_seconds(timing.duration_s)}, from {timing.start_s:.6g} s to "
                f"{timing.end_s:.6g} s"
            )
    for lane, seconds in busy_s.items():
        if seconds > (1 + _SPREAD_FRAC) * period_s:
            return f"has {took}, in which lane {lane} is busy for {format_seconds(seconds)}"
    return None

"""Timelines as Chrome trace JSON, for Perfetto or chrome://tracing: records side by side on one clock.

Format: "Trace Event Format" (Google, 2016); events of type X (task), C (memory level), i (instant) and M (name).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from ..basics.errors import ProtwinError
from ..basics.units import format_seconds
from ..schema.record import MemoryCurve, Origin, Record, TaskTiming
from ..schema.schedule import Lane, Memory, Schedule, TaskId
from .ranks import name_of_rank

Event = dict[str, Any]

_NANOSECONDS_PER_S = 10**9


def chrome_trace(records: Mapping[str, Record], *, schedule: Schedule | None = None) -> str:
    """The records as one Chrome trace: each a process, named by its key, and each lane of it a thread.

    Of a record of several ranks each is a process of its own, on their common clock; before a collective stands what
    its rank waits for the others.  Every record's time zero, the start of its first compute task, lies at the same
    place; all are shifted together so that nothing starts below zero.  Times are microseconds, rounded to nanoseconds.
    ``schedule``, where it is at hand, adds to every task the bytes that it moves, allocates and frees, and what it
    waits for, and to a simulated record what its device memory holds.
    Raises ProtwinError if ``schedule`` belongs to another plan than one of the records.
    """
    for label, record in records.items():
        check_schedule(record, schedule, label=label)
    shown = [one for label, record in records.items() for one in _ranks(label, record)]
    first_ns = min((_first_ns(record) + begins_ns for _, record, begins_ns, _ in shown), default=0)
    events: list[Event] = []
    for process, (label, record, begins_ns, waits_s) in enumerate(shown, start=1):
        zero_ns = begins_ns - first_ns
        events.extend(_names(process, label, record))
        events.extend(_marks(process, record, zero_ns))
        events.extend(_rank_waits(process, record, waits_s, zero_ns))
        events.extend(_tasks(process, record, schedule, zero_ns))
        events.extend(_levels(process, record, zero_ns))
        events.extend(_contents(process, record, schedule, zero_ns))
    lines = ",\n".join(json.dumps(event, ensure_ascii=False, allow_nan=False) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _ranks(label: str, record: Record) -> Iterator[tuple[str, Record, int, dict[int, float]]]:
    """Label, record, begin in nanoseconds and waits for others of every rank; of the record itself if it has none."""
    if not record.ranks:
        yield label, record, 0, {}
    for one in record.ranks:
        waits_s = {wait.task: wait.seconds for wait in one.rank_waits}
        yield f"{label}, {name_of_rank(record, one)}", record.of_rank(one.rank), _ns(one.begins_s), waits_s


def check_schedule(record: Record, schedule: Schedule | None, *, label: str) -> None:
    """Raise ProtwinError if ``schedule`` is not the one that ``record`` followed."""
    if schedule is None:
        return
    if schedule.plan_id != record.plan_id:
        raise ProtwinError(
            f"the {label} record follows plan {record.plan_id} but the schedule is that of plan {schedule.plan_id}. "
            f"Compile the schedule from the record's own plan."
        )
    beyond = next((timing for timing in record.tasks if timing.task >= len(schedule.tasks)), None)
    if beyond is not None:
        raise ProtwinError(
            f"the {label} record names task {beyond.task} ({beyond.name}) but its schedule has "
            f"{len(schedule.tasks)} tasks. The record is damaged: record it again."
        )


def subject_of(timing: TaskTiming) -> tuple[str, str] | None:
    """``("chunk", "7")`` or ``("section", "epilogue")`` as the task's name has it; None for a task without either."""
    rest = timing.name.removeprefix(str(timing.kind)).partition(" of micro-batch ")[0].strip()
    if not rest or rest == timing.name:
        return None
    return ("chunk", rest.removeprefix("chunk ")) if rest.startswith("chunk ") else ("section", rest)


def paced_times_s(record: Record, curve: MemoryCurve) -> tuple[float, ...]:
    """The curve's times, laid to the length of the iteration.

    [Note: Watched iterations]
    Watching memory slows an iteration down, so a measured curve comes from another iteration than the timings, and may
    be longer than they are.  Such a curve is shortened in proportion, to lie where the tasks are that it belongs to.
    """
    if not is_slowed(record, curve):
        return curve.times_s
    pace = record.iteration_s / curve.times_s[-1]
    return tuple(at_s * pace for at_s in curve.times_s)


def is_slowed(record: Record, curve: MemoryCurve) -> bool:
    """Whether the curve comes from an iteration that was longer than the timed ones; see [Note: Watched iterations]."""
    return record.origin is Origin.MEASURED and bool(curve.times_s) and curve.times_s[-1] > record.iteration_s


def _first_ns(record: Record) -> int:
    starts = [_ns(timing.start_s) for timing in record.tasks]
    samples = [_ns(paced_times_s(record, curve)[0]) for curve in record.memory if curve.times_s]
    return min(0, *starts, *samples) if starts or samples else 0


def _ns(seconds: float) -> int:
    return round(seconds * _NANOSECONDS_PER_S)


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000


def _names(process: int, label: str, record: Record) -> Iterator[Event]:
    def metadata(event: str, key: str, value: str | int, *, thread: int = 0) -> Event:
        return {"name": event, "ph": "M", "pid": process, "tid": thread, "args": {key: value}}

    where = record.machine or record.hardware_name
    labels = f"{where}, plan {record.plan_id}, iteration {format_seconds(record.iteration_s)}"
    yield metadata("process_name", "name", f"{label}: {record.model_name}")
    yield metadata("process_labels", "labels", labels)
    yield metadata("process_sort_index", "sort_index", process)
    for thread, lane in enumerate(record.lanes_shown, start=1):
        yield metadata("thread_name", "name", str(lane), thread=thread)
        yield metadata("thread_sort_index", "sort_index", thread, thread=thread)


def _marks(process: int, record: Record, zero_ns: int) -> Iterator[Event]:
    """Where the phases of the iteration begin."""
    marks = (
        ("iteration begins", 0.0),
        ("backward begins", record.forward_s),
        ("optimizer begins", record.forward_s + record.backward_s),
        ("next iteration begins", record.iteration_s),
    )
    for name, at_s in marks:
        yield {"name": name, "ph": "i", "s": "p", "pid": process, "tid": 0, "ts": _us(_ns(at_s) + zero_ns)}


def _tasks(process: int, record: Record, schedule: Schedule | None, zero_ns: int) -> Iterator[Event]:
    """Every task, ended at the latest where the next of its lane starts.

    Starts and durations of a measured record are medians, so neighbours may overlap by a little, although a lane runs
    one task after another; viewers of traces do not show tasks of one thread that overlap.
    """
    thread_of = {lane: thread for thread, lane in enumerate(Lane, start=1)}
    in_order = sorted(record.tasks, key=lambda t: (thread_of[t.lane], t.start_s, t.end_s, t.task))
    for timing, following in zip_longest(in_order, in_order[1:]):
        start_ns, end_ns = _ns(timing.start_s), _ns(timing.end_s)
        if following is not None and following.lane is timing.lane:
            end_ns = min(end_ns, _ns(following.start_s))
        yield {
            "name": timing.name,
            "cat": str(timing.kind),
            "ph": "X",
            "pid": process,
            "tid": thread_of[timing.lane],
            "ts": _us(start_ns + zero_ns),
            "dur": _us(max(0, end_ns - start_ns)),
            "args": _arguments(timing, schedule),
        }


def _rank_waits(process: int, record: Record, waits_s: Mapping[int, float], zero_ns: int) -> Iterator[Event]:
    """What stands before collectives: from when this rank came to them, or its one before has ended, to their start."""
    thread = list(Lane).index(Lane.COLLECTIVE) + 1
    ended_ns = None
    for timing in sorted((t for t in record.tasks if t.lane is Lane.COLLECTIVE), key=lambda t: (t.start_s, t.task)):
        start_ns = _ns(timing.start_s)
        came_ns = start_ns - _ns(waits_s.get(timing.task, 0.0))
        came_ns = came_ns if ended_ns is None else max(came_ns, ended_ns)
        if came_ns < start_ns:
            yield {
                "name": "waiting for other ranks",
                "cat": "rank_wait",
                "ph": "X",
                "pid": process,
                "tid": thread,
                "ts": _us(came_ns + zero_ns),
                "dur": _us(start_ns - came_ns),
                "args": {"before": timing.name},
            }
        ended_ns = _ns(timing.end_s)


def _arguments(timing: TaskTiming, schedule: Schedule | None) -> dict[str, object]:
    """What a click on a task shows."""
    arguments: dict[str, object] = {"task": timing.task, "kind": str(timing.kind)}
    subject = subject_of(timing)
    if subject is not None:
        name, value = subject
        arguments[name] = int(value) if value.isdecimal() else value
    arguments["duration_s"] = timing.duration_s
    if schedule is None:
        return arguments
    task = schedule.tasks[timing.task]
    arguments["moved_bytes"] = task.moved_bytes
    arguments["allocated_bytes"] = sum(schedule.buffers[buffer].size_bytes for buffer in task.allocates)
    arguments["freed_bytes"] = sum(schedule.buffers[buffer].size_bytes for buffer in task.frees)
    arguments["waits_for"] = _named(task.after, schedule)
    arguments["waits_for_previous_iteration"] = _named(task.after_previous, schedule)
    return arguments


def _named(tasks: tuple[TaskId, ...], schedule: Schedule) -> str:
    return ", ".join(f"{schedule.tasks[task].name} ({task})" for task in tasks)


def _levels(process: int, record: Record, zero_ns: int) -> Iterator[Event]:
    for curve in record.memory:
        for at_s, level_bytes in zip(paced_times_s(record, curve), curve.levels_bytes, strict=True):
            yield {
                "name": f"{curve.memory} memory",
                "ph": "C",
                "pid": process,
                "ts": _us(_ns(at_s) + zero_ns),
                "args": {"bytes": level_bytes},
            }


def _contents(process: int, record: Record, schedule: Schedule | None, zero_ns: int) -> Iterator[Event]:
    """What device memory holds over time; only of a simulation, whose times and curve are of one iteration."""
    from .memory_by_content import memory_stack

    stack = memory_stack(record, schedule) if schedule is not None and record.origin is Origin.SIMULATED else None
    if stack is None:
        return
    names = {content: "transient" if content is None else str(content) for content in stack.levels_bytes}
    for step, begin_s in enumerate(stack.begins_s.tolist()):
        yield {
            "name": f"{Memory.DEVICE} memory by content",
            "ph": "C",
            "pid": process,
            "ts": _us(_ns(begin_s) + zero_ns),
            "args": {name: int(stack.levels_bytes[content][step]) for content, name in names.items()},
        }

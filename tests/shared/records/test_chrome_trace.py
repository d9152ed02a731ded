"""Chrome traces: read back as JSON and held against the records, event by event."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from protwin.shared.basics.errors import ProtwinError
from protwin.shared.records.chrome_trace import chrome_trace, subject_of
from protwin.shared.schema.record import Record
from protwin.shared.schema.schedule import Memory
from tests.shared.laid_out import LaidOut, laid_out

Trace = dict[str, Any]
TOLERANCE_US = 2e-3
"""Times are rounded to a nanosecond at either end."""


@pytest.fixture(scope="module")
def example() -> LaidOut:
    return laid_out(8)


def both(example: LaidOut) -> dict[str, Record]:
    return {"simulated": example.predicted, "measured": example.measured}


def events(trace: Trace, phase: str, process: int) -> list[Trace]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase and event["pid"] == process]


def check_trace(trace: Trace, records: dict[str, Record]) -> None:
    """Assert that ``trace`` says what the records say, on one clock that begins at zero or later."""
    assert all(event.get("ts", 0) >= 0 for event in trace["traceEvents"])
    zeros = set()
    for process, (label, record) in enumerate(records.items(), start=1):
        zero_us = next(e["ts"] for e in events(trace, "i", process) if e["name"] == "iteration begins")
        zeros.add(zero_us)
        check_names(events(trace, "M", process), label, record)
        check_tasks(events(trace, "X", process), record, zero_us, thread_of(events(trace, "M", process)))
        check_counters(events(trace, "C", process), record, zero_us)
    assert len(zeros) == 1, "the processes have no common zero"


def check_names(metadata: list[Trace], label: str, record: Record) -> None:
    process_name = next(e["args"]["name"] for e in metadata if e["name"] == "process_name")
    assert label in process_name
    assert record.model_name in process_name
    threads = {e["tid"]: e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in metadata if e["name"] == "thread_sort_index"}
    assert [threads[thread] for thread in sorted(threads, key=lambda t: order[t])] == [
        str(lane) for lane in record.lanes_shown
    ]


def thread_of(metadata: list[Trace]) -> dict[str, int]:
    return {e["args"]["name"]: e["tid"] for e in metadata if e["name"] == "thread_name"}


def check_tasks(bars: list[Trace], record: Record, zero_us: float, thread_of: dict[str, int]) -> None:
    assert len(bars) == len(record.tasks)
    bar_of = {bar["args"]["task"]: bar for bar in bars}
    for timing in record.tasks:
        bar = bar_of[timing.task]
        assert bar["name"] == timing.name
        assert bar["tid"] == thread_of[str(timing.lane)]
        assert bar["args"]["kind"] == bar["cat"] == timing.kind
        assert bar["ts"] == pytest.approx(zero_us + timing.start_s * 1e6, abs=TOLERANCE_US)
        assert bar["ts"] + bar["dur"] == pytest.approx(zero_us + timing.end_s * 1e6, abs=TOLERANCE_US)
    check_no_overlap(bars)


def check_no_overlap(bars: list[Trace]) -> None:
    lanes: dict[int, list[Trace]] = {}
    for bar in bars:
        lanes.setdefault(bar["tid"], []).append(bar)
    for lane in lanes.values():
        lane.sort(key=lambda bar: (bar["ts"], bar["dur"]))
        for bar, following in pairwise(lane):
            assert bar["ts"] + bar["dur"] <= following["ts"] + TOLERANCE_US, "tasks of one lane overlap"


def check_counters(counters: list[Trace], record: Record, zero_us: float) -> None:
    for curve in record.memory:
        samples = [e for e in counters if e["name"] == f"{curve.memory} memory"]
        assert [e["args"]["bytes"] for e in samples] == list(curve.levels_bytes)
        assert [e["ts"] for e in samples] == pytest.approx(
            [zero_us + at_s * 1e6 for at_s in curve.times_s], abs=TOLERANCE_US
        )
    contents = [e for e in counters if e["name"] == "device memory by content"]
    assert len(counters) - len(contents) == sum(len(curve.times_s) for curve in record.memory)
    check_contents(contents, record)


def check_contents(contents: list[Trace], record: Record) -> None:
    """What device memory holds makes up its levels."""
    if contents:
        curve = record.curve(Memory.DEVICE)
        assert curve is not None
        totals = [sum(sample["args"].values()) for sample in contents]
        held = {
            level
            for at, level, after in zip(curve.times_s, curve.levels_bytes, curve.times_s[1:], strict=False)
            if after > at
        }
        assert set(totals) == held


def test_the_trace_says_what_the_records_say(example: LaidOut) -> None:
    trace = json.loads(chrome_trace(both(example)))
    assert any(timing.start_s < 0 for timing in example.predicted.tasks), "nothing was gathered ahead"
    check_trace(trace, both(example))


def shift_one_process(trace: Trace) -> None:
    for event in trace["traceEvents"]:
        if event["pid"] == 2 and "ts" in event:
            event["ts"] += 10.0


def drop_a_task(trace: Trace) -> None:
    trace["traceEvents"].remove(events(trace, "X", 1)[3])


def stretch_a_task(trace: Trace) -> None:
    events(trace, "X", 1)[0]["dur"] += 1000.0


def move_a_task_to_another_lane(trace: Trace) -> None:
    events(trace, "X", 1)[0]["tid"] = 2


def change_a_level(trace: Trace) -> None:
    events(trace, "C", 2)[1]["args"]["bytes"] += 1


def swap_lane_order(trace: Trace) -> None:
    first, second = [e for e in events(trace, "M", 1) if e["name"] == "thread_sort_index"][:2]
    first["args"], second["args"] = second["args"], first["args"]


@pytest.mark.parametrize(
    "spoil",
    [shift_one_process, drop_a_task, stretch_a_task, move_a_task_to_another_lane, change_a_level, swap_lane_order],
)
def test_the_check_notices_a_wrong_trace(example: LaidOut, spoil: Callable[[Trace], None]) -> None:
    trace = json.loads(chrome_trace(both(example)))
    spoil(trace)
    with pytest.raises(AssertionError):
        check_trace(trace, both(example))


def test_the_earliest_start_of_all_records_lies_at_zero(example: LaidOut) -> None:
    trace = json.loads(chrome_trace(both(example)))
    starts = [event["ts"] for event in trace["traceEvents"] if event["ph"] in "XC"]
    earliest_s = min(timing.start_s for record in both(example).values() for timing in record.tasks)
    assert min(starts) == 0
    marks = [event["ts"] for event in trace["traceEvents"] if event["name"] == "iteration begins"]
    assert marks == pytest.approx([-earliest_s * 1e6] * 2, abs=TOLERANCE_US)


def test_nothing_is_shifted_if_nothing_starts_early(example: LaidOut) -> None:
    record = example.predicted
    late = record.model_copy(update={"tasks": tuple(t for t in record.tasks if t.start_s >= 0)})
    trace = json.loads(chrome_trace({"simulated": late}))
    assert {e["ts"] for e in trace["traceEvents"] if e["name"] == "iteration begins"} == {0}


def test_neighbours_of_one_lane_that_overlap_by_rounding_are_cut_apart(example: LaidOut) -> None:
    """Medians of starts and of durations, as a measured record has them, need not fit each other."""
    record = example.measured
    longer = tuple(t.model_copy(update={"end_s": t.end_s + 1e-4}) for t in record.tasks)
    trace = json.loads(chrome_trace({"measured": record.model_copy(update={"tasks": longer})}))
    bars = events(trace, "X", 1)
    with pytest.raises(AssertionError):
        check_no_overlap([bar | {"dur": bar["dur"] + 100.0} for bar in bars])
    check_no_overlap(bars)
    assert len(bars) == len(record.tasks)


def test_a_curve_from_a_slower_iteration_is_laid_to_the_length_of_the_timed_ones(example: LaidOut) -> None:
    record = example.measured
    slow = tuple(
        c.model_copy(update={"times_s": tuple(2 * at_s for at_s in c.times_s)}) if len(c.times_s) > 1 else c
        for c in record.memory
    )
    trace = json.loads(chrome_trace({"measured": record.model_copy(update={"memory": slow})}))
    zero_us = next(e["ts"] for e in events(trace, "i", 1) if e["name"] == "iteration begins")
    end_us = max(e["ts"] for e in events(trace, "C", 1))
    assert 2 * record.memory[0].times_s[-1] > record.iteration_s
    assert end_us - zero_us == pytest.approx(record.iteration_s * 1e6, abs=TOLERANCE_US)


def test_marks_divide_the_iteration_into_its_phases(example: LaidOut) -> None:
    trace = json.loads(chrome_trace({"measured": example.measured}))
    marks = {e["name"]: e["ts"] for e in events(trace, "i", 1)}
    begins = marks["iteration begins"]
    record = example.measured
    assert marks["backward begins"] - begins == pytest.approx(record.forward_s * 1e6, abs=TOLERANCE_US)
    assert marks["next iteration begins"] - begins == pytest.approx(record.iteration_s * 1e6, abs=TOLERANCE_US)


def test_a_schedule_adds_what_each_task_moves_and_waits_for(example: LaidOut) -> None:
    trace = json.loads(chrome_trace(both(example), schedule=example.schedule))
    check_trace(trace, both(example))
    has_contents = [
        any(e["name"] == "device memory by content" for e in events(trace, "C", process)) for process in (1, 2)
    ]
    assert has_contents == [True, False], "a measured curve comes from another iteration than its times"
    bars = {bar["args"]["task"]: bar for bar in events(trace, "X", 1)}
    for task in example.schedule.tasks:
        arguments = bars[task.id]["args"]
        assert arguments["moved_bytes"] == task.moved_bytes
        assert arguments["waits_for"].count("(") == len(task.after)
        if task.chunk is not None:
            assert arguments["chunk"] == task.chunk
        elif task.section is not None:
            assert arguments["section"] == task.section
    moved = sum(bar["args"]["moved_bytes"] for bar in bars.values())
    assert moved == sum(use.moved_bytes for use in example.predicted.lanes) > 0
    device = [b for b in example.schedule.buffers if b.memory is Memory.DEVICE and not b.is_static]
    assert sum(bar["args"]["allocated_bytes"] for bar in bars.values()) == sum(b.size_bytes for b in device)


def test_a_schedule_of_another_plan_is_refused(example: LaidOut) -> None:
    other = replace(example.schedule, plan_id="another")
    with pytest.raises(ProtwinError, match=f"{example.predicted.plan_id}.*another"):
        chrome_trace(both(example), schedule=other)


def test_a_record_with_a_task_beyond_the_schedule_is_refused(example: LaidOut) -> None:
    shorter = replace(example.schedule, tasks=example.schedule.tasks[:-1])
    with pytest.raises(ProtwinError, match="damaged"):
        chrome_trace(both(example), schedule=shorter)


def test_equal_records_give_equal_bytes(example: LaidOut) -> None:
    again = laid_out(8)
    assert chrome_trace(both(example)) == chrome_trace(both(again))


def test_no_records_give_an_empty_trace() -> None:
    assert json.loads(chrome_trace({}))["traceEvents"] == []


def test_the_subject_is_read_off_the_name(example: LaidOut) -> None:
    for task, timing in zip(example.schedule.tasks, example.predicted.tasks, strict=True):
        expected = None
        if task.chunk is not None:
            expected = ("chunk", str(task.chunk))
        elif task.section is not None:
            expected = ("section", str(task.section))
        assert subject_of(timing) == expected

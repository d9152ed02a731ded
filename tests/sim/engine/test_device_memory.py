"""Memory over time against an oracle that asks, one moment at a time, what is alive."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.record import Holding, MemoryCurve
from protwin.shared.schema.schedule import (
    Allocation,
    AllocationId,
    ChunkId,
    Content,
    Lane,
    Memory,
    Schedule,
    Task,
    TaskId,
    TaskKind,
)
from protwin.shared.schema.workload import BlockId, Phase
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.engine.device_memory import DeviceMemory, pinned_host_curve, window_s
from protwin.sim.engine.simulator import simulate, simulate_timing
from protwin.sim.engine.timing import Timing
from tests.sim.hand_made import machine, plan, workload
from tests.strategies.machines import calibrations, hardware
from tests.strategies.plans import PlannedWorkload, planned_workloads

DURATIONS = st.floats(0.01, 4) | st.sampled_from((0.5, 1.0, 2.0))


class Oracle:
    """Device memory at any moment, from the rules alone, one buffer and one task at a time."""

    def __init__(
        self, schedule: Schedule, timing: Timing, *, only_this_iteration: bool = False, from_start: bool = False
    ) -> None:
        self.schedule = schedule
        self.timing = timing
        self.iterations = [timing.window] if only_this_iteration else range(timing.num_iterations)
        self.compute_buffers_from_start = from_start
        self.freed_by = {b: task for task in schedule.tasks for b in task.frees}

    def times_s(self) -> list[float]:
        """Every moment in the window at which anything may change."""
        begin_s, end_s = window_s(self.schedule, self.timing)
        times = {begin_s, end_s}
        for iteration in range(self.timing.num_iterations):
            for task in self.schedule.tasks:
                start_s, stop_s = self.span(iteration, task)
                times |= {start_s, stop_s}
                for end_frac, _ in task.phase.curve if task.phase is not None else ():
                    times.add(start_s + end_frac * (stop_s - start_s))
        return sorted(time_s for time_s in times if begin_s <= time_s <= end_s)

    def span(self, iteration: int, task: Task) -> tuple[float, float]:
        return float(self.timing.starts_s[iteration, task.id]), float(self.timing.ends_s[iteration, task.id])

    def buffers_at(self, time_s: float) -> dict[Content, int]:
        """Bytes alive by content, without the running task's curve."""
        held = dict.fromkeys(Content, 0)
        for buffer in self.schedule.buffers:
            if buffer.is_static and buffer.memory is Memory.DEVICE:
                held[buffer.content] += buffer.size_bytes
        for iteration in self.iterations:
            for task in self.schedule.tasks:
                for buffer_id in task.allocates:
                    start_s, end_s = self.span(iteration, task)
                    comes_at_end = task.lane is Lane.COMPUTE and not self.compute_buffers_from_start
                    _, goes_s = self.span(iteration, self.freed_by[buffer_id])
                    if (end_s if comes_at_end else start_s) <= time_s < goes_s:
                        buffer = self.schedule.buffers[buffer_id]
                        held[buffer.content] += buffer.size_bytes
        return held

    def transient_at(self, time_s: float) -> int:
        """What the running compute task's curve adds."""
        for iteration in self.iterations:
            for task in self.schedule.tasks:
                start_s, end_s = self.span(iteration, task)
                if task.lane is Lane.COMPUTE and task.phase is not None and start_s <= time_s < end_s:
                    freed_bytes = sum(self.schedule.buffers[b].size_bytes for b in task.frees)
                    for end_frac, level_bytes in task.phase.curve:
                        if time_s < start_s + end_frac * (end_s - start_s):
                            return max(level_bytes, -freed_bytes)
        return 0

    def level_at(self, time_s: float) -> int:
        return sum(self.buffers_at(time_s).values()) + self.transient_at(time_s)

    def samples(self) -> list[tuple[float, int]]:
        """The level in the middle of every stretch over which nothing changes."""
        middles = [(a + b) / 2 for a, b in pairwise(self.times_s()) if b - a > 1e-9]
        return [(middle, self.level_at(middle)) for middle in middles]


def level_of(curve: MemoryCurve, time_s: float) -> int:
    """What a curve says of a moment of its window."""
    return curve.levels_bytes[bisect_right(curve.times_s, time_s) - 1]


def run(schedule: Schedule, durations_s: list[float], contention: ContentionModel | None = None) -> Timing:
    return simulate_timing(
        schedule, durations_s, contention if contention is not None else ContentionModel.none(), num_more_iterations=1
    )


@given(planned_workloads(), st.data())
def test_the_curve_is_what_is_alive_at_every_moment(drawn: PlannedWorkload, data: st.DataObject) -> None:
    schedule = compile_schedule(drawn.plan, drawn.workload, drawn.layout)
    size = len(schedule.tasks)
    timing = run(schedule, data.draw(st.lists(DURATIONS, min_size=size, max_size=size)))
    curve, oracle = DeviceMemory(schedule, timing).curve(), Oracle(schedule, timing)
    begin_s, _ = window_s(schedule, timing)
    samples = oracle.samples()
    for time_s, level_bytes in samples:
        assert level_of(curve, time_s - begin_s) == level_bytes
    assert curve.peak_bytes == max(level_bytes for _, level_bytes in samples)
    assert curve.peak_bytes == sum(holding.size_bytes for holding in curve.alive_at_peak)
    peak_s = next(time_s for time_s, level_bytes in samples if level_bytes == curve.peak_bytes)
    if oracle.transient_at(peak_s) >= 0:
        expected = oracle.buffers_at(peak_s)
        found = {holding.content: holding.size_bytes for holding in curve.alive_at_peak}
        assert found.pop(None, 0) == oracle.transient_at(peak_s)
        assert found == {content: size_bytes for content, size_bytes in expected.items() if size_bytes}


@given(planned_workloads(measured=None), hardware(), st.none() | calibrations(), st.data())
def test_no_timing_exceeds_the_guaranteed_peak(
    drawn: PlannedWorkload, hardware: Hardware, calibration: Calibration | None, data: st.DataObject
) -> None:
    schedule = compile_schedule(drawn.plan, drawn.workload, drawn.layout)
    size = len(schedule.tasks)
    durations_s = data.draw(st.lists(st.just(0.0) | DURATIONS | st.floats(0, 1e-3), min_size=size, max_size=size))
    contention = ContentionModel.of(hardware, calibration)
    timing = run(schedule, durations_s, contention)
    assert DeviceMemory(schedule, timing).peak_bytes <= guaranteed_device_peak(schedule).size_bytes


# -- by hand ---------------------------------------------------------------------------------------------------------


def spread_over_iterations(*, is_trainable: bool) -> tuple[Schedule, Timing]:
    """Two checkpointed blocks, a place for each chunk.

    Trainable: copies to the host take so long that gradients leave during the next iteration.  Frozen: no CPU Adam
    holds the gathers, so that chunks come while the previous iteration still runs.
    """
    model = workload(2, is_trainable=is_trainable)
    schedule = compile_schedule(plan(model, n_checkpoint=2, prefetch_depth=2), model)
    return schedule, run(schedule, [5.0 if t.kind is TaskKind.GRADIENT_OFFLOAD else 1.0 for t in schedule.tasks])


def test_the_peak_by_hand() -> None:
    # Everything on the device, so there are no copies.  Static: 2 chunks of 256, their moments of 512 and a count of
    # steps of 4 each = 1 544.
    # Two kept blocks save 1 000 each; outputs of 100: prologue, block 0, block 1.  Levels at the end of each task:
    #   prologue 100, forward 0 1 200, forward 1 2 300, epilogue 2 340.
    # Within tasks: forward 1 rises by 1 500 from 1 200 = 2 700.  The epilogue's backward starts at 2 340 and rises by
    # 60 = 2 400.  Backward 1 starts at 2 300 (the epilogue's 40 are gone; in place of the last output there is its
    # gradient, of 100 bytes too) and rises by 700 = 3 000: the peak, 4 544 with what is static.
    # Backward 0 starts at 2 300 - 1 100 + 256 = 1 456 and rises by 700.
    model = workload()
    curve = simulate(plan(model, n_persist=2, n_buffer=0), model, machine()).curve(Memory.DEVICE)
    assert curve is not None
    assert curve.peak_bytes == 4544
    assert curve.peak_at == "backward 1"
    assert curve.alive_at_peak == (
        Holding(content=Content.PARAMETERS, size_bytes=512),
        Holding(content=Content.OPTIMIZER_STATE, size_bytes=1032),
        Holding(content=Content.ACTIVATIONS, size_bytes=2000),
        Holding(content=Content.OUTPUT, size_bytes=200),
        Holding(content=Content.INCOMING_GRADIENT, size_bytes=100),
        Holding(content=None, size_bytes=700),
    )
    assert curve.times_s[0] == 0
    assert curve.times_s[-1] == pytest.approx(12)  # eleven seconds of compute, and two chunks stepped in 2 s


@pytest.mark.parametrize("is_trainable", [True, False])
def test_neighbouring_iterations_reach_into_the_window(is_trainable: bool) -> None:
    schedule, timing = spread_over_iterations(is_trainable=is_trainable)
    samples, alone = Oracle(schedule, timing).samples(), Oracle(schedule, timing, only_this_iteration=True).samples()
    assert samples != alone  # a curve that looks at one iteration alone is wrong here
    curve = DeviceMemory(schedule, timing).curve()
    begin_s, _ = window_s(schedule, timing)
    assert [level_of(curve, time_s - begin_s) for time_s, _ in samples] == [level for _, level in samples]


def test_buffers_of_compute_tasks_count_from_their_end() -> None:
    # A phase's curve contains what it allocates: counted from the start on, it would count twice.
    schedule, timing = spread_over_iterations(is_trainable=True)
    twice = max(level for _, level in Oracle(schedule, timing, from_start=True).samples())
    assert DeviceMemory(schedule, timing).peak_bytes < twice


def test_what_a_task_frees_makes_room_at_the_same_instant() -> None:
    # One buffer: the gather of the next chunk starts at the very moment at which the block frees the last one.
    model = workload()
    one, two = (
        simulate(plan(model, n_buffer=n_buffer, n_checkpoint=2), model, machine()).curve(Memory.DEVICE)
        for n_buffer in (1, 2)
    )
    assert one is not None
    assert two is not None
    assert two.peak_bytes - one.peak_bytes == 256
    assert one.peak_bytes == _with_parameters(one, 256)


def _with_parameters(curve: MemoryCurve, size_bytes: int) -> int:
    """The peak, if exactly so many bytes of parameters were alive at it."""
    held = {holding.content: holding.size_bytes for holding in curve.alive_at_peak}
    return sum(held.values()) - held[Content.PARAMETERS] + size_bytes


def test_a_phase_cannot_release_more_than_it_frees() -> None:
    model = workload()
    impossible = model.profiles[0].backward.model_copy(update={"curve": ((0.5, -(10**9)), (1.0, 0))})
    profile = model.profiles[0].model_copy(update={"backward": impossible})
    record = simulate(
        plan(model, n_persist=2, n_buffer=0), model.model_copy(update={"profiles": (profile,)}), machine()
    )
    curve = record.curve(Memory.DEVICE)
    assert curve is not None
    assert min(curve.levels_bytes) >= 1536  # what is static


def waiting_for_copies() -> Schedule:
    """A backward that waits for its chunk to come and for gradients to leave, neither of which it holds meanwhile."""
    gradients = Allocation(AllocationId(0), Content.GRADIENTS, Memory.DEVICE, 100)
    chunk = Allocation(AllocationId(1), Content.PARAMETERS, Memory.DEVICE, 256)
    forward, gather, offload, backward, adam = (TaskId(place) for place in range(5))
    tasks = (
        Task(forward, TaskKind.FORWARD, BlockId(0), allocates=(gradients.id,)),
        Task(gather, TaskKind.GATHER, chunk=ChunkId(0), after=(forward,), allocates=(chunk.id,)),
        Task(offload, TaskKind.GRADIENT_OFFLOAD, chunk=ChunkId(0), after=(forward,), frees=(gradients.id,)),
        Task(backward, TaskKind.BACKWARD, BlockId(0), after=(gather, offload), frees=(chunk.id,)),
        Task(adam, TaskKind.DEVICE_ADAM),
    )
    return Schedule("", tasks, (gradients, chunk), num_slots=1, num_blocks=1, prefetch_depth=1)


def test_at_a_peak_while_compute_waits_the_next_task_is_named() -> None:
    # Forward until 1, the chunk comes from 1 on, gradients leave until 4, backward 4 to 5.
    schedule = waiting_for_copies()
    timing = run(schedule, [1.0, 2.0, 3.0, 1.0, 0.0])
    curve = DeviceMemory(schedule, timing).curve()
    assert curve.times_s == (0.0, 1.0, 4.0, 5.0)
    assert curve.levels_bytes == (0, 356, 256, 256)
    assert curve.peak_bytes == 356
    assert curve.peak_at == "backward 0"
    assert curve.alive_at_peak == (
        Holding(content=Content.PARAMETERS, size_bytes=256),
        Holding(content=Content.GRADIENTS, size_bytes=100),
    )
    # A bound that looks at running tasks alone sees 256: the peak falls into the pause between them.
    assert guaranteed_device_peak(schedule).size_bytes == 356


def releasing_as_it_runs() -> Schedule:
    """A backward that has released 150 of the 190 bytes that it frees when the next chunk begins to come."""
    activations = Allocation(AllocationId(0), Content.ACTIVATIONS, Memory.DEVICE, 100)
    gradients = Allocation(AllocationId(1), Content.GRADIENTS, Memory.DEVICE, 90)
    chunks = [
        Allocation(AllocationId(place), Content.PARAMETERS, Memory.DEVICE, size) for place, size in ((2, 10), (3, 1000))
    ]
    forward, small, large, backward, adam = (TaskId(place) for place in range(5))
    curve = Phase(curve=((0.5, 0), (1.0, -150)))
    tasks = (
        Task(forward, TaskKind.FORWARD, BlockId(0), allocates=(activations.id, gradients.id)),
        Task(small, TaskKind.GATHER, chunk=ChunkId(0), after=(forward,), allocates=(chunks[0].id,)),
        Task(large, TaskKind.GATHER, chunk=ChunkId(1), after=(forward,), allocates=(chunks[1].id,)),
        Task(
            backward, TaskKind.BACKWARD, BlockId(0), after=(forward,), frees=(activations.id, gradients.id), phase=curve
        ),
        Task(adam, TaskKind.DEVICE_ADAM, after=(large,), frees=tuple(chunk.id for chunk in chunks)),
    )
    return Schedule("", tasks, (activations, gradients, *chunks), num_slots=2, num_blocks=1, prefetch_depth=1)


def test_what_has_been_released_at_a_peak_is_taken_off_activations_first() -> None:
    # Forward until 1; backward until 3, the second half of it 150 lower; the large chunk comes from 2.6 on.
    schedule = releasing_as_it_runs()
    timing = run(schedule, [1.0, 1.6, 0.2, 2.0, 1.0])
    curve = DeviceMemory(schedule, timing).curve()
    assert curve.times_s == pytest.approx((0.0, 1.0, 2.0, 2.6, 3.0, 4.0))
    assert curve.levels_bytes == (0, 200, 50, 1050, 1010, 1010)
    assert curve.peak_at == "backward 0"
    assert curve.alive_at_peak == (
        Holding(content=Content.PARAMETERS, size_bytes=1010),
        Holding(content=Content.GRADIENTS, size_bytes=40),
    )


def test_pinned_host_memory_is_what_copies_need() -> None:
    # Offloaded: chunk 1 alone, 256 bytes of parameters and as much for its gradients.
    model = workload()
    schedule = compile_schedule(plan(model, n_persist=1), model)
    timing = run(schedule, [1.0] * len(schedule.tasks))
    curve = pinned_host_curve(schedule, timing)
    begin_s, end_s = window_s(schedule, timing)
    assert begin_s > 0
    assert curve.times_s == (0.0, end_s - begin_s)
    assert curve.memory is Memory.PINNED_HOST
    assert curve.peak_bytes == 512
    assert set(curve.levels_bytes) == {512}
    assert curve.alive_at_peak == (
        Holding(content=Content.PARAMETERS, size_bytes=256),
        Holding(content=Content.GRADIENTS, size_bytes=256),
    )


def test_without_a_successor_the_window_ends_with_the_iteration() -> None:
    schedule, timing = spread_over_iterations(is_trainable=True)
    alone = replace(timing, starts_s=timing.starts_s[:1], ends_s=timing.ends_s[:1])
    assert window_s(schedule, alone) == (0.0, float(timing.ends_s[0].max()))
    assert DeviceMemory(schedule, alone).peak_bytes > 0

"""Plausible records for tests of what shows them: a schedule laid out on time by hand, without the simulator."""

from __future__ import annotations

import random
from dataclasses import dataclass

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Holding, LaneUse, MemoryCurve, Origin, Record, TaskTiming
from protwin.shared.schema.schedule import Content, Lane, Memory, Schedule, Task, TaskKind
from protwin.shared.schema.workload import Block, BlockProfile, DType, Parameter, Phase, Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak

MIB = 2**20
_NUM_ITERATIONS = 4


@dataclass(frozen=True)
class LaidOut:
    """A schedule with a predicted record and a measured one, whose durations differ by some noise."""

    workload: Workload
    schedule: Schedule
    predicted: Record
    measured: Record


def decoder_workload(num_blocks: int, *, model_name: str = "decoder") -> Workload:
    """A decoder of equal blocks of 7 MiB of parameters and 24 MiB of saved activations each."""
    parameters = [Parameter(name="embedding", shape=(256, 384), dtype=DType.FLOAT32)]
    for block in range(num_blocks):
        for part, rows in enumerate((1152, 384, 1536, 1536)):
            name = f"layers.{block}.{part}"
            parameters.append(Parameter(name=name, shape=(rows, 384), dtype=DType.FLOAT32, block=block))
    parameters.append(Parameter(name="norm", shape=(384,), dtype=DType.FLOAT32))
    gradient_bytes = 4608 * 384 * 4
    output_bytes, saved_bytes = 2 * MIB, 24 * MIB
    profile = BlockProfile(
        output_bytes=output_bytes,
        forward=_phase(output_bytes + saved_bytes, 4 * MIB, 0.020),
        backward=_phase(gradient_bytes - output_bytes - saved_bytes, 6 * MIB, 0.042),
        checkpoint_forward=_phase(output_bytes, 10 * MIB, 0.019),
        recompute=_phase(saved_bytes, 4 * MIB, 0.021),
        checkpoint_backward=_phase(gradient_bytes - output_bytes - saved_bytes, 6 * MIB, 0.042),
    )
    return Workload(
        model_name=model_name,
        model_hash="0123456789abcdef",
        batch_shapes={"input_ids": (4, 256)},
        num_samples=4,
        num_tokens=1024,
        compute_dtype=DType.FLOAT32,
        parameters=tuple(parameters),
        blocks=tuple(Block(name=f"layers.{block}", profile=0) for block in range(num_blocks)),
        profiles=(profile,),
        prologue_forward=_phase(2 * MIB, 0, 0.002),
        epilogue_forward=_phase(3 * MIB, MIB, 0.006),
        epilogue_backward=_phase(-3 * MIB, 2 * MIB, 0.011),
        prologue_backward=_phase(-2 * MIB, 0, 0.003),
        resident_bytes=MIB // 2,
        traced_with="real",
        measured_on="two cores",
    )


def _phase(net_bytes: int, transient_bytes: int, measured_s: float) -> Phase:
    top = max(0, net_bytes) + transient_bytes
    return Phase(net_bytes=net_bytes, curve=((0.5, top), (1.0, max(0, net_bytes))), measured_s=measured_s)


def laid_out(num_blocks: int = 12, *, model_name: str = "decoder", noise_frac: float = 0.06, seed: int = 0) -> LaidOut:
    """A predicted and a measured record of one plan of a decoder."""
    workload = decoder_workload(num_blocks, model_name=model_name)
    chunk_bytes = 8 * MIB
    layout = build_layout(workload.parameters, num_blocks=num_blocks, chunk_bytes=chunk_bytes)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=chunk_bytes,
        n_persist=num_blocks // 4,
        n_buffer=layout.min_buffers(num_blocks // 4) + 3,
        prefetch_depth=2,
        n_checkpoint=num_blocks // 2,
    )
    schedule = compile_schedule(plan, workload, layout)
    return LaidOut(
        workload,
        schedule,
        record_of(schedule, plan, workload, origin=Origin.SIMULATED),
        record_of(schedule, plan, workload, origin=Origin.MEASURED, noise_frac=noise_frac, seed=seed),
    )


def record_of(
    schedule: Schedule, plan: Plan, workload: Workload, *, origin: Origin, noise_frac: float = 0.0, seed: int = 0
) -> Record:
    """The last of a few iterations in which every task starts as soon as it may."""
    rng = random.Random(seed)
    durations = [_duration_s(task) * (1 + noise_frac * rng.uniform(-1, 1)) for task in schedule.tasks]
    starts = _starts(schedule, durations)
    last = _NUM_ITERATIONS - 2
    first_compute, compute = schedule.lanes[Lane.COMPUTE][0], schedule.lanes[Lane.COMPUTE]
    zero = starts[last][first_compute]
    iteration_s = starts[last + 1][first_compute] - zero
    backward = next(t for t in compute if schedule.tasks[t].kind is TaskKind.BACKWARD)
    forward_s = starts[last][backward] - zero
    optimizer_s = zero + iteration_s - starts[last][compute[-1]]
    tasks = tuple(
        TaskTiming(
            task=task.id,
            name=task.name,
            kind=task.kind,
            lane=task.lane,
            start_s=starts[last][task.id] - zero,
            end_s=starts[last][task.id] - zero + durations[task.id],
            duration_s=durations[task.id],
        )
        for task in schedule.tasks
    )
    measured = origin is Origin.MEASURED
    return Record(
        origin=origin,
        plan=plan,
        plan_id=schedule.plan_id,
        model_name=workload.model_name,
        hardware_name="two-core-cpu",
        machine="two cores, 8 GiB" if measured else "",
        software={"python": "3.11.2", "torch": "2.13.0"} if measured else {},
        emulated=("device budget on host memory",) if measured else (),
        num_samples=workload.num_samples,
        num_tokens=workload.num_tokens,
        iteration_s=iteration_s,
        iteration_noise_frac=0.012 if measured else 0.0,
        num_iterations=30 if measured else 1,
        forward_s=forward_s,
        backward_s=iteration_s - forward_s - optimizer_s,
        optimizer_s=optimizer_s,
        tasks=tasks,
        lanes=_lane_uses(schedule, durations),
        memory=_curves(schedule, starts, durations, zero, iteration_s),
        guaranteed_peak_device_bytes=guaranteed_device_peak(schedule).size_bytes,
        num_gathers=sum(task.kind is TaskKind.GATHER for task in schedule.tasks),
        num_cpu_adam_steps=sum(task.kind is TaskKind.CPU_ADAM for task in schedule.tasks),
    )


def _duration_s(task: Task) -> float:
    if task.phase is not None:
        return task.phase.measured_s or 0.0
    return 2e-4 + task.moved_bytes / 1.2e9 + task.stepped_bytes / 4e9


def _starts(schedule: Schedule, durations: list[float]) -> list[list[float]]:
    """Start of every task in every iteration: the longest path of its dependencies and its lane."""
    starts: list[list[float]] = []
    free_at = dict.fromkeys(Lane, 0.0)
    for iteration in range(_NUM_ITERATIONS):
        row = [0.0] * len(schedule.tasks)
        for task in schedule.tasks:
            ready = [free_at[task.lane]]
            ready += [row[wait] + durations[wait] for wait in task.after]
            if iteration:
                ready += [starts[-1][wait] + durations[wait] for wait in task.after_previous]
            row[task.id] = max(ready)
            free_at[task.lane] = row[task.id] + durations[task.id]
        starts.append(row)
    return starts


def _lane_uses(schedule: Schedule, durations: list[float]) -> tuple[LaneUse, ...]:
    return tuple(
        LaneUse(
            lane=lane,
            num_tasks=len(program),
            busy_s=sum(durations[task] for task in program),
            moved_bytes=sum(schedule.tasks[task].moved_bytes for task in program),
        )
        for lane, program in schedule.lanes.items()
    )


def _curves(
    schedule: Schedule, starts: list[list[float]], durations: list[float], zero: float, iteration_s: float
) -> tuple[MemoryCurve, ...]:
    """Device memory of one iteration, and pinned memory, which never changes.

    Buffers of a compute task count from its end on; while it runs, the whole of its highest level counts.
    """
    changes: list[tuple[float, int, Content | None]] = []
    for row in starts:
        for task in schedule.tasks:
            start, end = row[task.id], row[task.id] + durations[task.id]
            made_at = end if task.lane is Lane.COMPUTE else start
            for buffer in (schedule.buffers[b] for b in task.allocates):
                changes.append((made_at, buffer.size_bytes, buffer.content))
            for buffer in (schedule.buffers[b] for b in task.frees):
                changes.append((end, -buffer.size_bytes, buffer.content))
            if task.phase is not None:
                changes += [(start, task.phase.peak_bytes, None), (end, -task.phase.peak_bytes, None)]
    alive: dict[Content | None, int] = {}
    for buffer in schedule.buffers:
        if buffer.is_static and buffer.memory is Memory.DEVICE:
            alive[buffer.content] = alive.get(buffer.content, 0) + buffer.size_bytes
    times, levels, alive_at_peak = [0.0], [0], dict(alive)
    for at, change_bytes, content in sorted(changes, key=lambda change: (change[0], change[1])):
        if at > zero + iteration_s:
            break
        alive[content] = alive.get(content, 0) + change_bytes
        level = sum(alive.values())
        if at <= zero:
            levels[0] = level
            continue
        if level > max(levels):
            alive_at_peak = dict(alive)
        times.append(at - zero)
        levels.append(level)
    compute = schedule.lanes[Lane.COMPUTE]
    peak_at_s = times[levels.index(max(levels))]
    running = [task for task in compute if starts[-2][task] - zero <= peak_at_s]
    pinned = schedule.static_bytes(Memory.PINNED_HOST)
    return (
        MemoryCurve(
            memory=Memory.DEVICE,
            times_s=tuple(times),
            levels_bytes=tuple(levels),
            peak_bytes=max(levels),
            peak_at=schedule.tasks[running[-1]].name,
            alive_at_peak=tuple(
                Holding(content=content, size_bytes=size) for content, size in alive_at_peak.items() if size
            ),
        ),
        MemoryCurve(
            memory=Memory.PINNED_HOST,
            times_s=(0.0,),
            levels_bytes=(pinned,),
            peak_bytes=pinned,
            peak_at=schedule.tasks[compute[0]].name,
        ),
    )

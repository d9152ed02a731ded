"""The record of a simulated iteration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeVar

from ...shared.basics.errors import WorkloadError
from ...shared.compile.compile import compile_schedule
from ...shared.layout.layout import Layout, layout_of
from ...shared.layout.residencies import chunk_counts
from ...shared.methods.method import Method
from ...shared.order.happens_before import HappensBefore
from ...shared.phases.operations import lowering_notes
from ...shared.records.flops import hardware_flops, model_flops
from ...shared.records.phase_times import phase_times_s
from ...shared.records.phase_waits import Span, SpanOf, phase_waits
from ...shared.records.question import matrix_dtype, question_of
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.record import LaneUse, MemoryCurve, Origin, PhaseWait, Record, TaskTiming
from ...shared.schema.schedule import LANES_ALONE, Schedule, Task, TaskId, TaskKind
from ...shared.schema.workload import Workload
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ...shared.verify.verify import verify_schedule
from ..costs.factorisation import factorisation_of
from ..memory.host import host_memory
from ..memory.reserved import AS_USUAL, Segments, device_reserved
from ..memory.rules import round_size
from .device_memory import DeviceMemory, pinned_host_curve, window_s
from .kept_schedule import kept_schedule
from .timing import Fold, Timing
from .unfolding import (
    count_left_out,
    more_phase_times_s,
    repeated_tasks,
    unfold_curve,
    unfold_flops,
    unfold_tasks,
    unfold_waits,
)

Figure = TypeVar("Figure", int, float)
_ITERATIONS: Final = 3
"""Over which the happens-before relation is known: what memory accounts need."""


@dataclass(frozen=True, kw_only=True)
class RankMachine:
    """What one of several equal ranks works on."""

    hardware: Hardware
    """The rank's share of the machine (``machine_of_rank``)."""
    collective_bytes: int
    """Device memory that carries collectives."""
    segments: Segments = AS_USUAL
    """How each of them holds the allocator's."""
    price_usd_per_hour: float | None = None
    """Rent of the machines that the devices of all ranks are in; None if unknown."""


def predicted_record(
    plan: Plan,
    workload: Workload,
    machine: RankMachine,
    calibration: Calibration | None,
    schedule: Schedule,
    timing: Timing,
    *,
    layout: Layout | None = None,
    method: Method | None = None,
) -> Record:
    """One iteration of ``timing`` in steady state, with the memory of one rank.

    Args:
        plan: The plan that ``schedule`` carries out.
        workload: Its model and batch.
        machine: Of the rank.
        calibration: Where seconds come from, besides the machine; None for none.
        schedule: The tasks of ``timing``.
        timing: Starts and ends of every task over some iterations.
        layout: Spares building the layout of ``plan`` again.
        method: The training method, where it is another than the plan names: by its rules ``schedule`` is verified.

    Seconds count from the start of the iteration's first compute task.  The schedule is verified first: a record of an
    unsafe one would predict the impossible.

    Raises WorkloadError if the iteration takes no time, ScheduleError if ``schedule`` is unsafe for ``plan``.
    """
    hardware, fold = machine.hardware, timing.fold
    _check_takes_time(workload, hardware, timing)
    layout = layout or layout_of(workload, plan.chunk_bytes)
    verified = plan.model_copy(update={"micro_batches": schedule.micro_batches})
    verify_schedule(schedule, verified, workload, layout, rules=None if method is None else method.rules)
    found = _iteration(schedule, timing)
    if fold is not None:
        # The proof of one micro-batch is that of all that are like it.
        schedule = fold.kept.with_all_left_over()
    order = HappensBefore(schedule, _ITERATIONS)
    as_seen = _as_seen(schedule, timing, plan, workload, layout, method)
    device_curve, pinned_curve = _memory_curves(schedule, as_seen, timing)
    return Record(
        origin=Origin.SIMULATED,
        plan=plan,
        plan_id=plan.identity,
        model_name=workload.model_name,
        hardware_name=hardware.name,
        num_samples=workload.num_samples * plan.num_batches,
        num_tokens=workload.num_tokens * plan.num_batches,
        iteration_s=timing.iteration_s,
        iteration_noise_frac=calibration.iteration_noise_frac if calibration is not None else 0.0,
        forward_s=found.forward_s,
        backward_s=found.backward_s,
        optimizer_s=found.optimizer_s,
        waits=found.waits,
        tasks=found.tasks,
        lanes=found.lanes,
        memory=(device_curve, pinned_curve),
        guaranteed_peak_device_bytes=guaranteed_device_peak(schedule, order).size_bytes,
        device_reserved=device_reserved(
            schedule if fold is None else fold.kept.with_all_left_over(round_size),
            workload,
            layout,
            hardware.device,
            order=order,
            beside_bytes=machine.collective_bytes,
            segments=machine.segments,
        ),
        host_memory=host_memory(
            schedule,
            workload.parameters,
            layout,
            hardware,
            widens=plan.widens_on_host,
            device_peak_bytes=device_curve.peak_bytes,
        ),
        price_usd_per_hour=machine.price_usd_per_hour,
        emulated=lowering_notes(
            workload.compiled, workload.float8, workload.packed_products, gather=workload.float8_gather
        ),
        model_flops=_times(
            plan.micro_batches * plan.num_ranks, model_flops(workload.shared_among(plan.sequence_ranks))
        ),
        hardware_flops=_times(plan.num_ranks, found.hardware_flops),
        peak_flop_per_s=_times(plan.num_ranks, hardware.device.matrix_flop_per_s(matrix_dtype(workload))),
        power_w=_times(plan.num_ranks, hardware.device.drawn_w),
        chunks=chunk_counts(plan, layout),
        factorisation=factorisation_of(workload, hardware, plan.num_ranks),
        num_gathers=_num_gathers(schedule, fold),
        num_cpu_adam_steps=sum(task.kind is TaskKind.CPU_ADAM for task in schedule.tasks),
        question=question_of(workload, plan, hardware, calibration),
    )


@dataclass(frozen=True, kw_only=True)
class _Iteration:
    """What the lanes of one rank do in an iteration, micro-batches that were left out among it."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    waits: tuple[PhaseWait, ...]
    tasks: tuple[TaskTiming, ...]
    lanes: tuple[LaneUse, ...]
    hardware_flops: int | None


def _iteration(schedule: Schedule, timing: Timing) -> _Iteration:
    fold = timing.fold
    begin_s, end_s = window_s(schedule, timing)
    tasks = _task_timings(schedule, timing, begin_s)
    forward_s, backward_s = phase_times_s(schedule, [task.end_s for task in tasks])
    found = _Iteration(
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=max(0.0, end_s - begin_s - forward_s - backward_s),
        waits=phase_waits(schedule, _spans(timing), (begin_s, end_s), timing.rank_waits_s),
        tasks=tasks,
        lanes=_lane_uses(schedule, tasks, fold),
        hardware_flops=hardware_flops(schedule),
    )
    if fold is None:
        return found
    more_forward_s, more_backward_s = more_phase_times_s(fold, tasks)
    return replace(
        found,
        forward_s=forward_s + more_forward_s,
        backward_s=backward_s + more_backward_s,
        waits=unfold_waits(fold, found.waits, _spans(timing), begin_s),
        tasks=unfold_tasks(fold, tasks),
        hardware_flops=unfold_flops(fold, found.hardware_flops),
    )


def _as_seen(
    schedule: Schedule, timing: Timing, plan: Plan, workload: Workload, layout: Layout, method: Method | None
) -> Schedule:
    """``schedule`` with the memory that the traced batch took, which other values may exceed.

    Both hold what left-out micro-batches leave over.
    """
    fold, seen = timing.fold, workload.as_seen
    if seen is workload:
        return schedule
    planned = plan.model_copy(update={"micro_batches": schedule.micro_batches})
    own = compile_schedule(planned, seen, layout, policies=None if method is None else method.policies)
    assert len(own.tasks) == len(schedule.tasks), "memory changes no task"
    if fold is None:
        return own
    kept = kept_schedule(own, fold.kept.num_left_out)
    return own if kept is None else kept.with_all_left_over()


def _memory_curves(schedule: Schedule, as_seen: Schedule, timing: Timing) -> tuple[MemoryCurve, MemoryCurve]:
    """Of the device and of pinned host memory; both schedules hold what left-out micro-batches leave over."""
    device_curve, pinned_curve = DeviceMemory(as_seen, timing).curve(), pinned_host_curve(schedule, timing)
    if timing.fold is None:
        return device_curve, pinned_curve
    begin_s, _ = window_s(schedule, timing)
    return unfold_curve(timing.fold, device_curve, begin_s), unfold_curve(timing.fold, pinned_curve, begin_s)


def _check_takes_time(workload: Workload, hardware: Hardware, timing: Timing) -> None:
    if timing.iteration_s <= 0:
        raise WorkloadError(
            f"nothing in the workload {workload.model_name} takes time on {hardware.name}: its phases have neither "
            f"operations nor seconds measured there. Trace the model again."
        )


def _times(number: int, of_one: Figure | None) -> Figure | None:
    return None if of_one is None else number * of_one


def _num_gathers(schedule: Schedule, fold: Fold | None) -> int:
    """Gathers that fill a buffer, by a copy or by a collective."""

    def fills(task: Task) -> bool:
        # An all-gather that allocates nothing completes what a gather has begun.
        return task.kind is TaskKind.GATHER or (task.kind is TaskKind.ALL_GATHER and len(task.allocates) > 0)

    found = sum(fills(task) for task in schedule.tasks)
    return found if fold is None else found + int(count_left_out(fold, fills))


def _task_timings(schedule: Schedule, timing: Timing, begin_s: float) -> tuple[TaskTiming, ...]:
    starts_s, ends_s = timing.starts_s[timing.window], timing.ends_s[timing.window]
    return tuple(
        [
            TaskTiming(
                task=task.id,
                name=task.name,
                kind=task.kind,
                lane=task.lane,
                start_s=float(starts_s[task.id]) - begin_s,
                end_s=float(ends_s[task.id]) - begin_s,
                duration_s=float(ends_s[task.id] - starts_s[task.id]),
            )
            for task in schedule.tasks
        ]
    )


def _spans(timing: Timing) -> SpanOf:
    """The spans of ``timing``, counted from its window."""
    starts_s, ends_s = timing.starts_s.tolist(), timing.ends_s.tolist()

    def span_of(iteration: int, task: TaskId) -> Span | None:
        row = timing.window + iteration
        return (starts_s[row][task], ends_s[row][task]) if 0 <= row < len(starts_s) else None

    return span_of


def _lane_uses(schedule: Schedule, tasks: tuple[TaskTiming, ...], fold: Fold | None) -> tuple[LaneUse, ...]:
    repeated = [] if fold is None else repeated_tasks(fold)
    num_left_out = 0 if fold is None else fold.kept.num_left_out
    found = []
    for lane, program in schedule.lanes.items():
        if program or lane in LANES_ALONE:
            more = [task.id for task in repeated if task.lane is lane]
            found.append(
                LaneUse(
                    lane=lane,
                    num_tasks=len(program) + num_left_out * len(more),
                    busy_s=sum(tasks[task].duration_s for task in program)
                    + num_left_out * sum(tasks[task].duration_s for task in more),
                    moved_bytes=sum(schedule.tasks[task].moved_bytes for task in program)
                    + num_left_out * sum(schedule.tasks[task].moved_bytes for task in more),
                )
            )
    return tuple(found)

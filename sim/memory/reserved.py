"""How much of a device PyTorch's allocator reserves for a simulated schedule, as a range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...shared.layout.layout import Layout
from ...shared.order.happens_before import HappensBefore
from ...shared.schema.hardware import Device, DeviceKind
from ...shared.schema.memory_accounts import DeviceReserved
from ...shared.schema.schedule import Content, Memory, Schedule, TaskKind
from ...shared.schema.workload import Workload
from .allocator import AllocatorFullError
from .libraries import matrix_workspaces, outside_allocator_bytes
from .request_replay import RequestLog, reserved_by
from .requests_of_schedule import allocation_program
from .rules import SEGMENT_ROUNDING_BYTES
from .static_tensors import static_tensors
from .within_task import Inside

_COARSE_ITERATIONS: Final = 2
"""The coarse reading takes nearly everything that it ever takes in the first iteration and the first with all state."""


@dataclass(frozen=True, slots=True)
class Segments:
    """How a process holds segments, beside what its schedule says."""

    are_expandable: bool = False
    """Whether it asks for expandable ones."""
    gathering_bytes: int = 0
    """Of the stream that gathers parameters, whose segments no other stream can have."""
    reducing_bytes: int = 0
    """Likewise of the stream that reduces gradients, beyond those that the schedule has."""
    parts_apart: bool = False
    """Whether what reduce-scatters give lies in segments of the stream that reduces, where it stays until the step."""
    num_together: int = 0
    """Scalars, at most, whose masters and moments are one tensor each, made in the set-up; 0: the first step makes
    moments, parameter by parameter."""

    @property
    def own_bytes(self) -> int:
        """Of streams beside that of compute."""
        return self.gathering_bytes + self.reducing_bytes


AS_USUAL: Final = Segments()


def device_reserved(
    schedule: Schedule,
    workload: Workload,
    layout: Layout,
    device: Device,
    *,
    order: HappensBefore | None = None,
    beside_bytes: int = 0,
    segments: Segments = AS_USUAL,
) -> DeviceReserved | None:
    """What the allocator holds once it asks the driver for no more; None where the CPU is the device, which has none.

    Iterations are replayed from the set-up on ([Note: What a replay knows] in ``sim/memory/within_task.py``),
    without a limit, in either reading of what happens within tasks.  Where the expected one exceeds the device, it is
    replayed once more within it, so that cached segments are given back, and with expandable segments, without a limit
    and, if that is needed, within it.  If ``segments`` are expandable, all replays are with these.

    Args:
        schedule: Asks for the memory.
        workload: Its parameters have tensors that stay.
        layout: The chunks of these.
        device: Has the memory.
        order: Spares computing the happens-before relation again.
        beside_bytes: Taken of the device beside the allocator, for collectives.
        segments: How the process holds them.
    """
    if device.kind is DeviceKind.CPU:
        return None
    static = static_tensors(schedule, workload.parameters, layout, num_together=segments.num_together)
    workspaces = matrix_workspaces(device)
    log, coarse_log = (
        RequestLog(
            allocation_program(schedule, order, by_curve=inside is Inside.AT_ONCE, parts_apart=segments.parts_apart),
            static,
            workspaces=workspaces,
            inside=inside,
        )
        for inside in (Inside.BY_SIZE, Inside.AT_ONCE)
    )
    limit_bytes, own_bytes = _limit_bytes(device, beside_bytes), bytes_of_other_streams(segments, schedule)
    left_bytes, are_expandable = limit_bytes - own_bytes, segments.are_expandable
    expected = reserved_by(log, expandable_segments=are_expandable)
    coarse = reserved_by(coarse_log, expandable_segments=are_expandable, max_iterations=_COARSE_ITERATIONS)
    num_retries: int | None = 0
    expandable_bytes: int | None = None
    expandable_retries: int | None = None
    if expected.peak_reserved_bytes > left_bytes:
        num_retries = _retries(log, left_bytes, expandable_segments=are_expandable)
        if not are_expandable:
            expandable_bytes = reserved_by(log, expandable_segments=True).peak_reserved_bytes + own_bytes
            expandable_retries = 0
            if expandable_bytes > limit_bytes:
                expandable_retries = _retries(log, left_bytes, expandable_segments=True)
    at_least_bytes = -(-expected.peak_allocated_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
    return DeviceReserved(
        at_least_bytes=at_least_bytes + own_bytes,
        expected_bytes=expected.peak_reserved_bytes + own_bytes,
        at_most_bytes=max(expected.peak_reserved_bytes, coarse.peak_reserved_bytes) + own_bytes,
        workspace_bytes=sum(workspaces),
        outside_bytes=device.memory_bytes - limit_bytes,
        limit_bytes=limit_bytes,
        num_retries=num_retries,
        expandable_bytes=expandable_bytes,
        expandable_retries=expandable_retries,
        num_iterations=expected.num_iterations,
        is_settled=expected.is_settled,
    )


def segment_limit_bytes(device: Device, *, beside_bytes: int = 0, margin_frac: float = 0.0) -> int | None:
    """The most that segments may take if ``margin_frac`` of the device's memory is to stay free besides.

    None where the CPU is the device, which has no segments.  ``beside_bytes``: as of ``device_reserved``.
    """
    if device.kind is DeviceKind.CPU:
        return None
    return _limit_bytes(device, beside_bytes) - round(margin_frac * device.memory_bytes)


def expected_segments_bytes(
    schedule: Schedule,
    workload: Workload,
    layout: Layout,
    device: Device,
    *,
    order: HappensBefore | None = None,
    segments: Segments = AS_USUAL,
) -> int:
    """``DeviceReserved.expected_bytes`` alone, or ``expandable_bytes``: one replay, without a limit."""
    log = expected_requests(schedule, workload, layout, device, order=order, segments=segments)
    found = reserved_by(log, expandable_segments=segments.are_expandable)
    return found.peak_reserved_bytes + bytes_of_other_streams(segments, schedule)


def expected_requests(
    schedule: Schedule,
    workload: Workload,
    layout: Layout,
    device: Device,
    *,
    order: HappensBefore | None = None,
    segments: Segments = AS_USUAL,
) -> RequestLog:
    """What ``expected_segments_bytes`` replays, with expandable segments or without."""
    return RequestLog(
        allocation_program(schedule, order, parts_apart=segments.parts_apart),
        static_tensors(schedule, workload.parameters, layout, num_together=segments.num_together),
        workspaces=matrix_workspaces(device),
        inside=Inside.BY_SIZE,
    )


def bytes_of_other_streams(segments: Segments, schedule: Schedule) -> int:
    """Of streams beside that of compute: parts of gradients that stay until the step, and one on its way besides."""
    if not segments.parts_apart:
        return segments.own_bytes
    stepped = {buffer for task in schedule.tasks if task.kind is TaskKind.DEVICE_ADAM for buffer in task.frees}
    parts = [
        buffer
        for buffer in schedule.buffers
        if buffer.content is Content.REDUCED_GRADIENTS and buffer.memory is Memory.DEVICE and not buffer.is_static
    ]
    passing_bytes = max((buffer.size_bytes for buffer in parts if buffer.id not in stepped), default=0)
    return segments.own_bytes + passing_bytes + sum(b.size_bytes for b in parts if b.id in stepped)


def _limit_bytes(device: Device, beside_bytes: int) -> int:
    return max(1, device.memory_bytes - outside_allocator_bytes(device) - beside_bytes)


def _retries(log: RequestLog, limit_bytes: int, *, expandable_segments: bool) -> int | None:
    """How often free memory must go back for the replay to stay within the allocator's limit; None if it cannot."""
    if limit_bytes <= 0:
        return None
    try:
        return reserved_by(log, expandable_segments=expandable_segments, limit_bytes=limit_bytes).num_retries
    except AllocatorFullError:
        return None

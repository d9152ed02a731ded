"""A plan close to another that has room for a larger batch: more blocks are checkpointed, then fewer chunks kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

from ...shared.layout.layout import Layout
from ...shared.layout.travelling_inputs import input_bytes
from ...shared.methods.known import method_named
from ...shared.schema.memory_accounts import DeviceReserved
from ...shared.schema.plan import ActivationMode, ParallelMode, Plan, mode_counts
from ...shared.schema.schedule import Memory, Schedule
from ...shared.schema.workload import Workload
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ..engine.kept_schedule import memory_schedule
from ..memory.host import planned_host_bytes

_MOST_TRIED: Final = 4
"""Each takes a compilation and a guaranteed peak, tens of milliseconds together."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a plan of one rank may fill.  Bytes."""

    device_bytes: int
    host_bytes: int
    """Pinned and pageable, with what steps make on the way."""
    segments_bytes: int | None = None
    """What the device's allocator may hold; None for no limit."""

    def lowered(self, reserved: DeviceReserved | None, peak_bytes: int) -> Room:
        """The room with segments counted as a share of the peak, the same as those of a plan with this peak."""
        if self.segments_bytes is None or reserved is None or not reserved.expected_bytes:
            return self
        most_bytes = peak_bytes * self.segments_bytes // reserved.expected_bytes
        return replace(self, device_bytes=min(self.device_bytes, most_bytes))


def plan_with_room(plan: Plan, workload: Workload, layout: Layout, room: Room) -> tuple[Plan, Schedule] | None:
    """``plan``, or one close to it that keeps less on the device, if its guaranteed peak and host memory fit.

    None if none of the few that are tried does: this is no search, and a search may find one.
    ``plan`` is for ``workload``, and ``layout`` is its layout.
    """
    tried: Plan | None = plan
    for _ in range(_MOST_TRIED):
        if tried is None:
            return None
        schedule = memory_schedule(tried, workload, layout)
        over_bytes = guaranteed_device_peak(schedule).size_bytes - room.device_bytes
        if over_bytes <= 0:
            host_bytes = planned_host_bytes(schedule, workload.parameters, layout, widens=tried.widens_on_host)
            return (tried, schedule) if host_bytes <= room.host_bytes else None
        tried = _leaner(tried, workload, layout, schedule, over_bytes)
    return None


def may_have_room(workload: Workload, layout: Layout, room: Room) -> bool:
    """False if no plan that ``plan_with_room`` could come to fits: in microseconds, before anything is compiled.

    When the last part of the model begins its forward, the device holds the chunks that it needs and what every block
    left behind, which is the least where it is checkpointed or swapped.  Where blocks have no modes, none leaves
    anything behind: the device holds the chunks of one step at least.
    """
    if not method_named(workload.method).policies.sections.has_modes:
        largest_bytes = max(sum(layout.chunks[chunk].size_bytes for chunk in chunks) for chunks in layout.needed)
        return largest_bytes <= room.device_bytes
    needed = layout.needed[workload.num_blocks + 1]
    profiles = [workload.profile_of(block) for block in range(workload.num_blocks)]
    left = [min(p.checkpoint_forward.net_bytes, p.forward.net_bytes - p.swappable_bytes) for p in profiles]
    # What a block hands on may wait on the host until the next one is recomputed.
    away = [*input_bytes(workload)[1:], 0]
    left_bytes = sum(max(0, of_block - moved) for of_block, moved in zip(left, away, strict=True))
    needed_bytes = sum(layout.chunks[chunk].size_bytes for chunk in needed)
    least_bytes = needed_bytes + left_bytes + workload.epilogue_forward.peak_bytes
    return least_bytes <= room.device_bytes


def _leaner(plan: Plan, workload: Workload, layout: Layout, schedule: Schedule, over_bytes: int) -> Plan | None:
    """A plan that holds about ``over_bytes`` less on the device; None if there is nothing left to save."""
    modes = plan.modes(workload.num_blocks)
    kept = [block for block, mode in enumerate(modes) if mode is ActivationMode.KEEP]
    has_modes = method_named(plan.method).policies.sections.has_modes
    saved_bytes = [_saved_by_checkpointing(workload, block) for block in kept if has_modes]
    if any(size_bytes > 0 for size_bytes in saved_bytes):
        # One more than the mean asks for: recomputation brings one block's activations back.
        num_more = 1 + -(-over_bytes * len(kept) // sum(max(0, size_bytes) for size_bytes in saved_bytes))
        counts = mode_counts(modes)
        most = workload.num_blocks - counts["n_swap"]
        counts["n_checkpoint"] = min(counts["n_checkpoint"] + num_more, most)
        return plan.model_copy(update={**counts, "activation_modes": None})
    if plan.parallel is ParallelMode.DDP:
        return None
    num_kept = _fewer_kept(plan, layout, schedule, over_bytes)
    if num_kept is None:
        return None
    n_persist = min(plan.n_persist, num_kept)
    n_buffer = max(plan.n_buffer, layout.min_buffers(num_kept))
    return plan.model_copy(
        update={"n_persist": n_persist, "n_host_stepped": num_kept - n_persist, "n_buffer": n_buffer}
    )


def _saved_by_checkpointing(workload: Workload, block: int) -> int:
    """Bytes that a block leaves behind less when it is checkpointed."""
    profile = workload.profile_of(block)
    return profile.forward.net_bytes - profile.checkpoint_forward.net_bytes


def _fewer_kept(plan: Plan, layout: Layout, schedule: Schedule, over_bytes: int) -> int | None:
    """The most chunks that stay whole without those that hold ``over_bytes`` on the device; none if all hold less.

    None if no chunk can go.
    """
    held = _held_by_chunk(schedule)
    now = layout.persistent(plan.num_kept)
    for num_kept in range(plan.num_kept - 1, -1, -1):
        gone = now - layout.persistent(num_kept)
        if gone and (num_kept == 0 or sum(held[chunk] for chunk in gone) >= over_bytes):
            return num_kept
    return None


def _held_by_chunk(schedule: Schedule) -> Counter[int]:
    """Bytes that every chunk holds on the device for good."""
    held: Counter[int] = Counter()
    for buffer in schedule.buffers:
        if buffer.is_static and buffer.memory is Memory.DEVICE and buffer.chunk is not None:
            held[buffer.chunk] += buffer.size_bytes
    return held

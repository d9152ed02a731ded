"""What training holds of the host's memory: pinned buffers, optimizer state, what loading takes, the process.

[Note: Pinned buffers]
PyTorch's own allocator of pinned memory rounds every buffer up to a power of two (``CachingHostAllocator.h``,
PowerOf2Ceil; pinned_max_round_threshold is unlimited by default): up to twice of what was asked for, and a page at
least.  The runtime maps and locks every buffer by itself instead, in whole pages of 4 KiB, and so does a CPU that
stands in for a device; ``PINNED_RULE`` is the one place that says so.

[Note: Loading]
Chunks are filled one after another, from files (``runtime/chunks/saved_weights.py``): a chunk's home and the places its
gradients arrive at are allocated, then its parameters are read into it, with a float32 master beside where they are
narrower.  Pages of the files are the system's, which takes them back.  Moments come with the first step, those of
chunks on the disk in their places.  A chunk that stays on the device and is stepped on the host has a home and masters
there too.  Places of the host that chunks on the disk share come first; such a chunk's masters, and its parameters if
they go there, are made in them and written before the next chunk comes.  Ranks of a sharded plan read their shards
alone, and keep them on the host or on the device.  A model that lies in memory before its chunks take it over is there
besides, less what has moved; rank 0 of several ranks may have it for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ...shared.layout.layout import Chunk, Layout
from ...shared.layout.projections import gradient_projections, parameter_projections
from ...shared.layout.shards import stepped_members, stepped_parts
from ...shared.optimizers.state import master_bytes
from ...shared.optimizers.work import host_step_bytes, host_temporary_bytes
from ...shared.schema.hardware import DeviceKind, Hardware
from ...shared.schema.memory_accounts import HostMemory, PinnedRule
from ...shared.schema.plan import ParallelMode, ProjectionPlace
from ...shared.schema.schedule import Content, Memory, Schedule
from ...shared.schema.workload import Parameter

PAGE_BYTES: Final = 4096
"""A page of host memory."""

PINNED_RULE: Final = PinnedRule.PAGES
"""What ``host_buffer`` of the runtime's devices does; see [Note: Pinned buffers]."""

RESERVE_BYTES: Final = 4 * 2**30
"""The most host memory that plans leave to the system, Python and the data loader."""

PROCESS_BYTES: Final = {DeviceKind.CPU: 400 * 2**20, DeviceKind.CUDA: 2048 * 2**20}
"""Resident memory of a process that has imported what training needs, and trained something small.  A data loader's
workers are processes of their own and not in it.

CPU: 380 MiB with torch 2.13 and transformers 5.23 on Linux, of which 113 MiB are pages of files that processes share,
rounded up; ``docs/memory.md`` has the command that prints it, and a test repeats it.

CUDA: the largest figure found for a process that has put one number on a device, 2 056 600 kB with torch 2.2 on an
RTX 3090 (github.com/pytorch/pytorch issue 113326).
"""


def in_pages(size_bytes: int) -> int:
    """``size_bytes`` in whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def power_of_two(size_bytes: int) -> int:
    """The smallest power of two of at least ``size_bytes``; 0 for nothing."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


def pinned_size(sizes_bytes: Iterable[int], rule: PinnedRule) -> int:
    """What pinned buffers of these sizes take of the host under ``rule``.  Bytes."""
    if rule is PinnedRule.POWER_OF_TWO:
        sizes_bytes = map(power_of_two, sizes_bytes)
    return sum(map(in_pages, sizes_bytes))


def host_memory(
    schedule: Schedule,
    parameters: Sequence[Parameter],
    layout: Layout,
    hardware: Hardware,
    *,
    widens: bool,
    device_peak_bytes: int,
) -> HostMemory:
    """What the process that carries out ``schedule`` holds of the host's memory.

    ``widens``: the host adds gradients up in float32 (``Plan.widens_on_host``).  ``device_peak_bytes``: the device's
    peak, which counts where the CPU is the device.
    """
    pinned = [b.size_bytes for b in schedule.buffers if b.memory is Memory.PINNED_HOST and b.is_static]
    is_cpu = hardware.device.kind is DeviceKind.CPU
    return HostMemory(
        pinned_requested_bytes=pinned_size(pinned, PinnedRule.PAGES),
        pinned_rounded_bytes=pinned_size(pinned, PinnedRule.POWER_OF_TWO),
        pinned_rule=PINNED_RULE,
        state_bytes=schedule.static_bytes(Memory.HOST),
        device_bytes=device_peak_bytes if is_cpu else 0,
        loading_bytes=loading_peak_bytes(schedule, parameters, layout, is_on_host=is_cpu),
        process_bytes=PROCESS_BYTES[hardware.device.kind],
        step_bytes=step_peak_bytes(schedule, parameters, layout, widens=widens, is_on_host=is_cpu),
    )


def step_peak_bytes(
    schedule: Schedule, parameters: Sequence[Parameter], layout: Layout, *, widens: bool, is_on_host: bool
) -> int:
    """The most that stepping one chunk makes in the host's memory.  Bytes.

    ``widens``: as of ``host_memory``.  ``is_on_host``: device memory is host memory too.  What torch's operators make
    there is in the schedule's account of the device; what kernels of bitsandbytes make within is not.
    """
    optimizer = schedule.optimizer
    most_bytes = 0
    for chunk, memory in _state_memories(schedule).items():
        if memory is not Memory.DEVICE:
            stepped = stepped_parts(layout.chunks[chunk], parameters, schedule.num_shards)
            projecting_bytes = _projecting_bytes(schedule, layout.chunks[chunk], parameters, widens=widens)
            most_bytes = max(most_bytes, host_step_bytes(stepped, optimizer, widens=widens), projecting_bytes)
        elif is_on_host and optimizer.is_of_bitsandbytes:
            made = (host_temporary_bytes(one, optimizer) for one in stepped_members(layout.chunks[chunk], parameters))
            most_bytes = max(most_bytes, *made, 0)
    return most_bytes


def _projecting_bytes(schedule: Schedule, chunk: Chunk, parameters: Sequence[Parameter], *, widens: bool) -> int:
    """The most that projections of a chunk on the host make there."""
    if not chunk.subspaces:
        return 0
    of_parameters = parameter_projections(chunk, parameters, schedule.optimizer).peak_bytes
    if schedule.projects_gradients_on is ProjectionPlace.DEVICE:
        return of_parameters
    return max(of_parameters, gradient_projections(chunk, parameters, widens=widens).peak_bytes)


def _state_memories(schedule: Schedule) -> dict[int, Memory]:
    """Where the optimizer state of every chunk lies that has some."""
    return {
        b.chunk: b.memory
        for b in schedule.buffers
        if b.is_static and b.chunk is not None and b.content is Content.OPTIMIZER_STATE
    }


def planned_host_bytes(schedule: Schedule, parameters: Sequence[Parameter], layout: Layout, *, widens: bool) -> int:
    """What a plan fills of the host's budget: all that is there for good, and the most that one step makes.

    ``widens``: as of ``host_memory``.
    """
    static_bytes = schedule.static_bytes(Memory.PINNED_HOST) + schedule.static_bytes(Memory.HOST)
    return static_bytes + step_peak_bytes(schedule, parameters, layout, widens=widens, is_on_host=False)


def loading_peak_bytes(schedule: Schedule, parameters: Sequence[Parameter], layout: Layout, *, is_on_host: bool) -> int:
    """The most host memory while chunks are filled from files; see [Note: Loading].  Bytes.

    ``is_on_host``: device memory is host memory too.
    """
    homes: dict[int, int] = {}
    on_device: dict[int, int] = {}
    on_disk = {b.chunk for b in schedule.buffers if b.memory is Memory.DISK and b.content is Content.OPTIMIZER_STATE}
    shared = [b for b in schedule.buffers if b.is_static and b.chunk is None and b.slot is not None]
    pinned = [b.size_bytes for b in shared if b.memory is Memory.PINNED_HOST]
    shared_bytes = pinned_size(pinned, PINNED_RULE) + sum(b.size_bytes for b in shared if b.memory is Memory.HOST)
    for buffer in schedule.buffers:
        if buffer.is_static and buffer.chunk is not None:
            if buffer.memory is Memory.PINNED_HOST:
                homes[buffer.chunk] = homes.get(buffer.chunk, 0) + pinned_size([buffer.size_bytes], PINNED_RULE)
            elif buffer.memory is Memory.DEVICE and buffer.content is Content.PARAMETERS:
                on_device[buffer.chunk] = buffer.size_bytes
    is_sharded = schedule.parallel is ParallelMode.SHARDED
    level = peak = shared_bytes
    for chunk in layout.chunks:
        members = [parameters[placed.index] for placed in chunk.parameters]
        masters = sum(p.num_elements * master_bytes(p.dtype, schedule.optimizer) for p in members if p.trainable)
        masters = 0 if chunk.id in on_disk else masters
        if is_sharded:
            is_whole = on_device.get(chunk.id, 0) >= chunk.size_bytes
            masters = masters if is_whole else -(-masters // schedule.num_shards)
        level += homes.get(chunk.id, 0)
        if is_on_host or chunk.id not in on_device or chunk.id in homes:
            level += masters
        # Every chunk is made on the device; an offloaded one goes from there when it has been filled.
        filling_bytes = chunk.size_bytes if is_on_host else 0
        peak = max(peak, level + filling_bytes)
        if is_on_host:
            level += on_device.get(chunk.id, 0)
    return peak


def default_reserve_bytes(memory_bytes: int, kind: DeviceKind) -> int:
    """Host memory that plans leave alone: a tenth of ``memory_bytes`` or 4 GiB, whichever is less.

    At least what Python and the libraries take, on a host that has four times that.
    """
    reserve_bytes = min(memory_bytes // 10, RESERVE_BYTES)
    process_bytes = PROCESS_BYTES[kind]
    return max(reserve_bytes, process_bytes) if memory_bytes >= 4 * process_bytes else reserve_bytes


def memory_with_room(room_bytes: int, kind: DeviceKind) -> int:
    """The least memory of a host that leaves ``room_bytes`` after ``default_reserve_bytes``.  Bytes."""
    # The reserve jumps where the process begins to count; what is left grows on both sides of that.
    step_bytes = 4 * PROCESS_BYTES[kind]
    for low, high in ((0, step_bytes - 1), (step_bytes, max(step_bytes, 2 * room_bytes))):
        if high - default_reserve_bytes(high, kind) < room_bytes:
            continue
        while low < high:
            middle = (low + high) // 2
            has_room = middle - default_reserve_bytes(middle, kind) >= room_bytes
            low, high = (low, middle) if has_room else (middle + 1, high)
        return low
    raise AssertionError("twice the room is enough")


def shares_of_one_memory(
    memory_bytes: int, *, most_device_bytes: int, host_needs_bytes: Sequence[int]
) -> tuple[int, int]:
    """Budgets for device and host where the CPU is the device and no budget is given: (device, host), bytes.

    Both lie in ``memory_bytes``.  Where there is room, the host has what the plan needs that offloads the most (the
    largest of ``host_needs_bytes``), and the device all the rest.  Otherwise the device comes first, up to what any
    plan could use of it (``most_device_bytes``), for there plans are fastest; but the host always has what the plan
    needs that offloads the least, without which there would be none.
    """
    host_bytes = min(max(host_needs_bytes), max(memory_bytes - most_device_bytes, min(host_needs_bytes)))
    host_bytes = max(0, min(host_bytes, memory_bytes - 1))
    return max(1, memory_bytes - host_bytes), host_bytes


def default_host_budget_bytes(hardware: Hardware, device_budget_bytes: int) -> int:
    """Host memory that plans may fill: all of it, less ``default_reserve_bytes``.

    Where the CPU is the device, the device's budget is a part of the same memory.
    """
    memory_bytes = hardware.host.memory_bytes
    left_bytes = memory_bytes - default_reserve_bytes(memory_bytes, hardware.device.kind)
    if hardware.device.kind is DeviceKind.CPU:
        left_bytes -= device_budget_bytes
    return max(0, left_bytes)

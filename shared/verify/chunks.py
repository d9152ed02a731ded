"""How parameters, gradients and optimizer state lie and move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..schema.plan import ParallelMode
from ..schema.schedule import ChunkId, Content, Lane, Memory, Section, Task, TaskKind
from ..schema.workload import DType
from .claim import Claim, check_amounts, chunk_of, compare_buffers, reject
from .shards import trained_scalars

_Home = tuple[Content, Memory, ChunkId | None, Section | None, int]
"""A static buffer: what it holds, where, of which chunk or section, in how many bytes."""


def check_chunks(claim: Claim) -> None:
    """Raise ScheduleError unless every chunk has its homes, its copies and exactly one Adam."""
    _check_static(claim)
    for buffer in claim.schedule.buffers:
        if not buffer.is_static and buffer.memory is not Memory.DEVICE:
            reject(f"buffer {buffer.id} ({buffer.content}) comes and goes in {buffer.memory} memory")
        micro_batch = 0 if buffer.is_static else claim.schedule.tasks[claim.allocating[buffer.id]].micro_batch
        if buffer.micro_batch != micro_batch:
            reject(f"buffer {buffer.id} ({buffer.content}) is of micro-batch {buffer.micro_batch}, not {micro_batch}")
        if claim.is_gathered(buffer.id) != (buffer.slot is not None):
            reject(f"buffer {buffer.id} ({buffer.content}) has slot {buffer.slot}")
        if buffer.slot is not None and not 0 <= buffer.slot < claim.plan.n_buffer:
            reject(f"buffer {buffer.id} has slot {buffer.slot} of {claim.plan.n_buffer}")
    for task in claim.tasks_of(TaskKind.GATHER):
        if (chunk := chunk_of(claim, task)).id in claim.persistent | claim.sharded:
            reject(f"{task.name} copies chunk {chunk.id}, which no host has")
        check_gather(claim, task, moved_bytes=claim.held[chunk.id].parameter_bytes)
    _check_updates(claim)
    for task in claim.schedule.tasks:
        if task.kind is TaskKind.DEVICE_ADAM:
            _check_device_adam(claim, task)
        elif task.lane is Lane.COMPUTE:
            check_amounts(task)


def _check_updates(claim: Claim) -> None:
    """Gradients of offloaded chunks leave once per micro-batch and are added up; one CPU Adam steps each chunk."""
    later = range(1, claim.plan.micro_batches)
    # It belongs to the micro-batch whose gradients it waited for last; after the norm of all of them, to none.
    last = claim.plan.micro_batches - 1 if claim.plan.max_gradient_norm is None else 0
    for kind, micro_batches, check in (
        (TaskKind.GRADIENT_OFFLOAD, range(claim.plan.micro_batches), _check_offload),
        (TaskKind.GRADIENT_ACCUMULATE, later, _check_accumulate),
        (TaskKind.CPU_ADAM, (last,), _check_cpu_adam),
    ):
        found = sorted((str(task.chunk), task.micro_batch) for task in claim.tasks_of(kind))
        expected = sorted((str(chunk), micro_batch) for chunk in claim.updated for micro_batch in micro_batches)
        if found != expected:
            reject(f"tasks of kind {kind} serve (chunk, micro-batch) {found}, not {expected}")
        for task in claim.tasks_of(kind):
            check(claim, task)
    norms = claim.tasks_of(TaskKind.GRADIENT_NORM)
    if len(norms) != (0 if claim.plan.max_gradient_norm is None else 1):
        reject(f"it takes the norm of the gradients {len(norms)} times")
    for task in norms:
        _check_norm(claim, task)


# -- homes -----------------------------------------------------------------------------------------------------------


def _check_static(claim: Claim) -> None:
    """What is there for good is what the layout says, each once, in its memory and with its size."""
    expected: Counter[_Home] = Counter([(Content.RESIDENT, Memory.DEVICE, None, None, claim.workload.resident_bytes)])
    for block, size_bytes in claim.swapping.items():
        expected[Content.SWAPPED, Memory.PINNED_HOST, None, block, size_bytes] += 1
    for chunk in claim.layout.chunks:
        is_persistent, is_sharded = chunk.id in claim.persistent, chunk.id in claim.sharded
        place = Memory.DEVICE if is_persistent or is_sharded else Memory.PINNED_HOST
        part = None if is_persistent else claim.held[chunk.id]
        size_bytes = chunk.size_bytes if part is None else part.parameter_bytes
        homes: list[_Home] = [(Content.PARAMETERS, place, chunk.id, None, size_bytes)]
        if chunk.is_trainable:
            place = Memory.DEVICE if is_persistent or is_sharded else Memory.HOST
            state_bytes = chunk.state_bytes if part is None else part.state_bytes
            homes.append((Content.OPTIMIZER_STATE, place, chunk.id, None, state_bytes))
            staged = [Content.GRADIENTS, *([Content.ARRIVING_GRADIENTS] if claim.plan.micro_batches > 1 else [])]
            if is_sharded and part is not None:
                homes.append((Content.REDUCED_GRADIENTS, place, chunk.id, None, part.gradient_bytes))
            elif part is not None:
                homes += [(content, Memory.PINNED_HOST, chunk.id, None, part.staging_bytes) for content in staged]
        expected.update(homes)
    static = [buffer for buffer in claim.schedule.buffers if buffer.is_static]
    found: Counter[_Home] = Counter((b.content, b.memory, b.chunk, b.section, b.size_bytes) for b in static)
    if found != expected:
        missing, extra = list((expected - found).keys()), list((found - expected).keys())
        reject(f"it has the static buffers {_shown(extra)} too much and {_shown(missing)} too little")


def _shown(entries: Iterable[_Home]) -> str:
    shown = [
        f"{content} of {f'block {section}' if chunk is None else f'chunk {chunk}'} in {memory} ({size} B)"
        for content, memory, chunk, section, size in entries
    ]
    return ", ".join(shown) or "nothing"


# -- copies and steps ------------------------------------------------------------------------------------------------


def check_gather(claim: Claim, task: Task, *, moved_bytes: int) -> None:
    """From the chunk's home into a fresh buffer of the chunk's size, which some block uses."""
    chunk = chunk_of(claim, task)
    compare_buffers(task, task.reads, [claim.homes[Content.PARAMETERS, chunk.id]], "reads")
    filled = [claim.buffer(b) for b in task.writes]
    if len(filled) != 1 or not claim.is_gathered(filled[0].id) or filled[0].chunk != chunk.id:
        reject(f"{task.name} does not fill one buffer for the parameters of chunk {chunk.id}")
    part = claim.held[chunk.id]
    if filled[0].size_bytes != part.gathered_bytes or filled[0].section is not None:
        reject(f"{task.name} fills {filled[0].size_bytes} bytes, the chunk has {part.gathered_bytes}")
    compare_buffers(task, task.allocates, filled, "allocates")
    compare_buffers(task, task.frees, [], "frees")
    readers = claim.on_compute(claim.readers[filled[0].id])
    if not readers:
        reject(f"{task.name} is gathered for nobody")
    if task.micro_batch != claim.schedule.tasks[readers[0]].micro_batch:
        reject(f"{task.name} is gathered for {claim.name(readers[0])}")
    check_amounts(task, moved_bytes=moved_bytes)


def _check_offload(claim: Claim, task: Task) -> None:
    """All gradients of the chunk to its staging buffer, those of later micro-batches beside it; then they go.

    Sharded, what leaves is the shard that was left of them.
    """
    chunk = chunk_of(claim, task)
    gradients = claim.gradients.get((chunk.id, task.micro_batch), [])
    if claim.plan.parallel is ParallelMode.SHARDED:
        named = (Content.REDUCED_GRADIENTS, chunk.id, task.micro_batch)
        gradients = [b for b in claim.schedule.buffers if (b.content, b.chunk, b.micro_batch) == named]
    content = Content.ARRIVING_GRADIENTS if task.micro_batch else Content.GRADIENTS
    compare_buffers(task, task.reads, gradients, "reads")
    compare_buffers(task, task.frees, gradients, "frees")
    compare_buffers(task, task.writes, [claim.homes[content, chunk.id]], "writes")
    compare_buffers(task, task.allocates, [], "allocates")
    check_amounts(task, moved_bytes=claim.held[chunk.id].gradient_bytes)


def _check_accumulate(claim: Claim, task: Task) -> None:
    """What has arrived is added to what is staged: two reads, one write."""
    chunk = chunk_of(claim, task)
    staged = claim.homes[Content.GRADIENTS, chunk.id]
    compare_buffers(task, task.reads, [staged, claim.homes[Content.ARRIVING_GRADIENTS, chunk.id]], "reads")
    compare_buffers(task, task.writes, [staged], "writes")
    compare_buffers(task, task.allocates, [], "allocates")
    compare_buffers(task, task.frees, [], "frees")
    check_amounts(task, stepped_bytes=3 * claim.held[chunk.id].gradient_bytes)


def _check_norm(claim: Claim, task: Task) -> None:
    """It reads every gradient: staged, waiting on the device whole or in part, or outside every block."""
    if task.chunk is not None or task.section is not None or task.phase is not None or task.micro_batch:
        reject(f"{task.name} names a chunk, a section, a phase or a micro-batch")
    left = [claim.buffer(b) for b in claim.freed_by(TaskKind.DEVICE_ADAM)]
    staged = [claim.homes[Content.GRADIENTS, chunk] for chunk in claim.updated]
    parts = [claim.homes[Content.REDUCED_GRADIENTS, chunk] for chunk in claim.scattered]
    compare_buffers(task, task.reads, [*staged, *parts, *left], "reads")
    compare_buffers(task, task.writes, [], "writes")
    compare_buffers(task, task.allocates, [], "allocates")
    compare_buffers(task, task.frees, [], "frees")
    check_amounts(task, stepped_bytes=sum(claim.held[chunk].gradient_bytes for chunk in claim.updated))


def _check_cpu_adam(claim: Claim, task: Task) -> None:
    """From the staged gradients to the chunk's parameters and state on the host."""
    chunk = chunk_of(claim, task)
    stepped = [claim.homes[content, chunk.id] for content in (Content.PARAMETERS, Content.OPTIMIZER_STATE)]
    compare_buffers(task, task.reads, [*stepped, claim.homes[Content.GRADIENTS, chunk.id]], "reads")
    compare_buffers(task, task.writes, stepped, "writes")
    compare_buffers(task, task.allocates, [], "allocates")
    compare_buffers(task, task.frees, [], "frees")
    scalars = claim.held[chunk.id].stepped
    check_amounts(task, num_stepped=scalars.total(), stepped_bytes=_stepped_bytes(claim, scalars))


def _check_device_adam(claim: Claim, task: Task) -> None:
    """Its buffers are those of a section (``verify_sections``); here its amounts."""
    stepped = trained_scalars((c for c in claim.layout.chunks if c.id in claim.persistent), claim.workload.parameters)
    for chunk in claim.scattered:
        stepped += claim.held[chunk].stepped
    check_amounts(task, num_stepped=stepped.total(), stepped_bytes=_stepped_bytes(claim, stepped))


def check_swaps(claim: Claim) -> None:
    """Raise ScheduleError unless what a block swaps goes out once and comes back once per micro-batch, whole."""
    expected = sorted((str(block), micro) for block in claim.swapping for micro in range(claim.plan.micro_batches))
    for kind in (TaskKind.ACTIVATION_OFFLOAD, TaskKind.ACTIVATION_FETCH):
        found = sorted((str(task.section), task.micro_batch) for task in claim.tasks_of(kind))
        if found != expected:
            reject(f"tasks of kind {kind} serve (block, micro-batch) {found}, not {expected}")
        for task in claim.tasks_of(kind):
            _check_swap(claim, task)


def _check_swap(claim: Claim, task: Task) -> None:
    """Between the block's home for them and one buffer on the device, which goes or comes with the copy."""
    if task.chunk is not None or task.phase is not None:
        reject(f"{task.name} has a chunk or a phase")
    homes = [
        b for b in claim.schedule.buffers if b.is_static and (b.content, b.section) == (Content.SWAPPED, task.section)
    ]
    is_leaving = task.kind is TaskKind.ACTIVATION_OFFLOAD
    moved = [claim.buffer(b) for b in (task.reads if is_leaving else task.writes)]
    if len(moved) != 1 or (moved[0].content, moved[0].section, moved[0].micro_batch, moved[0].is_static) != (
        Content.SWAPPED,
        task.section,
        task.micro_batch,
        False,
    ):
        reject(f"{task.name} does not move one device buffer of what block {task.section} swaps")
    if moved[0].size_bytes != homes[0].size_bytes:
        reject(f"{task.name} moves {moved[0].size_bytes} bytes, the block swaps {homes[0].size_bytes}")
    compare_buffers(task, task.reads, moved if is_leaving else homes, "reads")
    compare_buffers(task, task.writes, homes if is_leaving else moved, "writes")
    compare_buffers(task, task.allocates, [] if is_leaving else moved, "allocates")
    compare_buffers(task, task.frees, moved if is_leaving else [], "frees")
    check_amounts(task, moved_bytes=homes[0].size_bytes)


def _stepped_bytes(claim: Claim, stepped: Counter[DType]) -> int:
    """Adam reads and writes two moments and the weights, float32 or wider, reads gradients, writes narrow weights.

    Under a limit of their norm, gradients are read and written once more to be scaled.
    """
    is_scaled = claim.plan.max_gradient_norm is not None
    return sum(
        count
        * (2 * 3 * max(4, dtype.item_bytes) + dtype.item_bytes * ((1 if dtype.item_bytes >= 4 else 2) + 2 * is_scaled))
        for dtype, count in stepped.items()
    )

"""Residency: what lies where, when.

Homes of everything that is there for good, gathers of chunks and their stays in slots, swaps of activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from ..layout.keeping import BucketStay
from ..layout.layout import Chunk
from ..schema.plan import ParallelMode
from ..schema.schedule import Allocation, ChunkId, Content, Memory, Section, Task, TaskKind
from .claim import Claim, check_amounts, check_earlier, check_in_place, chunk_of, compare_buffers, reject
from .compute_tasks import bucket_sizes, held_cache_bytes, homes_of_rows
from .disk import is_on_its_way, shared_place_bytes
from .rules import Meeting
from .steps import Stepped, moments_bytes, paged_bytes, state_bytes, stepped_of

_Home = tuple[Content, Memory, ChunkId | None, Section | None, int | None, int]
"""A static buffer: what it holds, where, of which chunk or section, which of several, in how many bytes."""

# -- places ----------------------------------------------------------------------------------------------------------


def check_homes(claim: Claim) -> None:
    """Everything that is there for good is as the layout says, each once, in its memory and with its size.

    Parameters and optimizer state of every chunk, what gradients are staged in, buckets and gradients that stay, what
    blocks swap, and what the model holds beside parameters.
    """
    resident: _Home = (Content.RESIDENT, Memory.DEVICE, None, None, None, claim.workload.resident_bytes)
    expected: Counter[_Home] = Counter([resident])
    for block, size_bytes in claim.travelling.items():
        expected[Content.SWAPPED, Memory.PINNED_HOST, None, block, None, size_bytes] += 1
    for (content, memory), size_bytes in shared_place_bytes(claim).items():
        for slot in range(claim.plan.n_staging):
            expected[content, memory, None, None, slot, size_bytes] += 1
    if claim.keeping.buckets is not None and claim.keeping.buckets.stay is BucketStay.GOOD:
        expected.update((c, Memory.DEVICE, None, None, None, size) for c, size in bucket_sizes(claim).items())
    if cached := held_cache_bytes(claim):
        expected[Content.CACHED_KEYS, Memory.DEVICE, None, None, None, cached] += 1
    if claim.keeping.keeps_gradients:
        for section, sizes in claim.completed.items():
            kept = ((chunk, size) for chunk, size in sizes.items() if chunk in claim.persistent)
            expected.update((Content.GRADIENTS, Memory.DEVICE, chunk, section, None, size) for chunk, size in kept)
    for chunk in claim.layout.chunks:
        expected.update(_homes_of(claim, chunk))
    expected.update(homes_of_rows(claim))
    static = [buffer for buffer in claim.schedule.buffers if buffer.is_static]
    found: Counter[_Home] = Counter((b.content, b.memory, b.chunk, b.section, b.slot, b.size_bytes) for b in static)
    if found != expected:
        missing, extra = list((expected - found).keys()), list((found - expected).keys())
        reject(f"it has the static buffers {_shown(extra)} too much and {_shown(missing)} too little")


def _homes_of(claim: Claim, chunk: Chunk) -> list[_Home]:
    """What is there for good of a chunk: on the device, in its parts there, on the host, or on the host's disk."""
    is_persistent, is_sharded = chunk.id in claim.persistent, chunk.id in claim.sharded
    place = Memory.DEVICE if is_persistent or is_sharded else Memory.PINNED_HOST
    if chunk.id in claim.on_disk:
        place = Memory.DISK
    part = None if is_persistent else claim.held[chunk.id]
    size_bytes = chunk.size_bytes if part is None else part.parameter_bytes
    keeping = claim.keeping
    if is_sharded and keeping.parts_are_within:
        size_bytes = 0
    homes: list[_Home] = [(Content.PARAMETERS, place, chunk.id, None, None, size_bytes)]
    if chunk.id in claim.host_stepped:
        homes.append((Content.PARAMETERS, Memory.DEVICE, chunk.id, None, None, chunk.size_bytes))
    elif keeping.parts_stay and part is not None and not is_sharded:
        homes.append((Content.PARAMETERS, Memory.DEVICE, chunk.id, None, None, part.parameter_bytes))
    if chunk.is_trainable:
        place = Memory.DEVICE if is_persistent or is_sharded else Memory.HOST
        if chunk.id in claim.stepped_from_disk:
            place = Memory.DISK
        kept = part.stepped if part is not None else stepped_of([chunk], claim.workload.parameters)
        kept_bytes = state_bytes(kept, claim.plan.optimizer)
        elsewhere_bytes = _elsewhere(claim, kept) if place is Memory.DEVICE else 0
        homes.append((Content.OPTIMIZER_STATE, place, chunk.id, None, None, kept_bytes - elsewhere_bytes))
        if elsewhere_bytes:
            homes.append((Content.PAGED_STATE, Memory.HOST, chunk.id, None, None, elsewhere_bytes))
        if is_sharded and part is not None and not keeping.parts_go:
            times = part.num_parts if keeping.gradients_are_whole else 1
            homes.append((Content.REDUCED_GRADIENTS, place, chunk.id, None, None, times * part.gradient_bytes))
        elif not is_sharded and part is not None and not (claim.gradients_pass and chunk.id in claim.stepped_from_disk):
            homes.append((Content.GRADIENTS, Memory.PINNED_HOST, chunk.id, None, None, part.staging_bytes))
            arrives = chunk.id not in claim.looked_up or any(chunk.id in made for made in claim.completed.values())
            arrives = arrives and chunk.id not in claim.leave_once
            if arrives and (claim.plan.micro_batches > 1 or claim.plan.widens_on_host):
                homes.append((Content.ARRIVING_GRADIENTS, Memory.PINNED_HOST, chunk.id, None, None, part.arrival_bytes))
    return homes


def _elsewhere(claim: Claim, stepped: list[Stepped]) -> int:
    """What the device steps these with, and does not have between two steps."""
    return (moments_bytes if claim.keeping.moments_visit else paged_bytes)(stepped, claim.plan.optimizer)


def _shown(entries: Iterable[_Home]) -> str:
    shown = [
        f"{content} of {f'block {section}' if slot is None else f'place {slot}'} in {memory} ({size} B)"
        if chunk is None
        else f"{content} of chunk {chunk} in {memory} ({size} B)"
        for content, memory, chunk, section, slot, size in entries
    ]
    return ", ".join(shown) or "nothing"


def check_places(claim: Claim) -> None:
    """Of what comes and goes on the device, gathered chunks, and nothing else, have one of the plan's slots.

    A buffer is of the micro-batch of the task that allocates it.  What comes and goes in host memory has rules of its
    own (``check_shared_places``).
    """
    for buffer in claim.schedule.buffers:
        micro_batch = 0 if buffer.is_static else claim.schedule.tasks[claim.allocating[buffer.id]].micro_batch
        if buffer.micro_batch != micro_batch:
            reject(f"buffer {buffer.id} ({buffer.content}) is of micro-batch {buffer.micro_batch}, not {micro_batch}")
        if buffer.memory is not Memory.DEVICE:
            continue
        if claim.is_gathered(buffer.id) != (buffer.slot is not None):
            reject(f"buffer {buffer.id} ({buffer.content}) has slot {buffer.slot}")
        if buffer.slot is not None and not 0 <= buffer.slot < claim.plan.n_buffer:
            reject(f"buffer {buffer.id} has slot {buffer.slot} of {claim.plan.n_buffer}")


# -- single tasks ----------------------------------------------------------------------------------------------------


def check_gathers(claim: Claim) -> None:
    """A gather copies what the rank has of a chunk on its host into a fresh buffer of the chunk, for some section."""
    for task in claim.tasks_of(TaskKind.GATHER):
        if (chunk := chunk_of(claim, task)).id in claim.persistent | claim.sharded:
            reject(f"{task.name} copies chunk {chunk.id}, which no host has")
        if chunk.id not in claim.host_stepped:
            check_one_gather(claim, task, moved_bytes=claim.held[chunk.id].parameter_bytes)


def check_renewals(claim: Claim) -> None:
    """A chunk that the host steps and the device keeps is gathered once, into its place."""
    renewed: Counter[ChunkId] = Counter()
    for task in claim.tasks_of(TaskKind.GATHER):
        if (chunk := chunk_of(claim, task)).id in claim.host_stepped:
            _check_renewal(claim, task, chunk)
            renewed[chunk.id] += 1
    for chunk_id in sorted(claim.host_stepped):
        if renewed[chunk_id] != 1:
            reject(f"what the host has stepped of chunk {chunk_id} comes back {renewed[chunk_id]} times, not once")


def _check_renewal(claim: Claim, task: Task, chunk: Chunk) -> None:
    """From the chunk's home to its place on the device, all of it, for the iteration's first micro-batch."""
    compare_buffers(task, task.reads, [claim.homes[Content.PARAMETERS, chunk.id]], "reads")
    compare_buffers(task, task.writes, [claim.places[chunk.id]], "writes")
    compare_buffers(task, task.allocates, [], "allocates")
    compare_buffers(task, task.frees, [], "frees")
    if task.micro_batch:
        reject(f"{task.name} brings what the host has stepped, not with the first micro-batch")
    check_amounts(task, moved_bytes=chunk.size_bytes)


def check_one_gather(claim: Claim, task: Task, *, moved_bytes: int) -> None:
    """From the chunk's home into a fresh buffer of the chunk's size, which some section uses.

    Of a chunk on the disk, from what was read of it, which goes then.
    """
    chunk = chunk_of(claim, task)
    passing = [claim.buffer(b) for b in task.reads] if chunk.id in claim.on_disk else []
    if chunk.id in claim.on_disk and (len(passing) != 1 or not is_on_its_way(passing[0], chunk.id, task.micro_batch)):
        reject(f"{task.name} does not copy what was read of chunk {chunk.id}")
    compare_buffers(task, task.reads, passing or [claim.homes[Content.PARAMETERS, chunk.id]], "reads")
    filled = [claim.buffer(b) for b in task.writes]
    if len(filled) != 1 or not claim.is_gathered(filled[0].id) or filled[0].chunk != chunk.id:
        reject(f"{task.name} does not fill one buffer for the parameters of chunk {chunk.id}")
    part = claim.held[chunk.id]
    if filled[0].size_bytes != part.gathered_bytes or filled[0].section is not None:
        reject(f"{task.name} fills {filled[0].size_bytes} bytes, the chunk has {part.gathered_bytes}")
    compare_buffers(task, task.allocates, filled, "allocates")
    compare_buffers(task, task.frees, passing, "frees")
    readers = [user for user in claim.readers[filled[0].id] if user in claim.step_of]
    if not readers:
        reject(f"{task.name} is gathered for nobody")
    if task.micro_batch != claim.schedule.tasks[readers[0]].micro_batch:
        reject(f"{task.name} is gathered for {claim.name(readers[0])}")
    check_amounts(task, moved_bytes=moved_bytes)


def check_all_gathers(claim: Claim) -> None:
    """An all-gather makes a chunk whole: from the shards on the devices, or in the buffer that a gather has filled."""
    for task in claim.tasks_of(TaskKind.ALL_GATHER):
        if task.chunk in claim.sharded:
            check_one_gather(claim, task, moved_bytes=claim.held[task.chunk].gathered_bytes)
        else:
            _check_all_gather(claim, task)


def _check_all_gather(claim: Claim, task: Task) -> None:
    """In the buffer that one gather has filled with the rank's shard, the shards of the others."""
    chunk = chunk_of(claim, task)
    if len(task.reads) != 1 or not claim.is_gathered(task.reads[0]) or claim.buffer(task.reads[0]).chunk != chunk.id:
        reject(f"{task.name} does not work on one buffer for the parameters of chunk {chunk.id}")
    gathered = claim.buffer(task.reads[0])
    if claim.writers[gathered.id] != [claim.allocating[gathered.id], task.id]:
        reject(f"{task.name} does not follow the one gather of its buffer")
    check_in_place(task, [gathered])
    check_amounts(task, moved_bytes=claim.held[chunk.id].gathered_bytes)


def all_gathers(claim: Claim) -> Iterator[Meeting]:
    """One for every gather of shards from the hosts, and those that are listed of chunks sharded over the devices.

    The latter may come at any time, as gathers may: each must have its readers.
    """
    if claim.plan.parallel is not ParallelMode.SHARDED:
        return
    for gather in claim.tasks_of(TaskKind.GATHER):
        yield TaskKind.ALL_GATHER, gather.chunk, None, gather.micro_batch
    for task in claim.tasks_of(TaskKind.ALL_GATHER):
        if task.chunk in claim.sharded:
            yield task.kind, task.chunk, task.section, task.micro_batch


def check_swaps(claim: Claim) -> None:
    """What a block swaps, or its input, goes out once and comes back once per micro-batch, whole."""
    expected = sorted((str(block), micro) for block in claim.travelling for micro in range(claim.plan.micro_batches))
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


# -- order -----------------------------------------------------------------------------------------------------------


def check_slots(claim: Claim) -> None:
    """Stays in one slot follow each other, and so do stays of one chunk, across iterations too."""
    by_slot: dict[int, list[Allocation]] = {}
    by_chunk: dict[ChunkId | None, list[Allocation]] = {}
    for buffer in claim.schedule.buffers:
        if claim.is_gathered(buffer.id) and buffer.slot is not None:
            by_slot.setdefault(buffer.slot, []).append(buffer)
            by_chunk.setdefault(buffer.chunk, []).append(buffer)
    for stays in (*by_slot.values(), *by_chunk.values()):
        # What comes over several lanes stands in the list after what it waits for.
        stays.sort(key=lambda buffer: claim.allocating[buffer.id])
        for stay, following in pairwise(stays):
            if not claim.before(claim.freeing[stay.id], claim.allocating[following.id]):
                reject(f"{_both(stay, following)} at once")
        if not claim.before(claim.freeing[stays[-1].id], claim.allocating[stays[0].id], 1):
            reject(f"{_both(stays[-1], stays[0])} at once when the next iteration begins")


def _both(stay: Allocation, other: Allocation) -> str:
    if stay.slot == other.slot:
        return f"slot {stay.slot} may hold chunks {stay.chunk} and {other.chunk}"
    return f"chunk {stay.chunk} may be in slots {stay.slot} and {other.slot}"


def check_gather_window(claim: Claim) -> None:
    """No gather starts before the step ``prefetch_depth`` ahead of its first use has begun.

    With a depth beyond a whole iteration, it may still not start more than an iteration ahead.  New values of a chunk
    that stays on the device take no room there, and may come as soon as nobody uses the old ones.
    """
    steps, depth = claim.steps, claim.plan.prefetch_depth
    alone = [task for task in claim.tasks_of(TaskKind.ALL_GATHER) if task.chunk in claim.sharded]
    copied = [task for task in claim.tasks_of(TaskKind.GATHER) if task.chunk not in claim.host_stepped]
    for gather in (*copied, *alone):
        step = min(claim.step_of[user] for user in claim.readers[gather.writes[0]] if user in claim.step_of)
        limit = max(step - depth - 1, -len(steps))
        if not claim.before(steps[limit][-1], gather.id, 0 if limit >= 0 else 1):
            reject(f"{gather.name} may run more than {depth} sections ahead")


def check_swap_window(claim: Claim) -> None:
    """What is swapped is gone ``prefetch_depth + 1`` steps after its forward, and comes back no sooner than a chunk."""
    steps, step_of, depth = claim.steps, claim.step_of, claim.plan.prefetch_depth
    for task in claim.tasks_of(TaskKind.ACTIVATION_OFFLOAD):
        # The block before has made an input.
        forward = step_of[claim.allocating[task.reads[0]]] + (task.section in claim.offloaded_inputs)
        later = forward + depth + 1
        # Beyond this iteration the copy back, which waits for this one, is the tighter bound.
        if later < len(steps) and not claim.before(task.id, steps[later][0]):
            reject(f"what block {task.section} swaps may wait too long for {task.name}")
    for task in claim.tasks_of(TaskKind.ACTIVATION_FETCH):
        limit = min(step_of[user] for user in claim.readers[task.writes[0]] if user in step_of) - depth - 1
        if limit >= 0 and not claim.before(steps[limit][-1], task.id):
            reject(f"{task.name} may run more than {depth} sections ahead")


def check_all_gather_order(claim: Claim) -> None:
    """Chunks are whole before anything is computed on them."""
    for task in claim.tasks_of(TaskKind.ALL_GATHER):
        if task.chunk in claim.sharded:
            # Nobody reads what it allocates before it does, and what it reads is a home.
            continue
        for buffer_id in task.reads:
            check_earlier(claim, claim.allocating[buffer_id], task.id)
            for user in claim.on_compute(claim.readers[buffer_id]):
                check_earlier(claim, task.id, user)

"""One compute task: what it must read, make, write and drop, and whether it does.

Buffers are named here by what they hold: content, chunk, section and micro-batch.  Within one iteration such a name is
unique, save for gathered parameters and swapped activations.  The rules of data flow show that the one that is read is
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from ..layout.cached_keys import cached_bytes
from ..layout.keeping import BucketStay
from ..schema.plan import ActivationMode
from ..schema.schedule import (
    Allocation,
    AllocationId,
    ChunkId,
    Content,
    Lane,
    Memory,
    OuterSection,
    Section,
    Task,
    TaskKind,
)
from ..schema.workload import BlockId, Phase
from .claim import Claim, reject

Name = tuple[Content, ChunkId | None, Section | None, int]
"""The micro-batch is -1 for what a device has for good of a chunk that is sharded over all of them."""


_BRINGING: Final = (TaskKind.GATHER, TaskKind.ALL_GATHER, TaskKind.ACTIVATION_FETCH)
"""What fills whole buffers of the device."""


@dataclass(frozen=True)
class Expected:
    """One entry of the compute lane."""

    kind: TaskKind
    section: Section | None
    micro_batch: int
    phase: Phase | None
    reads: set[Name]
    makes: dict[Name, int] = field(default_factory=dict)
    """What it allocates and writes, with sizes."""
    updates: set[Name] = field(default_factory=set)
    """What it writes that was there before."""
    drops: set[Name] = field(default_factory=set)
    """What it frees, gathered parameters aside."""
    on_host: frozenset[AllocationId] = frozenset()
    """What it uses in the host's memory."""


def check_compute_task(claim: Claim, task: Task, entry: Expected) -> None:
    """Raise ScheduleError unless ``task`` is of the entry's micro-batch and phase, and uses its buffers and no others.

    It frees gathered chunks that it reads and no others; how long they stay is a matter of residency.
    """
    if task.chunk is not None:
        reject(f"{task.name} is a compute task and names a chunk")
    if task.micro_batch != entry.micro_batch:
        reject(f"{task.name} is of micro-batch {task.micro_batch}, not {entry.micro_batch}")
    if task.phase is not entry.phase and task.phase != entry.phase:
        reject(f"{task.name} has another phase than the workload gives it")
    for buffer_id in (*task.reads, *task.writes, *task.allocates, *task.frees):
        buffer = claim.buffer(buffer_id)
        # The device itself brings the pages of unified memory.
        is_elsewhere = buffer.memory is not Memory.DEVICE and buffer.content is not Content.PAGED_STATE
        if is_elsewhere and buffer_id not in entry.on_host:
            reject(f"{task.name} touches buffer {buffer_id} in {buffer.memory} memory")
    if not entry.on_host <= {*task.reads, *task.writes}:
        reject(f"{task.name} does not use buffers {sorted(entry.on_host - {*task.reads, *task.writes})} on the host")
    _compare(task, "reads", _names(claim, task.reads), entry.reads)
    _compare(task, "writes", _names(claim, task.writes), entry.updates | entry.makes.keys())
    _compare(task, "allocates", _names(claim, task.allocates), set(entry.makes))
    released = [buffer for buffer in task.frees if claim.is_gathered(buffer)]
    _compare(task, "frees", _names(claim, (b for b in task.frees if b not in released)), entry.drops)
    if not set(released) <= set(task.reads):
        reject(f"{task.name} frees a gathered chunk that it does not use")
    for buffer_id in task.allocates:
        buffer = claim.buffer(buffer_id)
        size_bytes = entry.makes[_name(claim, buffer)]
        if buffer.size_bytes != size_bytes:
            reject(f"{task.name} allocates {buffer.size_bytes} bytes of {buffer.content}, not {size_bytes}")


def check_arrivals(claim: Claim) -> None:
    """Compute tasks say how many bytes they are the first to read since something brought them to the device.

    Found by who reads what, in the order of the schedule, over two iterations: what is brought late is read first in
    the next one.  All other tasks are the first to read nothing.
    """
    fresh: dict[AllocationId, int] = {}
    for is_second in (False, True):
        for task in claim.schedule.tasks:
            if task.lane is not Lane.COMPUTE:
                fresh.update(_brought(claim, task))
            arrived_bytes = sum(fresh.pop(b, 0) for b in task.reads) if task.lane is Lane.COMPUTE else 0
            if is_second and task.arrived_bytes != arrived_bytes:
                reject(f"{task.name} is first to read {arrived_bytes} bytes that came, not {task.arrived_bytes}")


def _brought(claim: Claim, task: Task) -> dict[AllocationId, int]:
    """The bytes that a task brings to the device, by buffer."""
    if task.kind is TaskKind.RECEIVE:
        return dict.fromkeys(task.writes, task.moved_bytes)
    if task.kind not in _BRINGING:
        return {}
    return {b: claim.buffer(b).size_bytes for b in task.writes if claim.buffer(b).memory is Memory.DEVICE}


def _names(claim: Claim, buffers: Iterable[AllocationId]) -> list[Name]:
    return [_name(claim, claim.buffer(buffer)) for buffer in buffers]


def _name(claim: Claim, buffer: Allocation) -> Name:
    if buffer.is_static and buffer.chunk in claim.sharded:
        return name_of_part(buffer.content, buffer.chunk)
    # A chunk may be gathered for one micro-batch and still be there for the next.
    micro_batch = 0 if buffer.content is Content.PARAMETERS else buffer.micro_batch
    return (buffer.content, buffer.chunk, buffer.section, micro_batch)


def name_of_part(content: Content, chunk: ChunkId) -> Name:
    """What a device has for good of a sharded chunk."""
    return (content, chunk, None, -1)


def _compare(task: Task, verb: str, found: list[Name], expected: set[Name]) -> None:
    if len(found) != len(expected) or set(found) != expected:
        missing = sorted(map(_describe, expected - set(found)))
        extra = sorted(map(_describe, (name for name in found if name not in expected or found.count(name) > 1)))
        reject(f"{task.name} {verb} {extra or 'nothing'} too much and {missing or 'nothing'} too little")


def _describe(name: Name) -> str:
    content, chunk, section, micro_batch = name
    where = [f"{'part of ' if micro_batch < 0 else ''}chunk {chunk}"] if chunk is not None else []
    where += [f"section {section}"] if section is not None else []
    return " ".join([content, *where, *([f"of micro-batch {micro_batch}"] if micro_batch > 0 else [])])


def gradients_of(claim: Claim, section: Section, micro_batch: int) -> tuple[dict[Name, int], int]:
    """Gradients that a section's backward makes anew, with their bytes, and the bytes of all that it completes.

    Later micro-batches add to those that stay on the device where these lie; all do to those that are there for good.
    """
    sizes = claim.completed[section]
    made: dict[Name, int] = {
        (Content.GRADIENTS, chunk, section, micro_batch): size
        for chunk, size in sizes.items()
        if not claim.is_added_to(chunk, micro_batch)
    }
    of_rows = gradients_of_rows(claim, section)
    made |= {(Content.GRADIENTS, chunk, section, micro_batch): size for chunk, size in of_rows.items()}
    return made, sum(sizes.values()) + sum(of_rows.values())


def bucket_sizes(claim: Claim) -> dict[Content, int]:
    """Bytes of every bucket of gradients: as many scalars as it is said to have, in the type of what is trained."""
    buckets = claim.keeping.buckets
    trained = [parameter.dtype for parameter in claim.workload.parameters if parameter.trainable]
    if buckets is None or buckets.num_scalars == 0 or not trained:
        return {}
    contents = [Content.BUCKET, Content.SECOND_BUCKET][: buckets.number]
    return dict.fromkeys(contents, buckets.num_scalars * trained[0].item_bytes)


def with_buckets(claim: Claim, entry: Expected) -> Expected:
    """``entry`` with the buckets that it makes or frees.

    Buckets come behind the epilogue's forward and go with the prologue's backward: in every micro-batch, or in the
    first one and the last.
    """
    buckets = claim.keeping.buckets
    if buckets is None or buckets.stay is BucketStay.GOOD:
        return entry
    is_for_step, last = buckets.stay is BucketStay.STEP, claim.plan.micro_batches - 1
    sizes = bucket_sizes(claim)
    made: dict[Name, int] = {(c, None, None, entry.micro_batch): size for c, size in sizes.items()}
    gone: set[Name] = {(c, None, None, 0 if is_for_step else entry.micro_batch) for c in sizes}
    if (entry.kind, entry.section) == (TaskKind.FORWARD, OuterSection.EPILOGUE):
        return entry if is_for_step and entry.micro_batch else replace(entry, makes=entry.makes | made)
    if (entry.kind, entry.section) == (TaskKind.BACKWARD, OuterSection.PROLOGUE):
        stays = is_for_step and entry.micro_batch < last
        return entry if stays else replace(entry, reads=entry.reads | gone, drops=entry.drops | gone)
    return entry


def with_held_inputs(claim: Claim, entry: Expected) -> Expected:
    """``entry``, a backward, with what hooks hold: made by the blocks' backwards, and dropped by the prologue's.

    Behind a block's backward its own input stays, and the gradient that it was given: that of the next one's input.
    """
    if not claim.keeping.holds_inputs:
        return entry
    blocks = [BlockId(number) for number in range(len(claim.modes))]
    held = {block for block in blocks if claim.modes[block].is_recomputed and _has_frozen(claim, block)}
    if entry.section is OuterSection.EPILOGUE:
        return entry
    sizes: dict[Name, int] = {}
    for block in blocks:
        given = claim.workload.profile_of(block).output_bytes if BlockId(block + 1) in held else 0
        own = claim.workload.profile_of(BlockId(block - 1)).output_bytes if block and block in held else 0
        if given + own:
            sizes[(Content.HELD_INPUT, None, block, entry.micro_batch)] = given + own
    if entry.section is OuterSection.PROLOGUE:
        return replace(entry, reads=entry.reads | sizes.keys(), drops=entry.drops | sizes.keys())
    made = {name: size for name, size in sizes.items() if name[2] == entry.section}
    return replace(entry, makes=entry.makes | made)


def with_cached_keys(claim: Claim, entry: Expected) -> Expected:
    """``entry``, a forward, with what a key-value cache keeps: made by the blocks, and dropped by the epilogue."""
    if not claim.keeping.caches_keys or entry.section is OuterSection.PROLOGUE:
        return entry
    sizes: dict[Name, int] = {}
    for block, mode in enumerate(claim.modes):
        size_bytes = _cached_by(claim, BlockId(block))
        if mode is not ActivationMode.KEEP and size_bytes:
            sizes[(Content.CACHED_KEYS, None, BlockId(block), entry.micro_batch)] = size_bytes
    if entry.section is OuterSection.EPILOGUE:
        return replace(entry, reads=entry.reads | sizes.keys(), drops=entry.drops | sizes.keys())
    made = {name: size for name, size in sizes.items() if name[2] == entry.section}
    return replace(entry, makes=entry.makes | made)


def held_cache_bytes(claim: Claim) -> int:
    """Bytes of keys and values that a loop has for good which caches them and holds the model's output."""
    if not (claim.keeping.caches_keys and claim.workload.keeps_outputs):
        return 0
    blocks = (BlockId(number) for number in range(claim.workload.num_blocks))
    return sum(_cached_by(claim, block) for block in blocks)


def _cached_by(claim: Claim, block: BlockId) -> int:
    return cached_bytes(claim.workload.profile_of(block).forward)


def _has_frozen(claim: Claim, block: BlockId) -> bool:
    return any(parameter.block == block and not parameter.trainable for parameter in claim.workload.parameters)


def looking_up(claim: Claim, forward: Expected) -> Expected:
    """The prologue's ``forward`` with its lookups: it reads embeddings where the host has them, and stages rows."""
    tables: set[Name] = {(Content.PARAMETERS, chunk, None, 0) for chunk in claim.looked_up}
    staged: set[Name] = {(Content.LOOKED_UP_ROWS, chunk, None, 0) for chunk in claim.looked_up}
    homes = [claim.homes.get((content, chunk)) for content, chunk, _, _ in tables | staged]
    if None in homes:
        reject("the host lacks embeddings of which rows are looked up, or room for these")
    on_host = frozenset(home.id for home in homes if home is not None)
    return replace(forward, reads=forward.reads | tables, updates=staged, on_host=on_host)


# -- rows of embeddings ----------------------------------------------------------------------------------------------


def trained_rows(claim: Claim) -> list[ChunkId]:
    """The chunks whose gradients of rows leave the device."""
    return [chunk for chunk in claim.looked_up if claim.layout.chunks[chunk].is_trainable]


def bytes_of_rows(claim: Claim, chunk: ChunkId, *, trained: bool) -> int:
    """Bytes of the rows that one forward looks up, or of their gradients."""
    members = (placed.index for placed in claim.layout.chunks[chunk].parameters)
    parameters = ((index, claim.workload.parameters[index]) for index in members)
    return sum(
        claim.looked_up_rows[index] * parameter.shape[1] * parameter.dtype.item_bytes
        for index, parameter in parameters
        if parameter.trainable or not trained
    )


def gradients_of_rows(claim: Claim, section: Section) -> dict[ChunkId, int]:
    """Bytes of the gradients of rows that a section's backward leaves, by chunk: the prologue's alone."""
    if section is not OuterSection.PROLOGUE:
        return {}
    return {chunk: bytes_of_rows(claim, chunk, trained=True) for chunk in trained_rows(claim)}


def phases_of_prologue(claim: Claim) -> tuple[Phase, Phase]:
    """Its forward and backward, as the plan has them."""
    lookups = claim.workload.row_lookups if claim.plan.looks_up_rows else None
    found = claim.workload if lookups is None else lookups
    return found.prologue_forward, found.prologue_backward


def completing_tables(claim: Claim, section: Section, backward: Phase) -> Phase:
    """``backward`` of a section that completes embeddings' gradients as the prologue adds none on the device."""
    more_bytes = sum(
        claim.workload.parameters[index].size_bytes
        for index in claim.looked_up_rows
        if claim.workload.parameters[index].trainable and claim.completing(index) == section
    )
    return backward.with_more_gradients(more_bytes) if more_bytes else backward


def homes_of_rows(claim: Claim) -> Iterator[tuple[Content, Memory, ChunkId | None, Section | None, int | None, int]]:
    """What the host has for good to move rows."""
    for chunk in claim.looked_up:
        size_bytes = bytes_of_rows(claim, chunk, trained=False)
        yield Content.LOOKED_UP_ROWS, Memory.PINNED_HOST, chunk, None, None, size_bytes
    for chunk in trained_rows(claim):
        size_bytes = bytes_of_rows(claim, chunk, trained=True)
        yield Content.ROW_GRADIENTS, Memory.PINNED_HOST, chunk, None, None, size_bytes

"""One compute task: what it must read, make, write and drop, and whether it does.

Buffers are named here by what they hold: content, chunk, section and micro-batch.  Within one iteration such a name is
unique, save for gathered parameters and swapped activations.  The rules of data flow show that the one that is read is
there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..schema.schedule import Allocation, AllocationId, ChunkId, Content, Memory, Section, Task, TaskKind
from ..schema.workload import Phase
from .claim import Claim, reject

Name = tuple[Content, ChunkId | None, Section | None, int]
"""The micro-batch is -1 for what a device has for good of a chunk that is sharded over all of them."""


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
        if buffer.memory is not Memory.DEVICE and buffer.content is not Content.PAGED_STATE:
            reject(f"{task.name} touches buffer {buffer_id} in {buffer.memory} memory")
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

    Later micro-batches add to the gradients of persistent chunks where these lie.
    """
    sizes = claim.completed[section]
    made: dict[Name, int] = {
        (Content.GRADIENTS, chunk, section, micro_batch): size
        for chunk, size in sizes.items()
        if not (micro_batch and chunk in claim.persistent)
    }
    return made, sum(sizes.values())

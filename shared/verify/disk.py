"""The host's disk: what lies there, and the places of host memory that it passes through."""

from __future__ import annotations

from itertools import pairwise

from ..schema.schedule import Allocation, ChunkId, Content, Memory, Task, TaskKind
from .claim import Claim, check_amounts, chunk_of, compare_buffers, reject

_Sort = tuple[Content, Memory]
"""What passes through, and in which memory."""
_ON_ITS_WAY: _Sort = (Content.PARAMETERS, Memory.PINNED_HOST)
"""Parameters that a gather copies next."""


def shared_place_bytes(claim: Claim) -> dict[_Sort, int]:
    """The size of one place for everything that passes through: that of the largest."""
    held, parameters = claim.held, [claim.held[chunk].parameter_bytes for chunk in claim.on_disk]
    stepped = sorted(claim.stepped_from_disk)
    sizes: dict[_Sort, list[int]] = {
        _ON_ITS_WAY: parameters,
        (Content.PARAMETERS, Memory.HOST): [held[c].parameter_bytes for c in stepped if c in claim.on_disk],
        (Content.OPTIMIZER_STATE, Memory.HOST): [held[chunk].state_bytes for chunk in stepped],
        (Content.GRADIENTS, Memory.PINNED_HOST): [held[c].staging_bytes for c in stepped if claim.gradients_pass],
    }
    return {sort: max(found) for sort, found in sizes.items() if found}


def check_shared_places(claim: Claim) -> None:
    """What comes and goes in host memory does so in one of the plan's places, and fits into it."""
    place_bytes = shared_place_bytes(claim)
    for (content, memory, chunk), buffers in claim.passing.items():
        for buffer in buffers:
            if (content, memory) not in place_bytes or chunk is None:
                reject(f"buffer {buffer.id} ({content}) comes and goes in {memory} memory")
            if chunk not in (claim.on_disk if content is Content.PARAMETERS else claim.stepped_from_disk):
                reject(f"buffer {buffer.id} holds {content} of chunk {chunk}, which the disk does not have")
            if buffer.slot is None or not 0 <= buffer.slot < claim.plan.n_staging:
                reject(f"buffer {buffer.id} has place {buffer.slot} of {claim.plan.n_staging} in {memory} memory")
            expected = _bytes_of(claim, content, chunk)
            if buffer.size_bytes != expected or buffer.section is not None:
                reject(f"buffer {buffer.id} ({content}) of chunk {chunk} has {buffer.size_bytes} bytes, not {expected}")


def _bytes_of(claim: Claim, content: Content, chunk: ChunkId) -> int:
    held = claim.held[chunk]
    if content is Content.PARAMETERS:
        return held.parameter_bytes
    return held.staging_bytes if content is Content.GRADIENTS else held.state_bytes


def is_on_its_way(buffer: Allocation, chunk: ChunkId, micro_batch: int) -> bool:
    """Whether ``buffer`` holds parameters of ``chunk`` between the disk and the device, for ``micro_batch``."""
    found = (buffer.content, buffer.memory, buffer.chunk, buffer.micro_batch)
    return found == (*_ON_ITS_WAY, chunk, micro_batch) and not buffer.is_static


def is_to_project(claim: Claim, filled: list[Allocation], chunk: ChunkId) -> bool:
    """Whether ``filled`` is one place with parameters of ``chunk`` that go when gradients are projected against them.

    Who projects says which those are.
    """
    found = [(b.content, b.memory, b.chunk) for b in filled]
    if found != [(Content.PARAMETERS, Memory.HOST, chunk)] or filled[0].is_static:
        return False
    return claim.schedule.tasks[claim.freeing[filled[0].id]].kind is TaskKind.HOST_GRADIENT_PROJECTION


def check_disk_reads(claim: Claim) -> None:
    """Parameters are read for a gather, or all that CPU Adam steps of a chunk is read for that, once per step.

    Or they are read for gradients to be projected against them.
    """
    reads = claim.tasks_of(TaskKind.DISK_READ)
    _check_served(claim, [task for task in reads if _reads_state(claim, task)])
    for task in reads:
        chunk = chunk_of(claim, task)
        if _reads_state(claim, task):
            filled, homes = _stepped(claim, chunk.id), _homes(claim, chunk.id)
        else:
            if chunk.id not in claim.on_disk:
                reject(f"{task.name} reads parameters of chunk {chunk.id}, which the disk does not have")
            filled = [claim.buffer(b) for b in task.writes]
            is_for_gather = len(filled) == 1 and is_on_its_way(filled[0], chunk.id, task.micro_batch)
            if not is_for_gather and not is_to_project(claim, filled, chunk.id):
                reject(f"{task.name} does not fill one place for the parameters of chunk {chunk.id}")
            if is_for_gather and claim.schedule.tasks[claim.freeing[filled[0].id]].kind is not TaskKind.GATHER:
                reject(f"{task.name} is read for no gather")
            homes = [claim.homes[Content.PARAMETERS, chunk.id]]
        compare_buffers(task, task.reads, homes, "reads")
        compare_buffers(task, task.writes, filled, "writes")
        compare_buffers(task, task.allocates, filled, "allocates")
        compare_buffers(task, task.frees, [], "frees")
        check_amounts(task, moved_bytes=sum(home.size_bytes for home in homes))


def _reads_state(claim: Claim, task: Task) -> bool:
    return any(claim.buffer(buffer).content is Content.OPTIMIZER_STATE for buffer in task.reads)


def check_disk_writes(claim: Claim) -> None:
    """What CPU Adam has stepped of a chunk on the disk is written there, once per step, and goes from the host."""
    _check_served(claim, claim.tasks_of(TaskKind.DISK_WRITE))
    for task in claim.tasks_of(TaskKind.DISK_WRITE):
        chunk = chunk_of(claim, task)
        stepped, homes = _stepped(claim, chunk.id), _homes(claim, chunk.id)
        compare_buffers(task, task.reads, stepped, "reads")
        compare_buffers(task, task.writes, homes, "writes")
        compare_buffers(task, task.allocates, [], "allocates")
        compare_buffers(task, task.frees, stepped, "frees")
        check_amounts(task, moved_bytes=sum(home.size_bytes for home in homes))


def _check_served(claim: Claim, tasks: list[Task]) -> None:
    """One for every chunk that is stepped from the disk, of the micro-batch that its CPU Adam is of."""
    last = claim.plan.micro_batches - 1 if claim.plan.max_gradient_norm is None else 0
    found = sorted((str(task.chunk), task.micro_batch) for task in tasks)
    expected = sorted((str(chunk), last) for chunk in claim.stepped_from_disk)
    if found != expected:
        reject(f"the disk serves steps of (chunk, micro-batch) {found}, not {expected}")


def _on_disk(claim: Claim, chunk: ChunkId) -> tuple[Content, ...]:
    parameters = (Content.PARAMETERS,) if chunk in claim.on_disk else ()
    return (*parameters, Content.OPTIMIZER_STATE)


def _homes(claim: Claim, chunk: ChunkId) -> list[Allocation]:
    return [claim.homes[content, chunk] for content in _on_disk(claim, chunk)]


def _stepped(claim: Claim, chunk: ChunkId) -> list[Allocation]:
    return [claim.stepped_in(content, chunk) for content in _on_disk(claim, chunk)]


def check_turns(claim: Claim) -> None:
    """What passes through one place does so one after the other, across iterations too."""
    by_place: dict[tuple[Content, Memory, int | None], list[Allocation]] = {}
    for (content, memory, _), buffers in claim.passing.items():
        for buffer in buffers:
            by_place.setdefault((content, memory, buffer.slot), []).append(buffer)
    for stays in by_place.values():
        stays.sort(key=lambda buffer: claim.allocating[buffer.id])
        for stay, following in pairwise(stays):
            if not claim.before(claim.freeing[stay.id], claim.allocating[following.id]):
                reject(
                    f"place {stay.slot} may hold {stay.content} of chunks {stay.chunk} and {following.chunk} at once"
                )
        first, last = stays[0], stays[-1]
        if not claim.before(claim.freeing[last.id], claim.allocating[first.id], 1):
            reject(f"place {first.slot} may be taken by chunk {first.chunk} before chunk {last.chunk} leaves it")

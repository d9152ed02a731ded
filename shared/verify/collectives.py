"""Collectives of the update: ranks add gradients up, or leave each other parts of them, and agree on their norm."""

from __future__ import annotations

from collections.abc import Iterator

from ..schema.plan import ParallelMode
from ..schema.schedule import OF_OWNERS, Allocation, ChunkId, Content, Lane, RankAxis, Task, TaskKind
from .claim import Claim, check_amounts, check_earlier, check_in_place, chunk_of, compare_buffers, reject
from .rules import Meeting
from .steps import groups_of, ranks_of_group

_NORM_BYTES = 8
"""A float64."""
_NEIGHBOURS = 2
"""Ranks of a send and its receive."""


def reductions(claim: Claim) -> Iterator[Meeting]:
    """Gradients are added up in every micro-batch in which they leave, those that stay in the last, norms' parts once.

    Where several groups of ranks have parts of their own, what is left of gradients that leave is added up over the
    groups in every micro-batch too, and parts that stay in the last.
    """
    plan = claim.plan
    if plan.parallel is ParallelMode.SINGLE:
        return
    last = plan.micro_batches - 1
    stay = [c for c in claim.layout.chunks if c.is_trainable and c.id in claim.persistent]
    yield from ((TaskKind.ALL_REDUCE, chunk.id, None, last) for chunk in stay)
    is_sharded = plan.parallel is ParallelMode.SHARDED
    leaving = TaskKind.REDUCE_SCATTER if is_sharded else TaskKind.ALL_REDUCE
    for chunk_id in claim.updated + (claim.scattered if is_sharded else []):
        yield from ((leaving, chunk_id, None, micro_batch) for micro_batch in claim.leaving_in(chunk_id))
    if is_sharded and groups_of(plan) > 1:
        for chunk_id in claim.updated:
            yield from ((TaskKind.ALL_REDUCE, chunk_id, None, micro_batch) for micro_batch in range(last + 1))
        yield from ((TaskKind.ALL_REDUCE, chunk_id, None, last) for chunk_id in claim.scattered)
    if is_sharded and plan.max_gradient_norm is not None and (claim.updated or claim.scattered):
        yield TaskKind.ALL_REDUCE, None, None, 0


def check_reduce_scatters(claim: Claim) -> None:
    """A reduce-scatter leaves each rank its shard of a chunk's gradients, where they leave or where they stay."""
    for task in claim.tasks_of(TaskKind.REDUCE_SCATTER):
        _check_reduce_scatter(claim, task)


def _check_reduce_scatter(claim: Claim, task: Task) -> None:
    """From all gradients of the chunk, through a flat buffer that comes and goes, to the rank's shard of them.

    Sharded over the devices, the shard of the first micro-batch is written where it stays; those of later ones are made
    beside it, added to it, and go.
    """
    chunk = chunk_of(claim, task)
    part = claim.held[chunk.id]
    gradients = claim.gradients.get((chunk.id, task.micro_batch), [])
    made = [claim.buffer(b) for b in task.allocates]
    sizes = {Content.FLAT_GRADIENTS: part.num_parts * part.gradient_bytes}
    kept = [claim.parts[chunk.id]] if chunk.id in claim.sharded else []
    added = kept if task.micro_batch else []
    comes = claim.keeping.parts_go and not task.micro_batch
    if added or comes or not kept:
        sizes[Content.REDUCED_GRADIENTS] = part.gradient_bytes
    if sorted(b.content for b in made) != sorted(sizes) or any(
        (b.chunk, b.section, b.size_bytes) != (chunk.id, None, sizes[b.content]) for b in made
    ):
        reject(f"{task.name} does not make {', '.join(sizes)} of chunk {chunk.id}, and nothing else")
    compare_buffers(task, task.reads, [*gradients, *added], "reads")
    compare_buffers(task, task.writes, made if comes else [*made, *kept], "writes")
    passing = [b for b in made if (kept and not comes) or b.content is Content.FLAT_GRADIENTS]
    compare_buffers(task, task.frees, [*gradients, *passing], "frees")
    check_amounts(task, moved_bytes=sizes[Content.FLAT_GRADIENTS])


def check_all_reduces(claim: Claim) -> None:
    """An all-reduce adds gradients up where they lie, whole or a part of them, or the parts of their norm."""
    for task in claim.tasks_of(TaskKind.ALL_REDUCE):
        _check_all_reduce(claim, task)


def _check_all_reduce(claim: Claim, task: Task) -> None:
    """Gradients where they lie; or, of the norm, nothing that has a buffer.

    Of a chunk in parts, that is what a reduce-scatter has left: on its way to the host, or where it stays.
    """
    if task.phase is not None or task.section is not None:
        reject(f"{task.name} has a section or a phase")
    if task.chunk is not None:
        chunk = chunk_of(claim, task)
        if claim.plan.parallel is ParallelMode.SHARDED and chunk.id not in claim.persistent:
            gradients, size_bytes = left_of(claim, task, chunk.id), claim.held[chunk.id].gradient_bytes
        else:
            gradients = claim.gradients.get((chunk.id, made_in(claim, task)), [])
            size_bytes = chunk.gradient_bytes
    else:
        gradients, size_bytes = [], _NORM_BYTES
    check_in_place(task, gradients)
    check_amounts(task, moved_bytes=size_bytes)


def left_of(claim: Claim, task: Task, chunk: ChunkId) -> list[Allocation]:
    """The part of the gradients of ``chunk`` that reduce-scatters leave the rank in the task's micro-batch."""
    if chunk in claim.sharded:
        return [claim.parts[chunk]]
    named = (Content.REDUCED_GRADIENTS, chunk, task.micro_batch)
    return [b for b in claim.schedule.buffers if (b.content, b.chunk, b.micro_batch) == named]


def check_axes(claim: Claim) -> None:
    """Every collective has the ranks that it is for.

    Where groups of ranks have parts: those of one group gather, scatter and add up parts of the norm; those that have
    the same part, one of every group, add it up; all ranks add up gradients of chunks that stay whole.  Ranks that
    share sequences exchange parts of these.  What stages of a pipeline exchange joins two neighbours.
    """
    plan = claim.plan
    is_grouped = plan.parallel is ParallelMode.SHARDED and groups_of(plan) > 1
    numbers = {
        RankAxis.WORLD: plan.num_ranks,
        RankAxis.SHARD: ranks_of_group(plan),
        RankAxis.REPLICA: groups_of(plan),
        RankAxis.SEQUENCE: plan.sequence_ranks,
    }
    for task in claim.schedule.tasks:
        axis = RankAxis.WORLD
        if is_grouped and task.kind in (TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER, *OF_OWNERS):
            axis = RankAxis.SHARD
        elif is_grouped and task.kind is TaskKind.ALL_REDUCE and task.chunk not in claim.persistent:
            axis = RankAxis.SHARD if task.chunk is None else RankAxis.REPLICA
        elif task.kind is TaskKind.SEQUENCE_EXCHANGE:
            axis = RankAxis.SEQUENCE
        num_ranks = numbers[axis] if task.lane is Lane.COLLECTIVE else 1
        if task.kind in (TaskKind.RECEIVE, TaskKind.SEND):
            num_ranks = _NEIGHBOURS
        if (task.axis, task.num_ranks) != (axis, num_ranks):
            found = f"{task.num_ranks} of {plan.num_ranks} ranks together, along axis {task.axis}"
            reject(f"{task.name} is done by {found}, not by {num_ranks} along axis {axis}")


def made_in(claim: Claim, task: Task) -> int:
    """The micro-batch whose backwards have made the buffers of the gradients that ``task`` takes or changes."""
    return 0 if task.chunk in claim.added_on_device else task.micro_batch


def check_reduction_order(claim: Claim) -> None:
    """Gradients are complete before they are added up, and added up before anybody else looks at them."""
    for task in claim.tasks_of(TaskKind.REDUCE_SCATTER, TaskKind.ALL_REDUCE):
        for buffer_id in task.reads:
            readers, writers = claim.readers[buffer_id], claim.writers[buffer_id]
            for source in claim.on_compute(writers):
                # Projections are of what is added up.
                if claim.schedule.tasks[source].kind is not TaskKind.GRADIENT_PROJECTION:
                    check_earlier(claim, source, task.id)
            # Backwards of later micro-batches read what they add to: they write it too.
            for user in readers:
                if user not in writers:
                    check_earlier(claim, task.id, user)

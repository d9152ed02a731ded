"""What ranks do together: each collective is there once, on the right buffers, and at its place between the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from ..schema.plan import ParallelMode
from ..schema.schedule import Allocation, ChunkId, Content, Lane, OuterSection, Section, Task, TaskId, TaskKind
from .chunks import check_gather
from .claim import Claim, check_amounts, chunk_of, compare_buffers, reject

_NORM_BYTES: Final = 8
"""A float64."""
_Named = tuple[TaskKind, ChunkId | None, Section | None, int]
"""A collective: kind, chunk or section, and micro-batch."""


def check_collectives(claim: Claim) -> None:
    """Raise ScheduleError unless ranks gather what they have in parts and add up all gradients, each once.

    That every rank enters them in the same order needs no proof: all run one schedule, and it has one lane for them.
    """
    found = Counter(_named(task) for task in claim.schedule.tasks if task.lane is Lane.COLLECTIVE)
    expected = Counter(_expected(claim))
    if found != expected:
        missing, extra = expected - found, found - expected
        reject(f"ranks do {_shown(extra)} too much and {_shown(missing)} too little together")
    for task in claim.tasks_of(TaskKind.ALL_GATHER):
        if task.chunk in claim.sharded:
            check_gather(claim, task, moved_bytes=claim.held[task.chunk].gathered_bytes)
        else:
            _check_all_gather(claim, task)
    for task in claim.tasks_of(TaskKind.REDUCE_SCATTER):
        _check_reduce_scatter(claim, task)
    for task in claim.tasks_of(TaskKind.ALL_REDUCE):
        _check_all_reduce(claim, task)


def _named(task: Task) -> _Named:
    return (task.kind, task.chunk, task.section, task.micro_batch)


def _shown(named: Counter[_Named]) -> str:
    shown = [
        f"{kind} {f'chunk {chunk}' if section is None else section} of micro-batch {micro_batch}"
        for kind, chunk, section, micro_batch in named
    ]
    return ", ".join(shown) or "nothing"


def _expected(claim: Claim) -> list[_Named]:
    plan = claim.plan
    if plan.parallel is ParallelMode.SINGLE:
        return []
    last = plan.micro_batches - 1
    stay = [c for c in claim.layout.chunks if c.is_trainable and c.id in claim.persistent]
    expected: list[_Named] = [(TaskKind.ALL_REDUCE, chunk.id, None, last) for chunk in stay if chunk.blocks]
    if any(sum(chunk.gradient_bytes) for chunk in stay if not chunk.blocks):
        expected.append((TaskKind.ALL_REDUCE, None, OuterSection.PROLOGUE, last))
    is_sharded = plan.parallel is ParallelMode.SHARDED
    leaving = TaskKind.REDUCE_SCATTER if is_sharded else TaskKind.ALL_REDUCE
    expected += [(leaving, chunk, None, micro) for chunk in claim.updated for micro in range(plan.micro_batches)]
    if is_sharded:
        gathers = claim.tasks_of(TaskKind.GATHER)
        expected += [(TaskKind.ALL_GATHER, gather.chunk, None, gather.micro_batch) for gather in gathers]
        # How often chunks come from the devices is free, as it is for gathers: each must have its readers.
        expected += [_named(task) for task in claim.tasks_of(TaskKind.ALL_GATHER) if task.chunk in claim.sharded]
        scattered = [(chunk, micro) for chunk in claim.scattered for micro in range(plan.micro_batches)]
        expected += [(TaskKind.REDUCE_SCATTER, chunk, None, micro) for chunk, micro in scattered]
        if plan.max_gradient_norm is not None and (claim.updated or claim.scattered):
            expected.append((TaskKind.ALL_REDUCE, None, None, 0))
    return expected


def _check_all_gather(claim: Claim, task: Task) -> None:
    """In the buffer that one gather has filled with the rank's shard, the shards of the others."""
    chunk = chunk_of(claim, task)
    if len(task.reads) != 1 or not claim.is_gathered(task.reads[0]) or claim.buffer(task.reads[0]).chunk != chunk.id:
        reject(f"{task.name} does not work on one buffer for the parameters of chunk {chunk.id}")
    gathered = claim.buffer(task.reads[0])
    if claim.writers[gathered.id] != [claim.allocating[gathered.id], task.id]:
        reject(f"{task.name} does not follow the one gather of its buffer")
    _check_in_place(task, [gathered])
    check_amounts(task, moved_bytes=claim.held[chunk.id].gathered_bytes)


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
    kept = [claim.homes[Content.REDUCED_GRADIENTS, chunk.id]] if chunk.id in claim.sharded else []
    added = kept if task.micro_batch else []
    if added or not kept:
        sizes[Content.REDUCED_GRADIENTS] = part.gradient_bytes
    if sorted(b.content for b in made) != sorted(sizes) or any(
        (b.chunk, b.section, b.size_bytes) != (chunk.id, None, sizes[b.content]) for b in made
    ):
        reject(f"{task.name} does not make {', '.join(sizes)} of chunk {chunk.id}, and nothing else")
    compare_buffers(task, task.reads, [*gradients, *added], "reads")
    compare_buffers(task, task.writes, [*made, *kept], "writes")
    passing = [b for b in made if kept or b.content is Content.FLAT_GRADIENTS]
    compare_buffers(task, task.frees, [*gradients, *passing], "frees")
    check_amounts(task, moved_bytes=sizes[Content.FLAT_GRADIENTS])


def _check_all_reduce(claim: Claim, task: Task) -> None:
    """Gradients where they lie; or, of the norm, nothing that has a buffer."""
    if task.phase is not None:
        reject(f"{task.name} has a phase")
    if task.chunk is not None:
        chunk = chunk_of(claim, task)
        micro_batch = 0 if chunk.id in claim.persistent else task.micro_batch
        gradients = claim.gradients.get((chunk.id, micro_batch), [])
        size_bytes = sum(chunk.gradient_bytes)
    elif task.section is not None:
        gradients = [
            claim.buffer(b)
            for b in claim.freed_by(TaskKind.DEVICE_ADAM)
            if claim.buffer(b).content is Content.INCOMING_GRADIENT
        ]
        size_bytes = sum(sum(claim.layout.chunks[chunk].gradient_bytes) for chunk in claim.layout.unowned)
    else:
        gradients, size_bytes = [], _NORM_BYTES
    _check_in_place(task, gradients)
    check_amounts(task, moved_bytes=size_bytes)


def _check_in_place(task: Task, buffers: list[Allocation]) -> None:
    compare_buffers(task, task.reads, buffers, "reads")
    compare_buffers(task, task.writes, buffers, "writes")
    compare_buffers(task, task.allocates, [], "allocates")
    compare_buffers(task, task.frees, [], "frees")


def check_collective_order(claim: Claim, before: Callable[[TaskId, TaskId, int], bool]) -> None:
    """Raise ScheduleError unless what ranks do together comes between what makes its data and what needs its result.

    Chunks are whole before anything is computed on them; gradients are complete before they are added up, and added up
    before anybody else looks at them; Adam under a limit comes after the norm of all ranks.
    """

    def check(first: TaskId, second: TaskId) -> None:
        if first != second and not before(first, second, 0):
            reject(f"{claim.name(second)} may start before {claim.name(first)} has ended")

    for task in claim.schedule.tasks:
        if task.lane is not Lane.COLLECTIVE or (task.kind is TaskKind.ALL_GATHER and task.chunk in claim.sharded):
            # What an all-gather allocates nobody reads before it, and what it reads is a home.
            continue
        for buffer_id in task.reads:
            readers, writers = claim.readers[buffer_id], claim.writers[buffer_id]
            if task.kind is TaskKind.ALL_GATHER:
                sources, users = [claim.allocating[buffer_id]], claim.on_compute(readers)
            else:
                # Backwards of later micro-batches read what they add to: they write it too.
                sources = claim.on_compute(writers)
                users = [reader for reader in readers if reader not in writers]
            for source in sources:
                check(source, task.id)
            for user in users:
                check(task.id, user)
    _check_norm_order(claim, check)


def _check_norm_order(claim: Claim, check: Callable[[TaskId, TaskId], None]) -> None:
    shared = [t for t in claim.tasks_of(TaskKind.ALL_REDUCE) if t.chunk is None and t.section is None]
    for norm in claim.tasks_of(TaskKind.GRADIENT_NORM):
        for task in shared:
            check(norm.id, task.id)
        for kind in (TaskKind.CPU_ADAM, TaskKind.DEVICE_ADAM):
            for adam in claim.tasks_of(kind):
                check(shared[0].id if shared else norm.id, adam.id)

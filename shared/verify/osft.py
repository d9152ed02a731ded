"""The rules of orthogonal subspace fine-tuning: those of full training, and what is projected, where, and when.

What a projection takes is stated here a second time: nothing is read off ``shared/layout/projections.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from ..layout.layout import Chunk
from ..schema.plan import ProjectionPlace
from ..schema.schedule import Allocation, AllocationId, ChunkId, Content, Memory, Task, TaskKind
from ..schema.workload import Phase, Subspace, SubspaceAxis
from .claim import Claim, check_amounts, check_earlier, check_in_place, compare_buffers, reject
from .full_training import FULL_TRAINING
from .rules import Rule, Rules, Stage
from .steps import has_master

_GRADIENTS: Final = (TaskKind.GRADIENT_PROJECTION, TaskKind.HOST_GRADIENT_PROJECTION)
_PARAMETERS: Final = (TaskKind.PARAMETER_PROJECTION, TaskKind.HOST_PARAMETER_PROJECTION)

# -- who is projected where ------------------------------------------------------------------------------------------


def _kept(claim: Claim) -> list[Chunk]:
    """Chunks with subspaces that stay on the device with all that they are stepped with."""
    return [chunk for chunk in claim.layout.chunks if chunk.subspaces and chunk.id in claim.persistent]


def _updated(claim: Claim) -> list[Chunk]:
    """Chunks with subspaces that the host steps."""
    updated = set(claim.updated)
    return [chunk for chunk in claim.layout.chunks if chunk.subspaces and chunk.id in updated]


def check_subspaces(claim: Claim) -> None:
    """Every subspace of the workload is one of the chunk that has both its matrices, and of no other."""
    found: list[Subspace] = []
    for chunk in claim.layout.chunks:
        members = {placed.index for placed in chunk.parameters}
        for subspace in chunk.subspaces:
            if not {subspace.frozen, subspace.trained} <= members:
                reject(f"chunk {chunk.id} has one matrix of {_named(claim, subspace)} without the other")
        found += chunk.subspaces
    if sorted(_key(subspace) for subspace in found) != sorted(_key(subspace) for subspace in claim.workload.subspaces):
        reject(f"its chunks have {len(found)} subspaces, not the {len(claim.workload.subspaces)} of the workload")


def _key(subspace: Subspace) -> tuple[int, int, str]:
    return subspace.trained, subspace.frozen, subspace.axis


def _named(claim: Claim, subspace: Subspace) -> str:
    names = (claim.workload.parameters[place].name for place in (subspace.frozen, subspace.trained))
    return " and ".join(names)


def _check_served(claim: Claim, kind: TaskKind, chunks: Iterable[ChunkId | None], micro_batch: int) -> list[Task]:
    """The tasks of ``kind``: one for each of ``chunks``, None for those that stay, all of this micro-batch."""
    tasks = claim.tasks_of(kind)
    asked = sorted(str(chunk) for chunk in chunks)
    if sorted(str(task.chunk) for task in tasks) != asked:
        reject(f"tasks of kind {kind} serve chunks {[task.chunk for task in tasks]}, not {asked}")
    for task in tasks:
        expected = 0 if task.chunk is None else micro_batch
        if task.section is not None or task.micro_batch != expected:
            reject(f"{task.name} names a section, or is not of micro-batch {expected}")
    return tasks


# -- single tasks ----------------------------------------------------------------------------------------------------


def check_gradient_projections(claim: Claim) -> None:
    """All complete gradients that have subspaces are projected once, with the frozen matrices in the same memory.

    Those that stay on the device together; those that leave one chunk at a time, where the plan says: on the device
    before they leave, or on the host.
    """
    is_on_device = claim.plan.projects_gradients_on is ProjectionPlace.DEVICE
    kept, updated = _kept(claim), _updated(claim)
    of_all: list[ChunkId | None] = [None] if kept else []
    leaving: list[ChunkId | None] = [chunk.id for chunk in updated]
    last = claim.plan.micro_batches - 1
    on_device = [*of_all, *(leaving if is_on_device else [])]
    for task in _check_served(claim, TaskKind.GRADIENT_PROJECTION, on_device, last):
        chunks = kept if task.chunk is None else [claim.layout.chunks[task.chunk]]
        _check_on_device(claim, task, chunks)
        _check_work(claim, task, chunks, is_stored_wide=False)
    for task in _check_served(claim, TaskKind.HOST_GRADIENT_PROJECTION, [] if is_on_device else leaving, last):
        assert task.chunk is not None
        gradients = claim.stepped_in(Content.GRADIENTS, task.chunk)
        frozen, gone = _against(claim, task.chunk)
        compare_buffers(task, task.reads, [gradients, frozen], "reads")
        compare_buffers(task, task.writes, [gradients], "writes")
        compare_buffers(task, task.allocates, [], "allocates")
        compare_buffers(task, task.frees, gone, "frees")
        _check_work(claim, task, [claim.layout.chunks[task.chunk]], is_stored_wide=claim.plan.widens_on_host)


def _against(claim: Claim, chunk: ChunkId) -> tuple[Allocation, list[Allocation]]:
    """The parameters that gradients of ``chunk`` are projected against on the host, and what goes with that.

    Of a chunk on the disk, where it is stepped; under a limit of the norm, which steps wait for, they come before too.
    """
    if chunk not in claim.on_disk or claim.plan.max_gradient_norm is None:
        return claim.stepped_in(Content.PARAMETERS, chunk), []
    stepped = claim.stepped_in(Content.PARAMETERS, chunk)
    found = [b for b in claim.passing[Content.PARAMETERS, Memory.HOST, chunk] if b.id != stepped.id]
    if len(found) != 1:
        reject(f"parameters of chunk {chunk} are brought {len(found)} times to be projected against, not once")
    return found[0], found


def _check_on_device(claim: Claim, task: Task, chunks: list[Chunk]) -> None:
    """It changes all gradients of ``chunks`` where they lie, and reads their parameters, which may go with it."""
    micro_batch = task.micro_batch if task.chunk is not None else 0
    gradients = [b for chunk in chunks for b in claim.gradients.get((chunk.id, micro_batch), [])]
    frozen = [b for b in map(claim.buffer, task.reads) if _holds_parameters(b)]
    if sorted(str(b.chunk) for b in frozen) != sorted(str(chunk.id) for chunk in chunks):
        reject(f"{task.name} projects against chunks {[b.chunk for b in frozen]}, not {[c.id for c in chunks]}")
    compare_buffers(task, task.reads, [*gradients, *frozen], "reads")
    compare_buffers(task, task.writes, gradients, "writes")
    compare_buffers(task, task.allocates, [], "allocates")
    gone: set[AllocationId] = {b.id for b in frozen if claim.is_gathered(b.id)}
    if not set(task.frees) <= gone:
        reject(f"{task.name} frees more than the gathered chunk that it projects against")


def _holds_parameters(buffer: Allocation) -> bool:
    return buffer.content is Content.PARAMETERS and buffer.memory is Memory.DEVICE


def check_parameter_projections(claim: Claim) -> None:
    """All parameters that have subspaces are projected once, with their masters, where they are stepped."""
    kept, updated = _kept(claim), _updated(claim)
    of_all: list[ChunkId | None] = [None] if kept else []
    contents = (Content.PARAMETERS, Content.OPTIMIZER_STATE)
    for task in _check_served(claim, TaskKind.PARAMETER_PROJECTION, of_all, 0):
        check_in_place(task, [claim.homes[content, chunk.id] for chunk in kept for content in contents])
        _check_work(claim, task, kept, is_parameters=True)
    last = claim.plan.micro_batches - 1 if claim.plan.max_gradient_norm is None else 0
    for task in _check_served(claim, TaskKind.HOST_PARAMETER_PROJECTION, [chunk.id for chunk in updated], last):
        assert task.chunk is not None
        check_in_place(task, [claim.stepped_in(content, task.chunk) for content in contents])
        _check_work(claim, task, [claim.layout.chunks[task.chunk]], is_parameters=True)


def _check_work(
    claim: Claim, task: Task, chunks: list[Chunk], *, is_parameters: bool = False, is_stored_wide: bool = False
) -> None:
    """Two products for every subspace of ``chunks``, of matrices in float32 at least."""
    flops = touched = scalars = count = highest = 0
    for subspace in (subspace for chunk in chunks for subspace in chunk.subspaces):
        frozen, trained = (claim.workload.parameters[place] for place in (subspace.frozen, subspace.trained))
        (n, k), (_, r) = frozen.shape, trained.shape
        if subspace.axis is SubspaceAxis.ROWS:
            (k, n), (r, _) = frozen.shape, trained.shape
        own = max(4, trained.dtype.item_bytes) if is_stored_wide else trained.dtype.item_bytes
        wide = max(4, own, frozen.dtype.item_bytes)
        keeps_master = is_parameters and has_master(trained.dtype, claim.plan.optimizer)
        flops += 2 * k * n * r + 2 * n * k * r
        touched += wide * (2 * n * k + 3 * n * r + 2 * k * r)
        made = wide * k * r
        if frozen.dtype.item_bytes < wide:
            touched += (frozen.dtype.item_bytes + wide) * n * k
            made += wide * n * k
        if own < wide:
            touched += (1 if keeps_master else 2) * (own + wide) * n * r
            made += 0 if keeps_master else wide * n * r
        scalars, count, highest = scalars + n * r, count + 1, max(highest, made)
    check_amounts(task, num_stepped=scalars, stepped_bytes=touched, num_tensors=count, flops=flops)
    is_on_device = task.kind in (TaskKind.GRADIENT_PROJECTION, TaskKind.PARAMETER_PROJECTION)
    if task.phase != (Phase(curve=((1.0, highest),)) if is_on_device and highest else None):
        reject(f"{task.name} has another phase than one that adds {highest} B")


# -- order -----------------------------------------------------------------------------------------------------------


def check_projection_order(claim: Claim) -> None:
    """Gradients are complete before they are projected, and projected before anybody else reads them.

    So before they leave the device or their norm is taken, and before Adam.  Parameters are projected behind Adam; that
    nobody reads them in between, data flow shows.
    """
    for task in claim.tasks_of(*_GRADIENTS):
        for buffer in task.writes:
            writers = claim.writers[buffer]
            for writer in writers:
                check_earlier(claim, writer, task.id)
            for reader in claim.readers[buffer]:
                # Who adds to gradients reads them too.
                if reader not in writers:
                    check_earlier(claim, task.id, reader)
        if task.chunk is None:
            for adam in (*claim.tasks_of(TaskKind.DEVICE_ADAM), *claim.tasks_of(TaskKind.GRADIENT_NORM)):
                check_earlier(claim, task.id, adam.id)
    for task in claim.tasks_of(*_PARAMETERS):
        for buffer in task.writes:
            for writer in claim.writers[buffer]:
                check_earlier(claim, writer, task.id)


OSFT: Final[Rules] = replace(
    FULL_TRAINING,
    residency=(*FULL_TRAINING.residency, Rule(Stage.PROGRAM, check_subspaces)),
    updates=(
        *FULL_TRAINING.updates,
        Rule(Stage.CHUNKS, check_gradient_projections, _GRADIENTS),
        Rule(Stage.CHUNKS, check_parameter_projections, _PARAMETERS),
        Rule(Stage.CHUNK_ORDER, check_projection_order),
    ),
)
"""What every schedule of orthogonal subspace fine-tuning must be."""

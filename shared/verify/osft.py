"""The rules of orthogonal subspace fine-tuning: those of full training, and what is projected, where, and when.

What a projection takes is stated here a second time: nothing is read off ``shared/layout/projections.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Final

from ..layout.layout import Chunk
from ..schema.plan import ProjectionPlace
from ..schema.schedule import OF_OWNERS, Allocation, AllocationId, ChunkId, Content, Memory, Task, TaskKind
from ..schema.workload import Phase, Subspace, SubspaceAxis
from .claim import Claim, check_amounts, check_earlier, check_in_place, compare_buffers, reject
from .full_training import FULL_TRAINING
from .rules import Rule, Rules, Stage, compare_meetings
from .steps import has_master, ranks_of_group

_ALIGNMENT_BYTES: Final = 256
"""Where matrices begin."""
_LINE_BYTES: Final = 64
"""Parts are of whole cache lines."""
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


def _parted(claim: Claim) -> list[Chunk]:
    """Chunks with subspaces that lie on the devices in parts."""
    return [chunk for chunk in claim.layout.chunks if chunk.subspaces and chunk.id in claim.sharded]


# -- single tasks ----------------------------------------------------------------------------------------------------


def check_gradient_projections(claim: Claim) -> None:
    """All complete gradients that have subspaces are projected once, with the frozen matrices in the same memory.

    Those that stay on the device together, and with them what this rank owns of those in parts; those that leave one
    chunk at a time, where the plan says: on the device before they leave, or on the host.
    """
    is_on_device = claim.plan.projects_gradients_on is ProjectionPlace.DEVICE
    kept, updated = _kept(claim), _updated(claim)
    of_all: list[ChunkId | None] = [None] if kept or _parted(claim) else []
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
    is_added = task.chunk is None or task.chunk in claim.leave_once
    micro_batch = 0 if is_added else task.micro_batch
    gradients = [b for chunk in chunks for b in claim.gradients.get((chunk.id, micro_batch), [])]
    frozen = [b for b in map(claim.buffer, task.reads) if _holds_parameters(b)]
    if task.chunk is None:
        gradients += _made(claim, TaskKind.GRADIENTS_TO_OWNERS, Content.OWNED_TRAINED)
    if sorted(str(b.chunk) for b in frozen) != sorted(str(chunk.id) for chunk in chunks):
        reject(f"{task.name} projects against chunks {[b.chunk for b in frozen]}, not {[c.id for c in chunks]}")
    owned = _made(claim, TaskKind.GRADIENTS_TO_OWNERS, Content.OWNED_FROZEN) if task.chunk is None else []
    compare_buffers(task, task.reads, [*gradients, *frozen, *owned], "reads")
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
    of_all: list[ChunkId | None] = [None] if kept or _parted(claim) else []
    contents = (Content.PARAMETERS, Content.OPTIMIZER_STATE)
    for task in _check_served(claim, TaskKind.PARAMETER_PROJECTION, of_all, 0):
        stepped = [claim.homes[content, chunk.id] for chunk in kept for content in contents]
        stepped += _made(claim, TaskKind.PARAMETERS_TO_OWNERS, Content.OWNED_TRAINED)
        frozen = _made(claim, TaskKind.GRADIENTS_TO_OWNERS, Content.OWNED_FROZEN)
        compare_buffers(task, task.reads, [*stepped, *frozen], "reads")
        compare_buffers(task, task.writes, stepped, "writes")
        compare_buffers(task, task.allocates, [], "allocates")
        compare_buffers(task, task.frees, [], "frees")
        _check_work(claim, task, kept, is_parameters=True)
    last = claim.plan.micro_batches - 1 if claim.plan.max_gradient_norm is None else 0
    for task in _check_served(claim, TaskKind.HOST_PARAMETER_PROJECTION, [chunk.id for chunk in updated], last):
        assert task.chunk is not None
        check_in_place(task, [claim.stepped_in(content, task.chunk) for content in contents])
        _check_work(claim, task, [claim.layout.chunks[task.chunk]], is_parameters=True)


@dataclass
class _Total:
    """What several projections take, one after the other."""

    flops: int = 0
    touched: int = 0
    scalars: int = 0
    count: int = 0
    highest: int = 0
    """Bytes of the most that one of them makes."""

    def add(self, other: _Total) -> None:
        self.flops, self.touched = self.flops + other.flops, self.touched + other.touched
        self.scalars, self.count = self.scalars + other.scalars, self.count + other.count
        self.highest = max(self.highest, other.highest)


def _check_work(
    claim: Claim, task: Task, chunks: list[Chunk], *, is_parameters: bool = False, is_stored_wide: bool = False
) -> None:
    """Two products for every subspace of ``chunks``, and of those a rank owns; of matrices in float32 at least."""
    total = _Total()
    for subspace in (subspace for chunk in chunks for subspace in chunk.subspaces):
        total.add(_taken(claim, subspace, is_parameters=is_parameters, is_stored_wide=is_stored_wide))
    is_on_device = task.kind in (TaskKind.GRADIENT_PROJECTION, TaskKind.PARAMETER_PROJECTION)
    if is_on_device and task.chunk is None and _parted(claim):
        total.add(_most_owned(claim, is_parameters=is_parameters))
    check_amounts(
        task,
        num_stepped=total.scalars,
        stepped_bytes=total.touched,
        num_tensors=total.count,
        flops=total.flops,
    )
    highest = total.highest
    if task.phase != (Phase(curve=((1.0, highest),)) if is_on_device and highest else None):
        reject(f"{task.name} has another phase than one that adds {highest} B")


def _taken(claim: Claim, subspace: Subspace, *, is_parameters: bool, is_stored_wide: bool = False) -> _Total:
    """What one projection takes."""
    frozen, trained = (claim.workload.parameters[place] for place in (subspace.frozen, subspace.trained))
    (n, k), (_, r) = frozen.shape, trained.shape
    if subspace.axis is SubspaceAxis.ROWS:
        (k, n), (r, _) = frozen.shape, trained.shape
    own = max(4, trained.dtype.item_bytes) if is_stored_wide else trained.dtype.item_bytes
    wide = max(4, own, frozen.dtype.item_bytes)
    keeps_master = is_parameters and has_master(trained.dtype, claim.plan.optimizer)
    touched = wide * (2 * n * k + 3 * n * r + 2 * k * r)
    made = wide * k * r
    if frozen.dtype.item_bytes < wide:
        touched += (frozen.dtype.item_bytes + wide) * n * k
        made += wide * n * k
    if own < wide:
        touched += (1 if keeps_master else 2) * (own + wide) * n * r
        made += 0 if keeps_master else wide * n * r
    return _Total(2 * k * n * r + 2 * n * k * r, touched, n * r, 1, made)


# -- owners ----------------------------------------------------------------------------------------------------------


def _owners(claim: Claim) -> list[tuple[Chunk, Subspace, int]]:
    """Every subspace that lies in parts, with the rank of the group that owns it.

    The one with the most FLOPs first, each to the rank with the fewest so far.
    """
    pairs = [(chunk, subspace) for chunk in _parted(claim) for subspace in chunk.subspaces]
    flops = [_taken(claim, subspace, is_parameters=False).flops for _, subspace in pairs]
    load, owners = [0] * ranks_of_group(claim.plan), dict[int, int]()
    for at in sorted(range(len(pairs)), key=lambda at: (-flops[at], at)):
        owners[at] = load.index(min(load))
        load[owners[at]] += flops[at]
    return [(chunk, subspace, owners[at]) for at, (chunk, subspace) in enumerate(pairs)]


def _most_owned(claim: Claim, *, is_parameters: bool) -> _Total:
    """Of everything as much as the rank with the most."""
    totals = [_Total() for _ in range(ranks_of_group(claim.plan))]
    for _, subspace, owner in _owners(claim):
        totals[owner].add(_taken(claim, subspace, is_parameters=is_parameters))
    fields = ("flops", "touched", "scalars", "count", "highest")
    return _Total(*(max(getattr(total, field) for total in totals) for field in fields))


def _made(claim: Claim, kind: TaskKind, content: Content) -> list[Allocation]:
    """What tasks of ``kind`` make of ``content``."""
    made = [claim.buffer(buffer) for task in claim.tasks_of(kind) for buffer in task.allocates]
    return [buffer for buffer in made if buffer.content is content]


def check_exchanges(claim: Claim) -> None:
    """Owners are sent whole matrices and send projected parts back: of gradients once, and once behind device Adam.

    They keep the frozen matrices between the two.
    """
    parted = _parted(claim)
    expected = [(kind, None, None, 0) for kind in OF_OWNERS] if parted else []
    compare_meetings(claim, OF_OWNERS, expected)
    if not parted:
        return
    sizes = _sizes(claim)
    parts, state, gradients = (
        [claim.homes[content, chunk.id] for chunk in parted]
        for content in (Content.PARAMETERS, Content.OPTIMIZER_STATE, Content.REDUCED_GRADIENTS)
    )
    out, back, stepped_out, stepped_back = (claim.tasks_of(kind)[0] for kind in OF_OWNERS)
    frozen = _check_made(claim, out, Content.OWNED_FROZEN, sizes["frozen"].whole)
    of_gradients = _check_made(claim, out, Content.OWNED_TRAINED, sizes["gradients"].whole)
    stepped = _check_made(claim, stepped_out, Content.OWNED_TRAINED, sizes["stepped"].whole)
    for task, content, reads, changes, makes, drops in (
        (out, "both", [*parts, *gradients], [], [frozen, of_gradients], []),
        (back, "gradients", [*gradients, of_gradients], gradients, [], [of_gradients]),
        (stepped_out, "stepped", [*parts, *state], [], [stepped], []),
        (stepped_back, "stepped", [*parts, *state, stepped], [*parts, *state], [], [stepped, frozen]),
    ):
        size = sizes[content]
        passing = _check_made(claim, task, Content.PASSING_PARTS, size.held + size.owned)
        compare_buffers(task, task.allocates, [passing, *makes], "allocates")
        compare_buffers(task, task.reads, reads, "reads")
        compare_buffers(task, task.writes, [passing, *makes, *changes], "writes")
        compare_buffers(task, task.frees, [passing, *drops], "frees")
        check_amounts(task, moved_bytes=max(size.held, size.owned))
        if task.phase is not None:
            reject(f"{task.name} has a phase")


def _check_made(claim: Claim, task: Task, content: Content, size_bytes: int) -> Allocation:
    """The buffer of ``content`` that ``task`` makes, of this size, of no chunk."""
    made = [buffer for buffer in map(claim.buffer, task.allocates) if buffer.content is content]
    if [(b.size_bytes, b.memory, b.chunk, b.section) for b in made] != [(size_bytes, Memory.DEVICE, None, None)]:
        reject(f"{task.name} does not make {content} of {size_bytes} B on the device")
    return made[0]


@dataclass(frozen=True)
class _Size:
    """Bytes of the rank with the most."""

    held: int
    """Stretches of matrices that a rank has."""
    owned: int
    """Matrices that a rank owns, one right behind the other."""
    whole: int
    """The same, each where a parameter may begin."""


def _sizes(claim: Claim) -> dict[str, _Size]:
    """What is exchanged of frozen matrices, of gradients, of both, and of what is stepped."""
    found: dict[str, list[list[int]]] = {}
    num_ranks = ranks_of_group(claim.plan)
    for chunk, subspace, owner in _owners(claim):
        trained = claim.workload.parameters[subspace.trained].dtype
        master = 4 if has_master(trained, claim.plan.optimizer) else trained.item_bytes
        for name, place, item in (
            ("frozen", subspace.frozen, None),
            ("gradients", subspace.trained, None),
            ("both", subspace.frozen, None),
            ("both", subspace.trained, None),
            ("stepped", subspace.trained, master),
        ):
            held, owned, whole = found.setdefault(name, [[0] * num_ranks for _ in range(3)])
            stretches = _dealt(claim, chunk, place, num_ranks)
            own = claim.workload.parameters[place].dtype.item_bytes
            for rank, size_bytes in enumerate(stretches):
                held[rank] += size_bytes // own * (item or own)
            size_bytes = sum(stretches) // own * (item or own)
            owned[owner] += size_bytes
            whole[owner] += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return {name: _Size(*map(max, columns)) for name, columns in found.items()}


def _dealt(claim: Claim, chunk: Chunk, parameter: int, num_ranks: int) -> list[int]:
    """The bytes of a parameter that every rank has: cache lines of its run of neighbours alike, dealt in order."""
    parameters = claim.workload.parameters
    for _, run in groupby(
        chunk.parameters, key=lambda one: (parameters[one.index].dtype, parameters[one.index].trainable)
    ):
        members = list(run)
        last = members[-1]
        for member in members:
            if member.index == parameter:
                begin = member.offset_bytes - members[0].offset_bytes
                end = begin + parameters[parameter].size_bytes
                length = last.offset_bytes - members[0].offset_bytes
                length += -(-parameters[last.index].size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                share = -(-length // (_LINE_BYTES * num_ranks)) * _LINE_BYTES
                cuts = [min(max(share * rank, begin), end) for rank in range(num_ranks + 1)]
                return [after - before for before, after in pairwise(cuts)]
    raise AssertionError(f"chunk {chunk.id} does not have parameter {parameter}")


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
        Rule(Stage.RANKS, check_exchanges, OF_OWNERS),
        Rule(Stage.CHUNK_ORDER, check_projection_order),
    ),
)
"""What every schedule of orthogonal subspace fine-tuning must be."""

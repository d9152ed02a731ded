"""The chunk layout: which parameters share a flat buffer.

Rules: chunks follow the order of the program, from the prologue by way of the blocks to the epilogue; a block's
parameters stay together; a block begins a chunk of its own unless it fits whole into the rest of the current one; a
parameter larger than ``chunk_bytes`` has a chunk to itself.  Parameters that no block alone uses come with the first
section that uses them, and share chunks with parameters of the same uses alone: others would travel with them for
nothing, such as an embedding, which backward does not need, with the norm behind it, or a block with a tied head.
Trained and frozen matrix of a subspace (``Subspace``) are one unit of packing: a projection needs both at one place.
In bypass distillation a teacher's and a student's parameters never share a chunk: the ones are never written.
Source of the packing: ProTrain (arXiv 2406.08334), hierarchical chunk management.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ..basics.errors import PlanError
from ..basics.shown import Shown
from ..optimizers.check import check_host_gradients, check_optimizer
from ..schema.plan import (
    ParallelMode,
    Plan,
    ProjectionPlace,
    TrainingMethod,
    why_no_disk,
    why_not_parallel,
    why_not_shard_ranks,
)
from ..schema.schedule import ChunkId
from ..schema.workload import Parameter, Subspace, Workload
from .uses import NumberedUses, numbered_uses, parameters_of_blocks

ALIGNMENT_BYTES: Final = 256
"""Every parameter begins at a multiple of this within its chunk, as the device's allocator would place it.

Matrix kernels choose code paths by alignment; with less than an allocator's own, results would differ in the last bit
from those of plain training.
"""


def aligned(size_bytes: int) -> int:
    """``size_bytes`` rounded up to the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """A parameter's place within its chunk."""

    index: int
    """Index into ``Workload.parameters``."""
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class RowReads:
    """What the prologue does with a chunk of embeddings whose rows it looks up on the host, in each micro-batch."""

    forward_bytes: int
    """Rows that come to the device."""
    gradient_bytes: int
    """Gradients of rows that leave it, of trainable tables."""
    table_gradient_bytes: int
    """Gradients of the tables, which are whole on the host."""


@dataclass(frozen=True)
class Chunk:
    """Parameters that share one flat buffer."""

    id: ChunkId
    parameters: tuple[PlacedParameter, ...]
    forward: tuple[int, ...]
    """The sections that run forward with it, ascending; see [Note: Numbers of sections] in ``uses.py``."""
    backward: tuple[int, ...]
    """Those that run backward, or forward again, with it."""
    size_bytes: int
    """Size of the flat buffer, alignment included."""
    gradients: tuple[tuple[int, int], ...]
    """(section, bytes) of its gradients, by the section in whose backward they become final; ascending."""
    staging_bytes: int
    """Size of the host buffer that receives its gradients, alignment included; 0 if nothing is trainable."""
    num_trainable: int
    """Scalars that the optimizer steps."""
    rows: RowReads | None = None
    """What the prologue looks up of it on the host; None: the prologue uses it as any section does."""
    subspaces: tuple[Subspace, ...] = ()
    """Those of its parameters, in the workload's order."""

    @property
    def is_trainable(self) -> bool:
        """Whether the optimizer has anything to do with it."""
        return self.num_trainable > 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all its gradients."""
        if self.rows is not None:
            return self.rows.table_gradient_bytes
        return sum(size_bytes for _, size_bytes in self.gradients)

    @property
    def completed_by(self) -> int | None:
        """The section whose backward completes its gradients, as the last one; None if nothing is trainable.

        In bypass distillation it is the only one: no other section has gradients of a student block's parameters.  Of
        embeddings whose rows are looked up, the prologue.
        """
        if self.rows is not None and self.is_trainable:
            return 0
        return self.gradients[0][0] if self.gradients else None


@dataclass(frozen=True, repr=False)
class Layout(Shown):
    """All chunks of a workload, in execution order."""

    chunk_bytes: int
    chunks: tuple[Chunk, ...]
    num_blocks: int
    method: TrainingMethod = TrainingMethod.FULL
    """It decides in which order sections run."""

    @cached_property
    def derived(self) -> dict[Hashable, Any]:
        """What others have derived from the layout, by what else it depends on; kept as long as the layout is."""
        return {}

    @cached_property
    def needed(self) -> tuple[tuple[ChunkId, ...], ...]:
        """The chunks that each step of a micro-batch needs, in the order of the program.

        For n blocks, step s up to n is the forward of section s, step n + 1 is forward and backward of the epilogue,
        and step 2 (n + 1) - s is the backward of section s.  In bypass distillation step s is all of section s, and the
        epilogue has none.
        """
        last = self.num_blocks + 1
        if self.method is TrainingMethod.BYPASS:
            return tuple(
                tuple(chunk.id for chunk in self.chunks if section in (*chunk.forward, *chunk.backward))
                for section in range(last)
            )
        forward, backward = (
            [tuple(chunk.id for chunk in self.chunks if section in of_chunk(chunk)) for section in range(last + 1)]
            for of_chunk in (_forward, _backward)
        )
        return (*forward, *backward[last - 1 :: -1])

    @property
    def backwards_ascend(self) -> bool:
        """Whether the first section's backward is the first, as in bypass distillation; else it is the last."""
        return self.method is TrainingMethod.BYPASS

    @property
    def limits_each_block(self) -> bool:
        """Whether a limit of the norm is one of each block's gradients by itself, as in bypass distillation."""
        return self.method is TrainingMethod.BYPASS

    @property
    def num_owned(self) -> int:
        """The first so many chunks have all subspaces: ranks that share chunks have none of these on their hosts."""
        return max((chunk.id + 1 for chunk in self.chunks if chunk.subspaces), default=0)

    def enough_sharded(self, num_kept: int, n_shard: int) -> int:
        """``n_shard`` chunks behind ``num_kept`` ones, or as many as it takes to have all subspaces."""
        return max(n_shard, self.num_owned - num_kept)

    def persistent(self, n_persist: int) -> frozenset[ChunkId]:
        """The first ``n_persist`` chunks.  Raises PlanError if there are fewer."""
        if n_persist > len(self.chunks):
            raise PlanError(
                f"n_persist is {n_persist} but chunk_bytes = {self.chunk_bytes} gives {len(self.chunks)} chunks. "
                f"Lower n_persist."
            )
        return frozenset(chunk.id for chunk in self.chunks[:n_persist])

    def host_stepped(self, n_persist: int, n_host_stepped: int) -> frozenset[ChunkId]:
        """The trainable ones of the ``n_host_stepped`` chunks after the first ``n_persist``.

        Nobody steps the others, which are as persistent ones are.  Raises PlanError if there are fewer chunks.
        """
        if n_host_stepped and n_persist + n_host_stepped > len(self.chunks):
            raise PlanError(
                f"n_persist is {n_persist} and n_host_stepped is {n_host_stepped} but chunk_bytes = {self.chunk_bytes} "
                f"gives {len(self.chunks)} chunks. Lower n_host_stepped to {max(0, len(self.chunks) - n_persist)} or "
                f"less."
            )
        return frozenset(c.id for c in self.chunks[n_persist : n_persist + n_host_stepped] if c.is_trainable)

    def sharded(self, n_persist: int, n_shard: int) -> frozenset[ChunkId]:
        """The ``n_shard`` chunks after the first ``n_persist``.  Raises PlanError if there are fewer."""
        if n_shard and n_persist + n_shard > len(self.chunks):
            raise PlanError(
                f"n_persist is {n_persist} and n_shard is {n_shard} but chunk_bytes = {self.chunk_bytes} gives "
                f"{len(self.chunks)} chunks. Lower n_shard to {max(0, len(self.chunks) - n_persist)} or less."
            )
        return frozenset(chunk.id for chunk in self.chunks[n_persist : n_persist + n_shard])

    def on_disk(self, num_on_host: int, n_disk: int) -> frozenset[ChunkId]:
        """The last ``n_disk`` chunks, none of which is among the first ``num_on_host``.

        Raises PlanError if there are fewer others.
        """
        num_others = max(0, len(self.chunks) - num_on_host)
        if n_disk > num_others:
            raise PlanError(
                f"n_disk_state is {n_disk} but chunk_bytes = {self.chunk_bytes} gives {len(self.chunks)} chunks, of "
                f"which {num_others} are offloaded. Lower n_disk_state to {num_others} or less."
            )
        return frozenset(chunk.id for chunk in self.chunks[len(self.chunks) - n_disk :])

    def min_buffers(self, n_persist: int) -> int:
        """Fewest buffers that any plan with ``n_persist`` needs: the most other chunks of one step."""
        return max(sum(chunk >= n_persist for chunk in chunks) for chunks in self.needed)


def _forward(chunk: Chunk) -> tuple[int, ...]:
    return chunk.forward


def _backward(chunk: Chunk) -> tuple[int, ...]:
    return chunk.backward


def layout_of(workload: Workload, chunk_bytes: int) -> Layout:
    """The layout of a workload's parameters, for its method, in chunks of at most ``chunk_bytes``.

    Raises PlanError if ``chunk_bytes`` is not positive.
    """
    return build_layout(
        workload.parameters,
        num_blocks=workload.num_blocks,
        chunk_bytes=chunk_bytes,
        method=workload.method,
        subspaces=workload.subspaces,
    )


def build_layout(
    parameters: Sequence[Parameter],
    *,
    num_blocks: int,
    chunk_bytes: int,
    method: TrainingMethod = TrainingMethod.FULL,
    subspaces: Sequence[Subspace] = (),
) -> Layout:
    """Pack parameters, given in execution order, into chunks of at most ``chunk_bytes``.

    A unit that is larger, of one parameter or of those of a subspace, has a chunk to itself.

    Raises PlanError if ``chunk_bytes`` is not positive.
    """
    if chunk_bytes <= 0:
        raise PlanError(f"chunk_bytes is {chunk_bytes}; it must be positive.")
    uses = [numbered_uses(parameter, num_blocks) for parameter in parameters]
    packing = _Packing(parameters, uses, chunk_bytes, subspaces)
    units = _units(len(parameters), subspaces)
    for common, members in _groups_in_order(uses, num_blocks):
        sizes = {index: aligned(parameters[index].size_bytes) for index in members}
        # Blocks of the two models stand by turns, so that no block shares a chunk with another one.
        is_other_model = method is TrainingMethod.BYPASS
        if packing.is_open and (
            is_other_model or packing.common != common or not packing.has_room(sum(sizes.values()))
        ):
            packing.seal()
        packing.common = common
        for unit in (units[index] for index in members if units[index][0] == index):
            if packing.is_open and not packing.has_room(sum(sizes[index] for index in unit)):
                packing.seal()
            for index in unit:
                packing.place(index, sizes[index])
    packing.seal()
    return Layout(chunk_bytes=chunk_bytes, chunks=tuple(packing.chunks), num_blocks=num_blocks, method=method)


def largest_block_bytes(workload: Workload) -> int:
    """Bytes of the largest block's parameters as a chunk holds them; at least 1."""
    return max(1, *(sum(aligned(p.size_bytes) for p in of) for of in parameters_of_blocks(workload)))


def largest_block_elements(workload: Workload) -> int:
    """Scalars of the largest block's parameters; at least 1."""
    return max(1, *(sum(p.num_elements for p in of) for of in parameters_of_blocks(workload)))


def check_layout(layout: Layout, plan: Plan, workload: Workload) -> None:
    """Raise PlanError unless ``layout`` is one of the workload's parameters in chunks of the plan's size.

    Under DDP, all of these must be persistent; only under SHARDED some may be sharded over the devices, and none is
    stepped on the host for a device that keeps it.  The optimizer must be one that can step the parameters.
    """
    if layout.chunk_bytes != plan.chunk_bytes:
        raise PlanError(
            f"the layout was built for chunk_bytes = {layout.chunk_bytes} but the plan says {plan.chunk_bytes}. "
            f"Build it for the plan."
        )
    placed = sorted(member.index for chunk in layout.chunks for member in chunk.parameters)
    if placed != list(range(len(workload.parameters))) or layout.num_blocks != workload.num_blocks:
        raise PlanError(
            f"the layout holds {len(placed)} parameters of {layout.num_blocks} blocks but the workload has "
            f"{len(workload.parameters)} of {workload.num_blocks}. Build it for this workload."
        )
    if layout.method is not workload.method:
        raise PlanError(
            f"the layout was built for method {layout.method} but the workload is one of method {workload.method}. "
            f"Build it for this workload."
        )
    if sum(len(chunk.subspaces) for chunk in layout.chunks) != len(workload.subspaces):
        raise PlanError("the layout was built without the workload's subspaces. Build it for this workload.")
    if plan.n_host_stepped and plan.parallel is ParallelMode.SHARDED:
        raise PlanError(
            f"n_host_stepped is {plan.n_host_stepped} but parallel is {plan.parallel}: only ranks with whole chunks on "
            f"their hosts step these for their devices. Set n_host_stepped to 0, or parallel to replicated."
        )
    if plan.n_shard and plan.parallel is not ParallelMode.SHARDED:
        raise PlanError(
            f"n_shard is {plan.n_shard} but parallel is {plan.parallel}: only ranks in mode sharded have chunks that "
            f"lie on their devices in parts. Set n_shard to 0, or parallel to sharded."
        )
    if (reason := why_not_shard_ranks(plan.shard_ranks, plan.num_ranks, plan.parallel)) is not None:
        raise PlanError(f"{reason}.")
    check_optimizer(plan.optimizer, workload.parameters)
    check_host_gradients(plan.host_gradients, workload.parameters)
    if (reason := why_not_parallel(plan.optimizer, plan.parallel)) is not None:
        raise PlanError(f"{reason}.")
    layout.host_stepped(plan.n_persist, plan.n_host_stepped)
    layout.sharded(plan.num_kept, plan.n_shard)
    if (reason := why_no_disk(plan)) is not None:
        raise PlanError(f"{reason}.")
    layout.on_disk(plan.num_kept + plan.n_shard, plan.n_disk_state)
    if plan.projects_gradients_on is ProjectionPlace.DEVICE and (reason := why_not_on_device(layout)) is not None:
        raise PlanError(f"projects_gradients_on is {plan.projects_gradients_on}, but {reason}. Name host.")
    if plan.parallel is ParallelMode.SHARDED and (first := plan.num_kept + plan.n_shard) < layout.num_owned:
        raise PlanError(
            f"chunk {first} lies on the hosts in parts (parallel {plan.parallel}), where nobody has the whole matrices "
            f"that method {plan.method} projects. Let n_persist and n_shard count the first {layout.num_owned} chunks "
            f"together, or set parallel to replicated."
        )
    num_chunks = len(layout.chunks)
    if plan.parallel is ParallelMode.DDP and (kept := len(layout.persistent(plan.n_persist))) < num_chunks:
        raise PlanError(
            f"parallel is ddp, which keeps every chunk on every device, but n_persist = {plan.n_persist} keeps {kept} "
            f"of {num_chunks}. Set n_persist to {num_chunks}, or parallel to replicated or sharded."
        )


def why_not_on_device(layout: Layout) -> str | None:
    """Why gradients cannot be projected on the device before they leave; None if they can."""
    for chunk in layout.chunks:
        if chunk.subspaces and chunk.completed_by not in chunk.backward:
            return f"chunk {chunk.id} is not there when its gradients are complete"
    return None


def _groups_in_order(uses: Sequence[NumberedUses], num_blocks: int) -> list[tuple[NumberedUses | None, list[int]]]:
    """Parameter indices that stay together, by the first section that uses them; each group at its first member.

    With the uses that all parameters of a chunk must have; None for those that a block alone uses.
    """
    groups: dict[tuple[int, NumberedUses | None], list[int]] = {}
    for index, of_parameter in enumerate(uses):
        is_of_block = of_parameter.is_alone and 0 < of_parameter.gradient <= num_blocks
        key = (of_parameter.sections[0], None if is_of_block else of_parameter)
        groups.setdefault(key, []).append(index)
    in_order = sorted(groups.items(), key=lambda group: (group[0][0], group[1][0]))
    return [(common, members) for (_, common), members in in_order]


def _units(num_parameters: int, subspaces: Sequence[Subspace]) -> list[tuple[int, ...]]:
    """Of every parameter, the ascending ones that it shares a chunk with, itself included."""
    units: list[tuple[int, ...]] = [(index,) for index in range(num_parameters)]
    for subspace in subspaces:
        joined = tuple(sorted({*units[subspace.frozen], *units[subspace.trained]}))
        for index in joined:
            units[index] = joined
    return units


class _Packing:
    """Chunks sealed so far and the one that is open."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        uses: Sequence[NumberedUses],
        chunk_bytes: int,
        subspaces: Sequence[Subspace],
    ) -> None:
        self.parameters = parameters
        self.subspaces = subspaces
        self.uses = uses
        self.chunk_bytes = chunk_bytes
        self.chunks: list[Chunk] = []
        self.used_bytes = 0
        self.common: NumberedUses | None = None
        """The uses of all that is open; None where blocks alone use it."""
        self._open: list[PlacedParameter] = []

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def has_room(self, size_bytes: int) -> bool:
        return self.used_bytes + size_bytes <= self.chunk_bytes

    def place(self, index: int, size_bytes: int) -> None:
        self._open.append(PlacedParameter(index, self.used_bytes))
        self.used_bytes += size_bytes

    def seal(self) -> None:
        if not self._open:
            return
        members = [(self.parameters[placed.index], self.uses[placed.index]) for placed in self._open]
        trainable = [(parameter, uses) for parameter, uses in members if parameter.trainable]
        indices = {placed.index for placed in self._open}
        gradients: dict[int, int] = {}
        for parameter, uses in trainable:
            gradients[uses.gradient] = gradients.get(uses.gradient, 0) + parameter.size_bytes
        self.chunks.append(
            Chunk(
                id=ChunkId(len(self.chunks)),
                parameters=tuple(self._open),
                forward=tuple(sorted({section for _, uses in members for section in uses.forward})),
                backward=tuple(sorted({section for _, uses in members for section in uses.backward})),
                size_bytes=self.used_bytes,
                gradients=tuple(sorted(gradients.items())),
                staging_bytes=sum(aligned(p.size_bytes) for p, _ in trainable),
                num_trainable=sum(p.num_elements for p, _ in trainable),
                subspaces=tuple(subspace for subspace in self.subspaces if subspace.trained in indices),
            )
        )
        self._open = []
        self.used_bytes = 0

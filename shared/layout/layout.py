"""The chunk layout: which parameters share a flat buffer.

Rules: chunks follow execution order; a block's parameters stay together; a block begins a chunk of its own unless it
fits whole into the rest of the current one; a parameter larger than ``chunk_bytes`` has a chunk to itself.  Parameters
that no block owns never share a chunk with a block, since they would force the block's parameters to be persistent.
Source of the packing: ProTrain (arXiv 2406.08334), hierarchical chunk management.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ..basics.errors import PlanError
from ..basics.shown import Shown
from ..optimizers.check import check_optimizer
from ..schema.plan import ParallelMode, Plan, why_not_parallel
from ..schema.schedule import ChunkId
from ..schema.workload import Parameter, Workload

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


@dataclass(frozen=True)
class Chunk:
    """Parameters that share one flat buffer."""

    id: ChunkId
    parameters: tuple[PlacedParameter, ...]
    blocks: tuple[int, ...]
    """The blocks that own them, ascending; empty for parameters outside every block."""
    size_bytes: int
    """Size of the flat buffer, alignment included."""
    gradient_bytes: tuple[int, ...]
    """Bytes of its gradients, per entry of ``blocks`` (one entry for a chunk outside every block)."""
    staging_bytes: int
    """Size of the host buffer that receives its gradients, alignment included; 0 if nothing is trainable."""
    num_trainable: int
    """Scalars that the optimizer steps."""

    @property
    def is_trainable(self) -> bool:
        """Whether the optimizer has anything to do with it."""
        return self.num_trainable > 0


@dataclass(frozen=True, repr=False)
class Layout(Shown):
    """All chunks of a workload, in execution order."""

    chunk_bytes: int
    chunks: tuple[Chunk, ...]
    num_blocks: int

    @cached_property
    def derived(self) -> dict[Hashable, Any]:
        """What others have derived from the layout, by what else it depends on; kept as long as the layout is."""
        return {}

    @cached_property
    def unowned(self) -> frozenset[ChunkId]:
        """Chunks of parameters outside every block; they are persistent in every plan."""
        return frozenset(chunk.id for chunk in self.chunks if not chunk.blocks)

    @cached_property
    def chunks_of_block(self) -> tuple[tuple[ChunkId, ...], ...]:
        """The chunks that each block needs, in execution order."""
        return tuple(
            tuple(chunk.id for chunk in self.chunks if block in chunk.blocks) for block in range(self.num_blocks)
        )

    def persistent(self, n_persist: int) -> frozenset[ChunkId]:
        """The first ``n_persist`` chunks and the unowned ones.  Raises PlanError if there are fewer chunks."""
        if n_persist > len(self.chunks):
            raise PlanError(
                f"n_persist is {n_persist} but chunk_bytes = {self.chunk_bytes} gives {len(self.chunks)} chunks. "
                f"Lower n_persist."
            )
        return frozenset(chunk.id for chunk in self.chunks[:n_persist]) | self.unowned

    def sharded(self, n_persist: int, n_shard: int) -> frozenset[ChunkId]:
        """The ``n_shard`` chunks after the first ``n_persist``, without the unowned ones, which are persistent.

        Raises PlanError if there are fewer chunks.
        """
        if n_shard and n_persist + n_shard > len(self.chunks):
            raise PlanError(
                f"n_persist is {n_persist} and n_shard is {n_shard} but chunk_bytes = {self.chunk_bytes} gives "
                f"{len(self.chunks)} chunks. Lower n_shard to {max(0, len(self.chunks) - n_persist)} or less."
            )
        return frozenset(chunk.id for chunk in self.chunks[n_persist : n_persist + n_shard]) - self.unowned

    def min_buffers(self, n_persist: int) -> int:
        """Fewest buffers that any plan with ``n_persist`` needs: the most other chunks of one block."""
        persistent = self.persistent(n_persist)
        return max((sum(c not in persistent for c in chunks) for chunks in self.chunks_of_block), default=0)


def build_layout(parameters: Sequence[Parameter], *, num_blocks: int, chunk_bytes: int) -> Layout:
    """Pack parameters, given in execution order, into chunks of at most ``chunk_bytes``.

    Raises PlanError if ``chunk_bytes`` is not positive.
    """
    if chunk_bytes <= 0:
        raise PlanError(f"chunk_bytes is {chunk_bytes}; it must be positive.")
    packing = _Packing(parameters, chunk_bytes)
    for block, members in _groups_in_order(parameters):
        sizes = [aligned(parameters[index].size_bytes) for index in members]
        if packing.is_open and (packing.holds_unowned != (block is None) or not packing.has_room(sum(sizes))):
            packing.seal()
        for index, size_bytes in zip(members, sizes, strict=True):
            if packing.is_open and not packing.has_room(size_bytes):
                packing.seal()
            packing.place(index, size_bytes)
    packing.seal()
    return Layout(chunk_bytes=chunk_bytes, chunks=tuple(packing.chunks), num_blocks=num_blocks)


def check_layout(layout: Layout, plan: Plan, workload: Workload) -> None:
    """Raise PlanError unless ``layout`` is one of the workload's parameters in chunks of the plan's size.

    Under DDP, all of these must be persistent; only under SHARDED some may be sharded over the devices.  The optimizer
    must be one that can step the parameters.
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
    if plan.n_shard and plan.parallel is not ParallelMode.SHARDED:
        raise PlanError(
            f"n_shard is {plan.n_shard} but parallel is {plan.parallel}: only ranks in mode sharded have chunks that "
            f"lie on their devices in parts. Set n_shard to 0, or parallel to sharded."
        )
    check_optimizer(plan.optimizer, workload.parameters)
    if (reason := why_not_parallel(plan.optimizer, plan.parallel)) is not None:
        raise PlanError(f"{reason}.")
    layout.sharded(plan.n_persist, plan.n_shard)
    num_chunks = len(layout.chunks)
    if plan.parallel is ParallelMode.DDP and (kept := len(layout.persistent(plan.n_persist))) < num_chunks:
        raise PlanError(
            f"parallel is ddp, which keeps every chunk on every device, but n_persist = {plan.n_persist} keeps {kept} "
            f"of {num_chunks}. Set n_persist to {num_chunks}, or parallel to replicated or sharded."
        )


def _groups_in_order(parameters: Sequence[Parameter]) -> list[tuple[int | None, list[int]]]:
    """Parameter indices by block, each group at its first member; unowned parameters one by one."""
    groups: list[tuple[int | None, list[int]]] = []
    group_of_block: dict[int, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if parameter.block is None:
            groups.append((None, [index]))
        elif parameter.block in group_of_block:
            group_of_block[parameter.block].append(index)
        else:
            members = group_of_block[parameter.block] = [index]
            groups.append((parameter.block, members))
    return groups


class _Packing:
    """Chunks sealed so far and the one that is open."""

    def __init__(self, parameters: Sequence[Parameter], chunk_bytes: int) -> None:
        self.parameters = parameters
        self.chunk_bytes = chunk_bytes
        self.chunks: list[Chunk] = []
        self.used_bytes = 0
        self._open: list[PlacedParameter] = []

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    @property
    def holds_unowned(self) -> bool:
        return self.parameters[self._open[0].index].block is None

    def has_room(self, size_bytes: int) -> bool:
        return self.used_bytes + size_bytes <= self.chunk_bytes

    def place(self, index: int, size_bytes: int) -> None:
        self._open.append(PlacedParameter(index, self.used_bytes))
        self.used_bytes += size_bytes

    def seal(self) -> None:
        if not self._open:
            return
        members = [self.parameters[placed.index] for placed in self._open]
        trainable = [parameter for parameter in members if parameter.trainable]
        blocks = tuple(sorted({parameter.block for parameter in members if parameter.block is not None}))
        owners: tuple[int | None, ...] = blocks or (None,)
        self.chunks.append(
            Chunk(
                id=ChunkId(len(self.chunks)),
                parameters=tuple(self._open),
                blocks=blocks,
                size_bytes=self.used_bytes,
                gradient_bytes=tuple(sum(p.size_bytes for p in trainable if p.block == owner) for owner in owners),
                staging_bytes=sum(aligned(p.size_bytes) for p in trainable),
                num_trainable=sum(p.num_elements for p in trainable),
            )
        )
        self._open = []
        self.used_bytes = 0

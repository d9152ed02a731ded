"""What the chunks of a layout weigh and cost, as arrays over chunks and over numbers of persistent chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

import numpy as np

from ..shared.layout import Chunk, Layout
from ..shared.schedule import Task, TaskId, TaskKind
from ..shared.shards import rank_part, stepped_bytes
from ..shared.widening import narrow_peak_bytes, wide_gradient_bytes
from ..shared.workload import Workload
from .collective_table import CollectiveTable, collective_table
from .compute_table import FloatArray, Positions
from .costs import CostModel
from .space import BoolArray, IntArray
from .step_rule import StepRule

_NO_RULE: Final = StepRule()


@dataclass(frozen=True)
class ChunkTable:
    """Facts of every chunk.  Shapes: C chunks, E (chunk, block) pairs with gradients, T trainable chunks of blocks."""

    layout: Layout
    is_owned: BoolArray
    """(C,) whether a block owns it, so that it can be offloaded."""
    is_stepped: BoolArray
    """(C,) whether a block owns it and the optimizer steps it."""
    size_bytes: IntArray
    """(C,)"""
    state_bytes: IntArray
    """(C,) optimizer state."""
    staging_bytes: IntArray
    """(C,) host buffer of its gradients."""
    host_parameter_bytes: IntArray
    """(C,) what a rank's host has of it, if it is offloaded."""
    host_state_bytes: IntArray
    """(C,) and of its optimizer state."""
    offload_bytes: IntArray
    """(C,) bytes of gradients that are sent to a rank's host."""
    first_block: IntArray
    """(C,) the first block that owns it; the number of blocks where none does."""
    last_block: IntArray
    """(C,) the last block that owns it; the number of blocks where none does."""
    gather_s: FloatArray
    """(C,)"""
    offload_s: FloatArray
    """(C,) of its gradients; 0 where there are none."""
    cpu_adam_s: FloatArray
    """(C,) 0 where nothing is stepped."""
    accumulate_s: FloatArray
    """(C,) adding gradients of a later micro-batch up; 0 where nothing is stepped."""
    num_stepped: IntArray
    """(C,) scalars that the optimizer steps where the chunk is persistent."""
    stepped_bytes: IntArray
    """(C,) memory traffic of stepping all of it, the scaling of its gradients included where their norm is limited."""
    narrow_peak_bytes: IntArray
    """(C,) the most that device Adam of its narrow parameters adds; see [Note: Steps of device Adam]."""
    narrow_bytes: IntArray
    """(C,) their gradients."""
    wide_bytes: IntArray
    """(C,) the gradients of its other parameters."""
    gradient_chunk: IntArray
    """(E,) chunk of each gradient buffer."""
    gradient_block: IntArray
    """(E,) block whose backward makes it."""
    gradient_bytes: IntArray
    """(E,)"""
    update_order: IntArray
    """(T,) chunks as their gradients leave and CPU Adam steps them: last block first."""
    costs: CostModel
    rule: StepRule
    collectives: CollectiveTable | None
    """Where several ranks train together."""

    @cached_property
    def positions(self) -> Positions:
        """The program of the compute lane."""
        return Positions(self.layout.num_blocks, self.rule.micro_batches)

    def is_offloaded(self, n_persist: int | IntArray) -> BoolArray:
        """(..., C) whether a chunk is not persistent, for each entry of ``n_persist``."""
        first = np.asarray(n_persist)[..., None]
        is_offloaded: BoolArray = np.logical_and(self.is_owned, np.arange(len(self.layout.chunks)) >= first)
        return is_offloaded

    def static_device_bytes(self, n_persist: IntArray, resident_bytes: int) -> IntArray:
        """(R,) device bytes that are there for good."""
        home_bytes = self.size_bytes + self.state_bytes
        static_bytes: IntArray = resident_bytes + home_bytes.sum() - self.offloaded_sum(home_bytes)[n_persist]
        return static_bytes

    def pinned_host_bytes(self, n_persist: IntArray) -> IntArray:
        """(R,) of offloaded chunks: parameters and the buffers that receive gradients."""
        num_buffers = 2 if self.rule.accumulates else 1
        return self.offloaded_sum(self.host_parameter_bytes + num_buffers * self.staging_bytes)[n_persist]

    def host_bytes(self, n_persist: IntArray) -> IntArray:
        """(R,) host memory that is not pinned: optimizer state of offloaded chunks."""
        return self.offloaded_sum(self.host_state_bytes)[n_persist]

    @cached_property
    def device_adam_bytes(self) -> IntArray:
        """(C + 1,) the most that device Adam adds to the level at its start, for every ``n_persist``.

        Of the chunks before ``n_persist`` all are stepped, of the others those that no block owns.
        """
        unowned_bytes = np.where(self.is_owned, 0, self.narrow_bytes)
        early = self.narrow_peak_bytes - (self.narrow_bytes.cumsum() - self.narrow_bytes)
        late = np.where(self.is_owned, 0, self.narrow_peak_bytes - (unowned_bytes.cumsum() - unowned_bytes))
        most_early = np.append(0, np.maximum.accumulate(early))
        most_late = np.append(np.maximum.accumulate(late[::-1])[::-1], 0)
        owned_bytes = np.append(0, (self.narrow_bytes - unowned_bytes).cumsum())
        wide_bytes = self.wide_bytes.sum() - self.offloaded_sum(self.wide_bytes)
        most: IntArray = np.maximum(0, np.maximum(most_early, most_late - owned_bytes) - wide_bytes)
        return most

    @cached_property
    def device_adam_s(self) -> FloatArray:
        """(C + 1,) seconds of stepping the persistent chunks, for every ``n_persist``."""
        stepped = self.num_stepped.sum() - self.offloaded_sum(self.num_stepped)
        moved = self.stepped_bytes.sum() - self.offloaded_sum(self.stepped_bytes)
        price = cache(lambda pair: self.costs.task_s(_chunk_task(TaskKind.DEVICE_ADAM, *pair)))
        return np.array([price(pair) for pair in zip(moved.tolist(), stepped.tolist(), strict=True)])

    @cached_property
    def norm_s(self) -> FloatArray:
        """(C + 1,) seconds of the norm of all gradients, for every ``n_persist``; 0 where it is not limited."""
        if not self.rule.limits_norm:
            return np.zeros(len(self.size_bytes) + 1)
        read_bytes = self.offloaded_sum(np.where(self.is_stepped, self.offload_bytes, 0))
        price = cache(lambda size: self.costs.task_s(Task(TaskId(0), TaskKind.GRADIENT_NORM, stepped_bytes=size)))
        return np.array([price(size) for size in read_bytes.tolist()])

    def offloaded_sum(self, values: IntArray) -> IntArray:
        """(C + 1,) the sum of ``values`` (C,) over offloaded chunks, for every ``n_persist``."""
        return np.append(np.where(self.is_owned, values, 0)[::-1].cumsum()[::-1], 0)


def chunk_table(workload: Workload, layout: Layout, costs: CostModel, rule: StepRule = _NO_RULE) -> ChunkTable:
    """Tabulate ``layout``."""
    chunks = layout.chunks
    parts = [rank_part(chunk, workload.parameters, rule.parallel, rule.num_ranks) for chunk in chunks]
    gradient_bytes = [part.gradient_bytes for part in parts]
    num_scalings = 2 if rule.limits_norm else 0
    moved = [part.stepped_bytes + num_scalings * part.gradient_bytes for part in parts]
    whole = moved
    if rule.is_sharded:
        whole = [
            stepped_bytes(chunk, workload.parameters) + num_scalings * sum(chunk.gradient_bytes) for chunk in chunks
        ]
    stepped = [chunk for chunk in chunks if chunk.blocks and chunk.is_trainable]
    narrow = [narrow_peak_bytes(chunk, workload.parameters) for chunk in chunks]
    gradients = [
        (chunk.id, block, size_bytes)
        for chunk in chunks
        if chunk.blocks
        for block, size_bytes in zip(chunk.blocks, chunk.gradient_bytes, strict=True)
        if size_bytes
    ]

    def seconds(kind: TaskKind, moved_bytes: list[int], num_stepped: list[int]) -> FloatArray:
        """Seconds of a task of ``kind`` per chunk; equal ones are priced once."""
        price = cache(lambda moved, stepped: costs.task_s(_chunk_task(kind, moved, stepped)))
        return np.array([price(*pair) for pair in zip(moved_bytes, num_stepped, strict=True)], dtype=np.float64)

    none = [0] * len(chunks)
    num_stepped = [part.num_stepped for part in parts]
    is_stepped = np.array([bool(chunk.blocks) and chunk.is_trainable for chunk in chunks], dtype=np.bool_)
    return ChunkTable(
        layout=layout,
        is_owned=np.array([bool(chunk.blocks) for chunk in chunks], dtype=np.bool_),
        is_stepped=is_stepped,
        size_bytes=_integers(chunk.size_bytes for chunk in chunks),
        state_bytes=_of_trainable(chunks, (chunk.state_bytes for chunk in chunks)),
        staging_bytes=_of_trainable(chunks, (part.staging_bytes for part in parts)),
        host_parameter_bytes=_integers(part.parameter_bytes for part in parts),
        host_state_bytes=_of_trainable(chunks, (part.state_bytes for part in parts)),
        offload_bytes=_integers(gradient_bytes),
        first_block=_integers(chunk.blocks[0] if chunk.blocks else layout.num_blocks for chunk in chunks),
        last_block=_integers(chunk.blocks[-1] if chunk.blocks else layout.num_blocks for chunk in chunks),
        gather_s=seconds(TaskKind.GATHER, [part.parameter_bytes for part in parts], none),
        offload_s=np.where(is_stepped, seconds(TaskKind.GRADIENT_OFFLOAD, gradient_bytes, none), 0.0),
        cpu_adam_s=np.where(is_stepped, seconds(TaskKind.CPU_ADAM, moved, num_stepped), 0.0),
        accumulate_s=np.where(
            is_stepped, seconds(TaskKind.GRADIENT_ACCUMULATE, [3 * size for size in gradient_bytes], none), 0.0
        ),
        num_stepped=_integers(chunk.num_trainable for chunk in chunks),
        stepped_bytes=_integers(whole),
        narrow_peak_bytes=_integers(peak for peak, _ in narrow),
        narrow_bytes=_integers(dropped for _, dropped in narrow),
        wide_bytes=_integers(wide_gradient_bytes(chunk, workload.parameters) for chunk in chunks),
        gradient_chunk=_integers(chunk for chunk, _, _ in gradients),
        gradient_block=_integers(block for _, block, _ in gradients),
        gradient_bytes=_integers(size_bytes for _, _, size_bytes in gradients),
        update_order=_integers(c.id for c in sorted(stepped, key=lambda chunk: (-chunk.blocks[0], -chunk.id))),
        costs=costs,
        rule=rule,
        collectives=None if rule.num_ranks == 1 else collective_table(layout, parts, is_stepped.tolist(), costs, rule),
    )


def _chunk_task(kind: TaskKind, moved: int, stepped: int) -> Task:
    """A task with nothing but what its price depends on."""
    if kind in (TaskKind.GATHER, TaskKind.GRADIENT_OFFLOAD):
        return Task(TaskId(0), kind, moved_bytes=moved)
    return Task(TaskId(0), kind, num_stepped=stepped, stepped_bytes=moved)


def _of_trainable(chunks: Iterable[Chunk], values: Iterable[int]) -> IntArray:
    return _integers(value if chunk.is_trainable else 0 for chunk, value in zip(chunks, values, strict=True))


def _integers(values: Iterable[int]) -> IntArray:
    return np.array(list(values), dtype=np.int64)

"""What the chunks of a layout weigh and what is done with them, as arrays: the same for all families of the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Final, Self

import numpy as np

from ..drafts.program import NOT_THERE, BoolArray, IntArray, Work
from ..layout.adam_memory import alone_peak_bytes, together_gradient_bytes, widened_bytes, widened_part_bytes
from ..layout.layout import Chunk, Layout, RowReads
from ..layout.owners import Ownership
from ..layout.projections import ProjectionWork, gradient_projections, parameter_projections
from ..layout.shards import chunk_paged_bytes, chunk_state_bytes, num_tensors, rank_part, stepped_bytes
from ..layout.slots import Uses, stay_columns
from ..schema.optimizer import HostGradients, Optimizer
from ..schema.plan import ParallelMode, num_replicas, num_shards, widens_on_host
from ..schema.schedule import RankAxis
from ..schema.workload import Parameter

_FEW_USES: Final = 64
_FEW_STAYS: Final = 256
"""Stays of a model of hundreds of chunks and several micro-batches take a hundred kilobytes."""


@dataclass(frozen=True)
class StepKnobs:
    """What a plan says about the step rather than about memory."""

    micro_batches: int = 1
    limits_norm: bool = False
    """Whether CPU Adam waits for a norm."""
    parallel: ParallelMode = ParallelMode.SINGLE
    num_ranks: int = 1
    optimizer: Optimizer = Optimizer.ADAMW
    host_gradients: HostGradients = HostGradients.PARAMETERS
    shard_ranks: int | None = None
    """Ranks of a shard group; None where all are one."""
    projects_on_device: bool = False
    """Whether gradients of chunks that the host steps are projected before they leave."""

    @property
    def is_sharded(self) -> bool:
        """Whether ranks share what is gathered."""
        return self.parallel is ParallelMode.SHARDED

    @property
    def num_shards(self) -> int:
        """Equal parts of what is gathered."""
        return num_shards(self.parallel, self.num_ranks, self.shard_ranks)

    @property
    def num_replicas(self) -> int:
        """Shard groups, if ranks form several."""
        return num_replicas(self.num_ranks, self.shard_ranks)

    @property
    def shard_axis(self) -> RankAxis:
        """The ranks that have the parts of one chunk."""
        return RankAxis.SHARD if self.num_replicas > 1 else RankAxis.WORLD

    @property
    def widens(self) -> bool:
        """Whether gradients arrive on the host beside float32 sums."""
        return widens_on_host(self.host_gradients, self.micro_batches, limits_norm=self.limits_norm)

    @property
    def has_arrivals(self) -> bool:
        """Whether gradients arrive on the host beside the ones that they are added to."""
        return self.micro_batches > 1 or self.widens


@dataclass(frozen=True, eq=False)
class Stays:
    """The stays of gathered chunks on the device, G in the order of gathering."""

    chunk: IntArray
    slot: IntArray
    first_step: IntArray
    last_step: IntArray
    previous: IntArray
    """The stay that held the slot before, within the iteration; ``NOT_THERE`` if there is none."""
    earlier: IntArray
    """The stay of the same chunk before."""
    latest: IntArray
    """The last stay of the same chunk."""
    last_in_slot: IntArray
    """The last stay in the same slot."""

    @classmethod
    def of(cls, *columns: Sequence[int]) -> Self:
        """Of ``stay_columns``."""
        chunk, slot, first_step, last_step, previous = np.array(columns, dtype=np.int64)
        numbers = np.arange(len(chunk))
        by_chunk = np.argsort(chunk, kind="stable")
        earlier = np.full(len(chunk), NOT_THERE)
        follows = chunk[by_chunk[1:]] == chunk[by_chunk[:-1]]
        earlier[by_chunk[1:][follows]] = by_chunk[:-1][follows]
        return cls(
            chunk=chunk,
            slot=slot,
            first_step=first_step,
            last_step=last_step,
            previous=previous,
            earlier=earlier,
            latest=_last_of(chunk, numbers),
            last_in_slot=_last_of(slot, numbers),
        )

    def repeats(self, num_steps: int) -> bool:
        """Whether the chunks in all slots are the same before the third micro-batch as before the fourth.

        From there on all that follow are alike, but for the last one: what makes room depends on nothing else.
        ``num_steps``: of a micro-batch.
        """
        first = self.first_step
        if not len(first) or first[-1] < 3 * num_steps:
            # Nothing is gathered any more, or there are too few micro-batches to say.
            return True
        in_slot = np.full((2, int(self.slot.max()) + 1), NOT_THERE)
        for row, number in enumerate((2, 3)):
            is_before = first < number * num_steps
            # Of writes to one place the last one stays.
            in_slot[row, self.slot[is_before]] = self.chunk[is_before]
        return np.array_equal(*in_slot)


def _last_of(keys: IntArray, numbers: IntArray) -> IntArray:
    """Of every entry, the last one with the same key."""
    last = np.zeros(int(keys.max(initial=-1)) + 1, dtype=np.int64)
    # Of writes to one place the last one stays.
    last[keys] = numbers
    found: IntArray = last[keys]
    return found


@dataclass(frozen=True, eq=False)
class ChunkFacts:
    """Facts of every chunk.

    Shapes: C chunks, E (chunk, section) pairs with gradients, U (step, chunk) pairs of a micro-batch's steps and the
    chunks that they need, T trainable chunks.
    """

    layout: Layout
    parameters: Sequence[Parameter]
    step: StepKnobs

    @classmethod
    def of(cls, layout: Layout, parameters: Sequence[Parameter], step: StepKnobs) -> Self:
        """The facts of ``layout``; made once for the same ``parameters``, which they keep."""
        key = (cls, id(parameters), step)
        if key not in layout.derived:
            layout.derived[key] = cls(layout, parameters, step)
        found: Self = layout.derived[key]
        return found

    def stays(self, is_gathered: BoolArray, n_buffer: int, step_number: IntArray) -> Stays:
        """The stays of the gathered chunks in ``n_buffer`` buffers.

        ``step_number``: (S,) the number of each step within its micro-batch (``Layout.needed``).  Raises PlanError if a
        step needs more buffers.
        """
        return self._kept_stays(is_gathered.tobytes(), n_buffer, step_number.tobytes())

    @cached_property
    def _kept_stays(self) -> Callable[[bytes, int, bytes], Stays]:
        """The latest: plans that swap other blocks have the same."""

        @lru_cache(maxsize=_FEW_USES)
        def uses(is_gathered: bytes, step_number: bytes) -> Uses:
            found = np.frombuffer(is_gathered, dtype=np.bool_).tolist()
            needed = [[chunk for chunk in chunks if found[chunk]] for chunks in self.layout.needed]
            return Uses.of([needed[step] for step in np.frombuffer(step_number, dtype=np.int64).tolist()])

        @lru_cache(maxsize=_FEW_STAYS)
        def stays(is_gathered: bytes, n_buffer: int, step_number: bytes) -> Stays:
            return Stays.of(*stay_columns(uses(is_gathered, step_number), n_buffer))

        return stays

    # -- every chunk -------------------------------------------------------------------------------------------------

    @cached_property
    def is_trainable(self) -> BoolArray:
        """(C,) whether the optimizer has anything to do with it."""
        return np.array([chunk.is_trainable for chunk in self.layout.chunks], dtype=np.bool_)

    @cached_property
    def completed_by(self) -> IntArray:
        """(C,) the section whose backward completes the chunk's gradients; ``NOT_THERE`` where there are none."""
        found = (chunk.completed_by for chunk in self.layout.chunks)
        return integers(NOT_THERE if section is None else section for section in found)

    @cached_property
    def is_looked_up(self) -> BoolArray:
        """(C,) whether the prologue looks rows of it up on the host."""
        return np.array([chunk.rows is not None for chunk in self.layout.chunks], dtype=np.bool_)

    def of_rows(self, name: str) -> IntArray:
        """(C,) a field of ``RowReads``; 0 where no rows are looked up."""
        return self._of_rows[name]

    @cached_property
    def _of_rows(self) -> dict[str, IntArray]:
        reads = [chunk.rows for chunk in self.layout.chunks]
        names = (field.name for field in fields(RowReads))
        return {name: integers(0 if one is None else getattr(one, name) for one in reads) for name in names}

    @cached_property
    def left_by(self) -> IntArray:
        """(C,) the section whose backward completes the gradients that leave the device whole; ``NOT_THERE``: none."""
        return integers(c.gradients[0][0] if c.gradients else NOT_THERE for c in self.layout.chunks)

    @cached_property
    def update_order(self) -> IntArray:
        """(T,) trainable chunks as their gradients are complete: last section first, or, of pairs, the first one."""
        stepped = np.flatnonzero(self.is_trainable)[::-1]
        sections = self.completed_by[stepped]
        order: IntArray = stepped[np.argsort(sections if self.layout.backwards_ascend else -sections, kind="stable")]
        return order

    @cached_property
    def norm_sections(self) -> IntArray:
        """(N,) the sections whose gradients keep a limit of the norm by themselves; ``NOT_THERE`` alone: all together.

        Those by themselves ascend, as their backwards do.
        """
        if not self.layout.limits_each_block:
            return np.array([NOT_THERE])
        return np.unique(self.completed_by[self.is_trainable])

    @cached_property
    def norm_of(self) -> IntArray:
        """(C,) the place in ``norm_sections`` of each trainable chunk; 0 for others."""
        if not self.layout.limits_each_block:
            return np.zeros(len(self.layout.chunks), dtype=np.int64)
        found = np.searchsorted(self.norm_sections, self.completed_by)
        return np.where(self.is_trainable, found, 0).astype(np.int64)

    @cached_property
    def size_bytes(self) -> IntArray:
        """(C,) of the whole chunk."""
        return integers(chunk.size_bytes for chunk in self.layout.chunks)

    @cached_property
    def state_bytes(self) -> IntArray:
        """(C,) optimizer state of the whole chunk."""
        return integers(chunk_state_bytes(chunk, self.parameters, self.step.optimizer) for chunk in self.layout.chunks)

    @cached_property
    def paged_bytes(self) -> IntArray:
        """(C,) of that, what a paged optimizer has in unified memory where the whole chunk is stepped on the device."""
        optimizer = self.step.optimizer
        return integers(chunk_paged_bytes(chunk, self.parameters, optimizer) for chunk in self.layout.chunks)

    @cached_property
    def whole_gradient_bytes(self) -> IntArray:
        """(C,) the gradients of all sections."""
        return integers(chunk.gradient_bytes for chunk in self.layout.chunks)

    @cached_property
    def num_stepped(self) -> IntArray:
        """(C,) scalars that the optimizer steps."""
        return integers(chunk.num_trainable for chunk in self.layout.chunks)

    @cached_property
    def num_tensors(self) -> IntArray:
        """(C,) parameters that the optimizer steps."""
        return integers(num_tensors(chunk, self.parameters) for chunk in self.layout.chunks)

    @cached_property
    def whole_stepped_bytes(self) -> IntArray:
        """(C,) memory traffic of stepping all of it, scaled gradients included."""
        if not self.step.is_sharded:
            return self.part_stepped_bytes
        optimizer = self.step.optimizer
        traffic = (stepped_bytes(chunk, self.parameters, optimizer) for chunk in self.layout.chunks)
        return integers(traffic) + self._num_scalings * self.whole_gradient_bytes

    @property
    def _num_scalings(self) -> int:
        """Gradients are scaled down to the limit of their norm: in and out."""
        return 2 if self.step.limits_norm else 0

    # -- what a rank has of a gathered chunk -------------------------------------------------------------------------

    @cached_property
    def _parts(self) -> dict[str, IntArray]:
        """(C,) each field of ``RankPart``."""
        step = self.step
        parts = [
            rank_part(chunk, self.parameters, step.parallel, step.num_shards, step.optimizer, widens=step.widens)
            for chunk in self.layout.chunks
        ]
        names = parts[0].__slots__ if parts else ()
        return {name: integers(getattr(part, name) for part in parts) for name in names}

    def part(self, name: str) -> IntArray:
        """(C,) a field of ``RankPart``, of every chunk as if it were gathered."""
        return self._parts.get(name, np.zeros(0, dtype=np.int64))

    @cached_property
    def part_stepped_bytes(self) -> IntArray:
        """(C,) memory traffic of stepping a rank's part, scaled gradients included."""
        stepped: IntArray = self.part("stepped_bytes") + self._num_scalings * self.part("gradient_bytes")
        return stepped

    # -- device Adam -------------------------------------------------------------------------------------------------

    @cached_property
    def _widening(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """(C,) each: see [Note: Steps of device Adam] in ``shared/layout/adam_memory.py``.

        The most that stepping parameters alone adds, their gradients, those of the others, and the most that stepping a
        rank's part adds.
        """
        chunks, parameters, num_shards = self.layout.chunks, self.parameters, self.step.num_shards
        optimizer = self.step.optimizer
        alone = [alone_peak_bytes(chunk, parameters, optimizer) for chunk in chunks]
        part = (
            widened_part_bytes(chunk, parameters, num_shards, optimizer) if self.step.is_sharded else 0
            for chunk in chunks
        )
        return (
            integers(peak for peak, _ in alone),
            integers(dropped for _, dropped in alone),
            integers(together_gradient_bytes(chunk, parameters, optimizer) for chunk in chunks),
            integers(part),
        )

    def widened_bytes(self, whole: IntArray, parts: IntArray, *, drops: bool = True) -> int:
        """The most that device Adam of ``whole`` chunks, ascending, and of parts of others adds to the level before.

        ``drops``: whether gradients of whole ones go as it steps them.
        """
        peak, alone, together, of_part = self._widening
        if not drops:
            made = [widened_bytes(self.layout.chunks[c], self.parameters, self.step.optimizer) for c in whole.tolist()]
            return max(0, *made, int(of_part[parts].max(initial=0)))
        before = together[whole].sum() + alone[whole].cumsum() - alone[whole]
        highest = int((peak[whole] - before).max(initial=0))
        return max(highest, int(of_part[parts].max(initial=0) - together[whole].sum() - alone[whole].sum()))

    # -- sections and chunks -----------------------------------------------------------------------------------------

    @cached_property
    def uses(self) -> tuple[IntArray, IntArray, IntArray]:
        """(U,) steps of a micro-batch, the chunks that each needs, and the place of the chunk among them."""
        found = [
            (step, chunk, place) for step, chunks in enumerate(self.layout.needed) for place, chunk in enumerate(chunks)
        ]
        steps, chunks, places = zip(*found, strict=True) if found else ((), (), ())
        return integers(steps), integers(chunks), integers(places)

    @cached_property
    def gradients(self) -> tuple[IntArray, IntArray, IntArray]:
        """(E,) chunks, sections and bytes of all gradients that a section's backward completes; chunks ascend."""
        found = [
            (chunk.id, section, size_bytes)
            for chunk in self.layout.chunks
            for section, size_bytes in chunk.gradients
            if size_bytes
        ]
        chunks, sections, sizes = zip(*found, strict=True) if found else ((), (), ())
        return integers(chunks), integers(sections), integers(sizes)

    # -- work --------------------------------------------------------------------------------------------------------

    @cached_property
    def gather_work(self) -> Work:
        """By chunk: the copy of its parameters to the device."""
        return Work(moved_bytes=self.part("parameter_bytes"))

    @cached_property
    def all_gather_work(self) -> Work:
        """By chunk: the exchange of its parameters."""
        step = self.step
        return Work(moved_bytes=self.part("gathered_bytes"), num_ranks=step.num_shards, axis=step.shard_axis)

    @cached_property
    def offload_work(self) -> Work:
        """By chunk: the copy of its gradients to the host."""
        return Work(moved_bytes=self.part("gradient_bytes"))

    @cached_property
    def accumulate_work(self) -> Work:
        """By chunk: the sum of its gradients and those of earlier micro-batches."""
        return Work(stepped_bytes=self.part("gradient_bytes") + 2 * self.part("summed_bytes"))

    @cached_property
    def widen_work(self) -> Work:
        """By chunk: its first gradients, written as float32 sums."""
        return Work(stepped_bytes=self.part("gradient_bytes") + self.part("summed_bytes"))

    @cached_property
    def cpu_adam_work(self) -> Work:
        """By chunk: CPU Adam."""
        moved_bytes = self.part("host_stepped_bytes") + self._num_scalings * self.part("summed_bytes")
        tensors = self.part("num_tensors")
        return Work(num_stepped=self.part("num_stepped"), stepped_bytes=moved_bytes, num_tensors=tensors)

    @cached_property
    def scatter_work(self) -> Work:
        """By chunk: the sum of its gradients over the ranks of a shard group; each keeps its part."""
        step = self.step
        return Work(moved_bytes=self.part("reduced_bytes"), num_ranks=step.num_shards, axis=step.shard_axis)

    @cached_property
    def has_subspaces(self) -> BoolArray:
        """(C,) whether anything of a chunk is projected."""
        return np.array([bool(chunk.subspaces) for chunk in self.layout.chunks], dtype=np.bool_)

    @cached_property
    def leaves_once(self) -> BoolArray:
        """(C,) whether gradients of a chunk that the host steps leave behind the last micro-batch's backward alone.

        Those that are projected on the device: they are added up there, since none are projected before the sum is.
        """
        is_added = self.step.projects_on_device and self.step.micro_batches > 1
        once: BoolArray = self.has_subspaces & is_added
        return once

    @cached_property
    def num_offloads(self) -> IntArray:
        """(C,) how often gradients of a chunk that the host steps leave the device in an iteration."""
        return np.where(self.leaves_once, 1, self.step.micro_batches)

    def _projections(self, of_chunk: Callable[[Chunk], ProjectionWork]) -> tuple[Work, IntArray]:
        """By chunk, and (C,) the most that it makes on the way."""
        found = [of_chunk(chunk) for chunk in self.layout.chunks]
        work = Work(
            num_stepped=integers(one.num_projected for one in found),
            stepped_bytes=integers(one.touched_bytes for one in found),
            num_tensors=integers(one.num_tensors for one in found),
            flops=integers(one.flops for one in found),
        )
        return work, integers(one.peak_bytes for one in found)

    @cached_property
    def gradient_projections(self) -> tuple[Work, IntArray]:
        """By chunk: projection of its gradients on the device, and (C,) the most that it makes on the way."""
        return self._projections(lambda chunk: gradient_projections(chunk, self.parameters))

    @cached_property
    def host_gradient_projections(self) -> tuple[Work, IntArray]:
        """By chunk: projection of its gradients on the host, and (C,) the most that it makes on the way."""
        widens = self.step.widens
        return self._projections(lambda chunk: gradient_projections(chunk, self.parameters, widens=widens))

    @cached_property
    def parameter_projections(self) -> tuple[Work, IntArray]:
        """By chunk: projection of its parameters, and (C,) the most that it makes on the way."""
        optimizer = self.step.optimizer
        return self._projections(lambda chunk: parameter_projections(chunk, self.parameters, optimizer))

    def ownership(self, chunks: IntArray) -> Ownership:
        """Who projects the subspaces of ``chunks``, which lie on the devices of all ranks in parts."""
        return self._kept_ownership(tuple(chunks.tolist()))

    @cached_property
    def _kept_ownership(self) -> Callable[[tuple[int, ...]], Ownership]:
        """The latest: families that shard the same chunks have the same."""

        @lru_cache(maxsize=_FEW_USES)
        def ownership(chunks: tuple[int, ...]) -> Ownership:
            parts = tuple(self.layout.chunks[chunk] for chunk in chunks)
            return Ownership(parts, self.parameters, self.step.num_shards, self.step.optimizer)

        return ownership

    @cached_property
    def host_step_bytes(self) -> IntArray:
        """(C,) the most that a step on the host makes on the way, and what is projected there before and behind it."""
        peaks = [self.part("host_step_bytes"), self.parameter_projections[1]]
        if not self.step.projects_on_device:
            peaks.append(self.host_gradient_projections[1])
        found: IntArray = np.max(peaks, axis=0, initial=0)
        return found

    @cached_property
    def replica_work(self) -> Work:
        """By chunk: the sum of such a part over all shard groups."""
        return Work(moved_bytes=self.part("gradient_bytes"), num_ranks=self.step.num_replicas, axis=RankAxis.REPLICA)

    @cached_property
    def all_reduce_work(self) -> Work:
        """By chunk: the sum of its gradients over ranks which keep all of it."""
        return Work(moved_bytes=self.whole_gradient_bytes, num_ranks=self.step.num_ranks)


def integers(values: Iterable[int]) -> IntArray:
    """``values`` as an array."""
    return np.array(list(values), dtype=np.int64)

"""What the chunks of a layout weigh and cost, as arrays over chunks and over prefixes ([Note: Prefixes])."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

import numpy as np

from ...shared.compile.chunk_facts import ChunkFacts, Stays, StepKnobs
from ...shared.layout.adam_memory import alone_peak_bytes, together_gradient_bytes, widened_part_bytes
from ...shared.layout.layout import Chunk, Layout
from ...shared.layout.shards import chunk_paged_bytes, chunk_state_bytes, rank_part, stepped_bytes
from ...shared.schema.schedule import Task, TaskId, TaskKind
from ...shared.schema.workload import Parameter, Workload
from ..costs.task_costs import CostModel
from .collective_table import CollectiveTable, collective_table
from .compute_table import FloatArray, Positions
from .placements import Placements
from .space import BoolArray, IntArray
from .step_spec import StepSpec

_PLAIN_STEP: Final = StepSpec()


@dataclass(frozen=True)
class ChunkTable:
    """Facts of every chunk.

    Shapes: C chunks, P prefixes, E (chunk, section) pairs with gradients, T trainable chunks.
    """

    workload: Workload
    layout: Layout
    places: Placements
    is_stepped: BoolArray
    """(C,) whether the optimizer steps it."""
    size_bytes: IntArray
    """(C,)"""
    state_bytes: IntArray
    """(C,) optimizer state."""
    staging_bytes: IntArray
    """(C,) host buffer of its gradients."""
    part_bytes: IntArray
    """(C,) what a rank has of its parameters, on the host or on the device, if it is gathered."""
    part_state_bytes: IntArray
    """(C,) and of its optimizer state."""
    offload_bytes: IntArray
    """(C,) bytes of gradients that a rank is left with: sent to its host, or kept on its device."""
    paged_bytes: IntArray
    """(C,) of ``state_bytes``, what lies in unified memory where the chunk is persistent."""
    part_paged_bytes: IntArray
    """(C,) of ``part_state_bytes``, what lies there where the chunk is sharded over the devices."""
    part_num_stepped: IntArray
    """(C,) scalars of a rank's part that the optimizer steps."""
    part_stepped_bytes: IntArray
    """(C,) memory traffic of that."""
    part_widened_bytes: IntArray
    """(C,) the most that device Adam adds when it widens the gradients of a rank's part."""
    completed_by: IntArray
    """(C,) the section whose backward completes its gradients; -1 where it has none."""
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
    """(C,) the most that device Adam adds of parameters that are stepped alone, narrow ones above all; see [Note: Steps
    of device Adam]."""
    narrow_bytes: IntArray
    """(C,) their gradients."""
    wide_bytes: IntArray
    """(C,) the gradients of its other parameters."""
    gradient_chunk: IntArray
    """(E,) chunk of each gradient buffer."""
    gradient_section: IntArray
    """(E,) section whose backward completes it."""
    gradient_bytes: IntArray
    """(E,)"""
    update_order: IntArray
    """(T,) chunks as their gradients leave and CPU Adam steps them: last section first."""
    costs: CostModel
    step: StepSpec
    collectives: CollectiveTable | None
    """Where several ranks train together."""

    @cached_property
    def positions(self) -> Positions:
        """The program of the compute lane."""
        return Positions(self.layout.num_blocks, self.step.micro_batches)

    @cached_property
    def facts(self) -> ChunkFacts:
        """The compiler's facts of the chunks."""
        step = self.step
        knobs = StepKnobs(step.micro_batches, step.limits_norm, step.parallel, step.num_ranks, step.optimizer)
        return ChunkFacts.of(self.layout, self.workload.parameters, knobs)

    def stays(self, prefix: int, n_buffer: int) -> Stays:
        """The stays of gathered chunks in ``n_buffer`` buffers, as the compiler assigns them."""
        return self.facts.stays(self.is_gathered(prefix), n_buffer, self.positions.step_number)

    def is_offloaded(self, prefix: int | IntArray) -> BoolArray:
        """(..., C) whether a chunk is offloaded, for each entry of ``prefix``."""
        return self.places.is_offloaded(prefix)

    def is_gathered(self, prefix: int | IntArray) -> BoolArray:
        """(..., C) whether a chunk is not persistent, for each entry of ``prefix``."""
        return self.places.is_gathered(prefix)

    def static_device_bytes(self, prefix: IntArray, resident_bytes: int) -> IntArray:
        """(R,) device bytes that are there for good."""
        whole_bytes = self.places.persistent_sum(self.size_bytes + self.state_bytes - self.paged_bytes)
        # The gradients of a part lie there for good too.
        kept_bytes = np.where(self.is_stepped, self.offload_bytes, 0)
        own_bytes = self.part_bytes + self.part_state_bytes - self.part_paged_bytes
        parts_bytes = self.places.sharded_sum(own_bytes + kept_bytes)
        static_bytes: IntArray = resident_bytes + (whole_bytes + parts_bytes)[prefix]
        return static_bytes

    def pinned_host_bytes(self, prefix: IntArray) -> IntArray:
        """(R,) of offloaded chunks: parameters and the buffers that receive gradients."""
        num_buffers = 2 if self.step.accumulates else 1
        return self.places.offloaded_sum(self.part_bytes + num_buffers * self.staging_bytes)[prefix]

    def host_bytes(self, prefix: IntArray) -> IntArray:
        """(R,) host memory that is not pinned: optimizer state of offloaded chunks, and paged state of the others."""
        paged_bytes = self.places.persistent_sum(self.paged_bytes) + self.places.sharded_sum(self.part_paged_bytes)
        host_bytes: IntArray = (self.places.offloaded_sum(self.part_state_bytes) + paged_bytes)[prefix]
        return host_bytes

    @cached_property
    def device_adam_bytes(self) -> IntArray:
        """(P,) the most that device Adam of persistent chunks, and then of parts, adds to the level at its start."""
        added = self.narrow_peak_bytes - (self.narrow_bytes.cumsum() - self.narrow_bytes)
        places = self.places
        highest = np.append(0, np.maximum.accumulate(added))[places.n_persist]
        most: IntArray = np.maximum(0, highest - places.persistent_sum(self.wide_bytes))
        if places.has_shards:
            widened = np.where(places.is_sharded(places.all), self.part_widened_bytes, 0).max(axis=1, initial=0)
            most = np.maximum(most, widened - places.persistent_sum(self.wide_bytes + self.narrow_bytes))
        return most

    @cached_property
    def device_adam_s(self) -> FloatArray:
        """(P,) seconds of stepping persistent chunks and parts of sharded ones."""
        places = self.places
        stepped = places.persistent_sum(self.num_stepped) + places.sharded_sum(self.part_num_stepped)
        moved = places.persistent_sum(self.stepped_bytes) + places.sharded_sum(self.part_stepped_bytes)
        price = cache(lambda pair: self.costs.task_s(_chunk_task(TaskKind.DEVICE_ADAM, *pair)))
        return np.array([price(pair) for pair in zip(moved.tolist(), stepped.tolist(), strict=True)])

    @cached_property
    def norm_s(self) -> FloatArray:
        """(P,) seconds of the norm of all gradients; 0 where it is not limited."""
        if not self.step.limits_norm:
            return np.zeros(len(self.places.n_persist))
        read_bytes = self.places.offloaded_sum(np.where(self.is_stepped, self.offload_bytes, 0))
        price = cache(lambda size: self.costs.task_s(Task(TaskId(0), TaskKind.GRADIENT_NORM, stepped_bytes=size)))
        return np.array([price(size) for size in read_bytes.tolist()])


def chunk_table(
    workload: Workload,
    layout: Layout,
    costs: CostModel,
    step: StepSpec = _PLAIN_STEP,
    places: Placements | None = None,
) -> ChunkTable:
    """Tabulate ``layout``; ``places``: its prefixes, those without shards by default."""
    chunks = layout.chunks
    parameters, optimizer = workload.parameters, step.optimizer
    parts = [rank_part(chunk, parameters, step.parallel, step.num_ranks, optimizer) for chunk in chunks]
    gradient_bytes = [part.gradient_bytes for part in parts]
    num_scalings = 2 if step.limits_norm else 0
    moved = [part.stepped_bytes + num_scalings * part.gradient_bytes for part in parts]
    whole = _whole_stepped_bytes(chunks, parameters, step) if step.is_sharded else moved
    narrow = [alone_peak_bytes(chunk, parameters, optimizer) for chunk in chunks]
    gradients = [(chunk.id, *of_section) for chunk in chunks for of_section in chunk.gradients]
    num_stepped = [part.num_stepped for part in parts]
    is_stepped = np.array([chunk.is_trainable for chunk in chunks], dtype=np.bool_)
    completed_by = _integers(-1 if chunk.completed_by is None else chunk.completed_by for chunk in chunks)
    return ChunkTable(
        workload=workload,
        layout=layout,
        places=places or Placements.of(layout),
        is_stepped=is_stepped,
        size_bytes=_integers(chunk.size_bytes for chunk in chunks),
        state_bytes=_of_trainable(chunks, (chunk_state_bytes(chunk, parameters, optimizer) for chunk in chunks)),
        staging_bytes=_of_trainable(chunks, (part.staging_bytes for part in parts)),
        part_bytes=_integers(part.parameter_bytes for part in parts),
        part_state_bytes=_of_trainable(chunks, (part.state_bytes for part in parts)),
        offload_bytes=_integers(gradient_bytes),
        paged_bytes=_of_trainable(chunks, (chunk_paged_bytes(chunk, parameters, optimizer) for chunk in chunks)),
        part_paged_bytes=_of_trainable(chunks, (part.paged_bytes for part in parts)),
        part_num_stepped=_of_trainable(chunks, num_stepped),
        part_stepped_bytes=_of_trainable(chunks, moved),
        part_widened_bytes=_integers(
            widened_part_bytes(chunk, parameters, step.num_ranks, optimizer) if step.is_sharded else 0
            for chunk in chunks
        ),
        completed_by=completed_by,
        gather_s=_seconds(costs, TaskKind.GATHER, [part.parameter_bytes for part in parts]),
        offload_s=np.where(is_stepped, _seconds(costs, TaskKind.GRADIENT_OFFLOAD, gradient_bytes), 0.0),
        cpu_adam_s=np.where(is_stepped, _seconds(costs, TaskKind.CPU_ADAM, moved, num_stepped), 0.0),
        accumulate_s=np.where(
            is_stepped, _seconds(costs, TaskKind.GRADIENT_ACCUMULATE, [3 * n for n in gradient_bytes]), 0.0
        ),
        num_stepped=_integers(chunk.num_trainable for chunk in chunks),
        stepped_bytes=_integers(whole),
        narrow_peak_bytes=_integers(peak for peak, _ in narrow),
        narrow_bytes=_integers(dropped for _, dropped in narrow),
        wide_bytes=_integers(together_gradient_bytes(chunk, parameters, optimizer) for chunk in chunks),
        gradient_chunk=_integers(chunk for chunk, _, _ in gradients),
        gradient_section=_integers(section for _, section, _ in gradients),
        gradient_bytes=_integers(size_bytes for _, _, size_bytes in gradients),
        update_order=_integers(sorted(is_stepped.nonzero()[0], key=lambda c: (-completed_by[c], -c))),
        costs=costs,
        step=step,
        collectives=None if step.num_ranks == 1 else collective_table(layout, parts, is_stepped.tolist(), costs, step),
    )


def _whole_stepped_bytes(chunks: Sequence[Chunk], parameters: Sequence[Parameter], step: StepSpec) -> list[int]:
    """Memory traffic of stepping each chunk whole, scaled gradients included."""
    num_scalings = 2 if step.limits_norm else 0
    return [stepped_bytes(chunk, parameters, step.optimizer) + num_scalings * chunk.gradient_bytes for chunk in chunks]


def _seconds(
    costs: CostModel, kind: TaskKind, moved_bytes: Sequence[int], num_stepped: Sequence[int] | None = None
) -> FloatArray:
    """(C,) seconds of a task of ``kind`` per chunk; equal ones are priced once."""
    price = cache(lambda moved, stepped: costs.task_s(_chunk_task(kind, moved, stepped)))
    pairs = zip(moved_bytes, num_stepped or [0] * len(moved_bytes), strict=True)
    return np.array([price(*pair) for pair in pairs], dtype=np.float64)


def _chunk_task(kind: TaskKind, moved: int, stepped: int) -> Task:
    """A task with nothing but what its price depends on."""
    if kind in (TaskKind.GATHER, TaskKind.GRADIENT_OFFLOAD):
        return Task(TaskId(0), kind, moved_bytes=moved)
    return Task(TaskId(0), kind, num_stepped=stepped, stepped_bytes=moved)


def _of_trainable(chunks: Iterable[Chunk], values: Iterable[int]) -> IntArray:
    return _integers(value if chunk.is_trainable else 0 for chunk, value in zip(chunks, values, strict=True))


def _integers(values: Iterable[int]) -> IntArray:
    return np.array(list(values), dtype=np.int64)

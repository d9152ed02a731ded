"""What the chunks of a layout hold and cost by their residency, as arrays over prefixes ([Note: Prefixes])."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

import numpy as np

from ...shared.compile.chunk_facts import ChunkFacts
from ...shared.drafts.program import NOT_THERE, Work
from ...shared.layout.layout import Layout
from ...shared.layout.residencies import STEPPED_BY_HOST, ChunkResidency
from ...shared.schema.schedule import Task, TaskId, TaskKind
from ...shared.schema.workload import Workload
from ..costs.task_costs import CostModel
from .disk_choices import StagedBytes
from .placements import Placements
from .prices import FloatArray, PriceList
from .space import BoolArray, IntArray
from .step_spec import StepSpec

_PLAIN_STEP: Final = StepSpec()


@dataclass(frozen=True)
class ChunkTable:
    """The prefixes of a layout.  Shapes: C chunks, P prefixes, R of them."""

    workload: Workload
    layout: Layout
    places: Placements
    costs: CostModel
    step: StepSpec
    has_disk: bool = False
    """Whether plans are compared with some that have chunks on a disk, and so have its lane."""

    @cached_property
    def facts(self) -> ChunkFacts:
        """The compiler's facts of the chunks."""
        return ChunkFacts.of(self.layout, self.workload.parameters, self.step.knobs)

    def is_any_of(self, prefix: int, *some: ChunkResidency) -> BoolArray:
        """(C,) whether a chunk has one of these residencies."""
        return self.places.is_any_of(prefix, some)

    # -- bytes -------------------------------------------------------------------------------------------------------

    def static_device_bytes(self, prefix: IntArray, resident_bytes: int) -> IntArray:
        """(R,) device bytes that are there for good."""
        static_bytes: IntArray = resident_bytes + self._chunks_device_bytes[prefix]
        return static_bytes

    def pinned_host_bytes(self, prefix: IntArray) -> IntArray:
        """(R,) of chunks that the host steps: parameters and the buffers that receive gradients, or places for them."""
        pinned_bytes: IntArray = self._pinned_bytes[prefix]
        if self.places.uses_disk:
            pinned_bytes = pinned_bytes + self.staged_bytes.more_pinned(self.places.on_disk[prefix])
        return pinned_bytes

    def host_bytes(self, prefix: IntArray) -> IntArray:
        """(R,) host memory that is not pinned: optimizer state of chunks that the host steps, paged state of others."""
        host_bytes: IntArray = self._pageable_bytes[prefix]
        if self.places.uses_disk:
            host_bytes = host_bytes + self.staged_bytes.more_pageable(self.places.on_disk[prefix])
        return host_bytes

    def step_bytes(self, prefix: IntArray) -> IntArray:
        """(R,) the most that one step on the host makes on the way; chunks are stepped one after the other."""
        step_bytes: IntArray = self._step_bytes[prefix]
        return step_bytes

    @cached_property
    def staged_bytes(self) -> StagedBytes:
        """What chunks on a disk have there, and what passes through the host."""
        return StagedBytes.of(self.facts)

    @cached_property
    def _chunks_device_bytes(self) -> IntArray:
        """(P,) device bytes of chunks that are there for good."""
        facts, sum_of = self.facts, self.places.sum_of
        whole_state_bytes = self._trained(facts.state_bytes - facts.paged_bytes)
        # The gradients of a part lie there for good too.
        part_state_bytes = self._trained(
            facts.part("state_bytes") - facts.part("paged_bytes") + facts.part("gradient_bytes")
        )
        return (
            sum_of(facts.size_bytes + whole_state_bytes, ChunkResidency.PERSISTENT)
            + sum_of(facts.size_bytes, ChunkResidency.HOST_STEPPED)
            + sum_of(facts.part("parameter_bytes") + part_state_bytes, ChunkResidency.SHARDED)
        )

    @cached_property
    def _pinned_bytes(self) -> IntArray:
        """(P,) pinned host memory."""
        facts, part = self.facts, self.facts.part
        # Of what nobody leaves but lookups of rows, none arrives whole; what leaves once arrives where it stays.
        arrives = (facts.left_by != NOT_THERE) & ~facts.leaves_once & self.step.knobs.has_arrivals
        arrival_bytes = np.where(arrives, part("arrival_bytes"), 0)
        rows_bytes = facts.of_rows("forward_bytes") + facts.of_rows("gradient_bytes")
        buffer_bytes = self._trained(part("staging_bytes") + arrival_bytes) + rows_bytes
        return self.places.sum_of(part("parameter_bytes") + buffer_bytes, *STEPPED_BY_HOST)

    @cached_property
    def _pageable_bytes(self) -> IntArray:
        """(P,) host memory that is not pinned."""
        facts, sum_of = self.facts, self.places.sum_of
        return (
            sum_of(self._trained(facts.part("state_bytes")), *STEPPED_BY_HOST)
            + sum_of(self._trained(facts.paged_bytes), ChunkResidency.PERSISTENT)
            + sum_of(self._trained(facts.part("paged_bytes")), ChunkResidency.SHARDED)
        )

    @cached_property
    def _step_bytes(self) -> IntArray:
        """(P,) see ``step_bytes``."""
        return self.places.most_of(self.facts.host_step_bytes, *STEPPED_BY_HOST)

    def _trained(self, values: IntArray) -> IntArray:
        """(C,) ``values`` of trainable chunks, and 0 of others."""
        found: IntArray = np.where(self.facts.is_trainable, values, 0)
        return found

    # -- seconds of what is done for all chunks together -------------------------------------------------------------

    @cached_property
    def device_adam_s(self) -> FloatArray:
        """(P,) seconds of stepping persistent chunks and parts of sharded ones."""
        facts, sum_of = self.facts, self.places.sum_of
        whole, parts = ChunkResidency.PERSISTENT, ChunkResidency.SHARDED
        stepped = sum_of(self._trained(facts.num_stepped), whole)
        stepped += sum_of(self._trained(facts.part("num_stepped")), parts)
        moved = sum_of(self._trained(facts.whole_stepped_bytes), whole)
        moved += sum_of(self._trained(facts.part_stepped_bytes), parts)
        tensors = sum_of(self._trained(facts.num_tensors), whole)
        tensors += sum_of(self._trained(facts.part("num_tensors")), parts)
        work = Work(num_stepped=stepped, stepped_bytes=moved, num_tensors=tensors)
        return PriceList(self.costs).seconds(TaskKind.DEVICE_ADAM, work)[:-1]

    @cached_property
    def norm_s(self) -> FloatArray:
        """(P,) seconds of the norms that are taken, of all gradients or of each block's; 0 where they are not limited.

        What each of them reads adds up: its seconds are some for itself, and some for each byte.
        """
        if not self.step.knobs.limits_norm:
            return np.zeros(len(self.places.counts))
        facts, sum_of = self.facts, self.places.sum_of
        read_bytes = sum_of(self._trained(facts.part("summed_bytes")), *STEPPED_BY_HOST)
        whole_bytes = np.zeros(len(facts.size_bytes), dtype=np.int64)
        chunks, _, sizes = facts.gradients
        np.add.at(whole_bytes, chunks, sizes)
        kept_bytes = sum_of(self._trained(whole_bytes), ChunkResidency.PERSISTENT)
        kept_bytes = kept_bytes + sum_of(self._trained(facts.part("gradient_bytes")), ChunkResidency.SHARDED)

        @cache
        def price(on_host: int, on_device: int) -> float:
            norm = Task(TaskId(0), TaskKind.GRADIENT_NORM, moved_bytes=on_device, stepped_bytes=on_host)
            return self.costs.task_s(norm)

        seconds = np.array(list(map(price, read_bytes.tolist(), kept_bytes.tolist())))
        return seconds + (len(facts.norm_sections) - 1) * price(0, 0)


def chunk_table(
    workload: Workload,
    layout: Layout,
    costs: CostModel,
    step: StepSpec = _PLAIN_STEP,
    places: Placements | None = None,
    *,
    has_disk: bool = False,
) -> ChunkTable:
    """Tabulate ``layout``; ``places``: its prefixes, by default those that persist and offload and do nothing else.

    ``has_disk``: whether the plans have the lane of a disk, those included that have nothing there.
    """
    places = Placements.of(layout) if places is None else places
    return ChunkTable(workload, layout, places, costs, step, has_disk)

"""The chunks of a plan, made one by one: each of the kind that its residency and the ranks ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from ...shared.layout.layout import Chunk, Layout
from ...shared.layout.residencies import STEPPED_BY_HOST, ChunkResidency, residencies
from ...shared.layout.shards import regions
from ...shared.schema.plan import ParallelMode, Plan, ProjectionPlace
from ...shared.schema.workload import Workload
from ..devices.device import TrainingDevice
from ..ranks.collectives import Collectives
from .chunk import DeviceChunk, HostStepping
from .chunk_store import ChunkStore
from .parameter_values import ParameterValues
from .sharded_chunk import ShardedChunk, Shards


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkMaker:
    """What chunks are made from."""

    parameters: Mapping[str, nn.Parameter]
    """By all their names."""
    workload: Workload
    layout: Layout
    plan: Plan
    device: TrainingDevice
    store: ChunkStore | None
    """What lies on the disk, if anything does."""
    ranks: Collectives | None
    """Those that chunks are shared among, for use between two steps."""
    values: ParameterValues
    """Where the values of parameters come from."""

    def make(self, chunk: Chunk) -> DeviceChunk:
        """``chunk``, with its parameters moved in.  Raises what ``DeviceChunk`` does."""
        plan = self.plan
        specs = [self.workload.parameters[placed.index] for placed in chunk.parameters]
        own = [self.parameters[spec.name] for spec in specs]
        residency = self._residencies[chunk.id]
        stepping = HostStepping(
            has_arrivals=plan.micro_batches > 1 and not self.leaves_once(chunk),
            widens=plan.widens_on_host,
            optimizer=plan.optimizer,
            disk=None if self.store is None else self.store.chunks.get(chunk.id),
        )
        given: dict[str, Any] = {"residency": residency, "stepping": stepping, "values": self.values}
        if plan.parallel is ParallelMode.SHARDED and residency is not ChunkResidency.PERSISTENT:
            assert self.ranks is not None
            shards = Shards(regions(chunk, self.workload.parameters), self.ranks.shard)
            return ShardedChunk(chunk, specs, own, self.device, shards=shards, **given)
        return DeviceChunk(chunk, specs, own, self.device, **given)

    def leaves_once(self, chunk: Chunk) -> bool:
        """Whether gradients of ``chunk`` are added up on the device, and leave when they have been projected there."""
        leaves = self._residencies[chunk.id] in STEPPED_BY_HOST and bool(chunk.subspaces)
        on_device = self.plan.projects_gradients_on is ProjectionPlace.DEVICE
        return leaves and on_device and self.plan.micro_batches > 1

    @cached_property
    def _residencies(self) -> Sequence[ChunkResidency]:
        return residencies(self.plan, self.layout)

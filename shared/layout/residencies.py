"""The residencies of chunks: where a chunk lies, whether it is gathered, and who steps it.

[Note: Order of residencies]
Chunks follow execution order.  A plan counts how many of them have each residency, in the order of ``ChunkResidency``;
the last residency has the chunks that no knob counts.  A further residency is one more entry here, with its knob, and
with what the tables of the search say that it holds and does (``sim/space/chunk_table.py``, ``sim/bounds``).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final

from ..answers.plan_kind import PlanKind
from ..schema.plan import ParallelMode, Plan
from ..schema.record import ChunkCounts
from .layout import Layout


class ChunkResidency(IntEnum):
    """See [Note: Order of residencies]."""

    PERSISTENT = 0
    """Whole on the device for good, with its optimizer state."""
    HOST_STEPPED = 1
    """Its parameters on the device for good, its optimizer state on the host, which steps it."""
    SHARDED = 2
    """In parts on the devices of all ranks, which step them."""
    OFFLOADED = 3
    """On the host, which steps it."""

    @property
    def knob(self) -> str | None:
        """The field of ``Plan`` that counts its chunks; None for the residency of the rest."""
        return _KNOBS.get(self)

    @property
    def of_frozen(self) -> ChunkResidency:
        """What a chunk among them has that nobody steps: there is nothing for the host to do."""
        return ChunkResidency.PERSISTENT if self is ChunkResidency.HOST_STEPPED else self

    @property
    def kind(self) -> PlanKind:
        """The kind of plans with such chunks, and none of a residency that asks for more."""
        return _KINDS[self]

    def is_known_to(self, parallel: ParallelMode) -> bool:
        """Whether ranks in this mode have such chunks."""
        return parallel in _MODES.get(self, tuple(ParallelMode))


GATHERED: Final = (ChunkResidency.SHARDED, ChunkResidency.OFFLOADED)
"""Their parameters come to the device for stays in buffers."""
STEPPED_BY_HOST: Final = (ChunkResidency.HOST_STEPPED, ChunkResidency.OFFLOADED)
"""Their gradients leave the device."""

_KNOBS: Final = {
    ChunkResidency.PERSISTENT: "n_persist",
    ChunkResidency.HOST_STEPPED: "n_host_stepped",
    ChunkResidency.SHARDED: "n_shard",
}
_KINDS: Final = {
    ChunkResidency.PERSISTENT: PlanKind.RESIDENT,
    ChunkResidency.HOST_STEPPED: PlanKind.HOST_STEPPED,
    ChunkResidency.SHARDED: PlanKind.SHARDED,
    ChunkResidency.OFFLOADED: PlanKind.OFFLOADED,
}
_MODES: Final = {
    ChunkResidency.HOST_STEPPED: (ParallelMode.SINGLE, ParallelMode.REPLICATED),
    ChunkResidency.SHARDED: (ParallelMode.SHARDED,),
    ChunkResidency.OFFLOADED: (ParallelMode.SINGLE, ParallelMode.REPLICATED, ParallelMode.SHARDED),
}
"""The modes that know a residency, where not all do."""


def residencies(plan: Plan, layout: Layout) -> tuple[ChunkResidency, ...]:
    """The residency of every chunk.  Raises PlanError if the plan counts more chunks than the layout has."""
    layout.persistent(plan.n_persist)
    layout.host_stepped(plan.n_persist, plan.n_host_stepped)
    layout.sharded(plan.num_kept, plan.n_shard)
    found: list[ChunkResidency] = []
    for residency in ChunkResidency:
        number = len(layout.chunks) - len(found) if residency.knob is None else getattr(plan, residency.knob)
        found += [residency] * number
    return tuple(
        residency if chunk.is_trainable else residency.of_frozen
        for chunk, residency in zip(layout.chunks, found, strict=True)
    )


def chunk_counts(plan: Plan, layout: Layout) -> ChunkCounts:
    """How many chunks of ``layout`` have each residency, as the plan's knobs count them."""
    counted = [getattr(plan, residency.knob) for residency in ChunkResidency if residency.knob is not None]
    numbers = (*counted, len(layout.chunks) - sum(counted))
    return ChunkCounts(**{r.name.lower(): number for r, number in zip(ChunkResidency, numbers, strict=True)})


def most_demanding(kinds: Iterable[PlanKind]) -> PlanKind:
    """The kind of a plan that uses the means of all ``kinds``; RESIDENT for none."""
    return max(kinds, key=lambda kind: kind.complexity, default=PlanKind.RESIDENT)

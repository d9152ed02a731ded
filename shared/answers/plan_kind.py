"""Kinds of plans, simplest first: the order by which a recommendation prefers one plan over another."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pydantic import Field

from ..basics.documents import FrozenModel


class PlanKind(StrEnum):
    """The most that a plan asks of a machine and its user, simplest first.

    A plan is of the last kind whose means it uses: an offloaded plan may checkpoint blocks too.
    """

    RESIDENT = "resident"
    """Everything stays on the device: plain training, and on several ranks data parallel (DDP)."""
    CHECKPOINTED = "checkpointed"
    """Every chunk stays on the device; blocks are recomputed in backward."""
    SHARDED = "sharded"
    """Chunks lie in parts on the devices of all ranks; none is on a host."""
    HOST_STEPPED = "host-stepped"
    """Parameters lie on the device, or on those of all ranks; hosts step some of them."""
    OFFLOADED = "offloaded"
    """Chunks lie on the host, which steps them."""
    SWAPPED = "swapped"
    """Activations travel to the host and back."""

    @property
    def complexity(self) -> int:
        """Place in the order; 0 is the simplest."""
        return tuple(PlanKind).index(self)

    @property
    def uses_host(self) -> bool:
        """Whether anything that the device needs lies on the host."""
        return self in (PlanKind.HOST_STEPPED, PlanKind.OFFLOADED, PlanKind.SWAPPED)

    @property
    def words(self) -> str:
        """For a table."""
        return _WORDS[self]


_WORDS: Final = {
    PlanKind.RESIDENT: "everything on the device",
    PlanKind.CHECKPOINTED: "everything on the device, blocks checkpointed",
    PlanKind.SHARDED: "sharded over the devices",
    PlanKind.HOST_STEPPED: "chunks on the device, stepped on the host",
    PlanKind.OFFLOADED: "chunks offloaded to the host",
    PlanKind.SWAPPED: "activations swapped to the host",
}


class Uncertainty(FrozenModel):
    """How far apart two plans' predicted times must be for one to count as faster, as fractions of the longer one."""

    device_frac: float = Field(ge=0, lt=1)
    """Of two plans that both stay on devices, or both use the host: what differs is computed or gathered there."""
    host_frac: float = Field(ge=0, lt=1)
    """Of plans of which one has chunks or activations on the host: links, hosts and devices err by themselves."""
    source: str
    """The kind of prediction, in words."""

    def between(self, one: PlanKind, other: PlanKind) -> float:
        """The figure for two kinds."""
        return self.device_frac if one.uses_host is other.uses_host else self.host_frac

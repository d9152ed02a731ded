"""What a block's memory was seen to be, where it depends on values and the profile holds the most that was found."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PositiveInt

from ..basics.documents import FrozenModel
from .operations import Bytes, SignedBytes
from .phase import Phase

_Level = tuple[Annotated[float, Field(gt=0, le=1)], SignedBytes]


class PhaseMemory(FrozenModel):
    """The figures of memory of a phase; all fields as of ``Phase``."""

    net_bytes: SignedBytes = 0
    """With as many gradients as the profile's phase states."""
    curve: tuple[_Level, ...] = ()
    """Highest levels within consecutive stretches, as ``Phase.curve``."""
    adding_curve: tuple[_Level, ...] = ()
    """The same where all gradients are added to others, as ``Phase.adding_curve``."""

    @classmethod
    def of(cls, seen: Phase, worst: Phase) -> Self:
        """The memory of ``seen``, if it leaves the gradients of ``worst``."""
        more_bytes = worst.stated_gradient_bytes - seen.stated_gradient_bytes
        return cls(net_bytes=seen.net_bytes + more_bytes, curve=seen.curve, adding_curve=seen.adding_curve)

    def of_phase(self, phase: Phase) -> Phase:
        """``phase`` with this memory."""
        # Made anew: a copy would take along what is cached there.
        fields = {name: getattr(phase, name) for name in Phase.model_fields}
        return Phase(**{**fields, **{name: getattr(self, name) for name in PhaseMemory.model_fields}})


class SeenMemory(FrozenModel):
    """What a block took with the values of the traced batch; ``BlockProfile`` holds the most that its values may take.

    Predictions of memory come from this, guarantees from the profile.
    """

    forward: PhaseMemory
    """Of the forward in mode KEEP."""
    backward: PhaseMemory
    """Of the backward in mode KEEP."""
    checkpoint_forward: PhaseMemory
    """Of the forward in mode CHECKPOINT."""
    recompute: PhaseMemory
    """Of the recomputation."""
    checkpoint_backward: PhaseMemory
    """Of the backward proper after it."""
    loss: PhaseMemory | None = None
    """Of a student's block in bypass distillation."""
    swappable_bytes: Bytes = 0
    """As ``BlockProfile.swappable_bytes``."""
    is_forced: bool
    """Whether the profile's memory is the highest of routings that were forced upon the block's choices.  If not, the
    block makes none that can be forced, and it is the highest of several batches: more may happen."""
    num_tried: PositiveInt
    """Routings or batches that were tried, the traced batch included."""

"""Profiles: what a block does, in either activation mode, whole or with its MLP in tiles."""

from __future__ import annotations

from typing import Any, Final, Self

from pydantic import Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer, model_validator

from ..basics.documents import FrozenModel
from .activation_modes import ActivationMode
from .operations import Bytes
from .phase import Curve, Phase
from .seen_memory import SeenMemory
from .tiling import Tiles

_PHASES: Final = ("forward", "backward", "checkpoint_forward", "recompute", "checkpoint_backward")


class SelectiveRecomputation(FrozenModel):
    """What mode SELECTIVE changes of mode CHECKPOINT, for one ``Plan.product_stride``."""

    product_stride: PositiveInt
    """Of the products of a forward, the first of every so many is kept."""
    kept_bytes: Bytes
    """Results that stay from the forward on, beside the block's output."""
    changed: tuple[int, ...] = ()
    """Of the results that would be kept, the numbers of those that the model changes in place later: they are computed
    again.  A file has the field where there are any."""
    unused_bytes: Bytes = 0
    """Of these, what the recomputation ends before: it goes with the backward all the same."""
    forward_curve: Curve
    """``Phase.curve`` of the forward.  From where a result could have gone at the earliest, it counts as kept beside
    whatever is there: an upper bound."""
    forward_changes: tuple[int, ...] = ()
    """``Phase.changes`` of the same."""
    recompute: Phase
    """The forward again, without the operations whose results are there."""

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if not self.changed:
            fields.pop("changed", None)
        return fields


class BlockProfile(FrozenModel):
    """What a block does in either activation mode; equal blocks share one profile."""

    output_bytes: Bytes
    """Bytes of the block's output that outlive its forward as the next block's input."""
    forward: Phase
    """Forward in mode KEEP."""
    backward: Phase
    """Backward in mode KEEP."""
    checkpoint_forward: Phase
    """Forward in mode CHECKPOINT: nothing but the output outlives it."""
    recompute: Phase
    """The forward again, within backward, up to the last tensor that backward needs."""
    checkpoint_backward: Phase
    """Backward proper after the recomputation."""
    swappable_bytes: Bytes = 0
    """Of what ``forward`` saves, the bytes that mode SWAP moves: made by the block itself, no part of its output, and
    not tiny."""
    kept_bytes: Bytes = 0
    """Of what ``checkpoint_forward`` leaves beside the output, bytes that stay until the backward: nothing but in the
    profile ``selecting`` gives.  A file has the field where it is not 0."""
    selective: tuple[SelectiveRecomputation, ...] = ()
    """What mode SELECTIVE changes, by ascending strides; empty where nobody knows.  A file has the field where there
    are any."""
    seen: SeenMemory | None = None
    """What the traced batch took, where memory depends on values, as of a mixture of experts that loops over them: the
    phases above then hold the most that was found.  None: it depends on no values.  A file has the field where it is
    set."""

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if self.seen is None:
            fields.pop("seen", None)
        if not self.kept_bytes:
            fields.pop("kept_bytes", None)
        if not self.selective:
            fields.pop("selective", None)
        return fields

    def selecting(self, product_stride: int) -> BlockProfile:
        """The profile whose mode CHECKPOINT is SELECTIVE with that stride, which ``selective`` knows.

        Measured seconds of the recomputation are the share of the whole one's that its operations make.
        """
        chosen = next(of for of in self.selective if of.product_stride == product_stride)
        forward, backward = self.checkpoint_forward, self.checkpoint_backward
        measured_s = self.recompute.measured_s
        if measured_s is not None:
            whole = sum(operation.weight for operation in self.recompute.operations)
            measured_s *= sum(operation.weight for operation in chosen.recompute.operations) / max(1, whole)
        made = {
            "checkpoint_forward": _changed(
                forward,
                net_bytes=forward.net_bytes + chosen.kept_bytes,
                curve=chosen.forward_curve,
                changes=chosen.forward_changes,
            ),
            "recompute": _changed(chosen.recompute, measured_s=measured_s),
            "checkpoint_backward": _changed(backward, net_bytes=backward.net_bytes - chosen.unused_bytes),
        }
        fields = {name: getattr(self, name) for name in BlockProfile.model_fields}
        return BlockProfile(**fields | made | {"kept_bytes": chosen.kept_bytes, "selective": ()})

    @property
    def as_seen(self) -> BlockProfile:
        """The profile with the memory of the traced batch.

        One of which nothing was seen to travel in mode SWAP, and in which something may, stays as it is.
        """
        seen = self.seen
        if seen is None or (seen.swappable_bytes == 0) != (self.swappable_bytes == 0):
            return self
        memory = {name: getattr(seen, name).of_phase(getattr(self, name)) for name in _PHASES}
        return self.model_copy(update={**memory, "swappable_bytes": seen.swappable_bytes, "seen": None})

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All phases, of both modes."""
        return (self.forward, self.backward, self.checkpoint_forward, self.recompute, self.checkpoint_backward)

    def forward_in(self, mode: ActivationMode) -> Phase:
        """The forward phase of a block in ``mode``."""
        return self.checkpoint_forward if mode.is_recomputed else self.forward

    def backward_in(self, mode: ActivationMode) -> Phase:
        """The backward phase of a block in ``mode``, without recomputation."""
        return self.checkpoint_backward if mode.is_recomputed else self.backward


def _changed(phase: Phase, **update: Any) -> Phase:
    """Made anew: a copy would take along what is cached there."""
    return Phase(**{name: getattr(phase, name) for name in Phase.model_fields} | update)


class Tiling(Tiles):
    """What the blocks of a workload do where their MLPs run in tiles."""

    profiles: tuple[BlockProfile, ...] = Field(min_length=1)

    @property
    def as_seen(self) -> Tiling:
        """With the memory of the traced batch (``BlockProfile.as_seen``)."""
        return self.model_copy(update={"profiles": tuple(profile.as_seen for profile in self.profiles)})

    @model_validator(mode="after")
    def _has_profiles(self) -> Self:
        if max(self.profile_of, default=0) >= len(self.profiles):
            raise ValueError(f"a block names profile {max(self.profile_of)} of {len(self.profiles)}")
        return self

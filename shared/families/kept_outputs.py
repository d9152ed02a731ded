"""What a family of workloads does where the loop holds what the model gives."""

from __future__ import annotations

from typing import Final

from ..observed.assembly import TracedShape
from ..observed.fused_loss import UnknownLossError, with_outputs_held
from .family import Change, FamilyPiece, OutsideFamilyError

_OF_ONE_STACK: Final = 2
"""Samples and tokens: what the shape of a model without an encoder beside is made of."""


def keeping_outputs(change: Change | None) -> Change:
    """``change`` of what a trace sees, and then outputs held as ``with_outputs_held`` has it.

    It raises OutsideFamilyError where the loss has no form of which that is known without a trace.
    """

    def kept(shape: TracedShape, piece: FamilyPiece, values: tuple[int, ...]) -> TracedShape:
        seen = shape if change is None else change(shape, piece, values)
        if len(values) > _OF_ONE_STACK:
            raise OutsideFamilyError("outputs of models with an encoder hold its hidden states too.")
        try:
            return with_outputs_held(seen, shape)
        except UnknownLossError as error:
            raise OutsideFamilyError(f"nothing is known exactly of outputs that a loop holds: {error}.") from error

    return kept

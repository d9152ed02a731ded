"""What a family of workloads does where its loss is fused."""

from __future__ import annotations

from ..observed.assembly import TracedShape
from ..observed.fused_loss import UnknownLossError, with_fused_loss
from .family import Change, FamilyPiece, OutsideFamilyError


def fusing(change: Change | None) -> Change:
    """``change`` of what a trace sees, and then its loss fused.

    It raises OutsideFamilyError where the loss has no form of which that is known without a trace.
    """

    def fused(shape: TracedShape, piece: FamilyPiece, values: tuple[int, ...]) -> TracedShape:
        try:
            return with_fused_loss(shape if change is None else change(shape, piece, values))
        except UnknownLossError as error:
            raise OutsideFamilyError(f"nothing is known exactly of a fused loss there: {error}.") from error

    return fused

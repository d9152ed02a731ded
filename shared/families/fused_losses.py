"""What a family of workloads does where its loss is fused or narrow."""

from __future__ import annotations

from ..observed.assembly import TracedShape
from ..observed.fused_loss import UnknownLossError, with_loss
from ..phases.tiling import LossHead
from .family import Change, FamilyPiece, OutsideFamilyError


def making_loss(change: Change | None, loss_head: LossHead) -> Change:
    """``change`` of what a trace sees, and then its loss made so, fused or narrow.

    It raises OutsideFamilyError where the loss has no form of which that is known without a trace.
    """

    def made(shape: TracedShape, piece: FamilyPiece, values: tuple[int, ...]) -> TracedShape:
        try:
            return with_loss(shape if change is None else change(shape, piece, values), loss_head)
        except UnknownLossError as error:
            raise OutsideFamilyError(f"nothing is known exactly of a {loss_head} loss there: {error}.") from error

    return made

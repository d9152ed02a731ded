"""What a family of workloads does where it is compiled, or multiplies in float8."""

from __future__ import annotations

from ..observed.assembly import TracedShape
from ..observed.lowered import Lowering, lowered
from ..schema.training_options import TrainingOptions
from .family import Change, FamilyPiece


def lowering(change: Change | None, options: TrainingOptions) -> Change | None:
    """``change`` of what a trace sees, and then what ``options`` say of how it is computed.

    It raises WorkloadError where that is not known.
    """
    if not options.is_lowered:
        return change
    asked = Lowering(options.compiled, options.float8, options.float8_gather)

    def made(shape: TracedShape, piece: FamilyPiece, values: tuple[int, ...]) -> TracedShape:
        return lowered(shape if change is None else change(shape, piece, values), asked)

    return made

"""What of a model is trained: all of it, or low-rank matrices beside it, or all but frozen parts."""

from __future__ import annotations

from typing import Final

from pydantic import PositiveInt

from ..basics.documents import FrozenModel
from .workload import DType


class LoraOptions(FrozenModel):
    """Low-rank adaptation (arXiv 2106.09685)."""

    rank: PositiveInt
    targets: tuple[str, ...] = ()
    """Names of the linear maps within a block; none: all of them."""


class TrainingOptions(FrozenModel):
    """How a workload's model is trained."""

    lora: LoraOptions | None = None
    frozen: tuple[str, ...] = ()
    """Names or patterns of parameters that are not trained."""
    autocast: DType | None = None
    """Element type that forward computes in, by ``torch.autocast``, while parameters, which are then their own masters,
    and gradients keep theirs; None: that of the parameters."""

    @property
    def is_full(self) -> bool:
        """Whether every parameter is trained, none is added, and all compute in their own element type."""
        return self == FULL_TRAINING


FULL_TRAINING: Final = TrainingOptions()

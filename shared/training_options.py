"""What of a model is trained: all of it, or low-rank matrices beside it, or all but frozen parts."""

from __future__ import annotations

from typing import Final

from pydantic import PositiveInt

from .files import FrozenModel


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

    @property
    def is_full(self) -> bool:
        """Whether every parameter is trained and none is added."""
        return self.lora is None and not self.frozen


FULL_TRAINING: Final = TrainingOptions()

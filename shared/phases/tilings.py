"""Tilings: what a part of the model does where it runs tile by tile over tokens."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from ..basics.documents import FrozenModel
from .phase import Phase

MOST_TILES: Final = 2**20
"""Tiles of one part: more than any batch has tokens worth an operation of their own."""


class LossTiling(FrozenModel):
    """What the part after the last block does where head and loss run in tiles (``Plan.loss_tiles``)."""

    loss_tiles: int = Field(gt=1, le=MOST_TILES)
    """Tiles of tokens."""
    epilogue_forward: Phase
    """In place of ``Workload.epilogue_forward``.  Gradients of the head may be formed in it: they count as saved until
    backward hands them over."""
    epilogue_backward: Phase
    """In place of ``Workload.epilogue_backward``."""

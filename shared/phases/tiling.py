"""Tilings: what a part of the model does where it runs tile by tile over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field, NonNegativeInt

from ..basics.documents import FrozenModel, Name
from ..basics.errors import WorkloadError
from .phase import Phase

MOST_TILES: Final = 2**20
"""More tiles than any sequence is cut into."""


class LossHead(StrEnum):
    """How the loss is made of hidden states."""

    EAGER = "eager"
    """As the model's code has it: all logits are widened to float32, and their log-softmax is kept for backward."""
    NARROW = "narrow"
    """As eager, but logits stay in their own element type, and so do their log-softmax and its gradient."""
    FUSED = "fused"
    """Whole logits in their own element type, whose place their gradient takes; nothing as large is beside them."""
    CHUNKED = "chunked"
    """Head and loss by tiles of tokens: whole logits never exist (``Plan.loss_tiles``)."""

    @property
    def gives_logits(self) -> bool:
        """Whether the model's output has whole logits."""
        return self in (LossHead.EAGER, LossHead.NARROW)


class Tiles(FrozenModel):
    """Which modules run in how many tiles of tokens, forward and backward."""

    mlp_tiles: Annotated[int, Field(ge=2, le=MOST_TILES)]
    """Of equal length but for one token; as many as there are tokens where these are fewer."""
    modules: tuple[Name, ...] = Field(min_length=1)
    """Dotted paths of the modules that run in tiles."""
    profile_of: tuple[NonNegativeInt, ...]
    """By block: index into ``Tiling.profiles``."""


class LossTiling(FrozenModel):
    """What the part after the last block does where head and loss run in tiles (``Plan.loss_tiles``)."""

    loss_tiles: int = Field(gt=1, le=MOST_TILES)
    """Tiles of tokens."""
    epilogue_forward: Phase
    """In place of ``Workload.epilogue_forward``.  Gradients of the head may be formed in it: they count as saved until
    backward hands them over."""
    epilogue_backward: Phase
    """In place of ``Workload.epilogue_backward``."""


def why_no_tilings(tilings: Sequence[Tiles], num_blocks: int) -> str | None:
    """Why a workload of so many blocks cannot have ``tilings``; None if it can."""
    counts = [tiling.mlp_tiles for tiling in tilings]
    if len(set(counts)) < len(counts):
        return f"mlp_tiles {', '.join(map(str, counts))} name one number twice"
    for tiling in tilings:
        if len(tiling.profile_of) != num_blocks:
            return f"mlp_tiles {tiling.mlp_tiles} has profiles of {len(tiling.profile_of)} blocks of {num_blocks}"
    return None


def why_no_mlp_tiles(mlp_tiles: int, tilings: Sequence[Tiles], model_name: str) -> str | None:
    """Why blocks of ``model_name`` cannot run in so many tiles, with what to do; None if they can."""
    return _why_unknown("mlp_tiles", mlp_tiles, [tiling.mlp_tiles for tiling in tilings], model_name)


def why_no_loss_tiles(loss_tiles: int, tilings: Sequence[LossTiling], model_name: str) -> str | None:
    """Why head and loss of ``model_name`` cannot run in so many tiles, with what to do; None if they can."""
    return _why_unknown("loss_tiles", loss_tiles, [tiling.loss_tiles for tiling in tilings], model_name)


def checked_loss_head(loss_head: LossHead | str, sequence_ranks: Sequence[int] = ()) -> LossHead:
    """How a workload's loss is made.

    Raises WorkloadError if nobody knows, if it is the plan's to choose, or if ranks that share sequences have none so.
    """
    try:
        made = LossHead(loss_head)
    except ValueError:
        raise WorkloadError(f"loss_head is {loss_head!r}; use eager, narrow or fused.") from None
    if made is LossHead.CHUNKED:
        raise WorkloadError("loss_head is chunked, but chunks are the plan's to choose. Name loss_tiles (8) instead.")
    if made is not LossHead.EAGER and max(sequence_ranks, default=1) > 1:
        raise WorkloadError(
            f"loss_head is {made}, but {max(sequence_ranks)} ranks that share each sequence compute their part of the "
            f"loss eager. Leave sequence_ranks out, or train with loss eager, or chunked (loss_tiles)."
        )
    return made


def _why_unknown(knob: str, tiles: int, known: Sequence[int], model_name: str) -> str | None:
    if tiles == 1 or tiles in known:
        return None
    knows = f"knows {', '.join(map(str, [1, *known]))}" if known else "knows none"
    return (
        f"{knob}: {tiles}, but the workload of {model_name} {knows}. Trace the model with that number "
        f"({knob}=({tiles},) of trace(), --{knob.replace('_', '-')} {tiles}), or set {knob} to 1"
    )

"""What blocks do where a part of them runs tile by tile over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

from pydantic import Field, NonNegativeInt

from ..basics.documents import FrozenModel, Name

MOST_TILES: Final = 2**20
"""More tiles than any sequence is cut into."""


class Tiles(FrozenModel):
    """Which modules run in how many tiles of tokens, forward and backward."""

    mlp_tiles: Annotated[int, Field(ge=2, le=MOST_TILES)]
    """Of equal length but for one token; as many as there are tokens where these are fewer."""
    modules: tuple[Name, ...] = Field(min_length=1)
    """Dotted paths of the modules that run in tiles."""
    profile_of: tuple[NonNegativeInt, ...]
    """By block: index into ``Tiling.profiles``."""


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
    known = [tiling.mlp_tiles for tiling in tilings]
    if mlp_tiles == 1 or mlp_tiles in known:
        return None
    knows = f"knows {', '.join(map(str, [1, *known]))}" if known else "knows none"
    return (
        f"mlp_tiles: {mlp_tiles}, but the workload of {model_name} {knows}. Trace the model with that number "
        f"(mlp_tiles=({mlp_tiles},) of trace(), --mlp-tiles {mlp_tiles}), or set mlp_tiles to 1"
    )

"""Sequences that neighbouring ranks share: what one of these ranks does.

[Note: Sequence groups]
``sequence_ranks`` neighbouring ranks are a sequence group: each has an equal part of the tokens of every sequence of
one batch, and the micro-batches of a step are those of num_ranks / sequence_ranks groups.  All but attention runs on a
rank's own tokens.  Ahead of attention an all-to-all of queries, keys and values gives every rank all tokens of its part
of the heads, and another one behind it gives the tokens back.  Source: DeepSpeed Ulysses, arXiv 2309.14509.

A rank's loss is summed over its own tokens, divided by the tokens that count of the whole sequence, and multiplied by
``sequence_ranks``: the mean over all ranks, by which gradients are reduced anyway, is then the mean over groups of each
group's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

from pydantic import Field, NonNegativeInt, model_validator

from ..basics.documents import FrozenModel
from .block_profile import BlockProfile, Tiling
from .operations import Bytes
from .phase import Phase
from .shared_inputs import SharedInput
from .tiling import LossTiling, why_no_tilings

MOST_SEQUENCE_RANKS: Final = 10**6
"""As many as there may be ranks (``MOST_RANKS``)."""


class SequenceSharing(FrozenModel):
    """What one rank does where so many share each sequence; all fields in place of those of ``Workload``."""

    sequence_ranks: int = Field(ge=2, le=MOST_SEQUENCE_RANKS)
    """Ranks that share a sequence (``Plan.sequence_ranks``)."""
    profiles: tuple[BlockProfile, ...] = Field(min_length=1)
    profile_of: tuple[NonNegativeInt, ...]
    """By block: index into ``profiles``."""
    prologue_forward: Phase
    epilogue_forward: Phase
    epilogue_backward: Phase
    prologue_backward: Phase
    shared_inputs: tuple[SharedInput, ...] = ()
    resident_bytes: Bytes = 0
    tilings: tuple[Tiling, ...] = ()
    """Tiles of the rank's own tokens."""
    loss_tilings: tuple[LossTiling, ...] = ()
    """Tiles of the rank's own tokens."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All phases but those of tiles."""
        outer = (self.prologue_forward, self.epilogue_forward, self.epilogue_backward, self.prologue_backward)
        return (*outer, *(phase for profile in self.profiles for phase in profile.phases))

    @property
    def as_seen(self) -> SequenceSharing:
        """With the memory of the traced batch (``BlockProfile.as_seen``)."""
        profiles = tuple(profile.as_seen for profile in self.profiles)
        return self.model_copy(
            update={"profiles": profiles, "tilings": tuple(tiling.as_seen for tiling in self.tilings)}
        )

    @model_validator(mode="after")
    def _has_profiles(self) -> Self:
        if max(self.profile_of, default=0) >= len(self.profiles):
            raise ValueError(f"a block names profile {max(self.profile_of)} of {len(self.profiles)}")
        return self

    @model_validator(mode="after")
    def _exchanges_in_blocks(self) -> Self:
        outer = [self.prologue_forward, self.epilogue_forward, self.epilogue_backward, self.prologue_backward]
        outer += [phase for of in self.loss_tilings for phase in (of.epilogue_forward, of.epilogue_backward)]
        if any(phase.exchanges for phase in outer):
            raise ValueError("exchanges: blocks alone exchange parts of a sequence")
        for profile in (*self.profiles, *(profile for tiling in self.tilings for profile in tiling.profiles)):
            again = profile.recompute.exchanges + profile.checkpoint_backward.exchanges
            for kept, checkpointed in (
                (profile.forward.exchanges, profile.checkpoint_forward.exchanges),
                (profile.backward.exchanges, again),
            ):
                if bool(kept) != bool(checkpointed):
                    raise ValueError("exchanges: a block exchanges something in either activation mode, or in neither")
        return self

    @model_validator(mode="after")
    def _knows_tilings_once(self) -> Self:
        if (reason := why_no_tilings(self.tilings, len(self.profile_of))) is not None:
            raise ValueError(f"tilings: {reason}")
        counts = [tiling.loss_tiles for tiling in self.loss_tilings]
        if counts != sorted(set(counts)):
            raise ValueError(f"loss_tilings: {counts} tiles; each number stands once, and they ascend")
        return self


def why_no_sharings(sharings: Sequence[SequenceSharing], num_blocks: int) -> str | None:
    """Why a workload of so many blocks cannot have ``sharings``; None if it can."""
    counts = [sharing.sequence_ranks for sharing in sharings]
    if counts != sorted(set(counts)):
        return f"{counts} ranks; each number stands once, and they ascend"
    for sharing in sharings:
        if len(sharing.profile_of) != num_blocks:
            return f"{sharing.sequence_ranks} ranks have profiles of {len(sharing.profile_of)} blocks of {num_blocks}"
        named = max((block for shared in sharing.shared_inputs for block in shared.blocks), default=0)
        if named >= num_blocks:
            return f"a shared input of {sharing.sequence_ranks} ranks names block {named} of {num_blocks}"
    return None


def why_no_sequence_ranks(sequence_ranks: int, sharings: Sequence[SequenceSharing], model_name: str) -> str | None:
    """Why so many ranks cannot share sequences of ``model_name``, with what to do; None if they can."""
    known = [sharing.sequence_ranks for sharing in sharings]
    if sequence_ranks == 1 or sequence_ranks in known:
        return None
    knows = f"knows {', '.join(map(str, [1, *known]))}" if known else "knows none"
    return (
        f"sequence_ranks: {sequence_ranks}, but the workload of {model_name} {knows}. Trace the model with that number "
        f"(sequence_ranks=({sequence_ranks},) of trace(), --sequence-ranks {sequence_ranks}), or set sequence_ranks to "
        f"1"
    )


def why_not_shared(sequence_ranks: int, num_ranks: int) -> str | None:
    """Why ``num_ranks`` ranks cannot be groups of ``sequence_ranks`` that share sequences; None if they can."""
    if sequence_ranks == 1:
        return None
    if num_ranks == 1:
        return (
            f"sequence_ranks: {sequence_ranks} with parallel single; one rank alone has nobody to share a sequence "
            f"with. Set it to 1, or name num_ranks and another parallel"
        )
    if num_ranks % sequence_ranks:
        divisors = [number for number in range(1, min(num_ranks, MOST_SEQUENCE_RANKS) + 1) if num_ranks % number == 0]
        return (
            f"sequence_ranks: {sequence_ranks} does not divide num_ranks {num_ranks} into equal groups. Choose from "
            f"{', '.join(map(str, divisors))}"
        )
    return None

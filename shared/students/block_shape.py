"""What one block is made of, and which of its parameters are learnt."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from ..phases.distillation import KeyToLearn
from .families import Family
from .student import Subblock


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What one block is made of, under the names of ``BlockOverrides``."""

    is_attention: bool
    """Whether it attends; otherwise it has a state-space mixer."""
    intermediate_size: int
    """Channels of its FFN, or of each expert."""
    num_heads: int
    """Heads of queries."""
    num_key_value_heads: int
    num_local_experts: int | None = None
    """None: an FFN without experts."""
    num_experts_per_tok: int | None = None
    ffn: Subblock = Subblock.FULL
    attention: Subblock = Subblock.FULL

    @property
    def is_plain(self) -> bool:
        """Whether transformers has such a block: nothing is absent, nothing stands in for anything."""
        return self.ffn is Subblock.FULL and self.attention is Subblock.FULL

    @property
    def fields(self) -> dict[str, Any]:
        """All of it as a mapping."""
        return asdict(self)


def is_learnt(keys: Collection[KeyToLearn], family: Family, shape: BlockShape, parameter: str) -> bool:
    """Whether ``parameter``, by its path within a block of this shape, is learnt."""
    part = parameter.partition(".")[0]
    mixer_key = KeyToLearn.SUBBLOCK_ATTENTION if shape.is_attention else KeyToLearn.SUBBLOCK_MAMBA
    key_of = {
        family.attention: KeyToLearn.SUBBLOCK_ATTENTION,
        family.mamba: KeyToLearn.SUBBLOCK_MAMBA,
        family.attention_norm: mixer_key,
        family.ffn: KeyToLearn.SUBBLOCK_FFN,
        family.ffn_norm: KeyToLearn.SUBBLOCK_FFN,
    }
    return KeyToLearn.ENTIRE_BLOCK in keys or key_of.get(part) in keys


def has_learnt_part(keys: Collection[KeyToLearn], shape: BlockShape) -> bool:
    """Whether a block of this shape has anything to learn."""
    held = {KeyToLearn.SUBBLOCK_ATTENTION} if shape.is_attention else {KeyToLearn.SUBBLOCK_MAMBA}
    if shape.attention is Subblock.ABSENT:
        held.discard(KeyToLearn.SUBBLOCK_ATTENTION)
    if shape.ffn is not Subblock.ABSENT:
        held.add(KeyToLearn.SUBBLOCK_FFN)
    return bool(held if KeyToLearn.ENTIRE_BLOCK in keys else held & set(keys))

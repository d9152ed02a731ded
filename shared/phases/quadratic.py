"""Tensors of attention that grow with the square of the sequence: masks, biases and scores.

[Note: Where squares begin to matter]
Up to 256 tokens, the widest head that fused kernels take, a square of scores is no larger than the queries of a head,
so nothing is said of shorter sequences.
"""

from __future__ import annotations

from typing import Final

from ..basics.documents import FrozenModel
from ..basics.units import format_bytes
from .operations import Bytes

SHORTEST_SQUARE: Final = 257
"""Tokens of a sequence from which on squares are told of."""


class QuadraticMemory(FrozenModel):
    """Bytes of tensors with two dims of the sequence's length.  Memory of phases and of shared inputs has them too."""

    lasting_bytes: Bytes = 0
    """Made outside of the blocks, and alive when the first of them begins: masks and biases that all blocks are
    given."""
    kept_bytes: Bytes = 0
    """What all blocks together keep from forward to backward, each in mode KEEP."""
    most_kept_bytes: Bytes = 0
    """Of these, what one block keeps at most."""
    within_bytes: Bytes = 0
    """The most that one phase of one block has beyond what there is when it begins."""
    has_kernel: bool
    """Whether blocks run a fused attention kernel, which is given a mask; else they form scores."""

    @property
    def is_any(self) -> bool:
        """Whether there are such tensors."""
        return bool(self.lasting_bytes or self.kept_bytes or self.within_bytes)

    def where(self) -> str:
        """How many bytes there are in which place, in words."""
        parts = {
            "beside the blocks": self.lasting_bytes,
            "kept by blocks in mode KEEP": self.kept_bytes,
            "within one block at most": self.within_bytes,
        }
        return ", ".join(f"{format_bytes(size_bytes)} {place}" for place, size_bytes in parts.items() if size_bytes)


def attention_words(
    found: QuadraticMemory | None, model_name: str, num_tokens: int, *, has_flash: bool | None = None
) -> str | None:
    """What attention of a model takes with the square of ``num_tokens``, and what avoids it; None where it does not.

    ``has_flash``: whether transformers has FlashAttention for it; None where nobody knows.
    """
    if found is None:
        return None
    what = "its kernel is given a mask or a bias" if found.has_kernel else "it forms whole scores"
    remedy = (
        f'attn_implementation="flash_attention_2"{"" if has_flash else ", where the model has it,"} needs no mask: it '
        f"knows sliding windows and packed samples. "
        if found.has_kernel
        else 'A fused kernel (attn_implementation="sdpa") holds none, where the model adds no bias to them. '
    )
    if found.has_kernel and has_flash is False:
        remedy = ""
    return (
        f"attention of {model_name} takes memory with the square of {num_tokens:,} tokens: {what} ({found.where()}). "
        f"{remedy}Checkpointed blocks keep none of it."
    )

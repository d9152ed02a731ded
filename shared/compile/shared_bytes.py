"""What shared inputs change in the phases, for every choice of activation modes at once.

See [Note: Shared inputs] in ``shared/schema/shared_inputs.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from ..schema.shared_inputs import SharedInput
from .program import BoolArray, IntArray


@dataclass(frozen=True, eq=False)
class SharedBytes:
    """Shared inputs by where they go.  Shapes: K choices of modes, n blocks."""

    let_go_later: IntArray
    """(K, n + 1) bytes that each block's forward would let go of if no block held them; last the epilogue's."""
    freed_later: IntArray
    """(K, n) bytes that each block's backward counts off although they stay."""
    freed_now: IntArray
    """(K, n) bytes that go with it although it does not count them off."""

    @classmethod
    def of(cls, inputs: Iterable[SharedInput], is_checkpoint: BoolArray) -> Self:
        """``is_checkpoint``: (K, n) blocks in mode CHECKPOINT; what swaps holds as what it keeps."""
        num_rows, num_blocks = is_checkpoint.shape
        let_go_later = np.zeros((num_rows, num_blocks + 1), dtype=np.int64)
        freed_later, freed_now = (np.zeros((num_rows, num_blocks), dtype=np.int64) for _ in range(2))
        for shared in inputs:
            holds = _in_mode(shared.kept_by, shared.checkpointed_by, is_checkpoint)
            counts = _in_mode(shared.freed_in_kept, shared.freed_in_checkpointed, is_checkpoint)
            # It goes with the first block that holds it, whose backward is the last.
            rows = np.flatnonzero(holds.any(axis=1))
            goes = np.zeros_like(holds)
            goes[rows, holds[rows].argmax(axis=1)] = True
            let_go_later[rows, num_blocks if shared.let_go_by is None else shared.let_go_by] += shared.size_bytes
            freed_later += (counts & ~goes) * shared.size_bytes
            freed_now += (goes & ~counts) * shared.size_bytes
        return cls(let_go_later, freed_later, freed_now)


def _in_mode(kept: tuple[int, ...], checkpointed: tuple[int, ...], is_checkpoint: BoolArray) -> BoolArray:
    """(K, n) whether a block is among those that are named for its mode."""
    named = np.zeros((2, is_checkpoint.shape[1]), dtype=np.bool_)
    named[0, list(kept)] = True
    named[1, list(checkpointed)] = True
    in_mode: BoolArray = np.where(is_checkpoint, named[1], named[0])
    return in_mode

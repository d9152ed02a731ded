"""Tensors that several sections share beside the output of the section before: masks, positions, rotary tables.

[Note: Shared inputs]
The model's own forward holds such a tensor until a part of it returns: the whole model, or the encoder of two trees.
It lives on if a block holds it for its backward: because autograd saves it there (mode KEEP, and SWAP, since only what
a block makes itself travels), or because the block is checkpointed and will be given it once more.  Then it goes with
the last backward that needs it, which is that of the first block that holds it.  So no phase by itself says where it
goes: that depends on the modes of all blocks.  Phases are reckoned as if nobody held it.  The forward that lets it go
counts it off; ``Phase.with_shared`` puts it back where a block holds it, and counts it off in that block's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, NonNegativeInt

from .files import FrozenModel
from .plan import ActivationMode


class SharedInput(FrozenModel):
    """One such tensor, if it depends on the activation modes of the blocks how long it lives."""

    size_bytes: Annotated[int, Field(gt=0, le=2**60)]
    let_go_by: NonNegativeInt | None = None
    """The block whose forward lets it go where no block holds it; None for the epilogue."""
    kept_by: tuple[NonNegativeInt, ...] = ()
    """Blocks that hold it for their backward in mode KEEP or SWAP."""
    checkpointed_by: tuple[NonNegativeInt, ...] = ()
    """Blocks that hold it in mode CHECKPOINT."""

    def last_holder(self, modes: Sequence[ActivationMode]) -> int | None:
        """The block whose backward lets it go: the first that holds it; None where none does."""
        kept = (block for block in self.kept_by if modes[block] is not ActivationMode.CHECKPOINT)
        checkpointed = (block for block in self.checkpointed_by if modes[block] is ActivationMode.CHECKPOINT)
        return min((*kept, *checkpointed), default=None)


class SharedBytes:
    """What shared inputs change in the phases of one choice of activation modes."""

    def __init__(self, inputs: Sequence[SharedInput], modes: Sequence[ActivationMode]) -> None:
        self._held: dict[int | None, int] = {}
        self._freed: dict[int, int] = {}
        for shared in inputs:
            holder = shared.last_holder(modes)
            if holder is not None:
                self._held[shared.let_go_by] = self._held.get(shared.let_go_by, 0) + shared.size_bytes
                self._freed[holder] = self._freed.get(holder, 0) + shared.size_bytes

    def held_after(self, block: int | None) -> int:
        """Bytes that the forward of ``block`` (None: of the epilogue) would let go of if no block held them."""
        return self._held.get(block, 0)

    def freed_by(self, block: int) -> int:
        """Bytes that go with the backward of ``block``."""
        return self._freed.get(block, 0)

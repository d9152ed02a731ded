"""Tensors that several sections share beside the output of the section before: masks, positions, rotary tables.

[Note: Shared inputs]
The model's own forward holds such a tensor until a part of it returns: the whole model, or the encoder of two trees.
It lives on if a block holds it for its backward: because autograd saves it there (mode KEEP, and SWAP, since only what
a block makes itself travels), or because the block is checkpointed and will be given it once more.  Then it goes with
the last backward that needs it, which is that of the first block that holds it.  So no phase by itself says where it
goes: that depends on the modes of all blocks.  Phases count it off in a forward, as if nobody held it, and in those
backwards that were seen to free it.  ``Phase.with_shared`` puts it back where it lives on, and counts it off in the
backward that it goes with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, NonNegativeInt

from ..basics.documents import FrozenModel
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
    freed_in_kept: tuple[NonNegativeInt, ...] = ()
    """Blocks whose backward in mode KEEP or SWAP counts it off."""
    freed_in_checkpointed: tuple[NonNegativeInt, ...] = ()
    """Blocks whose backward in mode CHECKPOINT counts it off."""

    @property
    def blocks(self) -> set[int]:
        """All blocks that it names."""
        held = {*self.kept_by, *self.checkpointed_by, *self.freed_in_kept, *self.freed_in_checkpointed}
        return held if self.let_go_by is None else held | {self.let_go_by}

    def is_counted_off_by(self, block: int, mode: ActivationMode) -> bool:
        """Whether the phase of a block's backward lets it go."""
        return block in (self.freed_in_checkpointed if mode is ActivationMode.CHECKPOINT else self.freed_in_kept)

    def last_holder(self, modes: Sequence[ActivationMode]) -> int | None:
        """The block whose backward lets it go: the first that holds it; None where none does."""
        kept = (block for block in self.kept_by if modes[block] is not ActivationMode.CHECKPOINT)
        checkpointed = (block for block in self.checkpointed_by if modes[block] is ActivationMode.CHECKPOINT)
        return min((*kept, *checkpointed), default=None)


class SharedBytes:
    """What shared inputs change in the phases of one choice of activation modes."""

    def __init__(self, inputs: Sequence[SharedInput], modes: Sequence[ActivationMode]) -> None:
        self.let_go_later: Counter[int | None] = Counter()
        """By block, None for the epilogue: bytes that its forward would let go of if no block held them."""
        self.freed_later: Counter[int] = Counter()
        """By block: bytes that its backward counts off although they stay."""
        self.freed_now: Counter[int] = Counter()
        """By block: bytes that go with its backward although that does not count them off."""
        for shared in inputs:
            holder = shared.last_holder(modes)
            if holder is not None:
                self.let_go_later[shared.let_go_by] += shared.size_bytes
                if not shared.is_counted_off_by(holder, modes[holder]):
                    self.freed_now[holder] += shared.size_bytes
            for block in {*shared.freed_in_kept, *shared.freed_in_checkpointed} - {holder}:
                if shared.is_counted_off_by(block, modes[block]):
                    self.freed_later[block] += shared.size_bytes

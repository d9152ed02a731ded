"""Tensors that several sections share beside the output of the section before: masks, positions, rotary tables.

[Note: Shared inputs]
The model's own forward holds such a tensor until a part of it returns: the whole model, or the encoder of two trees.
It lives on if a block holds it for its backward: because autograd saves it there (mode KEEP, and SWAP, since only what
a block makes itself travels), or because the block is checkpointed and will be given it once more.  Then it goes with
the last backward that needs it, which is that of the first block that holds it.  So no phase by itself says where it
goes: that depends on the modes of all blocks.  Phases count it off in a forward, as if nobody held it, and in those
backwards that were seen to free it.  ``Phase.with_shared`` puts it back where it lives on, and counts it off in the
backward that it goes with.

What a block returns beside its output, attention weights for one, goes so too: no block is given it, and the model's
own forward holds it until it has what the next block returns.  Then it goes, unless the block that made it keeps it.

Of what a block makes, some is held until the whole forward ends: what the model gathers in a list of all blocks but
the last, casts of weights that autocast keeps.  No block is given it.  It goes with the epilogue's forward, unless a
block in mode KEEP has read it: then it goes with that block's backward.  Phases of the epilogue count none of it off,
since a block that was traced may stand for many.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt

from ..basics.documents import FrozenModel


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
    made_by: NonNegativeInt | None = None
    """The block that makes it, if no block is given it and the model's own forward holds it until its end."""

    @property
    def is_returned(self) -> bool:
        """Whether a block has made it, and the next one lets it go: no block is given it."""
        return self.let_go_by is not None and not self.checkpointed_by

    @property
    def blocks(self) -> set[int]:
        """All blocks that it names."""
        held = {*self.kept_by, *self.checkpointed_by, *self.freed_in_kept, *self.freed_in_checkpointed}
        return held | {block for block in (self.let_go_by, self.made_by) if block is not None}

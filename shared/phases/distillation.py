"""Bypass distillation: every block of a student learns from the teacher's input and output of that block."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from ..basics.documents import FrozenModel, Name
from .operations import Bytes
from .phase import Phase


class KeyToLearn(StrEnum):
    """Which parameters of a student's blocks are learnt."""

    ENTIRE_BLOCK = "entire_block"
    SUBBLOCK_ATTENTION = "subblock_attention"
    SUBBLOCK_FFN = "subblock_ffn"
    SUBBLOCK_MAMBA = "subblock_mamba"


class Distillation(FrozenModel):
    """What makes a workload one of bypass distillation, beside parameters, blocks and phases.

    Such a workload has 2n blocks for n pairs, in the order of execution: the teacher's block i is block 2i, the
    student's is block 2i + 1.  Of a teacher's block the forward alone counts.  A student's block reads the input of its
    teacher's block; its loss compares both outputs; its backward follows at once, and hands no gradient on.  The
    prologue is what the teacher does before its first block; the epilogue is empty.
    """

    losses: tuple[Phase, ...]
    """The loss of a block by profile (``Workload.profiles``): reads the teacher's and the student's output, leaves a
    scalar and what it saves for the backward, which ``backward`` of that profile takes away.  Of a teacher's profile an
    empty phase."""
    passing_bytes: Bytes = 0
    """Of what the prologue's forward leaves, the bytes that pass by all blocks: masks and rotary tables.  They go with
    the last student block's backward."""
    keys_to_learn: tuple[KeyToLearn, ...] = Field(default=(KeyToLearn.ENTIRE_BLOCK,), min_length=1)
    """Ascending by name, each once; ``entire_block`` stands alone."""
    loss: Name
    """What the loss of a block is called."""

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if list(self.keys_to_learn) != sorted(set(self.keys_to_learn)):
            raise ValueError(f"keys_to_learn: {', '.join(self.keys_to_learn)}; name each once, ascending")
        if KeyToLearn.ENTIRE_BLOCK in self.keys_to_learn and len(self.keys_to_learn) > 1:
            raise ValueError(f"keys_to_learn: {', '.join(self.keys_to_learn)}; entire_block stands alone")
        return self

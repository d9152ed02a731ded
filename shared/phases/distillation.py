"""Bypass distillation: every block of a student learns from the teacher's input and output of that block."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, NonNegativeInt, SerializerFunctionWrapHandler, model_serializer, model_validator

from ..basics.documents import FrozenModel, Name
from .operations import Bytes
from .phase import Phase


class KeyToLearn(StrEnum):
    """Which parameters of a student's blocks are learnt."""

    ENTIRE_BLOCK = "entire_block"
    SUBBLOCK_ATTENTION = "subblock_attention"
    SUBBLOCK_FFN = "subblock_ffn"
    SUBBLOCK_MAMBA = "subblock_mamba"


class StagePlace(FrozenModel):
    """Where the pairs of one stage stand among those of a whole distillation, which ranks carry out as a pipeline.

    The stage runs the teacher's prologue on the same batch as all others.  Then it receives the teacher's activation
    before its first pair, in place of the prologue's hidden state, and sends the one behind its last pair on.
    """

    num_stages: Annotated[int, Field(ge=2)]
    """Stages of the pipeline."""
    first_pair: NonNegativeInt
    """Pairs of the stages before."""
    of_pairs: Annotated[int, Field(ge=2)]
    """Pairs of all stages."""
    receives_bytes: Bytes = 0
    """The teacher's activation before the first pair; 0 of the first stage, which receives none."""
    sends_bytes: Bytes = 0
    """The teacher's activation behind the last pair; 0 of the last stage, which sends none."""

    @model_validator(mode="after")
    def _is_one_of_several(self) -> Self:
        if self.num_stages > self.of_pairs:
            raise ValueError(f"num_stages: {self.num_stages} stages of {self.of_pairs} pairs; each needs one at least")
        if (self.first_pair > 0) != (self.receives_bytes > 0):
            raise ValueError(
                f"receives_bytes: {self.receives_bytes} of the stage from pair {self.first_pair} on; every stage but "
                f"the first receives an activation"
            )
        return self


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
    stage: StagePlace | None = None
    """Which pairs of a whole distillation these are; None if they are all.  A file has the field where it is set."""

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if list(self.keys_to_learn) != sorted(set(self.keys_to_learn)):
            raise ValueError(f"keys_to_learn: {', '.join(self.keys_to_learn)}; name each once, ascending")
        if KeyToLearn.ENTIRE_BLOCK in self.keys_to_learn and len(self.keys_to_learn) > 1:
            raise ValueError(f"keys_to_learn: {', '.join(self.keys_to_learn)}; entire_block stands alone")
        return self

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if self.stage is None:
            fields.pop("stage", None)
        return fields

"""The modules of a student: the teacher's class with blocks of their own shapes, parameters on the meta device."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from ...shared.basics.errors import WorkloadError
from ...shared.students.block_shape import BlockShape
from ...shared.students.families import Family, family_of
from ...shared.students.shapes import size_fields, uniform_sizes
from ...shared.students.student import Subblock
from ..chunks.meta_parameters import parameters_on_meta
from ..model.configurations import quiet
from .stand_ins import AbsentAttention, AbsentFfn, LinearAttention


def build_student(model_class: Any, config: Any, shapes: Sequence[BlockShape]) -> Any:
    """A model of ``model_class`` whose blocks have ``shapes``, with buffers and without memory for parameters.

    ``config``: the teacher's, of transformers.  The student's own says the sizes of its blocks where all are alike;
    elsewhere it is the teacher's.  Raises WorkloadError if transformers refuses the sizes.
    """
    family = family_of(config.to_dict(), model_class.__name__)
    own_config = _changed(config, uniform_sizes(family, shapes) or {})
    try:
        with quiet(), parameters_on_meta():
            model = model_class._from_config(own_config)
            blocks = blocks_of(model, family)
            for number, shape in enumerate(shapes):
                _shape_block(blocks, number, shape, family, own_config)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise WorkloadError(f"{model_class.__name__} refuses the student's sizes: {error!s:.300}.") from error
    return model


def blocks_of(model: nn.Module, family: Family) -> nn.ModuleList:
    """The blocks of a model of this family.  Raises WorkloadError if it has none."""
    try:
        blocks = model.get_submodule(family.blocks)
    except AttributeError:
        blocks = None
    if not isinstance(blocks, nn.ModuleList):
        raise WorkloadError(
            f"{type(model).__name__} has no list of blocks {family.blocks}. Students are made of models with their "
            f"language-model head (AutoModelForCausalLM)."
        )
    return blocks


def _shape_block(blocks: nn.ModuleList, number: int, shape: BlockShape, family: Family, own_config: Any) -> None:
    """Let block ``number`` have ``shape``."""
    block: Any = blocks[number]
    sizes = size_fields(family, shape)
    if any(getattr(own_config, field) != size for field, size in sizes.items()):
        kind: Any = type(block)
        further = {"layer_type": block.block_type} if "layer_type" in inspect.signature(kind).parameters else {}
        block = blocks[number] = kind(_changed(own_config, sizes), layer_idx=number, **further)
    hidden = getattr(own_config, family.hidden_size)
    if shape.ffn is not Subblock.FULL:
        bias = _has_bias(getattr(block, family.ffn))
        linear = nn.Linear(hidden, hidden, bias=bias) if shape.ffn is Subblock.LINEAR else None
        _replace(block, family.ffn, family.ffn_norm, linear, AbsentFfn())
    if shape.attention is not Subblock.FULL:
        bias = _has_bias(getattr(block, family.attention))
        linear = LinearAttention(hidden, hidden, bias=bias) if shape.attention is Subblock.LINEAR else None
        _replace(block, family.attention, family.attention_norm, linear, AbsentAttention())


def _replace(block: nn.Module, part: str, norm: str, linear: nn.Module | None, absent: nn.Module) -> None:
    setattr(block, part, absent if linear is None else linear)
    if linear is None:
        # Before nothing, a norm would be a parameter without a gradient.
        setattr(block, norm, nn.Identity())


def _has_bias(part: nn.Module) -> bool:
    return any(name.rpartition(".")[2] == "bias" for name, _ in part.named_parameters())


def _changed(config: Any, fields: dict[str, Any]) -> Any:
    """A copy of a configuration with some fields changed."""
    made = copy.deepcopy(config)
    for field, value in fields.items():
        setattr(made, field, value)
    return made

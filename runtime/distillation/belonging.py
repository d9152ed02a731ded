"""Whether a teacher and a student belong together, and what of a teacher is turned off meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ...shared.basics.errors import WorkloadError
from ..model.blocks import NamedBlock, find_blocks


def collecting(model: nn.Module) -> list[tuple[Any, str]]:
    """The settings of transformers by which a model collects what its blocks make on the way."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [
        (config, name)
        for config in configs.values()
        for name in ("output_hidden_states", "output_attentions", "output_router_logits")
        if getattr(config, name, False) is True
    ]


def same_blocks(student: nn.Module, of_teacher: Sequence[NamedBlock]) -> tuple[NamedBlock, ...]:
    """The student's blocks, which are called as the teacher's are.  Raises WorkloadError if it has others."""
    names = [block.name for block in of_teacher]
    lists = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    try:
        found = find_blocks(student, names)
        rows = [list(student.get_submodule(path)._modules) for path in lists]
    except (WorkloadError, AttributeError):
        found, rows = (), []
    expected = [[name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == path] for path in lists]
    if [block.name for block in found] != names or any(
        len(row) > len(own) and row[: len(own)] == own for row, own in zip(rows, expected, strict=True)
    ):
        has = [len(row) for row in rows] or [len(find_blocks(student))]
        raise WorkloadError(
            f"the student has {sum(has)} blocks where the teacher has {len(names)} ({names[0]} and so on). Every block "
            f"of the student learns from the teacher's block of the same place: build a student of as many blocks."
        )
    return found


def check_attention(teacher: nn.Module, student: nn.Module) -> None:
    """Raise WorkloadError if the two read masks in two ways: the teacher makes the masks of both."""
    kinds = [getattr(getattr(model, "config", None), "_attn_implementation", None) for model in (teacher, student)]
    if None not in kinds and kinds[0] != kinds[1]:
        raise WorkloadError(
            f"the teacher's attention is {kinds[0]}, the student's {kinds[1]}, and the two read masks in different "
            f"ways: the student's blocks are given the teacher's masks. Load both with one attn_implementation."
        )


def check_learnt(teacher: nn.Module, student: nn.Module, blocks: Sequence[NamedBlock]) -> None:
    """Raise WorkloadError if nothing of the student's ``blocks`` is learnt, or something that others read too."""
    of_teacher = {id(parameter) for parameter in teacher.parameters()}
    owners: dict[int, str] = {}
    for block in blocks:
        for name, parameter in block.module.named_parameters():
            if not parameter.requires_grad:
                continue
            path = f"{block.name}.{name}"
            if id(parameter) in of_teacher:
                raise WorkloadError(
                    f"{path} of the student is the teacher's own tensor, which must not change. Copy it, or freeze it."
                )
            if id(parameter) in owners and not owners[id(parameter)].startswith(f"{block.name}."):
                raise WorkloadError(
                    f"{path} and {owners[id(parameter)]} of the student are one tensor: two blocks would learn it, "
                    f"each from a loss of its own. Give each block its own, or freeze it."
                )
            owners[id(parameter)] = path
    if not owners:
        raise WorkloadError(
            f"no block of the student ({type(student).__name__}) has a trainable parameter. Set requires_grad on some."
        )

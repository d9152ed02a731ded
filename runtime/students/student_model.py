"""A student made of its teacher."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any
from zlib import crc32

import torch
from torch import nn

from ...shared.basics.errors import WorkloadError
from ...shared.students.block_shape import BlockShape, is_learnt
from ...shared.students.families import family_of
from ...shared.students.shapes import student_shapes, teacher_shapes
from ...shared.students.student import Student
from ..chunks.saved_weights import SavedWeights
from ..model.pretrained import some
from .activation_statistics import ActivationStatistics
from .building import blocks_of, build_student
from .initial_values import BlockValues
from .teacher_values import TeacherValues


@torch.no_grad()
def make_student(
    teacher: Any,
    student: Student,
    *,
    statistics: ActivationStatistics | None = None,
    weights: SavedWeights | None = None,
    seed: int = 0,
    without: Sequence[str] = (),
) -> Any:
    """The student of ``teacher``, a model of transformers with its language-model head, on the teacher's device.

    Outside of its blocks it equals the teacher; what of its blocks is learnt requires gradients, and nothing else
    does.  No parameter is shared, and the teacher is not changed.

    Args:
        teacher: Its parameters have values, or ``weights`` gives them.
        student: How its blocks differ, and what they begin with.
        statistics: Of the teacher (``activation_statistics``), for channels and experts that are chosen by them.
        weights: The files of a teacher whose parameters are on the meta device.  Each is read when it is needed, so
            that the teacher takes no memory.
        seed: Of random values.
        without: Patterns (``model.layers.*.adapter.*``) of parameters of the teacher that the student does without.

    Raises WorkloadError if the student's file does not go with the teacher, if statistics are missing or of another
    model, or if the teacher has other parameters than its class makes; FileError if ``weights`` are not the teacher's.
    """
    configuration, name = teacher.config.to_dict(), type(teacher).__name__
    family = family_of(configuration, name)
    shapes = student_shapes(student, configuration, name=name)
    made = build_student(type(teacher), teacher.config, shapes)
    values = TeacherValues(teacher, weights)
    blocks = {
        f"{family.blocks}.{number}": BlockValues(
            number, family, before, shape, student.initialization, statistics, f"{family.blocks}.{number}", values
        )
        for number, (before, shape) in enumerate(zip(teacher_shapes(configuration), shapes, strict=True))
    }
    _check_names(values, made, blocks, without)
    _fill(made, values, blocks, seed)
    _copy_buffers(made, teacher)
    set_learnt(made, student, shapes)
    made.train(teacher.training)
    if made.can_generate():
        made.generation_config = copy.deepcopy(teacher.generation_config)
    return made


def set_learnt(model: nn.Module, student: Student, shapes: Sequence[BlockShape]) -> None:
    """Let what is learnt of a student's blocks require gradients, and nothing else of the model.

    Raises WorkloadError if that is nothing.
    """
    family = family_of(model.config.to_dict(), type(model).__name__)  # type: ignore[union-attr, operator]
    model.requires_grad_(False)
    num_learnt = 0
    for block, shape in zip(blocks_of(model, family), shapes, strict=True):
        for path, parameter in block.named_parameters():
            if parameter.is_floating_point() and is_learnt(student.keys_to_learn, family, shape, path):
                parameter.requires_grad_()
                num_learnt += 1
    if not num_learnt:
        raise WorkloadError(
            f"no parameter of the student is learnt with keys_to_learn = {', '.join(student.keys_to_learn)}. Name keys "
            f"of parts that its blocks have."
        )


def with_types_of(teacher: nn.Module, made: nn.Module) -> nn.Module:
    """``made``, a student without values, in the element types that ``make_student`` would give it, one by one.

    Buffers have types of their own: rotary frequencies are float32 in models of any type.
    """
    of_parameters = {name: one.dtype for name, one in teacher.named_parameters(remove_duplicate=False)}
    of_buffers = {name: one.dtype for name, one in teacher.named_buffers(remove_duplicate=False)}
    of_others = of_parameters[min(of_parameters)]
    for name, parameter in made.named_parameters():
        parameter.data = parameter.data.to(of_parameters.get(name, of_others))
    for path, module in made.named_modules():
        for name, buffer in module._buffers.items():
            dtype = of_buffers.get(f"{path}.{name}" if path else name)
            if buffer is not None and dtype is not None:
                module._buffers[name] = buffer.to(dtype)
    return made


def _block_of(name: str, blocks: Mapping[str, BlockValues]) -> tuple[BlockValues | None, str]:
    """The block of a parameter, and its path there; None outside of blocks."""
    for path, block in blocks.items():
        if name.startswith(f"{path}."):
            return block, name.removeprefix(f"{path}.")
    return None, name


def _check_names(
    values: TeacherValues, made: nn.Module, blocks: Mapping[str, BlockValues], without: Sequence[str]
) -> None:
    """Raise WorkloadError unless every parameter has a successor, or is known to have none, and none comes of nothing.

    Those of linear maps that stand for a part come of all of the part's.
    """
    own = values.names
    names = {name for name, _ in made.named_parameters(remove_duplicate=False)}

    def is_replaced(name: str) -> bool:
        block, path = _block_of(name, blocks)
        return block is not None and block.unused(path)

    superfluous = [
        name
        for name in sorted(own - names)
        if not is_replaced(name) and not any(fnmatchcase(name, pattern) for pattern in without)
    ]
    if superfluous:
        raise WorkloadError(
            f"the teacher has {some(superfluous)}, which its class {type(made).__name__} does not make and its student "
            f"has no use for. Merge adapters first, or name them in without=[...]."
        )
    missing = [name for name in sorted(names - own) if not is_replaced(name)]
    if missing:
        raise WorkloadError(
            f"the teacher lacks {some(missing)}, which its class {type(made).__name__} makes. Load it whole, without "
            f"leaving parts out."
        )


def _fill(made: Any, values: TeacherValues, blocks: Mapping[str, BlockValues], seed: int) -> None:
    """Give all parameters of ``made`` their values, tied parameters one."""
    filled: dict[int, nn.Parameter] = {}
    example = values(min(values.names))
    random: dict[str, nn.Module] = {}
    for path, module in made.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in filled:
                full = f"{path}.{name}" if path else name
                block, within = _block_of(full, blocks)
                value = values(full).detach().clone() if block is None else block.value(within)
                if value is None:
                    random[path] = module
                    value = torch.empty(parameter.shape, dtype=example.dtype, device=example.device)
                assert value.shape == parameter.shape, f"{full}: {list(value.shape)} for {list(parameter.shape)}"
                filled[id(parameter)] = nn.Parameter(value, requires_grad=value.is_floating_point())
            module._parameters[name] = filled[id(parameter)]
    for path, module in random.items():
        with torch.random.fork_rng(devices=[example.device] if example.device.type == "cuda" else []):
            # A seed of its own for each, so that none depends on what else is random.  The host's generator takes 32
            # bits.
            torch.manual_seed(crc32(f"{seed} {path}".encode()))
            made._init_weights(module)


def _copy_buffers(made: nn.Module, teacher: nn.Module) -> None:
    """Give buffers the teacher's values and element types, those that no file holds among them."""
    own = dict(teacher.named_buffers(remove_duplicate=False))
    for path, module in made.named_modules():
        for name in module._buffers:
            value = own.get(f"{path}.{name}" if path else name)
            if value is not None:
                module._buffers[name] = value.clone()

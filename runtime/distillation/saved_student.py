"""What a checkpoint of a distillation holds: the student, and whose its teacher's weights are."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import torch
from torch import nn

from ..checkpoints.manifest import LeftOut
from ..checkpoints.saved_part import SavedPart
from ..checkpoints.state import configuration_text
from ..chunks.saved_weights import SavedWeights, names_of
from ..model.configurations import is_of_own_code, quiet
from ..model.strides import in_memory_order
from .pair_weights import PairWeights
from .pairs import STUDENT, TEACHER, Pairs

_STRETCHES: Final = 64
_STRETCH: Final = 1024
"""How many stretches of a tensor, and how many scalars of each, tell weights apart; small tensors are read whole."""


def saved_student(pairs: Pairs, weights: PairWeights | None = None) -> SavedPart:
    """The student alone.  ``weights`` has the values of the teacher's parameters that are on the meta device.

    Raises FileError if it cannot be read.
    """
    of_teacher = None if weights is None else weights.parts.get(TEACHER)
    left_out = LeftOut(part=TEACHER, kept=STUDENT, identity=identity_of(pairs.teacher, of_teacher))
    return SavedPart(_configuration(pairs.student), left_out)


def identity_of(teacher: nn.Module, weights: SavedWeights | None = None) -> str:
    """A hash of names, shapes, element types and samples of the values of all parameters, wherever these lie."""
    digest = hashlib.sha256()
    for parameter, names in names_of(teacher.named_parameters(remove_duplicate=False)):
        digest.update(repr((names[0], tuple(parameter.shape), str(parameter.dtype))).encode())
        if parameter.is_meta and weights is None:
            continue
        for stretch in _stretches(parameter.numel()):
            digest.update(_read(parameter, names, weights, stretch).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _stretches(num_scalars: int) -> list[slice]:
    if num_scalars <= _STRETCHES * _STRETCH:
        return [slice(0, num_scalars)]
    begins = (number * (num_scalars - _STRETCH) // (_STRETCHES - 1) for number in range(_STRETCHES))
    return [slice(begin, begin + _STRETCH) for begin in begins]


def _read(parameter: nn.Parameter, names: list[str], weights: SavedWeights | None, stretch: slice) -> torch.Tensor:
    """(n,) on the host."""
    if not parameter.is_meta:
        return in_memory_order(parameter.detach())[stretch].cpu()
    assert weights is not None
    found = torch.empty(stretch.stop - stretch.start, dtype=parameter.dtype)
    for held in weights.find(names)[:1]:
        weights.read(held, parameter, stretch, found)
    return found


def _configuration(student: nn.Module) -> str | None:
    """The student's, if a model that is made of it is like the student; None otherwise.

    Where blocks have shapes of their own, no configuration of transformers says so: beside one that does not,
    ``from_pretrained`` would take the weights with parts that are random.  Nor is there one of a class that comes from
    files beside its configuration: these are not there, and a model of transformers may have the same names.
    """
    text = None if is_of_own_code(student) else configuration_text(student)
    if text is None:
        return None
    kind: Any = type(student)
    try:
        with quiet(), torch.device("meta"):
            made = kind._from_config(student.config)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return text if _shapes(made) == _shapes(student) else None


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in (*model.named_parameters(), *model.named_buffers())}

"""What a checkpoint of a distillation holds: the student, and whose its teacher's weights are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from ...shared.pipelines.pipeline import Pipeline
from ..checkpoints.manifest import LeftOut
from ..checkpoints.saved_part import SavedPart
from ..checkpoints.state import configuration_text
from ..chunks.saved_weights import SavedWeights, names_of
from ..model.configurations import is_of_own_code, quiet
from ..model.strides import in_memory_order
from ..ranks.agreement import agreed
from ..ranks.stages import StageRanks
from ..ranks.world import World, exchanged
from .pair_weights import PairWeights
from .pairs import STUDENT, TEACHER, Pairs

_STRETCHES: Final = 64
_STRETCH: Final = 1024
"""How many stretches of a tensor, and how many scalars of each, tell weights apart; small tensors are read whole."""


def saved_student(
    pairs: Pairs, weights: PairWeights | None = None, world: World | None = None, stages: StageRanks | None = None
) -> SavedPart:
    """The student alone.  ``weights`` has the values of the teacher's parameters that are on the meta device.

    To be called on all ranks of ``world``, which have the stages of a pipeline where there are ``stages``; none is
    alone yet (``Pairs.alone``).  Raises FileError, on all ranks, if weights cannot be read.
    """
    of_teacher = None if weights is None else weights.parts.get(TEACHER)
    left_out = LeftOut(part=TEACHER, kept=STUDENT, identity=_shared_identity(pairs, of_teacher, world, stages))
    configuration = agreed(world, lambda: _configuration(pairs.student))
    if stages is None:
        return SavedPart(configuration, left_out)
    renamed = _names_of_whole(pairs)
    num_stages = stages.pipeline.num_stages
    return SavedPart(configuration, left_out, elsewhere=pairs.elsewhere, renamed=renamed, num_stages=num_stages)


def _names_of_whole(pairs: Pairs) -> dict[str, str]:
    """The names that the whole model has for tensors that blocks of other stages have too, by those of this stage."""
    found = {}
    named = (*pairs.named_parameters(remove_duplicate=False), *pairs.named_buffers(remove_duplicate=False))
    for _, names in names_of(named):
        here = [name for name in names if not name.startswith(pairs.elsewhere)]
        if here and here[0] != names[0]:
            found[here[0]] = names[0]
    return found


# -- whose weights are left out --------------------------------------------------------------------------------------


def _shared_identity(pairs: Pairs, weights: SavedWeights | None, world: World | None, stages: StageRanks | None) -> str:
    """``identity_of`` of the teacher that the ranks have: rank 0's, of a pipeline each stage's own blocks."""
    if world is None:
        return identity_of(pairs.teacher, weights)
    if stages is None:
        own = agreed(world, lambda: identity_of(pairs.teacher, weights) if world.rank == 0 else "")
        return str(exchanged(world, own)[0])
    digest = hashlib.sha256()
    named = names_of(pairs.teacher.named_parameters(remove_duplicate=False))
    owners = [stages.pipeline.rank_of(_stage_of(names[0], pairs, stages.pipeline), 0) for _, names in named]

    def sampled() -> list[list[bytes]]:
        mine = zip(named, owners, strict=True)
        return [list(_samples(p, names, weights)) if rank == world.rank else [] for (p, names), rank in mine]

    # One parameter after the other: all samples of a large teacher would be much for every rank to hold.
    for (parameter, names), owner, own_samples in zip(named, owners, agreed(world, sampled), strict=True):
        digest.update(_described(parameter, names))
        for sample in exchanged(world, own_samples)[owner]:
            digest.update(sample)
    return digest.hexdigest()[:16]


def _stage_of(name: str, pairs: Pairs, pipeline: Pipeline) -> int:
    """The stage that has a teacher's parameter; the first one has what is in no block."""
    pair = next((at for at, block in enumerate(pairs.all_blocks) if name.startswith(f"{block}.")), 0)
    return next(at for at in reversed(range(pipeline.num_stages)) if pipeline.first_pair(at) <= pair)


def identity_of(teacher: nn.Module, weights: SavedWeights | None = None) -> str:
    """A hash of names, shapes, element types and samples of the values of all parameters, wherever these lie."""
    digest = hashlib.sha256()
    for parameter, names in names_of(teacher.named_parameters(remove_duplicate=False)):
        digest.update(_described(parameter, names))
        for sample in _samples(parameter, names, weights):
            digest.update(sample)
    return digest.hexdigest()[:16]


def _described(parameter: nn.Parameter, names: list[str]) -> bytes:
    return repr((names[0], tuple(parameter.shape), str(parameter.dtype))).encode()


def _samples(parameter: nn.Parameter, names: list[str], weights: SavedWeights | None) -> Iterator[bytes]:
    if parameter.is_meta and weights is None:
        return
    for stretch in _stretches(parameter.numel()):
        yield _read(parameter, names, weights, stretch).view(torch.uint8).numpy().tobytes()


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

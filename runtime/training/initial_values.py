"""What a model begins with: values of its own, those of a folder, or those of rank 0; and what is refused before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from ...shared.basics.errors import PlanError
from ..chunks.meta_parameters import check_exchangeable
from ..chunks.parameter_values import OwnValues, ParameterValues
from ..chunks.saved_weights import SavedTensor, SavedValues, SavedWeights, names_of, persistent_buffers
from ..model.strides import without_repeats
from ..ranks.agreement import agreed
from ..ranks.placing import Rank0Values, place_rank_0
from ..ranks.world import World


def check_values(model: nn.Module, saved: SavedWeights | None, world: World | None) -> None:
    """Raise ProtwinError unless every parameter and buffer of ``model`` has values, or will be given some.

    Those on the meta device are given those of ``saved``; on ranks other than 0, else those of rank 0.
    """
    is_first = world is None or world.rank == 0
    if saved is not None:
        saved.check(model, fills_all=is_first)
    for name, parameter in model.named_parameters():
        if parameter.is_meta and saved is None:
            if is_first:
                raise PlanError(
                    f"parameter {name} is on the meta device and has no values. Pass weights=FOLDER, the model's "
                    f"safetensors files, or load them first."
                )
            check_exchangeable(name, parameter)
    if is_first:
        filled = {id(buffer) for buffer, _ in _saved_buffers(model, saved)}
        for name, buffer in model.named_buffers():
            if buffer.is_meta and id(buffer) not in filled:
                raise PlanError(
                    f"buffer {name} is on the meta device and no file has it. Build the model within "
                    f"protwin.runtime.parameters_on_meta(), which leaves buffers real."
                )


def values_for(model: nn.Module, saved: SavedWeights | None, world: World | None) -> ParameterValues:
    """Where chunks get the values of parameters from."""
    values: ParameterValues = OwnValues() if world is None else Rank0Values(world)
    return values if saved is None else SavedValues(saved, model, values, world)


def fill_buffers(model: nn.Module, saved: SavedWeights | None, world: World | None) -> Callable[[], None]:
    """Give buffers on the meta device memory, read what ``saved`` has of any, and let all be those of rank 0.

    Gives what undoes all of it.  Buffers that have memory are written in place.  To be called on all ranks; raises
    FileError, on all of them, if a file cannot be read, and RanksError if a rank does not come: nothing has changed
    then, except on ranks that others have left.
    """
    before: list[tuple[nn.Module, str, torch.Tensor]] = []
    values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def undo() -> None:
        for module, name, buffer in before:
            module._buffers[name] = buffer
        for own, old in values:
            own.copy_(old)

    def fill() -> None:
        if world is not None or saved is not None:
            values.extend((own, own.clone()) for own in map(without_repeats, model.buffers()) if not own.is_meta)
        before.extend(_given_memory(model))
        for own, held in _saved_buffers(model, saved):
            assert saved is not None
            read = torch.empty(own.shape, dtype=own.dtype)
            saved.read(held, read, slice(0, own.numel()), read.view(-1))
            without_repeats(own).copy_(read[tuple(slice(0, 1 if s == 0 else None) for s in own.stride())])

    try:
        agreed(world, fill)
        if world is not None:
            place_rank_0(world, model.buffers())
    except BaseException:
        undo()
        raise
    return undo


def _given_memory(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Exchange buffers on the meta device for such on the host; gives what each was."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                # Several modules may share one.
                if id(buffer) not in made:
                    made[id(buffer)] = torch.empty_strided(
                        buffer.shape, buffer.stride(), dtype=buffer.dtype, device="cpu"
                    )
                module._buffers[name] = made[id(buffer)]
                yield module, name, buffer


def _saved_buffers(model: nn.Module, saved: SavedWeights | None) -> list[tuple[torch.Tensor, SavedTensor]]:
    """The buffers that files have, and where."""
    if saved is None:
        return []
    found = [(buffer, saved.find(names)) for buffer, names in names_of(persistent_buffers(model))]
    return [(buffer, held[0]) for buffer, held in found if held]

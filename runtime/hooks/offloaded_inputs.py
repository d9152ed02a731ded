"""The input of a recomputed block on its way to the host and back.

[Note: Inputs that travel]
Checkpointing keeps a block's arguments for its recomputation.  In mode OFFLOAD_INPUT what the block before has made and
handed on goes to the host instead: the storages of its outputs that it was not given itself.  Masks, positions and
whatever else several blocks are given stay.  Handles stand in the kept arguments for the tensors that travel; when the
recomputation begins, tensors are made anew as views of the storages that have come back, so strides and shared storages
stay what they were.  Checkpointing itself is given no tensor, and holds none.  The storages go with the graph of the
block's backward, as kept inputs do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...shared.basics.errors import ScheduleError
from ...shared.schema.plan import ActivationMode
from ...shared.schema.schedule import Schedule, TaskKind
from ..devices.device import TrainingDevice
from ..model.blocks import NamedBlock
from ..model.kept_tensors import kept_tensors
from ..model.nested_tensors import containers_as_they_are, has_storage, storages_in
from .swapping import SavedStorage, SavedTensor, SwappedBlock, rooms_on_host


class _SavedInput(SavedTensor):
    """What a recomputation is given in place of a tensor."""

    __slots__ = ("requires_grad",)

    def __init__(self, of: SavedStorage, tensor: torch.Tensor) -> None:
        super().__init__(of, tensor)
        self.requires_grad = tensor.requires_grad

    def again(self) -> torch.Tensor:
        """The tensor as the block was given it."""
        return self.tensor().requires_grad_(self.requires_grad)


class HandedOn:
    """The storages that a block has made and hands on to the next one."""

    def __init__(self, model: nn.Module, block: nn.Module) -> None:
        self._model = model
        self._modules = list(block.modules())
        self._given: set[int] = set()
        self.storages: set[int] = set()
        """By address, of the latest forward."""

    def enter(self, given: Any) -> None:
        """The block is about to run on these arguments."""
        self._given = storages_in(given)
        self.storages = set()

    def leave(self, output: Any) -> None:
        """The block has returned ``output``."""
        staying = [*self._model.parameters(), *kept_tensors(self._modules, model=self._model)]
        self.storages = storages_in(output) - self._given - storages_in(staying)


class InputsOfBlock:
    """The latest arguments of one block, with handles in place of what travels."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: dict[int, SavedStorage] = {}

    def packed(self, given: Any, handed: set[int]) -> Any:
        """``given`` with handles for the tensors in the storages ``handed``.

        Raises ScheduleError if there is none: then the block's input is another one than was planned with.
        """
        self._found = {}
        packed = self._packed(given, handed)
        if not self._found:
            raise ScheduleError(
                f"block {self._name} is not given what the block before it returns, or within another container than "
                f"a tuple, list or dict, so that its input cannot be offloaded. Checkpoint this block "
                f"(activation_modes, n_offload_input)."
            )
        return packed

    def take(self) -> list[SavedStorage]:
        """The storages that may travel; they are handed over.  What was changed since stays, for backward to say so."""
        found, self._found = list(self._found.values()), {}
        for saved in found:
            assert saved.source is not None
            saved.is_kept = saved.versions != {saved.source._version}
        return [saved for saved in found if not saved.is_kept]

    def _packed(self, value: Any, handed: set[int]) -> Any:
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata if has_storage(value) else None
            if key is None or key not in handed:
                return value
            if key not in self._found:
                self._found[key] = SavedStorage(value)
            return _SavedInput(self._found[key], value)
        if type(value) is dict:
            return {key: self._packed(item, handed) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._packed(item, handed) for item in value)
        return containers_as_they_are(value)


class OffloadedInput(SwappedBlock):
    """A block in mode OFFLOAD_INPUT: its input, and that input's home on the host."""

    arrives_for = TaskKind.RECOMPUTE

    def __init__(self, name: str, number: int, size_bytes: int, device: TrainingDevice) -> None:
        self._inputs = InputsOfBlock(name)
        super().__init__(self._inputs, number, size_bytes, device, what="input")

    def packed(self, given: Any, handed: set[int]) -> Any:
        """As ``InputsOfBlock.packed``, for a forward that begins."""
        self.forget()
        return self._inputs.packed(given, handed)


def as_given(packed: Any) -> Any:
    """The arguments that were packed, when what travelled has come back."""
    if isinstance(packed, _SavedInput):
        return packed.again()
    if type(packed) is dict:
        return {key: as_given(item) for key, item in packed.items()}
    if type(packed) in (list, tuple):
        return type(packed)(as_given(item) for item in packed)
    return containers_as_they_are(packed)


def offloaded_inputs(
    blocks: Sequence[NamedBlock], modes: Sequence[ActivationMode], schedule: Schedule, device: TrainingDevice
) -> dict[int, OffloadedInput]:
    """The blocks whose input travels, with room on the host for it."""
    return {
        number: OffloadedInput(blocks[number].name, number, size_bytes, device)
        for number, size_bytes in rooms_on_host(schedule).items()
        if modes[number] is ActivationMode.OFFLOAD_INPUT
    }

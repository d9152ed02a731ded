"""A checkpoint that is read, whoever has saved it, a stretch of a parameter at a time; and one that one rank saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import FileError
from ..model.strides import contiguous_strides, copy_strided, in_memory_order
from .checkpoints import CheckpointContent
from .manifest import Manifest
from .random_states import derived_states

WEIGHT: Final = "weights/"
MASTER: Final = "masters/"
STATE: Final = "state/"
"""Then the key of the optimizer's state, another slash, and the parameter's name."""
VALUES: Final = "values/"
COMMON: Final = ("step", "step_knobs", "scheduler", "loss_scaler")
"""What ranks have in common, beside the optimizer's groups and the shapes of parameters."""
OWN: Final = ("random", "data_position", "extra", "buffers")
"""What each rank has, beside the buffers that ``state_dict`` holds."""

Described = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


def size_bytes_of(described: Described) -> int:
    """Of a tensor's scalars."""
    shape, dtype = described
    return prod(shape) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class WantedWeight:
    """Scalars of a parameter that are to be read."""

    name: str
    parameter: nn.Parameter
    """Has the shape and the strides: scalars are numbered as they lie in memory."""
    begin: int
    into: torch.Tensor
    """(n,): gets those from number ``begin`` on."""


class Saved(ABC):
    """A verified checkpoint, as one rank sees it."""

    path: Path
    """The folder."""
    manifest: Manifest
    training: Mapping[str, Any]
    """Step, knobs, scheduler, random states, data positions, buffers, for this rank."""
    optimizer: Mapping[str, Any]
    """The ``class``, the ``groups`` of names and options."""

    @property
    @abstractmethod
    def weights(self) -> dict[str, Described]:
        """All parameters and persistent buffers."""

    @property
    @abstractmethod
    def masters(self) -> dict[str, Described | None]:
        """The masters of all parameters that were stepped; None of those that have none."""

    @property
    @abstractmethod
    def flat(self) -> dict[str, tuple[int, torch.dtype]]:
        """How many scalars all weights, masters and tensors of the state have, and of which type, by their names."""

    @abstractmethod
    def read_flat(self, name: str, begin: int, into: torch.Tensor) -> None:
        """Fill ``into`` (n,) with scalars of a tensor, from number ``begin`` on.  Raises FileError."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shape of every parameter, and the strides in which the scalars of its tensors are numbered."""

    @abstractmethod
    def values(self, name: str) -> dict[str, Any]:
        """What a parameter's state has beside its tensors, such as the count of steps.  Raises FileError."""

    @property
    @abstractmethod
    def common(self) -> Mapping[str, Any]:
        """What all ranks have in common: step, knobs, scheduler, optimizer, shapes."""

    @property
    @abstractmethod
    def num_replicas(self) -> int:
        """Ranks that have saved; the ranks of a pipeline count as one."""

    @abstractmethod
    def of_rank(self, rank: int) -> dict[str, Any]:
        """What one rank alone has saved, of a pipeline those of its stages together; its tensors are mapped.

        Random states and data position are those of the first stage.  Raises FileError and OSError.
        """

    @abstractmethod
    def weight(self, name: str) -> torch.Tensor:
        """A parameter or a persistent buffer, whole, on the host.  Raises FileError."""

    @abstractmethod
    def read_weights(self, wanted: Iterable[WantedWeight]) -> None:
        """Fill what is wanted.  Raises FileError."""

    @abstractmethod
    def state(
        self, name: str, parameter: nn.Parameter, stretch: slice | None
    ) -> tuple[dict[str, Any], torch.Tensor | None]:
        """A parameter's state and master, or those of a stretch of its scalars, in new tensors.  Raises FileError."""


class SavedByOne(Saved):
    """Whole tensors, which are mapped from their files."""

    def __init__(self, path: Path, content: CheckpointContent, manifest: Manifest, rank: int) -> None:
        self.path = path
        self._content = content
        self.manifest = manifest
        self.optimizer = content.optimizer
        training = dict(content.training)
        try:
            training["data_positions"] = (training["data_position"],)
            if rank:
                training["random"] = derived_states(training["random"], rank)
        except (KeyError, TypeError, RuntimeError) as error:
            raise inconsistent(error) from error
        self.training = training

    @property
    def weights(self) -> dict[str, Described]:
        """Their shapes and types."""
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._content.weights.items()}

    @property
    def flat(self) -> dict[str, tuple[int, torch.dtype]]:
        """Of all tensors."""
        return {name: (tensor.numel(), tensor.dtype) for name, tensor in self._tensors.items()}

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        """By names as pieces have them."""
        found = {WEIGHT + name: tensor for name, tensor in self._content.weights.items()}
        for name, entry in self.optimizer["parameters"].items():
            if entry["master"] is not None:
                found[MASTER + name] = entry["master"]
            for key, value in entry["state"].items():
                if is_of_scalars(key, value, self._content.weights[name].shape):
                    found[f"{STATE}{key}/{name}"] = value
        return found

    def read_flat(self, name: str, begin: int, into: torch.Tensor) -> None:
        """In the order of contiguous tensors, as which they are saved."""
        into.copy_(self._tensors[name].contiguous().view(-1)[begin : begin + into.numel()])

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Those of contiguous tensors."""
        found = {name: tuple(tensor.shape) for name, tensor in self._content.weights.items()}
        return {name: (shape, contiguous_strides(shape)) for name, shape in found.items()}

    def values(self, name: str) -> dict[str, Any]:
        """What is no tensor of its scalars."""
        shape = self._content.weights[name].shape
        state: Mapping[str, Any] = self.optimizer["parameters"][name]["state"]
        return {key: value for key, value in state.items() if not is_of_scalars(key, value, shape)}

    @property
    def common(self) -> Mapping[str, Any]:
        """The same in the form of several ranks."""
        described = {key: self.optimizer[key] for key in ("class", "groups")}
        return {
            **{key: self.training[key] for key in COMMON},
            "optimizer": described | {"parameters": sorted(self.optimizer["parameters"])},
            "shapes": self.shapes,
        }

    @property
    def num_replicas(self) -> int:
        """One."""
        return 1

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Of the only one."""
        assert rank == 0
        return {key: self._content.training[key] for key in OWN} | {"persistent": {}}

    @property
    def masters(self) -> dict[str, Described | None]:
        """Shapes and types of those that there are."""
        found = {name: entry["master"] for name, entry in self.optimizer["parameters"].items()}
        return {n: None if master is None else (tuple(master.shape), master.dtype) for n, master in found.items()}

    def weight(self, name: str) -> torch.Tensor:
        """Mapped from its file."""
        return self._content.weights[name]

    def read_weights(self, wanted: Iterable[WantedWeight]) -> None:
        """Fill what is wanted."""
        for one in wanted:
            stretch = slice(one.begin, one.begin + one.into.numel())
            one.into.copy_(part_of(self._content.weights[one.name], one.parameter, stretch))

    def state(
        self, name: str, parameter: nn.Parameter, stretch: slice | None
    ) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The state and the master."""
        entry = self.optimizer["parameters"][name]
        state = {key: part_of(value, parameter, stretch) for key, value in entry["state"].items()}
        master = entry["master"]
        return state, None if master is None else part_of(master, parameter, stretch)


def is_of_scalars(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Whether a value of an optimizer's state has one scalar for each of a tensor of this ``shape``."""
    return isinstance(value, torch.Tensor) and value.shape == tuple(shape) and key not in _COUNTS


_COUNTS: Final = frozenset({"step"})
"""State that is no scalar of a parameter, even of one that has no dimensions either."""


def part_of(value: Any, parameter: nn.Parameter, stretch: slice | None) -> Any:
    """A copy of what one optimizer gets of a whole state: all of it, or a ``stretch`` of its scalars (n,)."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape:
        return value.clone()
    # On disk everything is contiguous; beside a parameter its state has the parameter's strides.
    whole = copy_strided(value, parameter)
    return whole if stretch is None else in_memory_order(whole)[stretch].clone()


def inconsistent(error: BaseException) -> FileError:
    """What is raised of a checkpoint whose files contradict each other."""
    return FileError(f"the checkpoint is inconsistent ({type(error).__name__}: {error}). Resume from another one.")

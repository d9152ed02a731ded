"""What a token-wise module is given and gives: which tensors are laid out by token, and how a tile of them looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from ...shared.basics.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Values:
    """The arguments of one call.

    Legend: L leading dims of the first tensor (all but its last), over which its T tokens are spread; R other dims.
    """

    leaves: tuple[Any, ...]
    """None in the place of a tensor by token: whoever holds a call for its backward holds no tensor that way."""
    structure: Any
    places: tuple[int, ...]
    """Where tensors that are laid out by token stand among ``leaves``."""
    lead: tuple[int, ...]
    """L"""

    @classmethod
    def of(cls, arguments: tuple[tuple[Any, ...], dict[str, Any]], name: str) -> tuple[Self, tuple[torch.Tensor, ...]]:
        """The arguments without the tensors that are laid out by token, of shape (*L, *R), and these.

        Raises ScheduleError if there is no tensor by token, or one that has another place for tokens.
        """
        leaves, structure = pytree.tree_flatten(arguments)
        tensors = [(place, leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        first = next((tensor for _, tensor in tensors if tensor.dim() >= 2), None)
        if first is None:
            raise ScheduleError(f"{name} is given no tensor of two dims or more, so that it cannot run in tiles.")
        lead = tuple(first.shape[:-1])
        places = tuple(place for place, tensor in tensors if tuple(tensor.shape[: len(lead)]) == lead)
        for place, tensor in tensors:
            if place not in places and tensor.numel() != 1:
                raise ScheduleError(
                    f"{name} is given a tensor of shape {list(tensor.shape)} beside one of shape {list(first.shape)}: "
                    f"which part of it belongs to which token is not known. Train with mlp_tiles = 1."
                )
        by_token = tuple(leaves[place] for place in places)
        others = tuple(None if place in places else leaf for place, leaf in enumerate(leaves))
        return cls(others, structure, places, lead), by_token

    @property
    def num_tokens(self) -> int:
        """T."""
        return prod(self.lead)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """(*L, *R) as (1, T, *R): a view where its strides allow."""
        return tensor.reshape(1, self.num_tokens, *tensor.shape[len(self.lead) :])

    def flattened(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``flat`` of each."""
        return [self.flat(tensor) for tensor in tensors]

    def lead_of(self, num_tokens: int) -> tuple[int, ...]:
        """L of a tile."""
        return (*(1 for _ in self.lead[1:]), num_tokens)

    def arguments(self, tile: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call for a tile, of (1, t, *R) each."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tile, strict=True):
            leaves[place] = tensor.reshape(*self.lead_of(tensor.shape[1]), *tensor.shape[2:])
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs


@dataclass(frozen=True, slots=True)
class _Output:
    """One tensor that a module gives: (*L, *R), or (T, *R) if its leading dims are laid end to end."""

    is_flat: bool
    rest: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Layout:
    """What a module gives: tensors by token, and whatever else is the same for every tile."""

    structure: Any
    outputs: tuple[_Output | None, ...]
    """By leaf; None: no tensor."""
    constants: tuple[Any, ...]
    """By leaf; None for tensors."""
    lead: tuple[int, ...]

    @property
    def _num_tokens(self) -> int:
        return prod(self.lead)

    @property
    def _tensors(self) -> list[_Output]:
        return [output for output in self.outputs if output is not None]

    def check(self, other: Layout, name: str) -> None:
        """Raise ScheduleError if another tile gave something else."""
        is_same = self.structure == other.structure and self.outputs == other.outputs
        if not is_same or any(a is not b and a != b for a, b in zip(self.constants, other.constants, strict=True)):
            raise ScheduleError(
                f"{name} gives other things for one tile of tokens than for another. Train with mlp_tiles = 1."
            )

    def empty(self, tile: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Memory for the outputs over all tokens, on the device of a tile's."""
        return [
            tensor.new_empty((*((self._num_tokens,) if output.is_flat else self.lead), *output.rest))
            for tensor, output in zip(tile, self._tensors, strict=True)
        ]

    def fill(self, outputs: Sequence[torch.Tensor], tile: Sequence[torch.Tensor], place: slice) -> None:
        """Write a tile's outputs to their place."""
        for whole, tensor, output in zip(outputs, tile, self._tensors, strict=True):
            whole.view(self._num_tokens, *output.rest)[place].copy_(tensor.reshape(-1, *output.rest))

    def flattened(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of outputs as (T, *R)."""
        return [
            None if gradient is None else gradient.reshape(self._num_tokens, *output.rest)
            for gradient, output in zip(gradients, self._tensors, strict=True)
        ]

    def restored(self, outputs: Sequence[torch.Tensor | None]) -> Any:
        """The outputs in the structure that the module gives."""
        tensors = iter(outputs)
        leaves = [
            next(tensors) if output is not None else constant
            for output, constant in zip(self.outputs, self.constants, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.structure)


def laid_out(result: Any, num_tokens: int, values: Values, name: str) -> tuple[list[torch.Tensor], Layout]:
    """The tensors in what a module gave for a tile, and their layout over all tokens.

    Raises ScheduleError if one of them has no place for tokens.
    """
    leaves, structure = pytree.tree_flatten(result)
    lead = values.lead_of(num_tokens)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    outputs: list[_Output | None] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            outputs.append(None)
            continue
        shape = tuple(leaf.shape)
        is_flat = shape[: len(lead)] != lead
        if is_flat and shape[:1] != (num_tokens,):
            raise ScheduleError(
                f"{name} gives a tensor of shape {list(shape)} for {num_tokens} tokens, in which they have no place: "
                f"tiles of it cannot be put together. Train with mlp_tiles = 1."
            )
        outputs.append(_Output(is_flat, shape[1:] if is_flat else shape[len(lead) :], leaf.dtype))
    constants = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return tensors, Layout(structure, tuple(outputs), constants, values.lead)

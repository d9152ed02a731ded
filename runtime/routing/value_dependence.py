"""Which operations have results whose size depends on values, and which choices decide about them.

A mixture of experts that loops over its experts takes the rows of each with ``nonzero`` or a mask, and asks for values
with ``.item()``.  None of this is known by name of a model: torch itself tags such operators.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import torch

from ...shared.observed.observed_inputs import PhaseKey

_READERS: Final = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})
"""Functions that hand the values of a CPU tensor to the program, and run no operator for it."""
_MASKED: Final = frozenset({"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"})
_MASKS: Final = (torch.bool, torch.uint8)


class ValueWatch:
    """Notes the blocks in which an operation's size, or the program itself, depends on values."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        """In which something was seen that may depend on values."""
        self.sized_by_values: set[int] = set()
        """Those of them in which the shape of a tensor does."""

    def note(self, place: PhaseKey | None, operator: Any, args: tuple[Any, ...]) -> None:
        """An operation has run at ``place``."""
        if place is None or not isinstance(place[1], int):
            return
        if has_size_of_values(operator, args):
            self.sized_by_values.add(int(place[1]))
            self.blocks.add(int(place[1]))
        elif reads_values(operator):
            self.blocks.add(int(place[1]))

    def note_function(self, place: PhaseKey | None, function: Any) -> None:
        """A function of torch's was called at ``place``, which may read values behind the back of all operators."""
        if place is not None and isinstance(place[1], int) and getattr(function, "__name__", "") in _READERS:
            self.blocks.add(int(place[1]))


def joined(watches: Iterable[ValueWatch]) -> ValueWatch:
    """What any of ``watches`` noted."""
    found = ValueWatch()
    for watch in watches:
        found.blocks |= watch.blocks
        found.sized_by_values |= watch.sized_by_values
    return found


def has_size_of_values(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether the shape of what ``operator`` gives depends on the values in ``args``."""
    if _name(operator) in _MASKED:
        return any(tensor.dtype in _MASKS for tensor in _indices(args))
    return torch.Tag.dynamic_output_shape in _tags(operator)


def reads_values(operator: Any) -> bool:
    """Whether ``operator`` hands values of tensors to the program (``.item()``, ``.tolist()``)."""
    return torch.Tag.data_dependent_output in _tags(operator)


def _indices(args: tuple[Any, ...]) -> Iterable[torch.Tensor]:
    given = args[1] if len(args) > 1 else ()
    return (one for one in given if isinstance(one, torch.Tensor)) if isinstance(given, (list, tuple)) else ()


@cache
def _name(operator: Any) -> str:
    return str(operator._schema.name).removeprefix("aten::")


@cache
def _tags(operator: Any) -> frozenset[Any]:
    return frozenset(operator.tags)

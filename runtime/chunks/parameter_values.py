"""Where the values of parameters come from when chunks are filled: from the parameters themselves, unless said else.

[Note: Filling chunk by chunk]
A model that is too large for a host never lies there whole: its parameters begin on the meta device, without memory,
and every chunk is filled when it is made.  Values are asked for in *stretches*: scalars of one parameter as they lie in
memory, so that a rank with a part of a chunk asks for the part alone.  All ranks make the same chunks in the same
order.  Each says that it has memory for a chunk before any of them fills it, since one that has not would leave the
others waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from ..model.strides import in_memory_order

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A stretch of one parameter, and where it is to lie."""

    name: str
    parameter: torch.Tensor
    place: torch.Tensor
    """(n,) uninitialised scalars of the parameter's element type."""
    stretches: Sequence[slice] | None = None
    """Which of the parameter's scalars every rank wants, by rank; None: each wants all."""

    def own(self, rank: int) -> slice:
        """The stretch that ``rank`` wants."""
        return slice(0, self.parameter.numel()) if self.stretches is None else self.stretches[rank]


class ParameterValues(Protocol):
    """What fills chunks."""

    def made(self, make: Callable[[], _T]) -> _T:
        """What ``make`` gives, once it has succeeded on all ranks; an error of one of them is raised on all."""
        ...

    def fill(self, wanted: Sequence[Wanted]) -> None:
        """Write what is wanted to its places.  To be called on all ranks, for the same parameters, after ``made``."""
        ...


class OwnValues:
    """Of parameters that have values, in the one process that trains them."""

    def made(self, make: Callable[[], _T]) -> _T:
        """As there is but one rank."""
        return make()

    def fill(self, wanted: Sequence[Wanted]) -> None:
        """Copy it."""
        for one in wanted:
            one.place.copy_(in_memory_order(one.parameter.detach())[one.own(0)])

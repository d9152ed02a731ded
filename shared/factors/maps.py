"""The linear maps of a block, and where a trace's calls of them are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..observed.observation import Observation, OperatorCall
from ..schema.workload import DType

_PRODUCTS = ("mm", "addmm")


@dataclass(frozen=True, slots=True)
class LinearMap:
    """A linear map of m inputs and n outputs."""

    path: str
    num_out: int
    """n"""
    num_in: int
    """m"""
    dtype: DType
    has_bias: bool
    is_transposed: bool
    """Whether its weight is (m, n)."""

    @property
    def weight_bytes(self) -> int:
        """Of the dense weight."""
        return self.num_out * self.num_in * self.dtype.item_bytes

    @property
    def bias_bytes(self) -> int:
        """0 without one."""
        return self.num_out * self.dtype.item_bytes if self.has_bias else 0

    @property
    def looks(self) -> tuple[int, int, bool, DType]:
        """What a trace can tell it from other maps by."""
        return self.num_out, self.num_in, self.has_bias, self.dtype


@dataclass(frozen=True, slots=True)
class Place:
    """The calls [first, end) of one map in one section."""

    first: int
    end: int
    number: int
    """Of the map, among the block's."""
    num_tokens: int
    """t, rows of its input."""


def forward_places(observation: Observation, maps: Sequence[LinearMap]) -> list[Place] | None:
    """Where a forward or recomputation calls the maps, in order; None where that is not clear.

    Of maps that look the same, the first that stands in the block is taken to be called first.
    """
    left = dict(enumerate(maps))
    found: list[Place] = []
    for index, call in enumerate(observation.calls):
        number = next((n for n, each in left.items() if _is_product(call, each)), None)
        if number is not None:
            found.append(Place(index, index + 1, number, call.shape[1]))
            del left[number]
        elif any(_is_product(call, each) for each in maps):
            return None  # a map that is called twice
    return found


def backward_places(
    observation: Observation, maps: Sequence[LinearMap], forward: Sequence[Place]
) -> list[Place] | None:
    """Where a backward has the gradients of the maps, those called last first; None where that is not clear."""
    left = list(forward)
    found: list[Place] = []
    calls, index = observation.calls, 0
    while index < len(calls) - 1:
        pair = calls[index], calls[index + 1]
        place = next((p for p in reversed(left) if _are_gradients(pair, maps[p.number], p.num_tokens)), None)
        if place is None:
            index += 1
            continue
        linear = maps[place.number]
        end = index + 2
        if linear.has_bias:
            if end >= len(calls) or calls[end].name != "sum" or calls[end].writes_bytes != (linear.bias_bytes,):
                return None
            end += 1
        found.append(Place(index, end, place.number, place.num_tokens))
        left.remove(place)
        index = end
    return found if not left else None


def _is_product(call: OperatorCall, linear: LinearMap) -> bool:
    return (
        call.name == _PRODUCTS[linear.has_bias]
        and len(call.shape) == 4
        and call.shape[2:] == (linear.num_out, linear.num_in)
        and call.dtype == linear.dtype
        and call.reads[-1][1] == linear.weight_bytes
    )


def _are_gradients(pair: tuple[OperatorCall, OperatorCall], linear: LinearMap, num_tokens: int) -> bool:
    """Whether two calls make the gradients of a map's weight and input, in either order."""
    if any(call.name != "mm" or len(call.shape) != 4 for call in pair):
        return False
    sizes = (linear.num_in, linear.num_out) if linear.is_transposed else (linear.num_out, linear.num_in)
    of_weight, of_input = (1, *sizes, num_tokens), (1, num_tokens, linear.num_in, linear.num_out)
    # Biased maps have that of the input first.
    wanted = (of_input, of_weight) if linear.has_bias else (of_weight, of_input)
    return tuple(call.shape for call in pair) == wanted

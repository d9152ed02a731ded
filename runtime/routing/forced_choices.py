"""Choices of a mixture of experts made otherwise than its router would: so that few experts have all rows, or all.

[Note: Worst routings]
Of a loop over experts the bytes alive at each moment are a sum over experts: so much for each row of those that are
done, of the one at hand and of those to come, and so much for each expert that has any rows at all.  Such a sum is
highest where the rows are where they count most: as many experts as a row chooses have all of them, before, at or
after the one at hand.  So a few routings are tried: the first experts have everything, or the last, or those in the
middle, or some of both ends; the others have nothing, or a single row each; and all experts have equally many.  The
highest of what these take is the worst ([Note: Envelope] in ``shared/phases/envelope.py``).

[Note: Random branches]
A block may leave parts out at random (stochastic depth, layer drop): it draws a scalar and asks which side of a rate it
is on.  So such scalars are drawn as low and as high as they can be, all of them or every other one.  Where every other
one is high, a block begins otherwise than the one before: where all that learns is left out there is no backward to
see, and blocks that draw once would be left out together.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...shared.observed.observed_inputs import PhaseKey
from .value_dependence import ValueWatch

_PAIRS: Final = frozenset({"topk", "max", "min", "sort"})
"""Operators that give values and their indices along a dim."""
_ALONE: Final = frozenset({"argmax", "argmin", "multinomial"})
"""Those that give indices alone."""


_COMPARISONS: Final = frozenset({"gt", "ge", "lt", "le"})
_DRAWS: Final = frozenset({"rand", "uniform", "uniform_", "bernoulli", "bernoulli_"})
"""Operators that draw from 0 to 1, or between two bounds that follow the tensor."""
_MOST_DRAWS: Final = 32
"""Scalars that one phase is given: a loop that draws until one passes has to end."""


class Routing(StrEnum):
    """Which of the experts rows go to."""

    EVEN = "even"
    FIRST = "first"
    LAST = "last"
    FIRST_OF_ALL = "first of all"
    MIDDLE_OF_ALL = "middle of all"
    LAST_OF_ALL = "last of all"
    ENDS_OF_ALL = "ends of all"


_WITH_NONE: Final = frozenset({Routing.FIRST, Routing.LAST})
"""Routings in which some experts have nothing."""
_HIGH: Final = {
    Routing.EVEN: (True,),
    Routing.FIRST: (False,),
    Routing.LAST: (True,),
    Routing.FIRST_OF_ALL: (False, True),
    Routing.MIDDLE_OF_ALL: (True, False),
    Routing.LAST_OF_ALL: (True,),
    Routing.ENDS_OF_ALL: (False,),
}
"""Which of the scalars that a phase draws are high, in turns."""


class ForcedChoices(TorchDispatchMode):
    """Within it, every choice among several is made as ``routing`` says, in the blocks that ``watch`` names.

    A choice is ``topk``, ``argmax``, ``max`` along a dim, ``multinomial`` or a ``sort`` of floating-point scores, or a
    comparison of such scores with a threshold, which all pass where every expert is to have rows: only where shapes
    depend on values, since elsewhere a loop may run until none passes.  So is a scalar that is drawn at random
    ([Note: Random branches]).  Whoever watches operations does not see what is done here.
    """

    def __init__(self, routing: Routing, watch: ValueWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._routing, self._watch = routing, watch
        self.place: Callable[[], PhaseKey | None] | None = None
        """Where the model is."""
        self.forced: set[int] = set()
        """Blocks in which a choice was forced."""
        self._phase: PhaseKey | None = None
        """That of the latest operation."""
        self._num_drawn = 0
        """Scalars that it has drawn."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The operation, with other indices."""
        result = func(*args, **(kwargs or {}))
        place = self.place() if self.place is not None else None
        if place != self._phase:
            # A recomputation draws what its forward has drawn.
            self._phase, self._num_drawn = place, 0
        if place is None or not isinstance(place[1], int) or place[1] not in self._watch.blocks:
            return result
        with _disable_current_modes():
            block = int(place[1])
            if self._forces_draw(block, func, args, result) or self._forces(block, func, args, kwargs or {}, result):
                self.forced.add(block)
        return result

    def _forces(self, block: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Whether ``result`` is a choice; it is then made as ``routing`` says."""
        if func.overloadpacket.__name__ in _COMPARISONS:
            if block not in self._watch.sized_by_values or not result.dim() or not args[0].is_floating_point():
                return False
            if self._routing not in _WITH_NONE:
                result.fill_(True)
            return True
        indices = _indices_of(func, args, kwargs, result)
        if indices is None:
            return False
        scores = args[0]
        dim = _dim_of(func, args, kwargs) % scores.dim()
        _force(indices, self._routing, dim, scores.shape[dim])
        return True

    def _forces_draw(self, block: int, func: Any, args: tuple[Any, ...], result: Any) -> bool:
        """Whether ``result`` is a scalar that is drawn at random; it is then low or high."""
        name = func.overloadpacket.__name__
        if name not in _DRAWS or not isinstance(result, torch.Tensor) or result.numel() != 1:
            return False
        number = self._num_drawn
        self._num_drawn += 1
        if number >= _MOST_DRAWS:
            return False
        turns = _HIGH[self._routing]
        is_high = turns[(number + block) % len(turns)]
        if name.startswith("bernoulli"):
            result.fill_(1 if is_high else 0)
        else:
            # What is as it is by default comes in neither.
            given: tuple[float, ...] = args[1:3] if name.startswith("uniform") else ()
            low, high = *given, *(0.0, 1.0)[len(given) :]
            result.fill_(_just_below(high, low, result.dtype) if is_high else low)
        return True


def _just_below(high: float, low: float, dtype: torch.dtype) -> float:
    """The largest value of ``dtype`` below ``high``: what is drawn between two bounds never is the upper one."""
    end, start = (torch.tensor(value, dtype=dtype, device="cpu") for value in (high, low))
    return torch.nextafter(end, start).item()


def _indices_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> torch.Tensor | None:
    """The indices of a choice along a dim; None of anything else."""
    name = func.overloadpacket.__name__
    if name in _PAIRS and isinstance(result, tuple) and len(result) == 2:
        indices = result[1]
    elif name in _ALONE and isinstance(result, torch.Tensor):
        indices = result
    else:
        return None
    scores = args[0]
    if not scores.is_floating_point() or not scores.dim() or _dim_of(func, args, kwargs) is None:
        return None
    return indices if indices.dtype is torch.int64 and indices.numel() else None


def _dim_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dim along which ``func`` chooses; None where it is over all elements."""
    if func.overloadpacket.__name__ == "multinomial":
        return -1
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dim":
            given = args[place] if place < len(args) else kwargs.get("dim")
            return argument.default_value if given is None and argument.has_default_value() else given
    return None


def _force(indices: torch.Tensor, routing: Routing, dim: int, num_experts: int) -> None:
    """Write the chosen experts of ``routing`` in place of ``indices``, which lack ``dim`` if one is chosen."""
    is_wide = indices.dim() > dim and indices.shape[dim] <= num_experts
    rows = indices.movedim(dim, -1) if is_wide else indices.unsqueeze(-1)
    num_chosen = rows.shape[-1]
    number = torch.arange(rows[..., 0].numel(), device=indices.device)
    chosen = chosen_experts(routing, number, num_chosen, num_experts)
    rows.copy_(chosen.reshape(rows.shape))


def chosen_experts(routing: Routing, number: torch.Tensor, num_chosen: int, num_experts: int) -> torch.Tensor:
    """(rows, chosen) the experts of rows number ``number`` (rows,)."""
    place = torch.arange(num_chosen, device=number.device)
    if num_chosen == num_experts:
        return _orders(routing, number, place)
    if routing is Routing.EVEN:
        return (number[:, None] * num_chosen + place) % num_experts
    starts = {
        Routing.FIRST: 0,
        Routing.FIRST_OF_ALL: 0,
        Routing.MIDDLE_OF_ALL: (num_experts - num_chosen) // 2,
        Routing.LAST: num_experts - num_chosen,
        Routing.LAST_OF_ALL: num_experts - num_chosen,
    }
    if routing is Routing.ENDS_OF_ALL:
        num_first = (num_chosen + 1) // 2
        heavy = torch.where(place < num_first, place, num_experts - num_chosen + place)
    else:
        heavy = starts[routing] + place
    chosen = heavy.expand(len(number), num_chosen).clone()
    if routing not in _WITH_NONE:
        light = torch.ones(num_experts, dtype=torch.bool, device=number.device)
        light[heavy] = False
        others = light.nonzero()[:, 0][: len(number)]
        chosen[: len(others), 0] = others
    return chosen


def _orders(routing: Routing, number: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """(rows, experts) all experts of each row in the order in which it prefers them."""
    num_experts = len(place)
    if routing in (Routing.LAST, Routing.LAST_OF_ALL):
        place = place.flip(0)
    elif routing is Routing.MIDDLE_OF_ALL:
        place = place.roll(-(num_experts // 2))
    if routing is Routing.EVEN:
        turns = number
    else:
        turns = torch.where(number < (0 if routing in _WITH_NONE else num_experts), number, 0)
    return place[(torch.arange(num_experts, device=number.device) + turns[:, None]) % num_experts]

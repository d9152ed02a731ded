"""Casts of weights that autocast keeps, in a block whose saved activations travel.

[Note: Casts that blocks share]
Autocast casts a float32 weight once and keeps the cast until its own end, so whatever uses the weight uses one cast.
The gradients of all uses then add up in the narrow type before they are widened: other casts, one per use, would add up
in float32 and give other bits.  What autocast keeps therefore stays kept, or a weight that blocks share, or a head that
is used after every block, would be cast anew.

But a cast that is saved for backward is most of what a block of wide weights saves, and it cannot leave the device
while autocast holds it.  The casts of weights that nothing outside the block has are not needed until backward: their
bytes travel, and the tensor that autocast holds gets none instead.  Casts of all other weights stay on the device until
backward, as they do in a block that keeps everything; those of a module that runs several times are such.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import nn


class WeightCasts:
    """The casts that one block makes of its weights, while it runs; ``runs_again``: its module is others too."""

    def __init__(self, model: nn.Module, block: nn.Module, *, runs_again: bool) -> None:
        elsewhere = {id(p) for module in _reached_past(model, block) for p in module.parameters(recurse=False)}
        self._own = set() if runs_again else {id(p) for p in block.parameters()} - elsewhere
        """Parameters that the block alone has."""
        self._found: dict[int, torch.Tensor] = {}
        self._narrow: dict[str, torch.dtype] = {}
        """What autocast casts to on each kind of device, where it keeps casts."""

    def begin(self) -> None:
        """The block is about to run; within its operations nobody can ask autocast any more."""
        self._found.clear()
        self._narrow = {
            kind: torch.get_autocast_dtype(kind)
            for kind in ("cpu", "cuda")
            if torch.is_autocast_cache_enabled() and torch.is_autocast_enabled(kind)
        }

    def stays(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that is saved is the cast of a weight that others may use; notes it if none may."""
        if not self._narrow:
            return False
        cast = tensor._base if tensor._is_view() else tensor
        if cast is None or self._narrow.get(cast.device.type) is not cast.dtype:
            return False
        weight = _weight_of(cast)
        if weight is None:
            return False
        if id(weight) not in self._own:
            return True
        self._found[id(cast)] = cast
        return False

    def forget(self) -> None:
        """Let autocast keep everything as it is."""
        self._found.clear()

    def let_go(self, handed_on: Iterable[int]) -> None:
        """Take their bytes from the casts that autocast alone holds: whoever has saved them has the storages.

        ``handed_on`` are the addresses of storages that the block has returned.
        """
        kept = frozenset(handed_on)
        for cast, holders in zip(self._found.values(), _holders(self._found), strict=True):
            # A model that casts by hand may have put the cast somewhere, to be used again.
            if holders == _holders_of_one() and cast.untyped_storage()._cdata not in kept:
                cast.data = cast.new_empty(0)
        self._found.clear()


def _weight_of(cast: torch.Tensor) -> torch.Tensor | None:
    """The float32 parameter that ``cast`` was made from; None for everything else."""
    node = cast.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    weight: torch.Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return weight if weight is not None and weight.dtype == torch.float32 else None


def _reached_past(module: nn.Module, block: nn.Module) -> Iterator[nn.Module]:
    """The modules that ``module`` has by another way than through ``block``."""
    seen = {block}
    waiting = [module]
    while waiting:
        found = waiting.pop()
        if found not in seen:
            seen.add(found)
            yield found
            waiting.extend(found.children())


def _holders(tensors: dict[int, torch.Tensor]) -> list[tuple[int, int]]:
    """How many references Python has to each, and how many torch has."""
    return [(sys.getrefcount(tensor), tensor._use_count()) for tensor in tensors.values()]  # type: ignore[attr-defined]


@cache
def _holders_of_one() -> tuple[int, int]:
    """What ``_holders`` says of a tensor that torch holds once, and nobody else: versions of torch differ in that."""
    holder = nn.Parameter(torch.zeros(()))
    holder.grad = torch.zeros(())
    return _holders({0: holder.grad})[0]

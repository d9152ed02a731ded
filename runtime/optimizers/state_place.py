"""An optimizer whose masters and state lie in a place of the host that other chunks use in between.

[Note: State in a shared place]
The place is the same memory in every step of the chunk, so weights and state are views of it for good.  What they show
is the chunk's own from the read before a step to the write behind it; in between it is another chunk's.  A tensor gets
its stretch of the place when it is first seen: masters when the chunk is moved in, state when the first step has made
it.  Stretches never move, so the same bytes mean the same in every step.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch

from ...shared.basics.errors import PlanError
from ...shared.basics.units import format_bytes
from ..model.strides import strided

Key = tuple[int, str]
"""A weight's place among those of the chunk, and the name of what is kept for it."""
MASTER: Final = "master"
"""The name of the weight itself, where it is a master."""


class StateRecord(Protocol):
    """Where the content of a place is kept."""

    def read_to_step(self) -> None:
        """Fill the place."""

    def write_stepped(self) -> None:
        """Keep what is in the place."""

    def mapped_state(self) -> mmap.mmap:
        """What is kept, in memory that is read when it is looked at."""


class StatePlace:
    """The stretches of a place, by what lies there."""

    def __init__(self, place: torch.Tensor, record: StateRecord) -> None:
        """``place``: (bytes,) uint8 of the host; ``record``: what fills it and is filled from it."""
        self._place = place
        self.record = record
        self._end = 0
        self._kept: dict[Key, tuple[int, torch.Tensor]] = {}
        """Offset, and the view."""

    def put(self, key: Key, value: torch.Tensor) -> torch.Tensor:
        """A view of the stretch of ``key`` that holds ``value`` now.

        Raises PlanError if the place is too small.
        """
        found = self._kept.get(key)
        if found is None or (found[1].shape, found[1].dtype) != (value.shape, value.dtype):
            found = self._kept[key] = self._new(value)
        found[1].copy_(value)
        return found[1]

    def _new(self, like: torch.Tensor) -> tuple[int, torch.Tensor]:
        item_bytes = like.element_size()
        offset = -(-self._end // item_bytes) * item_bytes
        self._end = offset + like.numel() * item_bytes
        if self._end > len(self._place):
            raise PlanError(
                f"the optimizer keeps {format_bytes(self._end)} for a chunk on the disk, but the plan accounts for "
                f"{format_bytes(len(self._place))}. Choose an optimizer that the plan names, or keep less on the disk "
                f"(n_disk_state)."
            )
        return offset, _view(self._place, offset, like)

    def on_disk(self) -> Callable[[Key], torch.Tensor]:
        """What gives the tensor at each key as it is on the disk, in memory that is read when it is looked at.

        For who is done with it before the chunk is stepped again.  Raises FileError.
        """
        pages = self.record.mapped_state()

        def at(key: Key) -> torch.Tensor:
            offset, like = self._kept[key]
            if not like.numel():
                return torch.empty_like(like)
            flat = torch.frombuffer(pages, dtype=like.dtype, count=like.numel(), offset=offset)
            return strided(flat, like)

        return at

    def has(self, key: Key, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is what lies at ``key``."""
        found = self._kept.get(key)
        return found is not None and found[1] is tensor

    def adopt(self, optimizer: torch.optim.Optimizer, weights: list[torch.Tensor]) -> None:
        """Let tensors that ``optimizer`` has made for ``weights`` lie in the place.

        Maps of 8-bit state, which all tensors share, stay where they are.  Raises PlanError as ``put`` does.
        """
        for number, weight in enumerate(weights):
            state = optimizer.state.get(weight, {})
            made = [name for name, value in state.items() if self._is_made(optimizer, (number, name), value)]
            # Wide elements first, so that nothing is lost between them.
            for name in sorted(made, key=lambda name: -state[name].element_size()):
                state[name] = self.put((number, name), state[name])

    def _is_made(self, optimizer: torch.optim.Optimizer, key: Key, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        maps: Mapping[str, torch.Tensor] = getattr(optimizer, "name2qmap", {})
        if any(value is one for one in maps.values()):
            return False
        return not self.has(key, value)


def _view(place: torch.Tensor, offset_bytes: int, like: torch.Tensor) -> torch.Tensor:
    size_bytes = like.numel() * like.element_size()
    flat = place[offset_bytes : offset_bytes + size_bytes].view(like.dtype)
    return strided(flat, like)

"""An optimizer whose masters and state lie in a place of the host that other chunks use in between.

[Note: State in a shared place]
The place is the same memory in every step of the chunk, so weights and state are views of it for good.  What they show
is the chunk's own from the read before a step to the write behind it; in between it is another chunk's.  A tensor gets
its stretch of the place when it is first seen: masters when the chunk is moved in, state when the first step makes it.
Stretches never move, so the same bytes mean the same in every step.

[Note: State made in its place]
The place lies on the host because there is no memory for more, and the largest tensor's moments are gigabytes.  An
optimizer makes them in its first step with ``zeros_like`` or ``empty_like``, which are answered with stretches of the
place as long as these last.  Values are the same.  If some of them turn out to be no state, the state is copied out and
in again, so that nothing is left between stretches.  State that is made otherwise (small, of the optimizers that plans
name) lies in ordinary memory until it is copied.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch.overrides import TorchFunctionMode

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

    def put(self, key: Key, value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A view of the stretch of ``key`` that holds ``value`` now, in its element type or as ``dtype``.

        Raises PlanError if the place is too small.
        """
        dtype = dtype or value.dtype
        found = self._kept.get(key)
        if found is None or (found[1].shape, found[1].dtype) != (value.shape, dtype):
            found = self._kept[key] = self._new(value, dtype)
        found[1].copy_(value)
        return found[1]

    def _new(self, like: torch.Tensor, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        offset, end = self._next(like, dtype)
        if end > len(self._place):
            raise PlanError(
                f"the optimizer keeps {format_bytes(end)} for a chunk on the disk, but the plan accounts for "
                f"{format_bytes(len(self._place))}. Choose an optimizer that the plan names, or keep less on the disk "
                f"(n_disk_state)."
            )
        self._end = end
        return offset, _view(self._place, offset, like, dtype)

    def _next(self, like: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
        """Begin and end of the next stretch for such a tensor."""
        offset = -(-self._end // dtype.itemsize) * dtype.itemsize
        return offset, offset + like.numel() * dtype.itemsize

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
        self._adopt(optimizer, weights)

    @contextmanager
    def making(self, optimizer: torch.optim.Optimizer, weights: list[torch.Tensor]) -> Iterator[None]:
        """Within the block ``optimizer`` steps ``weights``; state that it makes lies in the place afterwards.

        See [Note: State made in its place].  Raises PlanError as ``put`` does.
        """
        if all(optimizer.state.get(weight) for weight in weights):
            yield
            self._adopt(optimizer, weights)
            return
        begin, made = self._end, _MadeInPlace(self, weights)
        with made:
            yield
        claimed = self._claim(optimizer, weights, made.stretches)
        if len(claimed) < len(made.stretches):
            # Some were no state: nothing may be left between those that are.
            for key in claimed:
                weight, name = weights[key[0]], key[1]
                optimizer.state[weight][name] = optimizer.state[weight][name].clone()
                del self._kept[key]
            self._end = begin
        self._adopt(optimizer, weights)

    def _claim(
        self, optimizer: torch.optim.Optimizer, weights: list[torch.Tensor], stretches: Mapping[int, torch.Tensor]
    ) -> list[Key]:
        """Which of ``stretches``, by their offsets, have become state."""
        offset_of = {id(made): offset for offset, made in stretches.items()}
        found = [
            ((number, name), offset_of[id(value)], value)
            for number, weight in enumerate(weights)
            for name, value in optimizer.state.get(weight, {}).items()
            if id(value) in offset_of
        ]
        self._kept |= {key: (offset, value) for key, offset, value in found}
        return [key for key, _, _ in found]

    def take(self, like: torch.Tensor, dtype: torch.dtype) -> tuple[int, torch.Tensor] | None:
        """The next stretch, with its offset; None if the place has no room for it."""
        return self._new(like, dtype) if self._next(like, dtype)[1] <= len(self._place) else None

    def _adopt(self, optimizer: torch.optim.Optimizer, weights: list[torch.Tensor]) -> None:
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


class _MadeInPlace(TorchFunctionMode):
    """Answers ``zeros_like`` and ``empty_like`` of tensors shaped as weights with stretches of a place."""

    def __init__(self, place: StatePlace, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._place = place
        self._forms = {(weight.shape, weight.stride()) for weight in weights}
        self.stretches: dict[int, torch.Tensor] = {}
        """By offset."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.zeros_like, torch.empty_like) or len(args) != 1:
            return func(*args, **kwargs)
        like: torch.Tensor = args[0]
        if (like.shape, like.stride()) not in self._forms:
            return func(*args, **kwargs)
        device, dtype = torch.device(kwargs.get("device") or like.device), kwargs.get("dtype") or like.dtype
        is_plain = kwargs.get("memory_format") in (None, torch.preserve_format) and device.type == "cpu"
        found = self._place.take(like, dtype) if is_plain and set(kwargs) <= _KNOWN else None
        if found is None:
            return func(*args, **kwargs)
        offset, made = found
        self.stretches[offset] = made
        return made.zero_() if func is torch.zeros_like else made


_KNOWN: Final = frozenset({"dtype", "device", "memory_format"})


def _view(place: torch.Tensor, offset_bytes: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    size_bytes = like.numel() * dtype.itemsize
    flat = place[offset_bytes : offset_bytes + size_bytes].view(dtype)
    return strided(flat, like)

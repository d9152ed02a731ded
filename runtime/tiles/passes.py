"""Loops over tiles that say where each pass begins, to whoever traces them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Listener(Protocol):
    """Who traces loops over tiles."""

    def heard(self, num_tokens: int | None) -> None:
        """A pass over a tile of so many tokens begins, or a loop has ended (None), with the next operation."""

    def have_settled(self) -> bool:
        """Whether another pass of as many tokens as the latest, which has ended, would do the same."""

    def repeat(self, num_passes: int) -> None:
        """So many more passes like the latest are left out."""


_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)
_IS_SPARING: ContextVar[bool] = ContextVar("is_sparing", default=False)


@contextmanager
def passes_heard(listener: Listener) -> Iterator[None]:
    """Within the block, ``listener`` is told of every pass in this thread."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextmanager
def passes_spared() -> Iterator[None]:
    """Within the block, of passes that are heard those do not run of which the listener knows what they would do.

    For tensors without values ([Note: Passes that need not run] in ``shared/observed/alike_passes.py``).
    """
    token = _IS_SPARING.set(True)
    try:
        yield
    finally:
        _IS_SPARING.reset(token)


def in_passes(tiles: Sequence[slice]) -> Iterator[slice]:
    """``tiles``; each of them begins a pass of a loop."""
    listener = _LISTENER.get()
    if listener is None:
        yield from tiles
        return
    number = 0
    while number < len(tiles):
        num_tokens = _length(tiles[number])
        listener.heard(num_tokens)
        yield tiles[number]
        number += 1
        if _IS_SPARING.get() and listener.have_settled():
            others = (place for place, tile in enumerate(tiles[number:], number) if _length(tile) != num_tokens)
            last = next(others, len(tiles)) - 1  # of as many tokens; it runs
            if last > number:
                listener.repeat(last - number)
                number = last
    listener.heard(None)


def _length(tile: slice) -> int:
    return int(tile.stop - tile.start)

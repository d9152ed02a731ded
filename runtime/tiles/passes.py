"""Loops over tiles that say where each pass begins, to whoever traces them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[int | None], None]
"""Gets the tokens of each pass when it begins, and None when the loop has ended."""
_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def passes_heard(listener: Listener) -> Iterator[None]:
    """Within the block, ``listener`` is told of every pass in this thread."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def in_passes(tiles: Iterable[slice]) -> Iterator[slice]:
    """``tiles``; each of them begins a pass of a loop."""
    listener = _LISTENER.get()
    if listener is None:
        yield from tiles
        return
    for tile in tiles:
        listener(tile.stop - tile.start)
        yield tile
    listener(None)

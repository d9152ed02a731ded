"""A progress bar on standard error, for a person who waits; nothing at all when nobody watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

PATIENCE_S: Final = 0.5
"""Work that ends sooner shows no bar."""
_WIDTH: Final = 40
_CLEAR: Final = "\r\033[K"
"""What empties the line of a terminal."""


class OnProgress(Protocol):
    """What long work calls now and then: so much of so much is done, in any unit."""

    def __call__(self, done: float, total: float) -> None:
        """``total`` may grow or shrink while work goes on."""


def no_progress(done: float, total: float) -> None:
    """The report that nobody reads."""


@contextmanager
def progress_bar(description: str) -> Iterator[OnProgress]:
    """A bar that follows the calls of what it yields.

    It is drawn on standard error, only on a terminal and only once the work has taken a while, and goes when the work
    ends, however it ends.
    """
    if not sys.stderr.isatty():
        yield no_progress
        return
    began_s, shown = time.monotonic(), ""

    def show(done: float, total: float) -> None:
        nonlocal shown
        seconds = time.monotonic() - began_s
        if seconds < PATIENCE_S:
            return
        frac = min(1.0, max(0.0, done / total)) if total > 0 else 0.0
        bar = ("━" * round(frac * _WIDTH)).ljust(_WIDTH, "·")
        line = f"{description} {bar} {frac:4.0%} {int(seconds) // 60}:{int(seconds) % 60:02}"
        if line != shown:
            shown = line
            sys.stderr.write(_CLEAR + line)
            sys.stderr.flush()

    try:
        yield show
    finally:
        if shown:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()

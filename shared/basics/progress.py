"""A progress bar on standard error, for a person who waits; nothing at all when nobody watches."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

PATIENCE_S: Final = 0.5
"""Work that ends sooner shows no bar."""
_WIDTH: Final = 40
_TICK_S: Final = 0.25
_CLEAR: Final = "\r\033[K"
"""What empties the line of a terminal."""


_open: Final[list[object]] = []
"""The bars of now: the last one alone speaks unasked."""


def to_stderr(line: object) -> None:
    """Print it where it does not mix with results."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


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
    ends, however it ends.  Until the first call it says by itself that the work goes on: imports alone can take long.
    """
    if not sys.stderr.isatty():
        yield no_progress
        return
    began_s, shown, is_told, writing = time.monotonic(), "", threading.Event(), threading.Lock()

    def draw(done: float, total: float) -> None:
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

    def wait() -> None:
        while not is_told.wait(_TICK_S):
            with writing:
                if not is_told.is_set() and _open[-1:] == [is_told]:
                    draw(0, 1)

    def show(done: float, total: float) -> None:
        with writing:
            is_told.set()
            draw(done, total)

    waiting = threading.Thread(target=wait, name="progress", daemon=True)
    _open.append(is_told)
    waiting.start()
    try:
        yield show
    finally:
        is_told.set()
        waiting.join()
        _open.remove(is_told)
        if shown:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()

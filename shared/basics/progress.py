"""A progress bar on standard error, for a person who waits; nothing at all when nobody watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_S: Final = 0.5
"""Work that ends sooner shows no bar."""


class OnProgress(Protocol):
    """What long work calls now and then: so much of so much is done, in any unit."""

    def __call__(self, done: float, total: float) -> None:
        """``total`` may grow or shrink while work goes on."""


def no_progress(done: float, total: float) -> None:
    """The report that nobody reads."""


@contextmanager
def progress_bar(description: str) -> Iterator[OnProgress]:
    """A bar that follows the calls of what it yields.  It is drawn on standard error, and only on a terminal."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    bar = _DelayedBar(description)
    try:
        yield bar
    finally:
        bar.close()


class _DelayedBar:
    """Imports rich and starts to draw once the work has taken a while."""

    def __init__(self, description: str) -> None:
        self._description = description
        self._began_s = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, done: float, total: float) -> None:
        if self._progress is None:
            if time.monotonic() - self._began_s < PATIENCE_S:
                return
            self._open()
        assert self._progress is not None
        assert self._task is not None
        self._progress.update(self._task, completed=done, total=total)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(self._description, total=None)
        self._progress.start()

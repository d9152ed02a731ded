"""Ctrl-C in the middle of a step: the step is completed first, so that what is saved is whole."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self


class RunInterruptedError(Exception):
    """The user has stopped the run, which is saved."""

    def __init__(self, path: Path, step: int) -> None:
        super().__init__(f"{path} was interrupted after step {step}")
        self.path = path
        """The run's folder."""
        self.step = step
        """Completed steps."""


class Interruption:
    """While it is entered the first Ctrl-C is a wish, and the second one ends the process as always."""

    def __init__(self) -> None:
        self.is_wanted = False
        """Whether the user wants the run to stop."""
        self._before: Any = None

    def __enter__(self) -> Self:
        # Python lets the main thread alone hear signals.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.is_wanted:
            raise KeyboardInterrupt
        self.is_wanted = True

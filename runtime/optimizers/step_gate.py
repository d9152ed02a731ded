"""Whether CPU Adam may begin another step: it may not, once the iteration has been given up."""

from __future__ import annotations

import threading

from ..devices.lanes import Cancelled


class StepGate:
    """Steps begin on a lane, iterations are given up by the compute thread; one of the two comes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[int, int] = {}
        """The latest step of every chunk, by its number."""
        self._first_refused: int | None = None

    def begin(self, chunk: int, number: int) -> None:
        """CPU Adam is about to step ``chunk`` for the iteration ``number``.  Raises Cancelled if that was given up."""
        with self._lock:
            if self._first_refused is not None and number >= self._first_refused:
                raise Cancelled("the iteration was given up")
            self._begun[chunk] = number

    def shut(self, number: int, *, may_have_begun: bool) -> list[int]:
        """Let no step of the iteration ``number`` begin any more; gives the chunks whose step has begun.

        If there are any, and ``may_have_begun`` is false, the gate stays open.
        """
        with self._lock:
            begun = sorted(chunk for chunk, latest in self._begun.items() if latest >= number)
            if may_have_begun or not begun:
                self._first_refused = number
            return begun

    def open(self) -> None:
        """The iteration begins anew."""
        with self._lock:
            self._first_refused = None
            self._begun.clear()

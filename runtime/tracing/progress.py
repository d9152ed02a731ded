"""How far a trace is."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], None]
"""Told how much is done, and of how much."""


def parts_of(report: OnProgress | None, count: int) -> list[OnProgress | None]:
    """Progress of each of ``count`` traces that are alike."""

    def part(number: int) -> OnProgress | None:
        return None if report is None else lambda done, total: report(number * total + done, count * total)

    return [part(number) for number in range(count)]


class Progress:
    """Steps that are done, of ``total``."""

    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self._total, self._done, self._report = total, 0, report

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        if self._report is not None:
            self._report(self._done, self._total)

"""The errors that a user can cause.  Each is one message: fact, values with units, the bound, what to do."""

from __future__ import annotations

import re
from typing import Final

_LONG_WORD: Final = re.compile(r"[^\s/]{256,}")
"""No name of a file is as long, so that paths stay whole."""
_HEAD_CHARACTERS, _TAIL_CHARACTERS = 80, 20
_LONGEST: Final = 5000
"""Characters of a message; the longest path has 4,096."""
_LONGEST_TAIL: Final = 1000


def shortened(message: str) -> str:
    """``message`` with whatever it quotes cut short: very long words, and the middle where it is very long itself.

    What is wrong stands at the head of a message, what to do at its end.
    """
    message = _LONG_WORD.sub(lambda word: _without_middle(word[0], _HEAD_CHARACTERS, _TAIL_CHARACTERS), message)
    return message if len(message) <= _LONGEST else _without_middle(message, _LONGEST - _LONGEST_TAIL, _LONGEST_TAIL)


def _without_middle(text: str, head: int, tail: int) -> str:
    return f"{text[:head]}... ({len(text) - head - tail} more characters) ...{text[-tail:]}"


class ProtwinError(Exception):
    """A mistake that the user can mend.  The command line prints it as one message and exits with code 2."""

    def __init__(self, message: str = "") -> None:
        """``message`` may quote input of any length (``shortened``)."""
        super().__init__(shortened(message))


class FileError(ProtwinError):
    """A file is missing, damaged, foreign, stale or written by a newer version."""


class CatalogueError(ProtwinError):
    """A model or machine that the catalogue does not hold."""


class WorkloadError(ProtwinError):
    """A model or batch that cannot be traced, or a workload that contradicts itself."""


class HardwareError(ProtwinError):
    """A machine description that is impossible or incomplete."""


class PlanError(ProtwinError):
    """A plan that its workload cannot follow."""


class InfeasibleError(PlanError):
    """No plan fits; the message says which limit binds, by how much, and names the closest plan."""


class ScheduleError(ProtwinError):
    """A schedule that the verifier rejects, or a model that leaves its schedule at run time."""


class CalibrationError(ProtwinError):
    """A calibration that does not fit the machine or the data."""


class DeviceOutOfMemoryError(ProtwinError):
    """The device's enforced budget is exceeded."""


class RanksError(ProtwinError):
    """Processes that cannot train together: badly launched, unlike each other, or not there in time."""

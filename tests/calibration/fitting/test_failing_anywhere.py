"""Calibrating leaves a model as it was found, whichever of all the functions that it calls fails.

The interpreter tells of every call; at one of them, drawn by chance, an error is raised in the place of what was
called, on whichever thread that is.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import pytest

import protwin.runtime
from protwin.calibration.fitting import slowdowns
from protwin.shared.basics.errors import ProtwinError
from tests.calibration.fitting.test_budgeted import _begun, measured, subject_of
from tests.runtime.timing.held import Held

_ROOT = Path(protwin.runtime.__file__).parents[1]
_OWN = tuple(f"{_ROOT / folder}/" for folder in ("runtime", "calibration"))
GIVING_BACK = (
    "runtime/timing/as_found.py",
    "runtime/model/snapshot.py",
    "runtime/model/kept_tensors.py",
)
"""Whose work it is that is tested: an error in the middle of giving back is one that nobody can make good."""


_ENDS = frozenset(
    ("__enter__", "__exit__", "__del__", "close", "let_end", "move_out", "remove", "stop", "_forget", "_free_lingering")
)
"""``with`` undoes nothing where what it has been given fails to be entered.  The last two are what the ledger hears of
a storage that goes: nobody above could catch an error."""
_GOING = "MemoryLedger._register.<locals>.<lambda>"
"""Who tells it so, called by the interpreter."""


class _Stop(Exception):
    """Injected."""


@dataclass
class Calls:
    """Of functions of runtime and calibration, in order."""

    stop_at: int = -1
    is_on: bool = True
    number: int = 0
    stopped_in: str = ""
    first: dict[CodeType, int] = field(default_factory=dict)
    """When each function was called first."""
    lock: Any = field(default_factory=threading.Lock)

    def notice(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not self.is_on or not code.co_filename.startswith(_OWN) or not may_fail(frame):
            return
        with self.lock:
            number = self.number = self.number + 1
            self.first.setdefault(code, number)
        if number == self.stop_at:
            self.is_on = False
            self.stopped_in = f"{code.co_filename.removeprefix(str(_ROOT))}:{code.co_qualname}"
            raise _Stop(self.stopped_in)


def may_fail(frame: FrameType | None) -> bool:
    """Whether nobody above is giving something back, or going away with a lane or an object."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in _ENDS or code.co_qualname == _GOING:
            return False
        if code.co_filename.removeprefix(f"{_ROOT}/") in GIVING_BACK:
            return False
        frame = frame.f_back
    return True


@contextmanager
def noticed(calls: Calls) -> Iterator[Calls]:
    """Within the block the interpreter tells ``calls`` of every one, on threads that begin in it too."""
    threading.setprofile(calls.notice)
    sys.setprofile(calls.notice)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def drawn(calls: Calls, chance: random.Random, each: int) -> list[int]:
    """First calls of functions, and any calls at all."""
    firsts = chance.sample(sorted(calls.first.values()), min(each, len(calls.first)))
    return firsts + chance.sample(range(1, calls.number * 9 // 10), each)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("seed", range(3))
def test_everything_is_as_found_whichever_call_fails(seed: int) -> None:
    check(measured, seed, each=4)


def check(work: Callable[[Any], Any], seed: int, each: int) -> None:
    model, optimizer = _begun()
    held = Held.of(model, optimizer)
    subject = subject_of(model)
    # As many calls each time: lanes that are measured take as many as there is time for.
    with patch.object(slowdowns, "measure_slowdowns", lambda *_, **__: ()):
        with noticed(Calls()) as calls:
            work(subject)
        assert held.changed(model, optimizer) == []
        assert len(calls.first) > 200
        raised = 0
        for number in drawn(calls, random.Random(seed), each):
            with noticed(Calls(number)) as failing:
                try:
                    work(subject)
                except (_Stop, ProtwinError):
                    raised += 1
            try:
                changed = held.changed(model, optimizer)
            except ProtwinError as error:
                changed = [str(error)]
            assert changed == [], failing.stopped_in
        assert raised > each

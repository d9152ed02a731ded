"""Searches of machines that take as long as a test wants, for processes that it starts and ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

from protwin.shared.answers.advice import MachineAdvice
from protwin.sim.questions.advise import AdviceRequest, Offer

QUICK = "rtx-4090"
FOLDER = "SLOW_SEARCH_FOLDER"
"""Names the variable with the folder in which every search leaves a file: machine, dot, process."""
SLOW_S = "SLOW_SEARCH_S"
"""Names the variable with the seconds of every search but the quick one."""


def search_one(request: AdviceRequest, asked: Offer, *, cache: Path | None = None) -> MachineAdvice:
    """An answer that is made up, at once for ``QUICK``."""
    hardware = asked.hardware
    (Path(os.environ[FOLDER]) / f"{hardware.name}.{os.getpid()}").touch()
    if hardware.name != QUICK:
        time.sleep(float(os.environ[SLOW_S]))
    return MachineAdvice(hardware_name=hardware.name, price_usd_per_hour=None, reason="made up")


def deaf() -> None:
    """How a searching process must not begin: it does not follow its parent."""

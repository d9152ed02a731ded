"""Making the simulator agree with a machine: measuring it, fitting factors, laying predictions over measurements.

Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fitting.calibrate import calibrate
    from .fitting.fit import Pair, fit_calibration
    from .fitting.slowdowns import measure_slowdowns

_HOMES = {
    "Pair": "fitting.fit",
    "calibrate": "fitting.calibrate",
    "fit_calibration": "fitting.fit",
    "measure_slowdowns": "fitting.slowdowns",
}

__all__ = ["Pair", "calibrate", "fit_calibration", "measure_slowdowns"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)

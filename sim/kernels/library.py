"""The compiled library, where there is one.

``setup.py`` builds it where there is a C compiler.  Where there is none, or where ``PROTWIN_KERNELS`` is 0 in the
environment, numpy does the same, with the same results up to rounding.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_double, c_int, c_int64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

SWITCH: Final = "PROTWIN_KERNELS"
_VERSION: Final = 4
"""``PROTWIN_KERNELS_VERSION`` in ``lanes.h``."""


class ReplayedLanes(Structure):
    """``struct replayed`` in ``lanes.h``."""

    _fields_ = [
        ("num_lanes", c_int64),
        ("lengths", c_void_p),
        ("waits", c_void_p),
        ("seconds", c_void_p),
        ("slowdowns", c_void_p),
        ("num_iterations", c_int64),
        ("steady_frac", c_double),
    ]


class OrderedLanes(Structure):
    """``struct ordered`` in ``lanes.h``."""

    _fields_ = [
        ("num_depths", c_int64),
        ("num_lanes", c_int64),
        ("lengths", c_void_p),
        ("waits", c_void_p),
        ("known", c_void_p),
    ]


class BoundedPlans(Structure):
    """``struct bounded`` in ``lanes.h``."""

    _fields_ = [
        ("num_plans", c_int64),
        ("num_lanes", c_int64),
        ("num_rows", c_int64),
        ("rooms", c_void_p),
        ("lengths", c_void_p),
        ("waits", c_void_p),
        ("known", c_void_p),
        ("seconds", c_void_p),
        ("compute_s", c_void_p),
        ("num_left_out", c_void_p),
        ("repeats", c_void_p),
        ("cuts", c_void_p),
        ("extremes", c_void_p),
        ("num_extremes", c_int64),
        ("num_vertices", c_int64),
        ("num_pairs", c_int64),
        ("weights", c_void_p),
        ("pairs", c_void_p),
        ("ratios", c_void_p),
        ("slack", c_void_p),
        ("spread", c_void_p),
        ("tie_frac", c_double),
        ("bounds_s", c_void_p),
    ]


class Allocated(Structure):
    """``struct allocated`` in ``allocator.h``."""

    _fields_ = [
        ("reserved_bytes", c_int64),
        ("allocated_bytes", c_int64),
        ("peak_reserved_bytes", c_int64),
        ("peak_allocated_bytes", c_int64),
        ("num_retries", c_int64),
        ("wanted_bytes", c_int64),
    ]


def is_available() -> bool:
    """Whether the compiled functions are there, and wanted."""
    return library() is not None


def library() -> ctypes.CDLL | None:
    """The compiled functions; None where numpy does their work."""
    return None if os.environ.get(SWITCH) == "0" else _loaded()[0]


def description() -> str:
    """Which of the two does the work, and why."""
    if os.environ.get(SWITCH) == "0":
        return f"numpy ({SWITCH} is 0)"
    return _loaded()[1]


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    folder = Path(__file__).parent
    found = next((path for suffix in EXTENSION_SUFFIXES if (path := folder / f"_lanes{suffix}").exists()), None)
    if found is None:
        return None, "numpy (the installation found no C compiler: install protwin again where there is one)"
    try:
        loaded = ctypes.CDLL(str(found))
        version = loaded.protwin_kernels_version()
    except (OSError, AttributeError) as error:
        return None, f"numpy ({found.name} cannot be loaded: {error})"
    if version != _VERSION:
        return None, f"numpy ({found.name} has version {version}, not {_VERSION}: install protwin again)"
    loaded.protwin_replay.argtypes = (POINTER(ReplayedLanes), POINTER(c_double))
    loaded.protwin_ends.argtypes = (POINTER(ReplayedLanes), c_void_p, c_void_p)
    loaded.protwin_known_before.argtypes = (POINTER(OrderedLanes),)
    loaded.protwin_least_periods.argtypes = (POINTER(BoundedPlans),)
    loaded.protwin_allocator_new.argtypes = (c_int64, c_int)
    loaded.protwin_allocator_play.argtypes = (c_void_p, c_int64, c_void_p, POINTER(Allocated))
    loaded.protwin_allocator_free.argtypes = (c_void_p,)
    for function in (
        *(loaded.protwin_replay, loaded.protwin_known_before, loaded.protwin_least_periods),
        *(loaded.protwin_ends, loaded.protwin_allocator_play),
    ):
        function.restype = c_int
    loaded.protwin_allocator_new.restype = c_void_p
    loaded.protwin_allocator_free.restype = None
    return loaded, f"compiled ({found.name})"

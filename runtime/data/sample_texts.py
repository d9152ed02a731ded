"""Texts that are unlike each other and that every Python installation has, or that a seed makes: for demonstrations."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import difflib
import enum
import inspect
import pathlib
import tarfile
from typing import Final

import numpy as np

from ...shared.basics.errors import FileError

_MODULES: Final = (argparse, dataclasses, datetime, difflib, enum, inspect, pathlib, tarfile)
_LARGEST: Final = 1000
"""Summands are below it."""


def library_source() -> bytes:
    """The source of a few modules of the standard library.  Raises FileError if it is not installed."""
    try:
        return "\n\n".join(inspect.getsource(module) for module in _MODULES).encode()
    except OSError as error:
        raise FileError(f"the standard library's source cannot be read: {error}. Install it with Python.") from error


def sums(num_lines: int, seed: int) -> bytes:
    """Lines such as ``12+345=357``, of summands below 1000."""
    summands = np.random.default_rng(seed).integers(0, _LARGEST, (num_lines, 2)).tolist()
    return "".join(f"{one}+{other}={one + other}\n" for one, other in summands).encode()

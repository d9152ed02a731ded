"""Text to quantities and back.  Inside the program a quantity is a bare number; its unit is in its name."""

from __future__ import annotations

import math
import re
from typing import Final

from .errors import ProtwinError

_BYTE_UNITS: Final[dict[str, int]] = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_QUANTITY: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*(/\s*s)?\s*")


def parse_bytes(text: str | int | float) -> int:
    """Bytes from ``"80GiB"``, ``"1.5 GB"``, ``"4096"`` or a number.

    A bare number is bytes.  Raises ProtwinError if the text is no positive, finite size of whole bytes.
    """
    value, unit = _split(text, rate=False)
    size_bytes = value * _BYTE_UNITS[unit]
    if not 1 <= size_bytes < 2**62:
        raise ProtwinError(f"size {text!r} is outside 1 B to 4 EiB. Write a size such as 80GiB.")
    return round(size_bytes)


def parse_bytes_per_s(text: str | int | float) -> float:
    """Bytes per second from ``"64 GB/s"`` or a number.  Raises ProtwinError if not positive and finite."""
    value, unit = _split(text, rate=True)
    rate = value * _BYTE_UNITS[unit]
    if not 0 < rate < math.inf:
        raise ProtwinError(f"bandwidth {text!r} is not positive and finite. Write one such as 64GB/s.")
    return float(rate)


def _split(text: str | int | float, *, rate: bool) -> tuple[float, str]:
    example = "64GB/s" if rate else "80GiB"
    if isinstance(text, bool):
        raise ProtwinError(f"{text!r} is no quantity. Write one such as {example}.")
    if isinstance(text, int | float):
        if not math.isfinite(text):
            raise ProtwinError(f"{text!r} is not finite. Write a quantity such as {example}.")
        return float(text), "B"
    match = _QUANTITY.fullmatch(text)
    if match is None or (match[3] is not None and not rate):
        raise ProtwinError(f"{text!r} is no quantity. Write one such as {example}.")
    unit = match[2] or "B"
    if unit not in _BYTE_UNITS:
        raise ProtwinError(f"{text!r} has the unknown unit {unit!r}; known are {', '.join(_BYTE_UNITS)}.")
    return float(match[1]), unit


def format_bytes(size_bytes: float) -> str:
    """``"3.1 GiB"``; binary units, three significant digits or fewer."""
    magnitude = abs(size_bytes)
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if magnitude >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """``"12.3 ms"``; the unit that leaves one to three digits before the point."""
    magnitude = abs(seconds)
    if magnitude >= 1 or magnitude == 0:
        return f"{seconds:.4g} s"
    if magnitude >= 1e-3:
        return f"{seconds * 1e3:.4g} ms"
    return f"{seconds * 1e6:.4g} µs"


def format_rate(bytes_per_s: float) -> str:
    """``"25.2 GB/s"``; decimal units, as data sheets state links."""
    for unit, scale in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_s >= scale:
            return f"{bytes_per_s / scale:.4g} {unit}"
    return f"{bytes_per_s:.4g} B/s"

"""Text to quantities and back.  Inside the program a quantity is a bare number; its unit is in its name."""

from __future__ import annotations

import math
import re
from fractions import Fraction
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
_QUANTITY: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)([eE][+-]?[0-9]+)?\s*([A-Za-z]*)\s*(/\s*s)?\s*")
_LARGEST: Final = Fraction(10) ** 30
"""Nothing that is measured in bytes comes near it."""
_LONGEST: Final = 100
"""Characters of a quantity; longer ones are mistakes that would take long to read exactly."""


def parse_bytes(text: str | int | float, *, least_bytes: int = 1) -> int:
    """Bytes from ``"80GiB"``, ``"1.5 GB"``, ``"4096"`` or a number.

    A bare number is bytes; fractions of a byte are rounded.  Raises ProtwinError if the text is no size from
    ``least_bytes`` to 4 EiB.
    """
    value, unit = _split(text, rate=False)
    size_bytes = value * _BYTE_UNITS[unit]
    if size_bytes < least_bytes or round(size_bytes) >= 2**62:
        raise ProtwinError(f"size {_shown(text)} is outside {least_bytes} B to 4 EiB. Write a size such as 80GiB.")
    return round(size_bytes)


def parse_bytes_per_s(text: str | int | float) -> float:
    """Bytes per second from ``"64 GB/s"`` or a number.  Raises ProtwinError if not positive and finite."""
    value, unit = _split(text, rate=True)
    rate = value * _BYTE_UNITS[unit]
    if not 0 < rate <= _LARGEST:
        raise ProtwinError(f"bandwidth {_shown(text)} is not positive and finite. Write one such as 64GB/s.")
    return float(rate)


def _split(text: str | int | float, *, rate: bool) -> tuple[Fraction, str]:
    """The number, exactly, and its unit.  What is far too large becomes ``2 * _LARGEST``."""
    example = "64GB/s" if rate else "80GiB"
    if isinstance(text, bool):
        raise ProtwinError(f"{text!r} is no quantity. Write one such as {example}.")
    if isinstance(text, int):
        return Fraction(text), "B"
    if isinstance(text, float):
        if not math.isfinite(text):
            raise ProtwinError(f"{text!r} is not finite. Write a quantity such as {example}.")
        return Fraction(text), "B"
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None or (match[4] is not None and not rate):
        raise ProtwinError(f"{_shown(text)} is no quantity. Write one such as {example}.")
    unit = match[3] or "B"
    if unit not in _BYTE_UNITS:
        meant = [known for known in _BYTE_UNITS if known.casefold() == unit.casefold()]
        asked = f" Did you mean {match[1]}{match[2] or ''}{meant[0]}{'/s' if match[4] else ''}?" if meant else ""
        raise ProtwinError(
            f"{_shown(text)} has the unknown unit {_shown(unit)}; known are {', '.join(_BYTE_UNITS)}.{asked}"
        )
    digits = match[1].rstrip(".") + (match[2] or "")
    # An exact number with a huge exponent would fill the memory.
    magnitude = float(digits)
    if magnitude > _LARGEST:
        return 2 * _LARGEST, unit
    return (Fraction(digits) if magnitude > 0 else Fraction(0)), unit


def _shown(text: str | int | float) -> str:
    """``text`` for a message, cut short."""
    if isinstance(text, int) and abs(text) > _LARGEST:
        return "of more than 30 digits"
    return f"{text!r:.40}"


def format_bytes(size_bytes: float) -> str:
    """``"3.1 GiB"``; binary units, four significant digits or fewer."""
    magnitude = abs(size_bytes)
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if magnitude >= scale:
            return f"{_digits(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def format_enough_bytes(size_bytes: int) -> str:
    """As ``format_bytes``, but never less than ``size_bytes``: what it says, typed in, is enough."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            digits = max(0, 4 - len(str(size_bytes // scale)))
            parts = 10**digits
            whole, rest = divmod(-(-size_bytes * parts // scale), parts)
            decimals = f"{rest:0{digits}}".rstrip("0")
            return f"{whole}{'.' if decimals else ''}{decimals} {unit}"
    return f"{size_bytes} B"


def format_seconds(seconds: float) -> str:
    """``"12.3 ms"``; the unit that leaves one to three digits before the point."""
    magnitude = abs(seconds)
    if magnitude >= 1 or magnitude == 0:
        return f"{_digits(seconds)} s"
    if magnitude >= 1e-3:
        return f"{_digits(seconds * 1e3)} ms"
    return f"{_digits(seconds * 1e6)} µs"


def format_rate(bytes_per_s: float) -> str:
    """``"25.2 GB/s"``; decimal units, as data sheets state links."""
    for unit, scale in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= scale:
            return f"{_digits(bytes_per_s / scale)} {unit}"
    return f"{_digits(bytes_per_s)} B/s"


def format_number(value: float) -> str:
    """``"17,360"`` or ``"267.2"``: whole and with commas from a thousand on, else four significant digits."""
    return f"{value:.4g}" if abs(value) < 999.95 else f"{value:,.0f}"


def _digits(value: float) -> str:
    """Four significant digits, without an exponent for large numbers."""
    return f"{value:.4g}" if abs(value) < 999.95 else f"{value:.0f}"

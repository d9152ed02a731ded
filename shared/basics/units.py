"""Text to quantities and back.  Inside the program a quantity is a bare number; its unit is in its name."""

from __future__ import annotations

import math
import re
from decimal import Context, Decimal
from typing import Final

from .errors import ProtwinError

_BYTE_UNITS: Final[dict[str, int]] = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "EB": 10**18,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
    "EiB": 2**60,
}
_QUANTITY: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)([eE][+-]?[0-9]+)?\s*([A-Za-z]*)\s*(/\s*s)?\s*")
_DURATION: Final = re.compile(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))([eE][+-]?[0-9]{1,4})?\s*([A-Za-zµμ]*)\s*")
_SECOND_UNITS: Final = {"": 0, "s": 0, "ms": -3, "us": -6, "µs": -6, "μs": -6, "ns": -9}
"""Powers of ten; the micro sign and the Greek letter look alike."""
_COUNT: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)([eE][+-]?[0-9]{1,3})?\s*([kKmMbBgGtT]?)\s*")
_COUNT_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_MOST_COUNTED: Final = 10**18
_TOKENS: Final = re.compile(r"\s*([0-9]{1,20})\s*([kKmM]?)\s*", re.ASCII)
_TOKEN_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20}
"""Lengths of sequences are counted in powers of two: 8k are 8,192 tokens."""
_EXACT: Final = Context(prec=40, traps=[])
"""Numbers of up to 40 digits are exact, and those that are far too large are infinite: neither takes time."""
_END_BYTES: Final = 2**62
"""Sizes are below it, 4 EiB."""


def parse_bytes(text: str | int | float, *, least_bytes: int = 1) -> int:
    """Bytes from ``"80GiB"``, ``"1.5 GB"``, ``"4096"`` or a number.

    A bare number is bytes; fractions of a byte are rounded.  Raises ProtwinError if the text is no size from
    ``least_bytes`` to 4 EiB.
    """
    size = _parsed(text, example="80GiB")
    if not least_bytes <= size < _END_BYTES - Decimal("0.5"):
        raise ProtwinError(f"size {_shown(text)} is outside {least_bytes} B to 4 EiB. Write a size such as 80GiB.")
    return round(size)


def as_bytes(size: int | str) -> int:
    """Bytes of a size as Python code states it: a number, or text such as ``"50MiB"``.  Raises ProtwinError."""
    return parse_bytes(size) if isinstance(size, str) else size


def parse_count(text: str) -> int:
    """A number of things from ``"1B"``, ``"300M"``, ``"2e9"`` or ``"1_000"``; k, M, B (or G) and T are powers of 1000.

    Fractions are rounded.  Raises ProtwinError if the text is no number from 1 to a quintillion (1e18).
    """
    match = _COUNT.fullmatch(text.replace("_", "").replace(",", ""))
    if match is None:
        raise ProtwinError(f"{_shown(text)} is no number. Write one such as 300M, 1B or 2e9.")
    scale = _COUNT_UNITS[match[3].upper()]
    count = _EXACT.multiply(_EXACT.create_decimal(match[1] + (match[2] or "")), scale)
    if not Decimal("0.5") <= count <= _MOST_COUNTED:
        raise ProtwinError(f"{_shown(text)} is outside 1 to 1e18. Write a number such as 300M, 1B or 2e9.")
    return max(1, round(count))


def parse_tokens(text: str) -> int | None:
    """Tokens of a sequence from ``"2048"`` or ``"8k"``, which is 8 x 1,024; M is 1,024 k.  None if it is no number."""
    match = _TOKENS.fullmatch(text)
    return None if match is None else int(match[1]) * _TOKEN_UNITS[match[2].upper()]


def parse_bytes_per_s(text: str | int | float) -> float:
    """Bytes per second from ``"64 GB/s"`` or a number.  Raises ProtwinError if not positive and finite."""
    rate = float(_parsed(text, example="64GB/s"))
    if not 0 < rate < math.inf:
        raise ProtwinError(f"bandwidth {_shown(text)} is not positive and finite. Write one such as 64GB/s.")
    return rate


def parse_seconds(text: str | int | float) -> float:
    """Seconds from ``"5us"``, ``"1.5 ms"``, ``"5e-6"`` or a number.

    Raises ProtwinError if the text is no duration; which durations make sense is for the caller to say.
    """
    if not isinstance(text, str):
        return float(text)
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ProtwinError(f"{_shown(text)} is no duration. Write one such as 5us.")
    if match[3] not in _SECOND_UNITS:
        raise ProtwinError(
            f"{_shown(text)} has the unknown unit {_shown(match[3])}; known are "
            f"{', '.join(unit for unit in _SECOND_UNITS if unit.isascii() and unit)}."
        )
    number = _EXACT.create_decimal(match[1] + (match[2] or ""))
    return float(_EXACT.scaleb(number, _SECOND_UNITS[match[3]]))


def _parsed(text: str | int | float, *, example: str) -> Decimal:
    """Bytes, or bytes per second where ``example`` is a rate."""
    if isinstance(text, bool):
        raise ProtwinError(f"{text!r} is no quantity. Write one such as {example}.")
    if not isinstance(text, str):
        if isinstance(text, float) and not math.isfinite(text):
            raise ProtwinError(f"{text!r} is not finite. Write a quantity such as {example}.")
        return Decimal(text)
    match = _QUANTITY.fullmatch(text)
    if match is None or (match[4] is not None and "/" not in example):
        raise ProtwinError(f"{_shown(text)} is no quantity. Write one such as {example}.")
    unit = match[3] or "B"
    if unit not in _BYTE_UNITS:
        meant = [known for known in _BYTE_UNITS if known.casefold() == unit.casefold()][:1]
        # "24G" of other tools is one or the other.
        meant = meant or [known for known in _BYTE_UNITS if known in (f"{unit.upper()}B", f"{unit.upper()}iB")]
        named = " or ".join(f"{match[1]}{match[2] or ''}{known}{'/s' if match[4] else ''}" for known in meant)
        asked = f" Did you mean {named}?" if meant else ""
        raise ProtwinError(
            f"{_shown(text)} has the unknown unit {_shown(unit)}; known are {', '.join(_BYTE_UNITS)}.{asked}"
        )
    return _EXACT.multiply(_EXACT.create_decimal(match[1] + (match[2] or "")), _BYTE_UNITS[unit])


def _shown(text: str | int | float) -> str:
    """``text`` for a message; whole numbers may have more digits than Python writes."""
    return f"{text!r}" if isinstance(text, str) else f"{Decimal(text):.6g}"


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


def format_duration(seconds: float) -> str:
    """``"3.2 h"`` or ``"12.5 days"``; as ``format_seconds`` below a minute."""
    for unit, scale in (("days", 2 * 86_400), ("h", 3600), ("min", 60)):
        if seconds >= scale:
            return f"{format_number(seconds / (86_400 if unit == 'days' else scale))} {unit}"
    return format_seconds(seconds)


def format_count(count: int) -> str:
    """``"8.03B"`` or ``"124M"``, as models are named: three digits and a power of 1000; whole below a thousand."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        # What would be rounded up to a thousand of a unit is one of the next.
        if count >= scale * 0.9995:
            return f"{count / scale:.3g}{unit}"
    return str(count)


def format_rate(bytes_per_s: float) -> str:
    """``"25.2 GB/s"``; decimal units, as data sheets state links."""
    for unit, scale in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= scale:
            return f"{_digits(bytes_per_s / scale)} {unit}"
    return f"{_digits(bytes_per_s)} B/s"


def format_flop_per_s(flop_per_s: float) -> str:
    """``"71 TFLOP/s"``; the decimal unit that leaves a number of at least one."""
    for unit, scale in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if flop_per_s >= scale:
            return f"{flop_per_s / scale:.4g} {unit}"
    return f"{flop_per_s:.4g} FLOP/s"


def format_number(value: float) -> str:
    """``"17,360"`` or ``"267.2"``: whole and with commas from a thousand on, else four significant digits."""
    return f"{value:.4g}" if abs(value) < 999.95 else f"{value:,.0f}"


def _digits(value: float) -> str:
    """Four significant digits, without an exponent for large numbers."""
    return f"{value:.4g}" if abs(value) < 999.95 else f"{value:.0f}"


def counted(number: int, what: str) -> str:
    """``1 sample``, ``4 samples``."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")

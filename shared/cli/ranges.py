"""Several numbers in one option: a list, or a range that doubles or goes in steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import typer

from ..basics.errors import ProtwinError
from ..basics.units import parse_tokens

_LARGEST: Final = 10**9
_MOST: Final = 1000
"""Numbers in one option."""
_FORMS: Final = "Write 2048:131072, which doubles from the first to the last, 1024:8192:1024 in steps, or 1,2,4."


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of one option, ascending, each once."""

    values: tuple[int, ...]


def whole_number(word: str) -> int | None:
    """A whole number of at most 20 digits; None if it is none."""
    word = word.strip()
    return int(word) if word.isascii() and word.isdecimal() and len(word) <= 20 else None


def parse_numbers(text: str, number: Callable[[str], int | None] = whole_number) -> Numbers:
    """The numbers of ``2048:131072``, ``1024:8192:1024``, ``1,2,4`` or ``8``, ascending, each once.

    ``A:B`` doubles A as long as it stays below B, and ends with B.  ``A:B:STEP`` adds the step as long as that leaves
    no more than B.  ``number`` reads each of them, and gives None of what is none.  Raises ProtwinError if the text is
    nothing of these, if a range is reversed, if a number is outside 1 to a billion, or if there are too many.
    """
    parts = [_parsed(part, text, number) for part in text.split(",")]
    found = sorted({at for part in parts for at in part})
    if len(found) > _MOST:
        raise ProtwinError(f"{text!r:.60} has more than {_MOST:,} numbers. Use larger steps.")
    return Numbers(tuple(found))


def numbers_option(text: str) -> Numbers:
    """The numbers of an option's value; raises typer.BadParameter, which names the option."""
    try:
        return parse_numbers(text)
    except ProtwinError as error:
        raise typer.BadParameter(str(error)) from error


def lengths_option(text: str) -> Numbers:
    """As ``numbers_option``, of tokens of a sequence: 8k is 8,192."""
    try:
        return parse_numbers(text, parse_tokens)
    except ProtwinError as error:
        raise typer.BadParameter(str(error)) from error


def _parsed(part: str, text: str, read: Callable[[str], int | None]) -> list[int]:
    """The numbers between two commas; no more than one beyond the most."""
    ends = [_number(word, text, read) for word in part.split(":")]
    if len(ends) == 1:
        return ends
    if len(ends) > 3:
        raise ProtwinError(f"{text!r:.60} is no range: it has {len(ends)} ends. {_FORMS}")
    low, high = ends[:2]
    if low > high:
        raise ProtwinError(f"{text!r:.60} runs from {low:,} down to {high:,}. Write {high}:{low}.")
    if len(ends) == 3:
        return list(range(low, high + 1, ends[2])[: _MOST + 1])
    found = [low]
    while found[-1] * 2 < high:
        found.append(found[-1] * 2)
    return found if found[-1] == high else [*found, high]


def _number(word: str, text: str, read: Callable[[str], int | None]) -> int:
    word = word.strip()
    if (number := read(word)) is None:
        what = f"{word!r:.30}, which is no whole number" if word else "nothing where a number should be"
        raise ProtwinError(f"{text!r:.60} has {what}. {_FORMS}")
    if not 1 <= number <= _LARGEST:
        raise ProtwinError(f"{text!r:.60} has {number:,}, outside 1 to {_LARGEST:,}. {_FORMS}")
    return number

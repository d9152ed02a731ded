"""Text for streams that cannot show all of Unicode: a character that is missing becomes plain ones that read alike."""

from __future__ import annotations

import codecs
import json
import unicodedata
from typing import Final

PLAIN: Final = "protwin.plain"
"""Name of the error handler (of ``codecs``) that writes plain characters."""
ESCAPED: Final = "protwin.json"
"""Name of the error handler that writes ``\\uXXXX``, which is the same text in JSON and in strings of TOML."""

_ALIKE: Final = {
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{EM DASH}": "-",
    "\N{HYPHEN}": "-",
    "\N{NON-BREAKING HYPHEN}": "-",
    "\N{MICRO SIGN}": "u",
    "\N{GREEK SMALL LETTER MU}": "u",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{PLUS-MINUS SIGN}": "+-",
    "\N{MIDDLE DOT}": ".",
    "\N{BULLET}": "*",
    "\N{RIGHTWARDS ARROW}": "->",
    "\N{LEFTWARDS ARROW}": "<-",
    "\N{UPWARDS ARROW}": "^",
    "\N{DOWNWARDS ARROW}": "v",
    "\N{BLACK LEFT-POINTING TRIANGLE}": "<",
    "\N{BLACK RIGHT-POINTING TRIANGLE}": ">",
    "\N{LESS-THAN OR EQUAL TO}": "<=",
    "\N{GREATER-THAN OR EQUAL TO}": ">=",
    "\N{ALMOST EQUAL TO}": "~",
    "\N{LEFT SINGLE QUOTATION MARK}": "'",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{LEFT DOUBLE QUOTATION MARK}": '"',
    "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
}
_UNKNOWN: Final = "?"


def plain(text: str, encoding: str) -> str:
    """``text`` with what ``encoding`` cannot say in plain characters; equal if it can say all."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(character if _can(character, encoding) else _alike(character) for character in text)
    return text


def _can(character: str, encoding: str) -> bool:
    try:
        character.encode(encoding, "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _alike(character: str) -> str:
    """ASCII that reads like ``character``: a stated one, a line, the letter without its accent, or a question mark."""
    if character in _ALIKE:
        return _ALIKE[character]
    name = unicodedata.name(character, "")
    if name.startswith("BOX DRAWINGS"):
        sides = {"UP", "DOWN", "LEFT", "RIGHT", "VERTICAL", "HORIZONTAL"} & set(name.split())
        return {frozenset({"HORIZONTAL"}): "-", frozenset({"VERTICAL"}): "|"}.get(frozenset(sides), "+")
    if name.endswith("BLOCK"):
        return "#"
    letters = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return letters or _UNKNOWN


def _plain_error(error: UnicodeError) -> tuple[str | bytes, int]:
    """A ``codecs`` error handler.  Bytes of a file's name that were no text come out as they went in."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return _alike(character), error.start + 1


def _escaped_error(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error(PLAIN, _plain_error)
codecs.register_error(ESCAPED, _escaped_error)

"""Standard output and standard error, in whatever encoding they are."""

from __future__ import annotations

import io
import sys
from typing import Final

from ..basics.plain_text import ESCAPED, PLAIN

_UNASKED: Final = {"stdout": ("strict", "surrogateescape"), "stderr": ("backslashreplace",)}
"""How Python deals with characters that a stream cannot show, unless PYTHONIOENCODING names something else."""


def show_plain_characters() -> None:
    """Let both streams show plain characters in the place of those that their encoding has not.

    Encodings of terminals, pipes and files are settled outside (PYTHONIOENCODING, the locale).  What the user asked
    to be done with such characters (``ascii:replace``) is done.
    """
    for name, unasked in _UNASKED.items():
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.errors in unasked:
            stream.reconfigure(errors=PLAIN)


def say(text: str = "") -> None:
    """Print a line on standard output at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_data(text: str) -> None:
    """Print JSON, or TOML whose strings alone hold what is not ASCII: what the encoding has not is escaped there."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, ESCAPED).decode(encoding))

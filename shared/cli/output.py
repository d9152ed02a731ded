"""What a command prints: tables for people, coloured on a terminal alone, or one JSON document for programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..basics.errors import FileError
from ..basics.plain_text import PLAIN, plain
from .streams import write_data

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..basics.documents import Document
    from ..tables.table import Parts

STANDARD_OUTPUT: Final = Path("-")
"""What ``--output`` calls standard output."""


def is_standard_output(output: Path | None) -> bool:
    """Whether the result of a command goes to standard output, which then shows no tables."""
    return output == STANDARD_OUTPUT


def check_standard_output(outputs: Mapping[str, Path | None], *, as_json: bool) -> None:
    """Make sure that standard output gets one thing.

    Raises FileError if ``--json`` writes there besides, or if an option other than ``--output`` names it.
    """
    for option, path in outputs.items():
        if is_standard_output(path) and option != "--output":
            raise FileError(f"{option} - is not possible: --output alone can be standard output. Name a file.")
        if is_standard_output(path) and as_json:
            raise FileError("--output - and --json both write to standard output. Name a file, or leave one out.")


def save(found: Document, output: Path | None) -> None:
    """Write a document to ``output``, standard output included; nothing if there is none.  Raises FileError."""
    if is_standard_output(output):
        write_data(found.to_json())
    elif output is not None:
        found.save(output)


def give(found: Document, output: Path | None, *, as_json: bool, tables: Callable[[], Parts]) -> None:
    """Write what a command found to ``output``, if that is asked for, and print it: as JSON, or as ``tables``."""
    save(found, output)
    tell(found, output, as_json=as_json, tables=tables)


def tell(found: Document, output: Path | None, *, as_json: bool, tables: Callable[[], Parts]) -> None:
    """Print what a command found: as JSON, or as ``tables``; nothing where ``output`` is standard output."""
    if as_json:
        write_data(found.to_json())
    elif not is_standard_output(output):
        show(tables())


def show(tables: Parts) -> None:
    """Print tables; where standard output is no terminal, plain text that does not depend on it."""
    from ..tables.table import in_words_of

    encoding = sys.stdout.encoding
    if sys.stdout.errors == PLAIN:
        tables = in_words_of(tables, lambda text: plain(text, encoding))
    if sys.stdout.isatty():
        from rich.console import Console

        from ..tables.terminal import Printed, least_width

        console = Console(highlight=False)
        # Lines that are wider than the terminal run over; rich would cut them.
        console.width = max(console.width, least_width(tables))
        console.print(Printed(tables))
        return
    from ..tables.terminal import as_text

    sys.stdout.write(as_text(tables))

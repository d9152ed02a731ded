"""What a command prints: tables for people, coloured on a terminal alone, or one JSON document for programs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ..basics.documents import Document
    from ..tables.table import Parts


def give(found: Document, output: Path | None, *, as_json: bool, tables: Callable[[], Parts]) -> None:
    """Write what a command found to ``output``, if that is asked for, and print it: as JSON, or as ``tables``."""
    if output is not None:
        found.save(output)
    if as_json:
        sys.stdout.write(found.to_json())
    else:
        show(tables())


def show(tables: Parts) -> None:
    """Print tables; where standard output is no terminal, plain text that does not depend on it."""
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

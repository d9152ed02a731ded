"""What a command prints: tables for people, coloured on a terminal alone, or one JSON document for programs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def show(tables: RenderableType) -> None:
    """Print tables; where standard output is no terminal, plain text that does not depend on it."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(tables)
        return
    from .tables import as_text

    sys.stdout.write(as_text(tables))

"""What the commands of all folders share: how an app is made, and options that mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]
OutputPath = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the result to this file.", dir_okay=False)
]


def command_app() -> typer.Typer:
    """An app for one entry of the group ``protwin.commands``; give it one command, or several as subcommands."""
    return typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


def examples(*lines: str) -> str:
    """The ``epilog`` of a command: example calls, kept line by line in its help."""
    return "\b\n" + "\n".join(("Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)))

"""How the command ends: exit codes, and the last line on standard error."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

EXIT_MISTAKE: Final = 2
"""Exit code of everything that the user can mend."""
EXIT_INTERRUPTED: Final = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells report it."""
EXIT_CLOSED_PIPE: Final = 1
"""Exit code when the reader of standard output has gone."""


def report_mistake(message: str) -> int:
    """Print one message on standard error, its head in red on a terminal; gives the exit code."""
    # Where standard error takes no more, the exit code still says it.
    with suppress(OSError):
        sys.stderr.write(f"{_in_red('error:')} {message}\n")
    return EXIT_MISTAKE


def report_interruption(*written: Path | None, holding: str = "") -> int:
    """Say that the user stopped the command, and what the files ``written`` are ``holding``; gives the exit code."""
    names = " and ".join(str(path) for path in written if path is not None and str(path) != "-")
    told = f": {holding} is in {names}" if names else ""
    sys.stderr.write(f"{_in_red('interrupted')}{told}\n")
    return EXIT_INTERRUPTED


def discard_output() -> int:
    """Let what is still buffered go nowhere, since nobody reads it; gives the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_CLOSED_PIPE


def _in_red(text: str) -> str:
    if not sys.stderr.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\033[1;31m{text}\033[0m"

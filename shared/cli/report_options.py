"""The option of all commands that can leave a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..basics.documents import write_atomically
from ..basics.errors import FileError
from .options import writable
from .told import warnings_so_far

if TYPE_CHECKING:
    from ..report.page import Report


def writable_html(path: Path | None) -> Path | None:
    """``path``, once it is sure that a page can be written to it.  Raises FileError."""
    if path is not None and path.suffix not in (".html", ".htm", "") and (path.is_file() or not path.exists()):
        raise FileError(f"{path} would hold HTML, which its name denies. Choose a name that ends in .html.")
    return writable(path)


ReportPath = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE.html", callback=writable_html, help="Write a report to look at, on one page."
    ),
]


def write_report(path: Path | None, make: Callable[[], Report]) -> None:
    """Write the report that ``make`` gives, with what the command warned of; makes none if there is no ``path``.

    Raises FileError.
    """
    if path is not None:
        made = make()
        warnings = tuple(dict.fromkeys((*made.warnings, *warnings_so_far())))
        write_atomically(path, replace(made, warnings=warnings).html)

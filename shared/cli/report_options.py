"""The options of all commands that can leave a report: a page, and its figures as pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..basics.documents import write_atomically
from ..basics.errors import FileError
from .options import writable

if TYPE_CHECKING:
    from ..report.page import Report


def writable_html(path: Path | None) -> Path | None:
    """``path``, once it is sure that a page can be written to it.  Raises FileError."""
    if path is not None and path.suffix not in (".html", ".htm", "") and (path.is_file() or not path.exists()):
        raise FileError(f"{path} would hold HTML, which its name denies. Choose a name that ends in .html.")
    return writable(path)


def picture_folder(folder: Path | None) -> Path | None:
    """``folder``, once it is sure that pictures can be drawn and written to it.

    Raises FileError if it is no folder or cannot be written, and ProtwinError if pictures cannot be drawn here.
    """
    if folder is None:
        return None
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder} is no folder; name one for the pictures.")
    writable(folder / "figure.png")
    from ..report.png import check_pictures_can_be_drawn

    check_pictures_can_be_drawn()
    return folder


ReportPath = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE.html", callback=writable_html, help="Write a report to look at, on one page."
    ),
]
PictureFolder = Annotated[
    Path | None,
    typer.Option(
        "--png",
        metavar="FOLDER",
        callback=picture_folder,
        help="Write the report's figures as pictures (protwin[png]).",
    ),
]


def write_report(page: Path | None, pictures: Path | None, make: Callable[[], Report]) -> None:
    """Write what was asked for of the report that ``make`` gives; makes none if nothing was.  Raises FileError."""
    if page is None and pictures is None:
        return
    made = make()
    if page is not None:
        write_atomically(page, made.html)
    if pictures is not None:
        from ..report.png import write_pictures

        write_pictures(made, pictures)

"""The options of commands that can leave a report, and of those that answer beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..basics.documents import write_atomically
from ..basics.errors import FileError
from .options import JsonFlag, NoCacheFlag, OutputPath, keep_apart, writable
from .output import tell
from .told import warnings_so_far

if TYPE_CHECKING:
    from ..basics.documents import Document
    from ..report.page import Report
    from ..tables.table import Parts


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


@dataclass(frozen=True, kw_only=True)
class AnswerChoice:
    """Where an answer goes, and whether its traces are kept; see [Note: Groups of options] in ``option_groups.py``."""

    output: OutputPath = None
    report: ReportPath = None
    as_json: JsonFlag = False
    no_cache: NoCacheFlag = False

    def keep_apart(self, read: Mapping[str, str | Path | None], **others: Path | None) -> None:
        """As ``keep_apart`` of all commands, with outputs of ``others`` besides.  Raises FileError."""
        besides = {f"--{name}": path for name, path in others.items()}
        outputs = {"--output": self.output, **besides, "--report": self.report}
        keep_apart(outputs, read, as_json=self.as_json)

    def tell(self, document: Document, tables: Callable[[], Parts], report: Callable[[], Report]) -> None:
        """Write the report if one is wanted, and tell the answer, which the caller has saved.  Raises FileError."""
        write_report(self.report, report)
        tell(document, self.output, as_json=self.as_json, tables=tables)

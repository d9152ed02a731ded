"""A report: sections of words, tables and figures, and the one page that they make (``page.html``).

The page needs no network.  Its policy forbids every request, and every script but the one that brings charts closer and
says what is pointed at, which it names by its hash: text that came to stand on the page can never run.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Final

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from ..tables.table import Table, heading_words
from .axes import Scale
from .svg import STROKES, Figure, joined, line, tag, value_text

_SCRIPTS: Final = ("chart.js", "levels.js", "lanes.js", "page.js")
"""The parts of the one script, in order: each builds on those before it."""
_ERROR_WIDTH: Final = 96.0
_ERROR_FULL_FRAC: Final = 0.25
"""The error that fills half of its little chart; larger ones end there."""


@dataclass(frozen=True, slots=True)
class Card:
    """One headline figure."""

    label: str
    figure: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table with its look."""

    table: Table
    class_: str = ""
    swatches: Mapping[str, str] = field(default_factory=dict)
    """The colours of rows by their names, where the rows but the last are a figure's legend; others have the rest's."""


Part = Figure | PageTable | str
"""Words are a paragraph, unless they are markup already."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what stands below it; parts within a tuple stand side by side."""

    heading: str
    content: tuple[Part | tuple[Part, ...], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """One page."""

    title: str
    subtitle: str
    cards: tuple[Card, ...]
    """The headline figures."""
    sections: tuple[Section, ...]
    warnings: tuple[str, ...] = ()
    """They stand below the headline figures."""

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All figures in order."""
        return tuple(part for section in self.sections for part in section.content if isinstance(part, Figure))

    @property
    def html(self) -> str:
        """The page as text; equal reports give equal bytes."""
        script = "\n".join(map(_file, _SCRIPTS))
        return _template().render(
            report=self,
            policy=policy(script),
            script=script,
            style=_file("report.css"),
            strokes=STROKES,
        )


def policy(script: str) -> str:
    """The page's content security policy: no request at all, and no script but this one."""
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def quiet(*words: str) -> Markup:
    """A paragraph of less weight."""
    return tag("p", *words, class_="quiet")


@cache
def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(
        loader=FunctionLoader(_file), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"heading": _heading, "plain": heading_words, "error_bar": _error_bar, "number": value_text}
    return environment.get_template("page.html")


def _heading(column: str) -> Markup:
    """A heading that may be broken after its underscores."""
    words = str(escape(column.removeprefix(">")))
    return Markup(words.replace("_\n", "_<wbr>").replace("-\n", "-<wbr>").replace("\n", " "))


def _error_bar(error_frac: float | None) -> Markup:
    """The signed error as a bar left or right of the middle."""
    if error_frac is None:
        return joined([])
    scale = Scale(-_ERROR_FULL_FRAC, _ERROR_FULL_FRAC, 0.0, _ERROR_WIDTH)
    middle = scale(0.0)
    end = scale(max(-_ERROR_FULL_FRAC, min(_ERROR_FULL_FRAC, error_frac)))
    bar = tag("rect", x=min(middle, end), y=3.0, width=abs(end - middle), height=8.0, class_="error")
    return tag("svg", bar, line(middle, 0, middle, 14, "axis"), width=_ERROR_WIDTH, height=14.0, aria_hidden="true")

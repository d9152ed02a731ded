"""A report: sections of words, tables and figures, and the one page that they make.

The page needs no network.  Its policy forbids every request, and every script but the one that lets pointed-at tasks
show what they wait for, which it names by its hash: text that came to stand on the page can never run.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files

from .svg import Figure, tag
from .svg_patterns import pattern_definitions


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what stands below it: figures, and markup."""

    heading: str
    content: tuple[Figure | str, ...]

    @property
    def markup(self) -> str:
        """The section as a part of the page."""
        name = self.heading.lower().replace(" ", "-")
        parts = (part.markup if isinstance(part, Figure) else part for part in self.content)
        return tag("section", tag("h2", escape(self.heading), id=name), *parts, aria_labelledby=name)


@dataclass(frozen=True, slots=True)
class Report:
    """One page."""

    title: str
    subtitle: str
    cards: str
    """The headline figures, as markup."""
    sections: tuple[Section, ...]

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All figures in order."""
        return tuple(part for section in self.sections for part in section.content if isinstance(part, Figure))

    @property
    def html(self) -> str:
        """The page as text; equal reports give equal bytes."""
        header = tag("header", tag("h1", escape(self.title)), tag("p", escape(self.subtitle), class_="quiet"))
        body = "\n".join([header, self.cards, *(section.markup for section in self.sections)])
        style, script = stylesheet("report.css") + stylesheet("report_figures.css"), _script()
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy(script)}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self.title)}</title>\n<style>\n{style}</style>\n</head>\n"
            f"<body>\n{pattern_definitions()}\n<main>\n{body}\n</main>\n<script>{script}</script>\n</body>\n</html>\n"
        )


def policy(script: str) -> str:
    """The page's content security policy: no request at all, and no script but this one."""
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def card(label: str, figure: str, *details: str) -> str:
    """One headline figure; ``details`` are markup."""
    return tag(
        "div",
        tag("div", escape(label), class_="label"),
        tag("div", escape(figure), class_="figure"),
        *(tag("div", detail, class_="detail") for detail in details),
        class_="card",
    )


def card_grid(cards: Sequence[str]) -> str:
    """Headline figures side by side."""
    return tag("div", *cards, class_=f"cards {'four' if len(cards) in (4, 7, 8) else 'three'}")


@cache
def stylesheet(name: str) -> str:
    """The text of one of the report's stylesheets."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    return stylesheet("report_hover.js")

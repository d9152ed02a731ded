"""Patterns of the report: every colour also has a texture, so that areas stay apart without colour.

A pattern holds its colour and its strokes; ``report_figures.css`` fills areas with it.  All colours are variables, so
that the same patterns serve the light page, the dark one and print.
"""

from __future__ import annotations

from typing import Final

from .svg import tag

_SIZE: Final = 8.0
"""Width and height of the tile that repeats."""

STROKES: Final[dict[str, str]] = {
    "blue": "",
    "orange": "M-2 2l4-4M0 8l8-8M6 10l4-4",
    "sky": "M0 2h8",
    "green": "M2 0v8",
    "red": "M-2 6l4 4M0 0l8 8M6-2l4 4",
    "purple": "M0 2h8M2 0v8",
    "gold": "M1 2h2M5 6h2",
    "grey": "M-2 2l4-4M0 8l8-8M6 10l4-4M-2 6l4 4M0 0l8 8M6-2l4 4",
    "teal": "M0 2h8M0 6h8",
    "pink": "M2 0v8M6 0v8",
    "brown": "M2 2h4v4h-4z",
    "olive": "M2 2l4 4M6 2l-4 4",
    "magenta": "M0 2h8M4 2v6",
    "navy": "M4 1v2M4 5v2",
    "rest": "M3 4h2",
}
"""What is drawn upon the plain colour, in a tile of 8 by 8; each is another texture."""


def pattern_definitions() -> str:
    """The patterns as a drawing that takes no place; once on every page, before what uses them."""
    return tag("svg", pattern_markup(), width=0.0, height=0.0, aria_hidden="true", class_="patterns")


def pattern_markup() -> str:
    """The patterns as content of a drawing."""
    return tag("defs", *(_pattern(colour, strokes) for colour, strokes in STROKES.items()))


def _pattern(colour: str, strokes: str) -> str:
    ground = tag("rect", width=_SIZE, height=_SIZE, class_=f"ground-{colour}")
    drawn = tag("path", d=strokes, class_=f"hatch hatch-{colour}") if strokes else ""
    return tag(
        "pattern", ground, drawn, id=f"pattern-{colour}", width=_SIZE, height=_SIZE, patternUnits="userSpaceOnUse"
    )

"""Elements of HTML and SVG, and a figure: a drawing with its words.

Whatever is no ``Markup`` yet is escaped on its way into an element, so that a name is never taken for markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup, escape

PLOT_PX: Final = 932.0
"""The width that drawings are made for.  A page draws them as wide as it is: horizontal places are shares of the width
(``share``), all else is in pixels, so that words never shrink."""
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
    "lime": "M0 6l2-2 2 2 2-2 2 2",
    "maroon": "M1 1h2v2h-2zM5 5h2v2h-2z",
    "slate": "M0 1h4v4M4 5h4",
    "coral": "M1 4h6M4 1v2",
    "mint": "M0 4h3M5 2v4",
    "plum": "M2 1v3M6 4v3",
    "indigo": "M0 0l8 4",
    "amber": "M0 4l4-4 4 4",
    "rose": "M4 0v8M1 6h2",
    "forest": "M1 7h6M4 3l-2 3M4 3l2 3",
    "sand": "M0 2h3M5 6h3",
    "steel": "M2 0v3M6 5v3",
    "wine": "M0 8l8-4",
    "moss": "M1 1l3 3 3-3",
    "clay": "M1 2l3 4 3-4M4 0v2",
    "rest": "M3 4h2",
}
"""Every colour also has a texture, so that areas stay apart without colour: strokes upon it in a tile of 8 by 8."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One drawing with its words."""

    name: str
    """Unique in a report."""
    drawing: Markup
    """What is within the svg element, or with ``is_rows`` the cells of a grid of four columns."""
    label: str
    """What a screen reader says of it."""
    height: float = 0.0
    """In pixels; of rows what they need."""
    caption: tuple[str, str] = ("", "")
    """What stands above it: stressed words, then plain ones."""
    legend: tuple[tuple[Markup, str], ...] = ()
    """Marks, each the content of a drawing of 24 by 12, with their words."""
    below: Markup | str = ""
    class_: str | None = None
    has_legend_on_page: bool = True
    """False where the next figure of the page has the same one."""
    list_id: str = ""
    """The list on the page that has all that is drawn, from which a closer look is drawn."""
    is_rows: bool = False
    """Whether it is rows of names, bars and words."""


def tag(name: str, *content: str, **attributes: str | float | None) -> Markup:
    """An element.

    ``class_`` is class, other underscores of attributes are hyphens, and None leaves the attribute out.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{value_text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{shown}>{''.join(map(escape, content))}</{name}>")


def value_text(value: str | float) -> str:
    """An attribute's value: text escaped, numbers with two decimals at most."""
    if isinstance(value, str):
        return str(escape(value))
    return f"{value:.2f}".rstrip("0").rstrip(".")


def joined(parts: Iterable[str]) -> Markup:
    """Elements one after another."""
    return Markup("").join(parts)


def share(place_px: float) -> str:
    """A horizontal place or width as a share of the plot's."""
    return f"{place_px / PLOT_PX * 100:.4f}".rstrip("0").rstrip(".") + "%"


def zoomable(height: float, *content: str) -> Markup:
    """What a reader may look at more closely: the script widens the inner drawing and moves it within the outer."""
    inner = tag("svg", *content, class_="plot", x="0%", width="100%", height=height, aria_hidden="true")
    return tag("svg", inner, class_="window", width="100%", height=height, aria_hidden="true")


def stretched(height: float, *paths: str) -> Markup:
    """Paths, which cannot have shares in them: in pixels of ``PLOT_PX``, drawn as wide as the plot is."""
    return tag(
        "svg",
        *paths,
        class_="stretched",
        viewBox=f"0 0 {value_text(PLOT_PX)} {value_text(height)}",
        preserveAspectRatio="none",
        width="100%",
        height=height,
        aria_hidden="true",
    )


def text(
    x: float | str, y: float, words: str, *, anchor: str = "start", class_: str | None = None, dx: float | None = None
) -> Markup:
    """Words at a place, in pixels or as a share, moved by ``dx`` pixels; ``y`` is their middle."""
    return tag("text", words, x=x, y=y + 4, dx=dx, text_anchor=anchor if anchor != "start" else None, class_=class_)


def line(x1: float | str, y1: float, x2: float | str, y2: float, class_: str) -> Markup:
    """A straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def circle(x: float | str, y: float, radius: float, class_: str, *, title: str = "") -> Markup:
    """A circle; ``title`` is what the pointer shows."""
    return tag("circle", *([tag("title", title)] if title else []), cx=x, cy=y, r=radius, class_=class_)


def area_mark(colour: str) -> Markup:
    """The mark of what is drawn as an area of ``colour``."""
    return tag("rect", x=5.0, y=0.0, width=14.0, height=12.0, rx=2.0, class_=f"fill-{colour}")


def shortened(name: str, most: int) -> str:
    """``name`` in at most that many characters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def spread(positions: Sequence[float], *, gap: float) -> list[float]:
    """The positions moved downwards as little as needed to lie at least ``gap`` apart, in their order."""
    placed: dict[int, float] = {}
    last = -math.inf
    for index in sorted(range(len(positions)), key=lambda i: (positions[i], i)):
        last = max(positions[index], last + gap)
        placed[index] = last
    return [placed[index] for index in range(len(positions))]

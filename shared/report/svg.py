"""Drawing for the report: elements of HTML and SVG as text, scales, and axes with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final


@dataclass(frozen=True, slots=True)
class Scale:
    """A straight map from values to pixels; the pixels may run downwards."""

    low: float
    high: float
    low_px: float
    high_px: float

    def __call__(self, value: float) -> float:
        """The pixel of ``value``."""
        span = self.high - self.low
        frac = (value - self.low) / span if span > 0 else 0.0
        return self.low_px + frac * (self.high_px - self.low_px)

    @property
    def per_px(self) -> float:
        """Values per pixel."""
        return (self.high - self.low) / abs(self.high_px - self.low_px)


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of an axis: how many base units it is worth, and its name."""

    worth: float
    name: str


@dataclass(frozen=True, slots=True)
class Tick:
    """One round number on an axis."""

    value: float
    """In base units."""
    label: str


def tag(name: str, *content: str, **attributes: str | float | None) -> str:
    """An element; ``content`` is markup already.

    Attributes are escaped; ``class_`` is class, other underscores are hyphens, and None leaves the attribute out.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{value_text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{shown}>{''.join(content)}</{name}>"


def value_text(value: str | float) -> str:
    """An attribute's value: text escaped, numbers to a hundredth."""
    if isinstance(value, str):
        return escape(value, quote=True)
    return f"{value:.2f}".rstrip("0").rstrip(".")


def svg(width: float, height: float, *content: str, label: str, class_: str | None = None) -> str:
    """A drawing that scales with the page; ``label`` is what a screen reader says of it."""
    view = f"0 0 {value_text(width)} {value_text(height)}"
    return tag("svg", *content, viewBox=view, role="img", aria_label=label, class_=class_)


def text(x: float, y: float, words: str, *, anchor: str = "start", class_: str | None = None) -> str:
    """Words at a place; ``y`` is their middle."""
    return tag("text", escape(words), x=x, y=y + 4, text_anchor=anchor if anchor != "start" else None, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    """A straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


# -- ticks -----------------------------------------------------------------------------------------------------------


def ticks(low: float, high: float, unit: Unit, *, at_most: int) -> tuple[Tick, ...]:
    """Multiples of 1, 2 or 5 times a power of ten units within the range, ``at_most`` of them or fewer."""
    low, high = low / unit.worth, high / unit.worth
    step = _round_step((high - low) / max(1, at_most - 1))
    if step <= 0:
        return (Tick(low * unit.worth, _tick_label(low, 0)),)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(Tick(k * step * unit.worth, _tick_label(k * step, decimals)) for k in range(first, last + 1))


def _round_step(least: float) -> float:
    """The least of 1, 2, 5, 10 times a power of ten that is not below ``least``."""
    if not least > 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(least))
    steps = (factor * power for factor in (1, 2, 5, 10, 20))
    return next((step for step in steps if step >= least * (1 - 1e-9)), 0.0)


def _tick_label(value: float, decimals: int) -> str:
    label = f"{value:.{decimals}f}"
    return label.replace("-", "−") if float(label) else label.lstrip("-")


def time_unit(span_s: float) -> Unit:
    """The unit in which a stretch of time reads well."""
    for unit in (Unit(1.0, "s"), Unit(1e-3, "ms")):
        if span_s >= unit.worth:
            return unit
    return Unit(1e-6, "µs")


def bytes_unit(high_bytes: float) -> Unit:
    """The unit in which sizes up to ``high_bytes`` read well."""
    for unit in (Unit(2.0**40, "TiB"), Unit(2.0**30, "GiB"), Unit(2.0**20, "MiB"), Unit(2.0**10, "KiB")):
        if high_bytes >= unit.worth:
            return unit
    return Unit(1.0, "B")


def time_axis(scale: Scale, *, top: float, bottom: float) -> str:
    """Grid lines and labelled ticks of a time axis along ``bottom``; the last label carries the unit."""
    unit = time_unit(scale.high - scale.low)
    marks = ticks(scale.low, scale.high, unit, at_most=12)
    drawn = []
    for tick in marks:
        x = scale(tick.value)
        drawn.append(line(x, top, x, bottom, "grid"))
        drawn.append(
            text(x, bottom + 12, f"{tick.label} {unit.name}" if tick is marks[-1] else tick.label, anchor="middle")
        )
    return "".join(drawn)


def bytes_axis(scale: Scale, *, left: float, right: float) -> str:
    """Grid lines and labelled ticks of a vertical size axis at ``left``."""
    unit = bytes_unit(scale.high)
    drawn = []
    for tick in ticks(scale.low, scale.high, unit, at_most=7):
        y = scale(tick.value)
        drawn.append(line(left, y, right, y, "grid"))
        drawn.append(text(left - 8, y, f"{tick.label} {unit.name}", anchor="end"))
    return "".join(drawn)


def spread(positions: Sequence[float], *, gap: float) -> list[float]:
    """The positions moved downwards as little as needed to lie at least ``gap`` apart, in their order."""
    placed: dict[int, float] = {}
    last = -math.inf
    for index in sorted(range(len(positions)), key=lambda i: (positions[i], i)):
        last = max(positions[index], last + gap)
        placed[index] = last
    return [placed[index] for index in range(len(positions))]


LEGEND_MARK_PX: Final = 24.0
"""Width of a legend's mark; its height is half of it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One drawing with its words: a part of the page, and a picture of its own."""

    name: str
    """Unique in a report, fit for the name of a file."""
    width: float
    height: float
    drawing: str
    """What is within the svg element, as markup."""
    label: str
    """What a screen reader says of it."""
    caption: tuple[str, str] = ("", "")
    """What stands above it: stressed words, then plain ones."""
    legend: tuple[tuple[str, str], ...] = ()
    """Marks, each the content of a drawing of 24 by 12, with their words."""
    below: str = ""
    """Markup under it that only the page has."""
    class_: str | None = None
    has_legend_on_page: bool = True
    """False where the next figure of the page has the same one."""

    @property
    def markup(self) -> str:
        """The figure as a part of a page."""
        stressed, plain = self.caption
        words = tag("b", escape(stressed)) if stressed else ""
        words = tag("figcaption", words + escape(plain)) if stressed or plain else ""
        drawn = svg(self.width, self.height, self.drawing, label=self.label, class_=self.class_)
        marks = legend(self.legend) if self.legend and self.has_legend_on_page else ""
        return tag("figure", words, tag("div", drawn, class_="scroll"), marks, self.below, id=f"figure-{self.name}")


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """A list of marks, given as the content of a 24 by 12 drawing, each with its words."""
    items = (
        tag("li", tag("svg", mark, width=24.0, height=12.0, viewBox="0 0 24 12", aria_hidden="true"), escape(words))
        for mark, words in entries
    )
    return tag("ul", *items, class_="legend")


def area_mark(colour: str) -> str:
    """The mark of what is drawn as an area of ``colour``."""
    return tag("rect", x=5.0, y=0.0, width=14.0, height=12.0, rx=2.0, class_=f"fill-{colour}")

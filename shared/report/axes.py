"""Scales, ticks at round numbers, axes; and the chart that several figures are: named rows of bars on one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from ..basics.interval import Interval
from .svg import PLOT_PX, joined, line, share, tag, text, zoomable


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


ONE: Final = Unit(1.0, "")
_MOST_NARROW_LABELS: Final = 5


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
    label = f"{value:,.{decimals}f}"
    return label.replace("-", "−") if label.strip("-0.") else label.lstrip("-")


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


def across(low: float, high: float) -> Scale:
    """The scale of a horizontal axis from the left edge of the plot to its right one."""
    return Scale(low, high, 0.0, PLOT_PX)


def x_axis(
    scale: Scale,
    unit: Unit,
    *,
    top: float,
    bottom: float,
    at_most: int = 10,
    title: str = "",
    marks: Sequence[Tick] = (),
    group: str | None = None,
) -> Markup:
    """Grid lines and labelled ticks of a horizontal axis; the last label carries the unit.

    Args:
        scale: the axis.
        unit: of the labels.
        top: where the grid lines end.
        bottom: where the grid lines begin; labels stand below.
        at_most: ticks on the axis.
        title: below the labels.
        marks: the ticks themselves, in place of round numbers.
        group: of axes that are looked at more closely together.
    """
    drawn = []
    shown = marks or ticks(scale.low, scale.high, unit, at_most=at_most)
    for place, tick in enumerate(shown, start=1):
        x, label = share(scale(tick.value)), f"{tick.label} {unit.name}".rstrip() if tick is shown[-1] else tick.label
        # Where there are many, a narrow page has every other label, the last one among them.
        class_ = "roomy" if len(shown) > _MOST_NARROW_LABELS and (len(shown) - place) % 2 else None
        drawn += [line(x, top, x, bottom, "grid"), text(x, bottom + 12, label, anchor="middle", class_=class_)]
    # The script needs the axis itself to find round numbers within a part of it; it moves ticks that are given.
    numbers = {} if marks else {"data_low": repr(scale.low / unit.worth), "data_high": repr(scale.high / unit.worth)}
    numbers["data_worth"] = repr(unit.worth)
    axis = tag("g", *drawn, class_="ticks", data_group=group, data_unit=unit.name, data_most=at_most, **numbers)
    return axis + text("50%", bottom + 30, title, anchor="middle") if title else axis


def y_axis(scale: Scale, unit: Unit, *, title: str = "") -> Markup:
    """Grid lines and labelled ticks at the left, with the axis' title above."""
    drawn = [text(0, scale.high_px - 10, title)] if title else []
    for tick in ticks(scale.low, scale.high, unit, at_most=7):
        y = scale(tick.value)
        drawn.append(line(0, y, "100%", y, "grid"))
        drawn.append(text(-8, y, f"{tick.label} {unit.name}".rstrip(), anchor="end"))
    return joined(drawn)


# -- rows of bars ----------------------------------------------------------------------------------------------------

_ROW_PX: Final = 30.0
_BAR_PX: Final = 18.0
_CAP_PX: Final = 5.0
"""Half of the caps of a whisker."""
_CHARACTER_PX: Final = 7.2
NARROWEST_PX: Final = 250.0
"""The width of a plot on a telephone."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a bar."""

    low: float
    high: float
    colour: str
    title: str = ""
    """What the pointer shows, where it is not the row's."""
    label: str = ""
    """Stands in it where there is room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarRow:
    """One row: its name, bars one after another, and words behind them."""

    name: str
    words: str
    title: str
    """What the pointer shows."""
    bars: tuple[Segment, ...] = ()
    """One without extent is not left out."""
    figure: str = ""
    """Stressed, before the axis."""
    bound: float | None = None
    """Where a mark stands across the row."""
    whisker: Interval | None = None
    """Where the true end of the bars is expected."""
    is_stressed: bool = False


def bar_rows(rows: Sequence[BarRow], scale: Scale, unit: Unit, *, title: str, marks: Sequence[Tick] = ()) -> Markup:
    """The rows below each other, and their axis, named ``title``: cells of a grid, which a narrow page lays anew."""
    drawn: list[Markup] = []
    for row in rows:
        stress = "strong" if row.is_stressed else None
        drawn.append(tag("span", row.name, class_=f"name {stress or ''}".rstrip()))
        drawn.append(tag("span", row.figure, class_="figure-cell strong"))
        drawn.append(tag("span", row.words, class_="words"))
        drawn.append(tag("svg", _bar_row(row, scale), class_="row", height=_ROW_PX, aria_hidden="true"))
    axis = x_axis(scale, unit, top=0.0, bottom=6.0, at_most=8, title=title, marks=marks)
    drawn.append(tag("svg", axis, class_="row", height=44.0 if title else 26.0, aria_hidden="true"))
    return joined(drawn)


def _bar_row(row: BarRow, scale: Scale) -> Markup:
    top = (_ROW_PX - _BAR_PX) / 2
    parts = [tag("title", row.title), tag("rect", x=0.0, y=top, width="100%", height=_BAR_PX, class_="track")]
    for bar in row.bars:
        parts += _segment(bar, scale, top)
    if scale.low < 0.0:
        parts.append(line(share(scale(0.0)), 0, share(scale(0.0)), _ROW_PX, "axis"))
    if row.bound is not None:
        x = share(scale(row.bound))
        parts.append(line(x, 1, x, _ROW_PX - 1, "limit-line"))
    if row.whisker is not None:
        left, right, middle = share(scale(row.whisker.low)), share(scale(row.whisker.high)), _ROW_PX / 2
        parts.append(line(left, middle, right, middle, "whisker"))
        parts += [line(end, middle - _CAP_PX, end, middle + _CAP_PX, "whisker") for end in (left, right)]
    return zoomable(_ROW_PX, tag("g", *parts))


def _segment(bar: Segment, scale: Scale, top: float) -> list[Markup]:
    left, right = sorted((scale(bar.low), scale(bar.high)))
    width = max(1.0, right - left)
    title = [tag("title", bar.title)] if bar.title else []
    class_ = f"fill-{bar.colour}" + (" segment" if bar.title else "")
    drawn = [tag("rect", *title, x=share(left), y=top, width=share(width), height=_BAR_PX, class_=class_)]
    if room := room_class(bar.label, width, _CHARACTER_PX):
        middle = share(left + width / 2)
        drawn.append(text(middle, top + _BAR_PX / 2, bar.label, anchor="middle", class_=f"{room} on-{bar.colour}"))
    return drawn


def room_class(label: str, width_px: float, character_px: float) -> str:
    """The class of a label in an area of this width: shown on wide pages alone where a narrow one has no room for it.

    Empty where no page has.
    """
    need_px = len(label) * character_px + 3
    if not label or need_px > width_px:
        return ""
    return "mark" if need_px <= width_px * NARROWEST_PX / PLOT_PX else "mark wide"

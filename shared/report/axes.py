"""Scales, ticks at round numbers, axes; and the chart that several figures are: named rows of bars on one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from .svg import joined, line, tag, text

LEFT_PX: Final = 112.0
RIGHT_PX: Final = 1044.0
"""Where the horizontal axis begins and ends in figures with a vertical one, and in lane charts."""


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


def x_axis(
    scale: Scale,
    unit: Unit,
    *,
    top: float,
    bottom: float,
    at_most: int = 10,
    title: str = "",
    marks: Sequence[Tick] = (),
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
    """
    marks = marks or ticks(scale.low, scale.high, unit, at_most=at_most)
    drawn = []
    for tick in marks:
        x, label = scale(tick.value), f"{tick.label} {unit.name}".rstrip() if tick is marks[-1] else tick.label
        drawn += [line(x, top, x, bottom, "grid"), text(x, bottom + 12, label, anchor="middle")]
    if title:
        drawn.append(text((scale.low_px + scale.high_px) / 2, bottom + 30, title, anchor="middle"))
    return joined(drawn)


def y_axis(scale: Scale, unit: Unit, *, title: str = "") -> Markup:
    """Grid lines and labelled ticks at the left, with the axis' title above."""
    drawn = [text(0, scale.high_px - 10, title)] if title else []
    for tick in ticks(scale.low, scale.high, unit, at_most=7):
        y = scale(tick.value)
        drawn.append(line(LEFT_PX, y, RIGHT_PX, y, "grid"))
        drawn.append(text(LEFT_PX - 8, y, f"{tick.label} {unit.name}".rstrip(), anchor="end"))
    return joined(drawn)


# -- rows of bars ----------------------------------------------------------------------------------------------------

_TOP_PX: Final = 8.0
_PITCH_PX: Final = 32.0
_BAR_PX: Final = 18.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BarRow:
    """One row: its name, bars one after another, and words where they end."""

    name: str
    words: str
    title: str
    """What the pointer shows."""
    bars: tuple[tuple[float, float, str], ...] = ()
    """From, to and the colour of each; one without extent is not left out."""
    figure: str = ""
    """Stressed, before the axis."""
    bound: float | None = None
    """Where a mark stands across the row."""
    is_stressed: bool = False


def bar_rows(
    rows: Sequence[BarRow], across: Scale, unit: Unit, *, title: str, marks: Sequence[Tick] = ()
) -> tuple[Markup, float]:
    """The rows below each other upon their axis, named ``title``; and the height of it all."""
    bottom = _TOP_PX + len(rows) * _PITCH_PX
    axis = x_axis(across, unit, top=_TOP_PX - 4, bottom=bottom, at_most=8, title=title, marks=marks)
    drawn = [_bar_row(row, across, _TOP_PX + (place + 0.5) * _PITCH_PX) for place, row in enumerate(rows)]
    if across.low < 0.0:
        drawn.append(line(across(0.0), _TOP_PX - 4, across(0.0), bottom, "axis"))
    return joined([axis, *drawn]), bottom + 40


def _bar_row(row: BarRow, across: Scale, middle: float) -> Markup:
    parts = [tag("title", row.title), text(0, middle, row.name, class_="strong" if row.is_stressed else None)]
    if row.figure:
        parts.append(text(across.low_px - 10, middle, row.figure, anchor="end", class_="strong"))
    end = across(0.0)
    for low, high, colour in row.bars:
        left, right = sorted((across(low), across(high)))
        end = max(end, right)
        parts.append(
            tag(
                "rect",
                x=left,
                y=middle - _BAR_PX / 2,
                width=max(1.0, right - left),
                height=_BAR_PX,
                class_=f"fill-{colour}",
            )
        )
    if row.bound is not None:
        x = across(row.bound)
        end = max(end, x)
        parts.append(line(x, middle - _BAR_PX / 2 - 4, x, middle + _BAR_PX / 2 + 4, "limit-line"))
    parts.append(text(end + 8, middle, row.words, class_="halo"))
    return tag("g", *parts)

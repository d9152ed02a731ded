"""Sensitivity in the report: what the best iteration would become if one thing were different, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from ..basics.units import format_seconds
from ..schema.search_result import WhatIf
from .svg import Figure, Scale, Unit, area_mark, line, tag, text, ticks

_WIDTH: Final = 1120.0
_LEFT: Final = 325.0
_RIGHT: Final = 845.0
_TOP: Final = 8.0
_PITCH: Final = 32.0
_BAR_PX: Final = 18.0
_LONGEST_NAME: Final = 45
_PERCENT: Final = Unit(0.01, " %")


def sensitivity_chart(iteration_s: float, answers: Sequence[WhatIf]) -> Figure | None:
    """One bar per answer: left where tokens take less time than in the best plan's ``iteration_s``, right where more.

    With the same tokens in an iteration that is the iteration's time.  In order of what they save, those where nothing
    fits last; None without answers.
    """
    if not answers:
        return None
    ordered = sorted(answers, key=lambda one: (one.speedup is None, -(one.speedup or 0.0), one.change))
    changes = [1 / one.speedup - 1 for one in ordered if one.speedup is not None]
    low, high = min(0.0, *changes, -0.01), max(0.0, *changes, 0.01)
    across = Scale(low, high, _LEFT, _RIGHT)
    bottom = _TOP + len(ordered) * _PITCH
    drawn = [_axis(across, bottom)]
    for row, one in enumerate(ordered):
        drawn.append(_row(one, across, _TOP + (row + 0.5) * _PITCH))
    zero = across(0.0)
    drawn.append(line(zero, _TOP - 4, zero, bottom, "axis"))
    told = "; ".join(f"{one.change}: {_effect(one)}" for one in ordered)
    return Figure(
        name="sensitivity",
        width=_WIDTH,
        height=bottom + 40,
        drawing="".join(drawn),
        label=f"What the best iteration would become: {told}",
        caption=("If one thing were different", f": the best plan's time beside today's {format_seconds(iteration_s)}"),
        legend=((area_mark("blue"), "shorter"), (area_mark("orange"), "longer")),
    )


def _row(one: WhatIf, across: Scale, middle: float) -> str:
    shown = one.change if len(one.change) <= _LONGEST_NAME else f"{one.change[: _LONGEST_NAME - 1]}…"
    words, zero = _effect(one), across(0.0)
    name = text(0, middle, shown)
    if one.speedup is None:
        reason = tag("title", escape(f"{one.change}: {one.reason}")) if one.reason else ""
        return name + tag("g", reason, text(zero + 8, middle, words, class_="strong halo"))
    end = across(1 / one.speedup - 1)
    bar = tag(
        "rect",
        tag("title", escape(f"{one.change}: {words}")),
        x=min(zero, end),
        y=middle - _BAR_PX / 2,
        width=max(1.0, abs(end - zero)),
        height=_BAR_PX,
        class_=f"fill-{'blue' if end <= zero else 'orange'}",
    )
    return name + bar + text(max(zero, end) + 8, middle, words, class_="strong halo")


def _effect(one: WhatIf) -> str:
    if one.iteration_s is None or one.speedup is None:
        return "nothing fits"
    percent = round((1 / one.speedup - 1) * 100, 1)
    if not percent:
        return "no change"
    change = f"{percent:+.1f} %".replace("-", "−")
    factor = f", {one.speedup:.2f} times as fast" if one.speedup > 1 else ""
    return f"{change}, {format_seconds(one.iteration_s)}{factor}"


def _axis(across: Scale, bottom: float) -> str:
    drawn = []
    for tick in ticks(across.low, across.high, _PERCENT, at_most=7):
        x = across(tick.value)
        drawn.append(line(x, _TOP - 4, x, bottom, "grid"))
        drawn.append(text(x, bottom + 12, f"{tick.label} %", anchor="middle"))
    drawn.append(text((_LEFT + _RIGHT) / 2, bottom + 28, "change of the time per token", anchor="middle"))
    return "".join(drawn)

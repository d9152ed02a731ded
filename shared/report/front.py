"""The front of iteration time against device memory, as a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from ..answers.search_result import SearchResult
from ..basics.units import format_bytes, format_seconds
from ..schema.plan import Plan
from ..tables.labels import knobs
from .axes import Scale, across, bytes_unit, time_unit, x_axis, y_axis
from .svg import PLOT_PX, Figure, circle, joined, line, share, stretched, tag, text, zoomable
from .svg import value_text as px

_TOP: Final = 20.0
_BOTTOM: Final = 340.0
_Point = tuple[int, float]
"""Guaranteed bytes, and seconds of an iteration."""


def front_chart(result: SearchResult) -> Figure | None:
    """Iteration time of the front's plans against their guaranteed peak; None if it is a single plan.

    It is drawn as a staircase: for every size, the fastest of the plans that are at most as large.  The plan itself
    counts too: the front leaves out plans that save little memory beside a faster one or an equal one.
    """
    if len(result.pareto) < 2:
        return None
    prediction = result.prediction
    own = (prediction.guaranteed_peak_device_bytes, prediction.iteration_s)
    points = [(one.guaranteed_peak_device_bytes, one.iteration_s) for one in result.pareto]
    rightwards, upwards = _scales([*points, own], result.device_budget_bytes)
    axes = [
        x_axis(
            rightwards,
            bytes_unit(rightwards.high),
            top=_TOP,
            bottom=_BOTTOM,
            title="device memory that the plan never exceeds",
        ),
        y_axis(upwards, time_unit(upwards.high), title="iteration"),
    ]
    stairs = lower_envelope([*points, own])
    path = f"M{px(rightwards(stairs[0][0]))} {px(_TOP)}V{px(upwards(stairs[0][1]))}"
    path += "".join(f"H{px(rightwards(x))}V{px(upwards(y))}" for x, y in stairs[1:])
    drawn = [stretched(_BOTTOM, tag("path", d=f"{path}H{px(PLOT_PX)}", class_="front"))]
    if result.device_budget_bytes <= rightwards.high:
        x = share(rightwards(result.device_budget_bytes))
        drawn.append(line(x, _TOP, x, _BOTTOM, "limit-line"))
        words = f"budget {format_bytes(result.device_budget_bytes)}"
        drawn.append(text(x, _TOP - 10, words, anchor="end", class_="limit", dx=4))
    for one, (size_bytes, time_s) in zip(result.pareto, points, strict=True):
        class_ = "dot" if one.is_simulated else "ring stroke-blue"
        title = _title((size_bytes, time_s), one.plan)
        drawn.append(circle(share(rightwards(size_bytes)), upwards(time_s), 5.0, class_, title=title))
    drawn.append(_own_mark(own, result.plan, rightwards, upwards, lowest_s=stairs[-1][1]))
    if stairs[0] != own:
        x, y = share(rightwards(stairs[0][0])), upwards(stairs[0][1])
        drawn.append(text(x, y - 10, f"least memory: {_words(stairs[0])}", class_="halo", dx=10))
    return Figure(
        name="front",
        height=_BOTTOM + 42,
        drawing=joined([*axes, zoomable(_BOTTOM, *drawn)]),
        label=f"Iteration time against device memory: {len(points)} plans, none of which is slower and larger than "
        f"another",
        caption=("The price of memory", ": the recommended plan, and what less memory costs. Axes begin above 0."),
        legend=(
            (_diamond(12, 6, 5.5), "the plan"),
            (circle(12, 6, 4, "dot"), "simulated"),
            (circle(12, 6, 4, "ring stroke-blue"), "replayed by the same rules"),
        ),
    )


def lower_envelope(points: Sequence[_Point]) -> list[_Point]:
    """Of plans those that no other one equals or beats in both, ascending in bytes."""
    kept: list[_Point] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _scales(points: Sequence[_Point], budget_bytes: int) -> tuple[Scale, Scale]:
    """Both axes with some margin; the budget is on the first one if it lies near the points."""
    low_bytes, high_bytes = min(x for x, _ in points), max(x for x, _ in points)
    if budget_bytes <= high_bytes + 1.5 * (high_bytes - low_bytes):
        high_bytes = max(high_bytes, budget_bytes)
    margin = 0.05 * (high_bytes - low_bytes) or 1.0
    rightwards = across(max(0.0, low_bytes - margin), high_bytes + margin)
    low_s, high_s = min(y for _, y in points), max(y for _, y in points)
    margin_s = 0.08 * (high_s - low_s) or 0.05 * high_s
    return rightwards, Scale(max(0.0, low_s - 2 * margin_s), high_s + margin_s, _BOTTOM, _TOP)


def _own_mark(own: _Point, plan: Plan, rightwards: Scale, upwards: Scale, *, lowest_s: float) -> Markup:
    """The plan, named where the front leaves room: on the right below all plans, on the left above itself."""
    x, y = rightwards(own[0]), upwards(own[1])
    is_right = x > PLOT_PX / 2
    name = text(
        share(x),
        upwards(lowest_s) + 18 if is_right else y - 14,
        f"the plan: {_words(own)}",
        anchor="end" if is_right else "start",
        class_="strong halo",
        dx=-12 if is_right else 12,
    )
    return _diamond(share(x), y, 8.0, title=f"the plan: {_title(own, plan)}") + name


def _diamond(x: float | str, y: float, size: float, *, title: str = "") -> Markup:
    path = f"M0 {px(-size)}L{px(size)} 0L0 {px(size)}L{px(-size)} 0Z"
    drawn = tag("path", *([tag("title", title)] if title else []), d=path, class_="chosen-dot")
    return tag("svg", drawn, x=x, y=y, class_="placed", aria_hidden="true")


def _words(point: _Point) -> str:
    return f"{format_bytes(point[0])}, {format_seconds(point[1])}"


def _title(point: _Point, plan: Plan) -> str:
    return f"{_words(point)}\n" + ", ".join(f"{knob.name} {knob.value}" for knob in knobs(plan))

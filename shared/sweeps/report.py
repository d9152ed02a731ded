"""The page of a sweep: throughput and what offloading costs against the tokens of a step, one line per length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from markupsafe import Markup

from ..answers.plan_kind import PlanKind
from ..basics.units import format_bytes, format_number, format_seconds
from ..report.axes import ONE, Scale, Tick, Unit, across, x_axis, y_axis
from ..report.page import Card, PageTable, Report, Section, quiet
from ..report.svg import Figure, joined, line, share, stretched, tag, zoomable
from ..report.svg import value_text as px
from .sweep import FREE_FRAC, Sweep, SweepPoint
from .tables import emulated_sentences, free_sentences, missing_table, point_table, price_sentences, too_long

_TOP: Final = 24.0
_BOTTOM: Final = 380.0
_COLOURS: Final = ("blue", "orange", "green", "purple", "red", "teal", "gold", "pink", "brown", "navy", "lime", "slate")
_PERCENT: Final = Unit(0.01, "%")
_SIZE: Final = 5.5
_CIRCLE: Final = f"M{-_SIZE} 0a{_SIZE} {_SIZE} 0 1 0 {2 * _SIZE} 0a{_SIZE} {_SIZE} 0 1 0 {-2 * _SIZE} 0Z"
_MARKS: Final = {
    PlanKind.RESIDENT: _CIRCLE,
    PlanKind.CHECKPOINTED: "M-5 -5H5V5H-5Z",
    PlanKind.SHARDED: "M0 -6L6 5H-6Z",
    PlanKind.HOST_STEPPED: "M-6 -2H-2V-6H2V-2H6V2H2V6H-2V2H-6Z",
    PlanKind.OFFLOADED: "M0 -6L6 0L0 6L-6 0Z",
    PlanKind.SWAPPED: "M0 6L6 -5H-6Z",
}
"""Outlines of marks around (0, 0), by the kind of the plan."""


@dataclass(frozen=True, slots=True)
class _Chart:
    """Points against the tokens of a step, by one figure of each."""

    name: str
    value: Callable[[SweepPoint], float | None]
    unit: Unit
    title: str
    caption: tuple[str, str]
    label: str
    limit: float | None = None
    """Where a line stands across."""


def sweep_report(sweep: Sweep) -> Report:
    """One page about all points."""
    sections = []
    if sweep.with_plan:
        sections.append(Section("Throughput", (throughput_chart(sweep),)))
        said = tuple(quiet(words) for words in (*free_sentences(sweep), *too_long(sweep)))
        costs = cost_chart(sweep)
        sections.append(Section("Offloading", said if costs is None else (costs, *said)))
        notes = tuple(quiet(words) for words in (*emulated_sentences(sweep), *price_sentences(sweep)))
        sections.append(Section("Every point", (PageTable(point_table(sweep, "")), *notes)))
    if missing := missing_table(sweep):
        sections.append(Section(missing.title, (PageTable(replace(missing, title="")),)))
    lengths, sizes = sweep.sequence_lengths, sweep.batch_sizes
    asked = f"{_range(sizes)} x {_range(lengths)} tokens"
    shapes = "one shape" if len(sweep.points) == 1 else f"each of {len(sweep.points)} shapes"
    ranks = f", {sweep.num_ranks:,} ranks" if sweep.num_ranks > 1 else ""
    return Report(
        title=f"{sweep.model_name} on {sweep.hardware_name}: a sweep",
        subtitle=f"The best plan for {shapes} of the batch, {asked}{ranks}",
        cards=_cards(sweep),
        sections=tuple(sections),
        warnings=() if sweep.is_complete else ("The sweep was interrupted, and is not complete.",),
    )


def throughput_chart(sweep: Sweep) -> Figure:
    """Tokens per second against the tokens of a step: a line for each length, a mark for each kind of plan."""
    return _drawn(
        sweep.with_plan,
        _Chart(
            "throughput",
            lambda point: None if point.found is None else point.found.tokens_per_s,
            ONE,
            "tokens per second",
            ("Tokens per second", " of the best plan, by the tokens of a step; one line for each sequence length"),
            "Tokens per second against tokens of a step",
        ),
    )


def cost_chart(sweep: Sweep) -> Figure | None:
    """What offloading costs against the tokens of a step; None where nothing is offloaded."""
    points = tuple(point for point in sweep.points if point.offloads)
    if not points:
        return None
    return _drawn(
        points,
        _Chart(
            "offloading",
            lambda point: point.offloading_cost_frac,
            _PERCENT,
            "offloading costs",
            ("What offloading costs", " beside a device of unlimited memory that recomputes as much; below the line "
             f"of {FREE_FRAC * 100:g} % it is free"),
            "What offloading costs against tokens of a step",
            limit=FREE_FRAC,
        ),
    )  # fmt: skip


def _drawn(points: Sequence[SweepPoint], chart: _Chart) -> Figure:
    shown = [(point, value) for point in points if (value := chart.value(point)) is not None]
    lengths = sorted({point.sequence_length for point, _ in shown})
    rightwards, ticks = _tokens_axis([point.num_tokens for point, _ in shown])
    upwards = _upwards([value for _, value in shown], chart.limit)
    axes = [
        x_axis(rightwards, ONE, top=_TOP, bottom=_BOTTOM, title="tokens in a step", marks=ticks),
        y_axis(upwards, chart.unit, title=chart.title),
    ]
    drawn, legend = [], []
    if chart.limit is not None:
        y = upwards(chart.limit)
        drawn.append(line("0%", y, "100%", y, "limit-line"))
    for place, length in enumerate(lengths):
        colour = f"stroke-{_COLOURS[place % len(_COLOURS)]}"
        style = f"line {colour}" + (" dashed" if place >= len(_COLOURS) else "")
        own = sorted((one for one in shown if one[0].sequence_length == length), key=lambda one: one[0].batch_size)
        places = [(rightwards(math.log2(point.num_tokens)), upwards(value)) for point, value in own]
        path = "M" + "L".join(f"{px(x)} {px(y)}" for x, y in places)
        drawn.append(stretched(_BOTTOM, tag("path", d=path, class_=style)))
        legend.append((line(0, 6, 24, 6, style), f"{length:,} tokens"))
        for (point, value), (x, y) in zip(own, places, strict=True):
            drawn.append(_mark(_kind(point), share(x), y, colour, title=_title(point, value, chart)))
    kinds = [kind for kind in PlanKind if any(_kind(point) is kind for point, _ in shown)]
    legend += [(_mark(kind, 12, 6, "stroke-slate"), kind.words) for kind in kinds]
    told = "; ".join(_title(point, value, chart).partition("\n")[0] for point, value in shown)
    return Figure(
        name=chart.name,
        height=_BOTTOM + 42,
        drawing=joined([*axes, zoomable(_BOTTOM, *drawn)]),
        label=f"{chart.label}: {told}",
        caption=chart.caption,
        legend=tuple(legend),
    )


def _tokens_axis(numbers: Sequence[int]) -> tuple[Scale, tuple[Tick, ...]]:
    """A scale of powers of two, with a tick at each, or at every other one."""
    low, high = math.log2(min(numbers)), math.log2(max(numbers))
    margin = 0.04 * (high - low) or 0.5
    first, last = math.floor(low), math.ceil(high)
    every = max(1, -(-(last - first) // 11))
    ticks = [Tick(float(power), f"{2**power:,}") for power in range(first, last + 1, every)]
    rightwards = across(low - margin, high + margin)
    return rightwards, tuple(tick for tick in ticks if rightwards.low <= tick.value <= rightwards.high)


def _upwards(values: Sequence[float], limit: float | None) -> Scale:
    """From 0, or from below it where a figure is."""
    low, high = min(0.0, *values), max(0.0, *values, *([] if limit is None else [2 * limit]))
    return Scale(1.05 * low, 1.08 * high or 1.0, _BOTTOM, _TOP)


def _kind(point: SweepPoint) -> PlanKind:
    assert point.found is not None, "points without a plan are not drawn"
    return point.found.plan_kind


def _mark(kind: PlanKind, x: float | str, y: float, colour: str, *, title: str = "") -> Markup:
    path = tag("path", *([tag("title", title)] if title else []), d=_MARKS[kind], class_=f"ring {colour}")
    return tag("svg", path, x=x, y=y, class_="placed", aria_hidden="true")


def _title(point: SweepPoint, value: float, chart: _Chart) -> str:
    found = point.found
    assert found is not None
    shown = f"{format_number(value / chart.unit.worth)} {chart.unit.name or chart.title}"
    kept = ", which keep results of some operations" if found.plan.n_selective else ""
    memory = f"device {format_bytes(found.guaranteed_peak_device_bytes)}, host {format_bytes(found.host_bytes)}"
    return (
        f"{point.words} tokens: {shown}\n{found.plan_kind.words}{kept}, {format_seconds(found.iteration_s)}, {memory}"
    )


def _cards(sweep: Sweep) -> tuple[Card, ...]:
    cards = []
    if sweep.with_plan:
        best = max(sweep.with_plan, key=lambda point: 0.0 if point.found is None else point.found.tokens_per_s)
        assert best.found is not None
        rate = f"{format_number(best.found.tokens_per_s)} tokens/s"
        cards.append(Card("Fastest", rate, (f"{best.words} tokens, {best.found.plan_kind}",)))
        most = max(sweep.with_plan, key=lambda point: point.num_tokens)
        cards.append(Card("Most in a step", f"{most.num_tokens:,} tokens", (most.words,)))
    if any(point.offloads for point in sweep.points):
        first = sweep.free_from
        figure = "nowhere" if first is None else f"{first.num_tokens:,} tokens"
        cards.append(Card("Offloading is free from", figure, () if first is None else (first.words,)))
    cards.append(Card("Points with a plan", f"{len(sweep.with_plan)} of {len(sweep.points)}"))
    return tuple(cards)


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"

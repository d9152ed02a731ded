"""Predicted times with the intervals that measured ones are expected in, as bars with whiskers."""

from __future__ import annotations

from collections.abc import Sequence

from ..answers.search_result import SearchResult
from ..basics.interval import Interval
from ..basics.units import format_seconds
from ..schema.record import Origin, Record
from ..tables.answer import short_plan
from ..tables.labels import ORIGIN_NAMES, format_interval_s
from .axes import BarRow, Segment, across, bar_rows, time_unit
from .svg import Figure, area_mark, line

_NAME_OF_PLAN = "the plan"


def expected_chart(records: Sequence[Record], result: SearchResult | None) -> Figure | None:
    """A bar per record, and per plan that the search names beside its answer; None if no interval is known."""
    if all(record.iteration_interval_s is None for record in records):
        return None
    rows = [_row_of(record, is_stressed=result is not None and record.origin is Origin.SIMULATED) for record in records]
    others = () if result is None else result.alternatives
    for number, one in enumerate(others, start=1):
        title = short_plan(one) + (", which intervals cannot tell from the plan" if one.is_near_tie else "")
        rows.append(_row(f"next best {number}", one.iteration_s, one.iteration_interval_s, "rest", title))
    ends_s = [row.bars[0].high for row in rows] + [row.whisker.high for row in rows if row.whisker is not None]
    rightwards = across(0.0, max(ends_s))
    return Figure(
        name="expected",
        is_rows=True,
        drawing=bar_rows(rows, rightwards, time_unit(rightwards.high), title="iteration"),
        label="Iteration times and where measured ones are expected: " + "; ".join(f"{r.name} {r.words}" for r in rows),
        caption=("How sure the times are", ": nine in ten measured ones lie within the whisker"),
        legend=(
            (line(2, 6, 22, 6, "whisker"), "where the measured time is expected"),
            *([(area_mark("rest"), "plans close to it")] if others else []),
        ),
    )


def _row_of(record: Record, *, is_stressed: bool) -> BarRow:
    is_predicted = record.origin is Origin.SIMULATED
    name = _NAME_OF_PLAN if is_stressed else ORIGIN_NAMES[record.origin]
    colour = "blue" if is_predicted else "orange"
    return _row(name, record.iteration_s, record.iteration_interval_s, colour, name, is_stressed=is_stressed)


def _row(
    name: str,
    seconds: float,
    whisker: Interval | None,
    colour: str,
    title: str,
    *,
    is_stressed: bool = False,
) -> BarRow:
    told = format_seconds(seconds)
    return BarRow(
        name=name,
        words=told if whisker is None else format_interval_s(whisker),
        title=f"{title}: {told}",
        bars=(Segment(0.0, seconds, colour),),
        whisker=whisker,
        is_stressed=is_stressed,
    )

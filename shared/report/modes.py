"""Parallel modes in the report: how long the best plan of each takes, what none can beat, and why some have none."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from ..basics.units import format_seconds
from ..schema.search_result import ModeChoice, SearchResult
from ..tables.labels import NO_VALUE
from .svg import Figure, Scale, area_mark, line, tag, text, ticks, time_unit

_WIDTH: Final = 1120.0
_LEFT: Final = 130.0
_RIGHT: Final = 620.0
_TOP: Final = 8.0
_PITCH: Final = 34.0
_BAR_PX: Final = 18.0


def modes_chart(result: SearchResult) -> Figure | None:
    """One bar per mode, as long as its best plan's iteration, with a mark at what no plan of it can beat.

    None where one rank alone was asked about.
    """
    if not result.modes:
        return None
    times_s = [time_s for one in result.modes for time_s in _times(one)]
    across = Scale(0.0, max(times_s, default=result.prediction.iteration_s), _LEFT, _RIGHT)
    bottom = _TOP + len(result.modes) * _PITCH
    drawn = [_axis(across, bottom)]
    for row, one in enumerate(result.modes):
        drawn.append(_row(one, one.parallel is result.plan.parallel, across, _TOP + (row + 0.5) * _PITCH))
    is_rivalled = any(one.best_iteration_s and one.parallel is not result.plan.parallel for one in result.modes)
    told = "; ".join(f"{one.parallel}: {_words(one)}" for one in result.modes)
    return Figure(
        name="modes",
        width=_WIDTH,
        height=bottom + 40,
        drawing="".join(drawn),
        label=f"The best plan's iteration in every parallel mode: {told}",
        caption=(f"What {result.plan.num_ranks:,} ranks do together", ": the best plan of every mode"),
        legend=(
            (area_mark("blue"), "the chosen mode"),
            *([(area_mark("rest"), "another mode's best plan, as far as it was searched")] if is_rivalled else []),
            (line(2, 6, 22, 6, "limit-line"), "no plan of the mode is faster"),
        ),
    )


def _row(one: ModeChoice, is_chosen: bool, across: Scale, middle: float) -> str:
    drawn = [text(0, middle, one.parallel, class_="strong" if is_chosen else None)]
    title = tag("title", escape(f"{one.parallel}: {_words(one)}{f'. {one.reason}' if one.reason else ''}"))
    if one.best_iteration_s is not None:
        drawn.append(
            tag(
                "rect",
                title,
                x=_LEFT,
                y=middle - _BAR_PX / 2,
                width=max(1.0, across(one.best_iteration_s) - _LEFT),
                height=_BAR_PX,
                class_="fill-blue" if is_chosen else "fill-rest",
            )
        )
        title = ""
    if one.shortest_possible_s is not None:
        x = across(one.shortest_possible_s)
        drawn.append(line(x, middle - _BAR_PX / 2 - 4, x, middle + _BAR_PX / 2 + 4, "limit-line"))
    end = max((across(time_s) for time_s in _times(one)), default=_LEFT)
    drawn.append(tag("g", title, text(end + 8, middle, _words(one), class_="halo")))
    return "".join(drawn)


def _axis(across: Scale, bottom: float) -> str:
    unit, drawn = time_unit(across.high), []
    for tick in ticks(0.0, across.high, unit, at_most=6):
        x = across(tick.value)
        drawn.append(line(x, _TOP - 4, x, bottom, "grid"))
        drawn.append(text(x, bottom + 12, f"{tick.label} {unit.name}", anchor="middle"))
    drawn.append(text((_LEFT + _RIGHT) / 2, bottom + 28, "iteration", anchor="middle"))
    return "".join(drawn)


def _times(one: ModeChoice) -> list[float]:
    return [time_s for time_s in (one.best_iteration_s, one.shortest_possible_s) if time_s is not None]


def _words(one: ModeChoice) -> str:
    if one.reason:
        return "no plan fits" if one.num_candidates else "has no plan"
    best = "" if one.best_iteration_s is None else format_seconds(one.best_iteration_s)
    bound = "" if one.shortest_possible_s is None else f"not below {format_seconds(one.shortest_possible_s)}"
    counted = f"{one.num_simulated:,} of {one.num_candidates:,} plans simulated"
    return ", ".join(words for words in (best, bound, counted) if words)


def mode_table(result: SearchResult) -> str:
    """Per mode its best plan's time, what no plan of it can beat, how many plans it has, and why none fits."""
    head = ("mode", "best iteration", "not below", "plans", "simulated", "why there is none")
    cells_of_head = (
        tag("th", escape(name), scope="col", class_="number" if 0 < place < len(head) - 1 else None)
        for place, name in enumerate(head)
        if name != head[-1] or any(one.reason for one in result.modes)
    )
    caption = tag("caption", "Parallel modes")
    body = _rows(result.modes, result)
    table = tag("table", caption, tag("thead", tag("tr", *cells_of_head)), tag("tbody", *body))
    return tag("div", table, class_="scroll")


def _rows(modes: Sequence[ModeChoice], result: SearchResult) -> list[str]:
    has_reasons = any(one.reason for one in modes)
    rows = []
    for one in modes:
        figures = (
            NO_VALUE if one.best_iteration_s is None else format_seconds(one.best_iteration_s),
            NO_VALUE if one.shortest_possible_s is None else format_seconds(one.shortest_possible_s),
            f"{one.num_candidates:,}",
            f"{one.num_simulated:,}",
        )
        rows.append(
            tag(
                "tr",
                tag("th", escape(one.parallel), scope="row"),
                *(tag("td", escape(words), class_="number") for words in figures),
                tag("td", escape(one.reason)) if has_reasons else "",
                class_="total" if one.parallel is result.plan.parallel else None,
            )
        )
    return rows

"""Lane charts of the report: what every lane does when, drawn to one time axis for prediction and measurement."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from markupsafe import Markup

from ..basics.units import format_seconds
from ..records.chrome_trace import paced_times_s
from ..schema.record import Record
from ..schema.schedule import Lane, Schedule, TaskKind
from ..tables.labels import KIND_NAMES, LANE_NAMES, ORIGIN_NAMES, bottleneck, busy_frac, format_share
from .axes import LEFT_PX, RIGHT_PX, Scale, time_unit, x_axis
from .bars import BAR_PX, KIND_COLOURS, LANE_PX, MERGED_BELOW_PX, TOP_PX, Bars
from .svg import WIDTH, Figure, area_mark, joined, line, tag, text

_CLOSER_ABOVE_FRAC: Final = 0.3
"""Share of the tasks that joint bars may stand for before a second chart shows a part of the iteration closer."""
_CLOSER_TASKS: Final = 24
"""Tasks of the compute lane that such a chart shows."""
_PREVIOUS_MARK: Final = tag("rect", x=5.0, y=0.0, width=14.0, height=12.0, class_="previous")
_HINT: Final = "Point at a task to see what it waits for and what waits for it; a click holds it, arrow keys walk."


def time_range_s(records: Sequence[Record]) -> tuple[float, float]:
    """From the first start to the last end of all records, whole iterations and memory curves included."""
    times_s = [0.0]
    for record in records:
        times_s += [record.iteration_s]
        times_s += [at_s for timing in record.tasks for at_s in (timing.start_s, timing.end_s)]
        times_s += [at_s for curve in record.memory for at_s in paced_times_s(record, curve)]
    return min(times_s), max(times_s)


def lane_charts(records: Sequence[Record], schedule: Schedule | None) -> tuple[Figure, ...]:
    """One chart per record on a common time axis, and where it leaves much untold a closer look at a part of it."""
    low, high = time_range_s(records)
    scale = Scale(low, high, LEFT_PX, RIGHT_PX)
    names = [ORIGIN_NAMES[record.origin] for record in records]
    if len(set(names)) < len(names):
        names = [f"{name}-{place}" for place, name in enumerate(names, start=1)]
    charts = []
    for record, name in zip(records, names, strict=True):
        bars = Bars.of(record, scale, schedule)
        charts.append(_overview(record, scale, bars, name))
        if bars.num_merged > _CLOSER_ABOVE_FRAC * len(record.tasks):
            charts.append(_closer(record, schedule, name))
    return (
        *(replace(one, has_legend_on_page=one.legend != following.legend) for one, following in pairwise(charts)),
        charts[-1],
    )


def _overview(record: Record, scale: Scale, bars: Bars, name: str) -> Figure:
    """The lanes of one record; ``name`` tells it from the other charts."""
    busiest = bottleneck(record)
    caption = f", iteration {format_seconds(record.iteration_s)}"
    if busiest is not None:
        caption += f", bottleneck: {LANE_NAMES[busiest]}"
    return _chart(
        record,
        scale,
        bars,
        name=f"timeline-{name}",
        caption=(_words(name), f"{caption}. {bars.thinning_words}".rstrip()),
        label=f"Timeline, {_words(name)}: {len(record.tasks)} tasks on {len(record.lanes_shown)} lanes",
        is_whole=True,
    )


def _closer(record: Record, schedule: Schedule | None, name: str) -> Figure:
    """A stretch of the iteration in which tasks can be told apart."""
    low, high = telling_stretch_s(record)
    scale = Scale(low, high, LEFT_PX, RIGHT_PX)
    bars = Bars.of(record, scale, schedule)
    span = f"{format_seconds(low)} to {format_seconds(high)}"
    return _chart(
        record,
        scale,
        bars,
        name=f"timeline-{name}-closer",
        caption=(f"{_words(name)}, closer", f": {len(bars.place_of)} tasks, {span}. {bars.thinning_words}".rstrip()),
        label=f"Timeline, {_words(name)}, {span}: {len(bars.place_of)} tasks on {len(record.lanes_shown)} lanes",
        is_whole=False,
    )


def telling_stretch_s(record: Record) -> tuple[float, float]:
    """Of all runs of a few consecutive compute tasks the one that shows the most kinds of tasks, then the most tasks.

    Runs with long pauses, more than half of the time beyond the densest run, are left aside.
    """
    compute = sorted((t for t in record.tasks if t.lane is Lane.COMPUTE), key=lambda t: (t.start_s, t.end_s))
    if not compute:
        return time_range_s([record])
    size = min(_CLOSER_TASKS, len(compute))
    runs = [compute[first : first + size] for first in range(len(compute) - size + 1)]
    spans_s = [max(run[-1].end_s - run[0].start_s, 1e-12) for run in runs]
    busy_fracs = [sum(t.duration_s for t in run) / span_s for run, span_s in zip(runs, spans_s, strict=True)]
    in_order = sorted(record.tasks, key=lambda t: t.start_s)
    starts_s = [t.start_s for t in in_order]

    def telling(place: int) -> tuple[int, int, int]:
        run = runs[place]
        within = in_order[bisect_left(starts_s, run[0].start_s) : bisect_left(starts_s, run[-1].end_s)]
        return len({t.kind for t in within}), len(within), -place

    dense = [place for place, busy_frac in enumerate(busy_fracs) if busy_frac >= max(busy_fracs) / 2]
    chosen = runs[max(dense, key=telling)]
    return chosen[0].start_s, chosen[-1].end_s


def _words(name: str) -> str:
    return name.replace("-", ", number ").capitalize()


def _chart(
    record: Record, scale: Scale, bars: Bars, *, name: str, caption: tuple[str, str], label: str, is_whole: bool
) -> Figure:
    """Lanes with their names, the time axis, and the bars.

    Args:
        record: what the lanes did.
        scale: the time axis.
        bars: the tasks within it.
        name: of the figure.
        caption: its stressed words and its plain ones.
        label: for a screen reader.
        is_whole: whether the axis has the whole iteration; then the share of it that each lane is busy stands at the
            right, and what the previous iteration left is drawn too.
    """
    bottom = TOP_PX + len(record.lanes_shown) * LANE_PX
    runs = list(_runs_into_next(record, scale)) if is_whole else []
    times = x_axis(scale, time_unit(scale.high - scale.low), top=TOP_PX, bottom=bottom, at_most=12)
    drawn = [*_lane_tracks(record, has_shares=is_whole), times]
    drawn += [_of_previous(run, record, scale) for run in runs]
    drawn += [bars.drawn(place, scale) for place in range(len(bars.stretches))]
    drawn += [*_period(record.iteration_s, scale, bottom), tag("g", class_="links")]
    kinds = {timing.kind for stretch in bars.stretches for timing in stretch.timings}
    has_waits = bool(bars.waits)
    return Figure(
        name=name,
        height=bottom + 22,
        drawing=joined(drawn),
        label=label,
        caption=caption,
        legend=(
            *((area_mark(KIND_COLOURS[kind]), KIND_NAMES[kind]) for kind in TaskKind if kind in kinds),
            *([(_PREVIOUS_MARK, "previous iteration")] if runs else []),
        ),
        below=tag("p", _HINT, class_="told quiet", aria_live="polite") if has_waits else "",
        class_="lanes" if has_waits else None,
    )


def _lane_tracks(record: Record, *, has_shares: bool) -> Iterator[Markup]:
    """Per lane its name and ground, the busiest stressed; with ``has_shares`` how much of the iteration it is busy."""
    busiest = bottleneck(record) if has_shares else None
    if has_shares:
        yield text(WIDTH, TOP_PX - 12, "busy", anchor="end")
    for row, lane in enumerate(record.lanes_shown):
        middle = TOP_PX + (row + 0.5) * LANE_PX
        emphasis = "strong" if lane is busiest else None
        yield text(0, middle, LANE_NAMES[lane], class_=emphasis)
        width = RIGHT_PX - LEFT_PX
        yield tag("rect", x=LEFT_PX, y=middle - BAR_PX / 2, width=width, height=BAR_PX, class_="track")
        if has_shares:
            yield text(WIDTH, middle, format_share(busy_frac(record, lane)), anchor="end", class_=emphasis)


def _period(iteration_s: float, scale: Scale, bottom: float) -> Iterator[Markup]:
    """Where the iteration begins and where the next one does, if that is on the axis."""
    for at_s, words, side, anchor in ((0.0, "iteration begins", 4, "start"), (iteration_s, "next begins", -4, "end")):
        if scale.low <= at_s <= scale.high:
            x = scale(at_s)
            yield line(x, TOP_PX - 6, x, bottom, "period")
            yield text(x + side, TOP_PX - 12, words, anchor=anchor)


def _runs_into_next(record: Record, scale: Scale) -> Iterator[tuple[Lane, float, float]]:
    """Per lane, when it is busy after the iteration's end: begin and end, gaps below two pixels closed."""
    for lane in Lane:
        late = [timing for timing in record.tasks if timing.lane is lane and timing.end_s > record.iteration_s]
        begin_s = end_s = -math.inf
        for timing in sorted(late, key=lambda t: t.start_s):
            start_s = max(timing.start_s, record.iteration_s)
            if start_s - end_s > MERGED_BELOW_PX * scale.per_px:
                if end_s > begin_s:
                    yield lane, begin_s, end_s
                begin_s = start_s
            end_s = max(end_s, timing.end_s)
        if end_s > begin_s:
            yield lane, begin_s, end_s


def _of_previous(run: tuple[Lane, float, float], record: Record, scale: Scale) -> Markup:
    """The same stretch of the previous iteration, which keeps the lane busy at the beginning of this one."""
    lane, begin_s, end_s = run
    left, right = scale(begin_s - record.iteration_s), scale(end_s - record.iteration_s)
    middle = TOP_PX + (tuple(Lane).index(lane) + 0.5) * LANE_PX
    return tag(
        "rect",
        tag("title", "still at work for the previous iteration"),
        x=left,
        y=middle - BAR_PX / 2,
        width=max(0.5, right - left),
        height=BAR_PX,
        class_="previous",
    )

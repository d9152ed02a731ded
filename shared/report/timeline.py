"""Lane charts of the report: what every lane does when, drawn to one time axis for prediction and measurement."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from markupsafe import Markup

from ..basics.units import format_seconds
from ..records.period import folded
from ..records.waits import Waits
from ..schema.record import Record
from ..schema.schedule import Lane, Schedule, in_kind_order
from ..tables.labels import LANE_NAMES, ORIGIN_NAMES, bottleneck, busy_frac, format_share, kind_name, task_name
from .axes import Scale, across, time_unit, x_axis
from .bars import BAR_PX, LANE_PX, TOP_PX, Bars, kind_colour
from .svg import Figure, area_mark, joined, line, share, tag, text, zoomable

_CLOSER_ABOVE_FRAC: Final = 0.3
"""Share of the tasks that joint bars may stand for before a second chart shows a part of the iteration closer."""
_CLOSER_BELOW_FRAC: Final = 0.5
"""Share of the iteration below which such a part is worth a chart of its own."""
_CLOSER_TASKS: Final = 24
"""Tasks of the compute lane that such a chart shows."""
_NEIGHBOURS_MARK: Final = tag("rect", x=5.0, y=0.0, width=14.0, height=12.0, class_="neighbours fill-rest")


def time_range_s(records: Sequence[Record]) -> tuple[float, float]:
    """From the beginning of an iteration to its end, of the longest one if several are laid over each other."""
    of_ranks = [one.iteration_s for record in records for one in record.ranks]
    return 0.0, max([record.iteration_s for record in records] + of_ranks)


def lane_charts(records: Sequence[Record], schedule: Schedule | None) -> tuple[Figure, ...]:
    """One chart per record on a common time axis, and where it leaves much untold a closer look at a part of it.

    Of a record of several ranks the slowest is drawn, and the one that waits most for the others.
    """
    scale = across(*time_range_s(records))
    names = [ORIGIN_NAMES[record.origin] for record in records]
    if len(set(names)) < len(names):
        names = [f"{name}-{place}" for place, name in enumerate(names, start=1)]
    pairs = [pair for record, name in zip(records, names, strict=True) for pair in _ranks_drawn(record, name)]
    records, names = [record for record, _ in pairs], [name for _, name in pairs]
    charts = []
    for record, name in zip(records, names, strict=True):
        bars = Bars.of(record, scale, schedule)
        charts.append(replace(_overview(record, scale, bars, name), below=task_list(record, bars.waits, name)))
        begin_s, end_s = telling_stretch_s(record)
        is_near = end_s - begin_s < _CLOSER_BELOW_FRAC * record.iteration_s
        if is_near and bars.num_merged > _CLOSER_ABOVE_FRAC * len(record.tasks):
            charts.append(_closer(record, schedule, name))
    return (
        *(replace(one, has_legend_on_page=one.legend != following.legend) for one, following in pairwise(charts)),
        charts[-1],
    )


def _ranks_drawn(record: Record, name: str) -> Iterator[tuple[Record, str]]:
    if not record.ranks:
        yield record, name
        return
    waits_most = max(record.ranks, key=lambda one: one.waited_s).rank
    for rank in dict.fromkeys((record.rank, waits_most)):
        yield record.of_rank(rank), f"{name}-rank-{rank}"


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
        list_name=name,
        is_whole=True,
    )


def _closer(record: Record, schedule: Schedule | None, name: str) -> Figure:
    """A stretch of the iteration in which tasks can be told apart."""
    low, high = telling_stretch_s(record)
    scale = across(low, high)
    bars = Bars.of(record, scale, schedule)
    span = f"{format_seconds(low)} to {format_seconds(high)}"
    return _chart(
        record,
        scale,
        bars,
        name=f"timeline-{name}-closer",
        caption=(f"{_words(name)}, closer", f": {bars.num_tasks} tasks, {span}. {bars.thinning_words}".rstrip()),
        label=f"Timeline, {_words(name)}, {span}: {bars.num_tasks} tasks on {len(record.lanes_shown)} lanes",
        list_name=name,
        is_whole=False,
    )


def telling_stretch_s(record: Record) -> tuple[float, float]:
    """Of all runs of a few consecutive compute tasks the one that shows the most kinds of tasks, then the most tasks.

    Runs with long pauses, more than half of the time beyond the densest run, are left aside.
    """
    pieces = sorted(folded(record.tasks, record.iteration_s), key=lambda p: (p.start_s, p.end_s))
    compute = [piece for piece in pieces if piece.timing.lane is Lane.COMPUTE]
    if not compute:
        return time_range_s([record])
    size = min(_CLOSER_TASKS, len(compute))
    runs = [compute[first : first + size] for first in range(len(compute) - size + 1)]
    spans_s = [max(run[-1].end_s - run[0].start_s, 1e-12) for run in runs]
    busy_fracs = [sum(p.end_s - p.start_s for p in run) / span_s for run, span_s in zip(runs, spans_s, strict=True)]
    starts_s = [piece.start_s for piece in pieces]

    def telling(place: int) -> tuple[int, int, int]:
        run = runs[place]
        within = pieces[bisect_left(starts_s, run[0].start_s) : bisect_left(starts_s, run[-1].end_s)]
        return len({piece.timing.kind for piece in within}), len(within), -place

    dense = [place for place, busy_frac in enumerate(busy_fracs) if busy_frac >= max(busy_fracs) / 2]
    chosen = runs[max(dense, key=telling)]
    return chosen[0].start_s, chosen[-1].end_s


def _words(name: str) -> str:
    return name.replace("-rank-", ", rank ").replace("-", ", number ").capitalize()


def _chart(
    record: Record,
    scale: Scale,
    bars: Bars,
    *,
    name: str,
    caption: tuple[str, str],
    label: str,
    list_name: str,
    is_whole: bool,
) -> Figure:
    """Lanes with their names, the time axis, and the bars.

    Args:
        record: what the lanes did.
        scale: the time axis.
        bars: the tasks within it.
        name: of the figure.
        caption: its stressed words and its plain ones.
        label: for a screen reader.
        list_name: of the list of the record's tasks.
        is_whole: whether the axis has the whole iteration; then the share of it that each lane is busy stands at the
            right.
    """
    bottom = TOP_PX + len(record.lanes_shown) * LANE_PX
    group = "time" if is_whole else None
    times = x_axis(scale, time_unit(scale.high - scale.low), top=TOP_PX, bottom=bottom, at_most=12, group=group)
    drawn = tag("g", *(bars.drawn(place, scale) for place in range(len(bars.stretches))), class_="bars")
    kinds = {piece.timing.kind for stretch in bars.stretches for piece in stretch.pieces}
    has_neighbours = any(stretch.is_neighbours for stretch in bars.stretches)
    end = _end(record.iteration_s, scale, bottom)
    return Figure(
        name=name,
        height=bottom + 22,
        drawing=joined(
            [*_lane_tracks(record, has_shares=is_whole), times, zoomable(bottom, *end, drawn), tag("g", class_="links")]
        ),
        label=label,
        caption=caption,
        legend=(
            *((area_mark(kind_colour(kind)), kind_name(kind)) for kind in in_kind_order(kinds)),
            *([(_NEIGHBOURS_MARK, "of the previous or for the next iteration")] if has_neighbours else []),
        ),
        class_="lanes",
        list_id=f"tasks-{list_name}",
    )


def _lane_tracks(record: Record, *, has_shares: bool) -> Iterator[Markup]:
    """Per lane its name and ground, the busiest stressed; with ``has_shares`` how much of the iteration it is busy."""
    busiest = bottleneck(record) if has_shares else None
    if has_shares:
        yield text("100%", TOP_PX - 12, "busy", dx=8)
    for row, lane in enumerate(record.lanes_shown):
        middle = TOP_PX + (row + 0.5) * LANE_PX
        emphasis = "strong" if lane is busiest else None
        yield text(-8, middle, LANE_NAMES[lane], anchor="end", class_=emphasis)
        yield tag("rect", x=0.0, y=middle - BAR_PX / 2, width="100%", height=BAR_PX, class_="track")
        if has_shares:
            yield text("100%", middle, format_share(busy_frac(record, lane)), class_=emphasis, dx=8)


def _end(iteration_s: float, scale: Scale, bottom: float) -> Iterator[Markup]:
    """Where an iteration ends that is shorter than the axis."""
    if scale.low < iteration_s < scale.high:
        x = share(scale(iteration_s))
        yield line(x, TOP_PX - 6, x, bottom, "period")
        yield text(x, TOP_PX - 12, "next begins", anchor="end", dx=-4)


def task_list(record: Record, waits: Mapping[int, Waits], name: str) -> Markup | str:
    """All tasks as plain lines, lane by lane in order of start: a list to read, and what the script draws from.

    A line without tabs names a lane.  Others have the task's number and name, its start and duration in the list's
    unit, and the numbers of the tasks that it waits for, of this iteration and of the previous one, the last to end
    first, and of the one that held it up.
    """
    if not record.tasks:
        return ""
    unit = time_unit(record.iteration_s)
    # A ten-millionth of the iteration: nothing that a closer look shows is rounded away.
    decimals = max(0, 7 - math.ceil(math.log10(record.iteration_s / unit.worth)))
    lines = [f"number\ttask\tstart ({unit.name})\tduration ({unit.name})"]
    lines[0] += "\tafter\tafter those of the previous iteration\theld up by" if waits else ""
    for lane in record.lanes_shown:
        lines.append(LANE_NAMES[lane])
        in_order = sorted((t for t in record.tasks if t.lane is lane), key=lambda t: (t.start_s, t.end_s, t.task))
        for timing in in_order:
            times = (f"{at_s / unit.worth:.{decimals}f}" for at_s in (timing.start_s, timing.end_s - timing.start_s))
            # Tabs and line ends part cells and lines.
            cells = [str(timing.task), " ".join(task_name(timing.name, timing.kind).split()), *times]
            if (waited := waits.get(timing.task)) is not None:
                held = waited.held_up_by
                cells += [" ".join(map(str, waited.after)), " ".join(map(str, waited.earlier))]
                on_lane = ", the task before it on its lane" if waited.is_held_by_lane else ""
                cells.append("" if held is None else f"{held}{on_lane}")
            lines.append("\t".join(cells))
    kinds = {timing.kind for timing in record.tasks}
    colours = ";".join(f"{kind_name(kind)}={kind_colour(kind)}" for kind in in_kind_order(kinds))
    listed = tag(
        "pre",
        "\n".join(lines),
        id=f"tasks-{name}",
        class_="tasks",
        data_colours=colours,
        data_period=repr(record.iteration_s / unit.worth),
        data_worth=repr(unit.worth),
    )
    return tag("details", tag("summary", f"All {len(record.tasks):,} tasks, {_words(name).lower()}, as a list"), listed)

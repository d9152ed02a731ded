"""Lane charts of the report: what every lane does when, drawn to one time axis for prediction and measurement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from .record import Record, TaskTiming
from .report_svg import Figure, Scale, area_mark, line, tag, text, time_axis
from .report_waits import Waits, waits_of
from .report_words import KIND_NAMES, LANE_NAMES, ORIGIN_NAMES, bottleneck, busy_frac, format_share, task_name
from .schedule import Lane, Schedule, TaskKind
from .timeline import paced_times_s, subject_of
from .units import format_bytes, format_seconds

KIND_COLOURS: Final[dict[TaskKind, str]] = {
    TaskKind.FORWARD: "blue",
    TaskKind.RECOMPUTE: "sky",
    TaskKind.BACKWARD: "orange",
    TaskKind.GATHER: "green",
    TaskKind.GRADIENT_OFFLOAD: "red",
    TaskKind.GRADIENT_ACCUMULATE: "pink",
    TaskKind.GRADIENT_NORM: "grey",
    TaskKind.ACTIVATION_OFFLOAD: "brown",
    TaskKind.ACTIVATION_FETCH: "teal",
    TaskKind.CPU_ADAM: "gold",
    TaskKind.DEVICE_ADAM: "purple",
}

_WIDTH: Final = 1120.0
LEFT_PX: Final = 112.0
RIGHT_PX: Final = 1044.0
"""Where the time axis begins and ends, here and under the memory curves."""
_TOP: Final = 22.0
_LANE_HEIGHT: Final = 34.0
_BAR_HEIGHT: Final = 24.0
_MERGED_BELOW_PX: Final = 2.0
"""Tasks narrower than this are merged with their neighbours: they could not be told apart, and a chart of thousands
of tasks stays small."""
_MERGED_UP_TO_PX: Final = 6.0
_FAINTEST: Final = 0.25
_NARROWEST_PX: Final = 1.5
_EDGED_ABOVE_PX: Final = 4.0
"""Bars narrower than this have no edge: it would hide them."""
_CHARACTER_PX: Final = 7.0
_PREVIOUS_MARK: Final = tag("rect", x=5.0, y=0.0, width=14.0, height=12.0, class_="previous")
_HINT: Final = "Point at a task to see what it waits for and what waits for it; a click holds it, arrow keys walk."


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tasks of one lane that are drawn as one bar; nearly always a single task."""

    timings: tuple[TaskTiming, ...]

    @property
    def start_s(self) -> float:
        """Start of the first."""
        return self.timings[0].start_s

    @property
    def end_s(self) -> float:
        """End of the last."""
        return max(timing.end_s for timing in self.timings)

    @property
    def busy_frac(self) -> float:
        """Share of the stretch during which a task runs; how solid its bar is."""
        span_s = self.end_s - self.start_s
        if len(self.timings) == 1 or span_s <= 0:
            return 1.0
        return min(1.0, sum(timing.end_s - timing.start_s for timing in self.timings) / span_s)

    @property
    def kind(self) -> TaskKind:
        """The kind that takes the most seconds."""
        seconds: dict[TaskKind, float] = {}
        for timing in self.timings:
            seconds[timing.kind] = seconds.get(timing.kind, 0.0) + timing.end_s - timing.start_s
        return max(seconds, key=lambda kind: seconds[kind])


def time_range_s(records: Sequence[Record]) -> tuple[float, float]:
    """From the first start to the last end of all records, whole iterations and memory curves included."""
    times_s = [0.0]
    for record in records:
        times_s += [record.iteration_s]
        times_s += [at_s for timing in record.tasks for at_s in (timing.start_s, timing.end_s)]
        times_s += [at_s for curve in record.memory for at_s in paced_times_s(record, curve)]
    return min(times_s), max(times_s)


def lane_charts(records: Sequence[Record], schedule: Schedule | None) -> tuple[Figure, ...]:
    """One chart per record on a common time axis, each with the legend of the task kinds that occur in it."""
    low, high = time_range_s(records)
    scale = Scale(low, high, LEFT_PX, RIGHT_PX)
    names = [ORIGIN_NAMES[record.origin] for record in records]
    if len(set(names)) < len(names):
        names = [f"{name}-{place}" for place, name in enumerate(names, start=1)]
    return tuple(lane_chart(record, scale, schedule, name) for record, name in zip(records, names, strict=True))


def lane_chart(record: Record, scale: Scale, schedule: Schedule | None, name: str) -> Figure:
    """The lanes of one record; at the right the share of the iteration that each is busy.

    ``name`` tells it from the other charts.
    """
    bottom = _TOP + len(Lane) * _LANE_HEIGHT
    busiest = bottleneck(record)
    drawn = [text(_WIDTH, _TOP - 12, "busy", anchor="end")]
    for row, lane in enumerate(Lane):
        middle = _TOP + (row + 0.5) * _LANE_HEIGHT
        emphasis = "strong" if lane is busiest else None
        drawn.append(text(0, middle, LANE_NAMES[lane], class_=emphasis))
        drawn.append(
            tag(
                "rect",
                x=LEFT_PX,
                y=middle - _BAR_HEIGHT / 2,
                width=RIGHT_PX - LEFT_PX,
                height=_BAR_HEIGHT,
                class_="track",
            )
        )
        drawn.append(text(_WIDTH, middle, format_share(busy_frac(record, lane)), anchor="end", class_=emphasis))
    drawn.append(time_axis(scale, top=_TOP, bottom=bottom))
    bars = _Bars.of(record, scale, schedule)
    drawn += [_of_previous(run, record, scale) for run in _runs_into_next(record, scale)]
    drawn += [bars.drawn(place, scale) for place in range(len(bars.stretches))]
    drawn.append(_period(record, scale, bottom))
    drawn.append(tag("g", class_="links"))
    words = name.replace("-", ", number ").capitalize()
    caption = f", iteration {format_seconds(record.iteration_s)}"
    if busiest is not None:
        caption += f", bottleneck: {LANE_NAMES[busiest]}"
    kinds = {timing.kind for timing in record.tasks}
    return Figure(
        name=f"timeline-{name}",
        width=_WIDTH,
        height=bottom + 22,
        drawing="".join(drawn),
        label=f"Timeline, {words}: {len(record.tasks)} tasks on {len(Lane)} lanes",
        caption=(words, f"{caption}. {bars.thinning_words}".rstrip()),
        legend=(
            *((area_mark(KIND_COLOURS[kind]), KIND_NAMES[kind]) for kind in TaskKind if kind in kinds),
            *([(_PREVIOUS_MARK, "previous iteration")] if any(_runs_into_next(record, scale)) else []),
        ),
        below=tag("p", _HINT, class_="told quiet", aria_live="polite") if schedule is not None else "",
        class_="lanes" if schedule is not None else None,
    )


@dataclass(frozen=True, slots=True)
class _Bars:
    """The bars of one chart, and how the tasks behind them wait for each other."""

    stretches: tuple[Stretch, ...]
    """Lane by lane, in order of start."""
    place_of: dict[int, int]
    """The bar of every task."""
    waits: dict[int, Waits]
    """Empty without a schedule."""
    schedule: Schedule | None

    @classmethod
    def of(cls, record: Record, scale: Scale, schedule: Schedule | None) -> _Bars:
        """The bars of a record, on a time axis."""
        stretches: list[Stretch] = []
        for lane in Lane:
            stretches += merged([timing for timing in record.tasks if timing.lane is lane], scale.per_px)
        place_of = {timing.task: place for place, stretch in enumerate(stretches) for timing in stretch.timings}
        waits = waits_of(record, schedule) if schedule is not None else {}
        return cls(tuple(stretches), place_of, waits, schedule)

    @property
    def thinning_words(self) -> str:
        """How many tasks are not drawn one by one; empty if all are."""
        joint = [stretch for stretch in self.stretches if len(stretch.timings) > 1]
        if not joint:
            return ""
        num_merged = sum(len(stretch.timings) for stretch in joint)
        bars = "1 joint bar" if len(joint) == 1 else f"{len(joint):,} joint bars"
        return (
            f"{num_merged:,} of {len(self.place_of):,} tasks are too short to be told apart at this width and drawn "
            f"as {bars}."
        )

    def drawn(self, place: int, scale: Scale) -> str:
        """One bar, with what it waits for as the places of other bars."""
        stretch = self.stretches[place]
        left, right = scale(stretch.start_s), scale(stretch.end_s)
        width = max(right - left, _NARROWEST_PX)
        colour = KIND_COLOURS[stretch.kind]
        top = _TOP + (tuple(Lane).index(stretch.timings[0].lane) + 0.5) * _LANE_HEIGHT - _BAR_HEIGHT / 2
        bar = tag(
            "rect",
            tag("title", escape(self._words(stretch))),
            x=left,
            y=top,
            width=width,
            height=_BAR_HEIGHT,
            fill_opacity=max(_FAINTEST, stretch.busy_frac) if stretch.busy_frac < 1 else None,
            class_=f"bar {'task' if width > _EDGED_ABOVE_PX else 'thin'} fill-{colour}",
            data_after=self._places(place, [t for timing in stretch.timings for t in self._after(timing)]),
            data_earlier=self._places(place, [t for timing in stretch.timings for t in self._earlier(timing)]),
        )
        label = _short_label(stretch)
        if len(label) * _CHARACTER_PX + 3 > width:
            return bar
        return bar + text(left + width / 2, top + _BAR_HEIGHT / 2, label, anchor="middle", class_=f"mark on-{colour}")

    def _after(self, timing: TaskTiming) -> Sequence[int]:
        return self.waits[timing.task].after if self.waits else ()

    def _earlier(self, timing: TaskTiming) -> Sequence[int]:
        return self.waits[timing.task].earlier if self.waits else ()

    def _places(self, own: int, tasks: Sequence[int]) -> str | None:
        """The bars of these tasks, the last to end first, without the bar itself; None if there are none."""
        places = dict.fromkeys(self.place_of[task] for task in tasks)
        places.pop(own, None)
        return " ".join(map(str, places)) or None

    def _words(self, stretch: Stretch) -> str:
        """What the pointer shows."""
        span = f"{format_seconds(stretch.start_s)} to {format_seconds(stretch.end_s)}"
        tasks = self.schedule.tasks if self.schedule is not None else None
        moved_bytes = sum(tasks[timing.task].moved_bytes for timing in stretch.timings) if tasks is not None else 0
        moved = f"\n{format_bytes(moved_bytes)} moved" if moved_bytes else ""
        if len(stretch.timings) == 1:
            timing = stretch.timings[0]
            name = task_name(timing.name, timing.kind)
            return f"{name}\n{span} ({format_seconds(timing.duration_s)}){moved}{self._held_up(timing)}"
        counts = Counter(timing.kind for timing in stretch.timings)
        kinds = ", ".join(f"{KIND_NAMES[kind]} × {counts[kind]}" for kind in TaskKind if counts[kind])
        seconds = sum(timing.duration_s for timing in stretch.timings)
        return f"{len(stretch.timings)} tasks: {kinds}\n{span} (busy {format_seconds(seconds)}){moved}"

    def _held_up(self, timing: TaskTiming) -> str:
        waits = self.waits.get(timing.task)
        if waits is None or waits.held_up_by is None or self.schedule is None:
            return ""
        task = self.schedule.tasks[waits.held_up_by]
        lane = ", the task before it on its lane" if waits.is_held_by_lane else ""
        return f"\nheld up by {task_name(task.name, task.kind)}{lane}"


def _period(record: Record, scale: Scale, bottom: float) -> str:
    """Where the iteration begins and where the next one does."""
    drawn = []
    for at_s, words in ((0.0, "iteration begins"), (record.iteration_s, "next begins")):
        x = scale(at_s)
        drawn.append(line(x, _TOP - 6, x, bottom, "period"))
        if at_s == 0.0:
            drawn.append(text(x + 4, _TOP - 12, words))
        else:
            drawn.append(text(x - 4, _TOP - 12, words, anchor="end"))
    return "".join(drawn)


def _runs_into_next(record: Record, scale: Scale) -> Iterator[tuple[Lane, float, float]]:
    """Per lane, when it is busy after the iteration's end: begin and end, gaps below two pixels closed."""
    for lane in Lane:
        late = [timing for timing in record.tasks if timing.lane is lane and timing.end_s > record.iteration_s]
        begin_s = end_s = -math.inf
        for timing in sorted(late, key=lambda t: t.start_s):
            start_s = max(timing.start_s, record.iteration_s)
            if start_s - end_s > _MERGED_BELOW_PX * scale.per_px:
                if end_s > begin_s:
                    yield lane, begin_s, end_s
                begin_s = start_s
            end_s = max(end_s, timing.end_s)
        if end_s > begin_s:
            yield lane, begin_s, end_s


def _of_previous(run: tuple[Lane, float, float], record: Record, scale: Scale) -> str:
    """The same stretch of the previous iteration, which keeps the lane busy at the beginning of this one."""
    lane, begin_s, end_s = run
    left, right = scale(begin_s - record.iteration_s), scale(end_s - record.iteration_s)
    middle = _TOP + (tuple(Lane).index(lane) + 0.5) * _LANE_HEIGHT
    return tag(
        "rect",
        tag("title", "still at work for the previous iteration"),
        x=left,
        y=middle - _BAR_HEIGHT / 2,
        width=max(0.5, right - left),
        height=_BAR_HEIGHT,
        class_="previous",
    )


def merged(timings: Sequence[TaskTiming], per_px: float) -> Iterator[Stretch]:
    """The bars of one lane in order of start, neighbours too narrow to be told apart merged; ``per_px`` in seconds."""
    narrow_s, widest_s = _MERGED_BELOW_PX * per_px, _MERGED_UP_TO_PX * per_px
    pending: list[TaskTiming] = []
    for timing in sorted(timings, key=lambda t: (t.start_s, t.end_s, t.task)):
        if timing.end_s - timing.start_s >= narrow_s:
            if pending:
                yield Stretch(tuple(pending))
                pending = []
            yield Stretch((timing,))
            continue
        if pending and (timing.start_s - pending[-1].end_s >= narrow_s or timing.end_s - pending[0].start_s > widest_s):
            yield Stretch(tuple(pending))
            pending = []
        pending.append(timing)
    if pending:
        yield Stretch(tuple(pending))


def _short_label(stretch: Stretch) -> str:
    """The block or chunk, as it stands in the bar where there is room."""
    subject = subject_of(stretch.timings[0]) if len(stretch.timings) == 1 else None
    return subject[1] if subject is not None else ""

"""Bars of the report's lane charts: tasks as they are drawn, thinned where too many, tied to what they wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from ..basics.units import format_bytes, format_seconds
from ..records.chrome_trace import subject_of
from ..records.waits import Waits, waits_of
from ..schema.record import Record, TaskTiming
from ..schema.schedule import Lane, Schedule, TaskKind
from ..tables.labels import KIND_NAMES, task_name
from .axes import Scale
from .svg import tag, text

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
    TaskKind.ALL_GATHER: "olive",
    TaskKind.REDUCE_SCATTER: "magenta",
    TaskKind.ALL_REDUCE: "navy",
}

TOP_PX: Final = 22.0
LANE_PX: Final = 34.0
BAR_PX: Final = 24.0
"""Where the first lane begins, and the heights of a lane and of a bar."""
MERGED_BELOW_PX: Final = 2.0
"""Tasks narrower than this are merged with their neighbours: they could not be told apart, and a chart of thousands
of tasks stays small."""
_MERGED_UP_TO_PX: Final = 6.0
_FAINTEST: Final = 0.25
_NARROWEST_PX: Final = 1.5
_EDGED_ABOVE_PX: Final = 4.0
"""Bars narrower than this have no edge: it would hide them."""
_CHARACTER_PX: Final = 7.0


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


def merged(timings: Sequence[TaskTiming], per_px: float) -> Iterator[Stretch]:
    """The bars of one lane in order of start, neighbours too narrow to be told apart merged; ``per_px`` in seconds."""
    narrow_s, widest_s = MERGED_BELOW_PX * per_px, _MERGED_UP_TO_PX * per_px
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


@dataclass(frozen=True, slots=True)
class Bars:
    """The bars of one chart, and how the tasks behind them wait for each other."""

    stretches: tuple[Stretch, ...]
    """Lane by lane, in order of start."""
    place_of: dict[int, int]
    """The bar of every task."""
    waits: dict[int, Waits]
    """Empty without a schedule."""
    schedule: Schedule | None

    @classmethod
    def of(cls, record: Record, scale: Scale, schedule: Schedule | None) -> Bars:
        """The bars of what a record does within the time axis."""
        shown = [timing for timing in record.tasks if _is_within(timing, scale)]
        stretches: list[Stretch] = []
        for lane in Lane:
            stretches += merged([timing for timing in shown if timing.lane is lane], scale.per_px)
        place_of = {timing.task: place for place, stretch in enumerate(stretches) for timing in stretch.timings}
        waits = waits_of(record, schedule) if schedule is not None else {}
        return cls(tuple(stretches), place_of, waits, schedule)

    @property
    def num_merged(self) -> int:
        """Tasks that are not drawn one by one."""
        return sum(len(stretch.timings) for stretch in self.stretches if len(stretch.timings) > 1)

    @property
    def thinning_words(self) -> str:
        """How many tasks are not drawn one by one; empty if all are."""
        num_joint = sum(len(stretch.timings) > 1 for stretch in self.stretches)
        if not num_joint:
            return ""
        bars = "1 joint bar" if num_joint == 1 else f"{num_joint:,} joint bars"
        return (
            f"{self.num_merged:,} of {len(self.place_of):,} tasks are too short to be told apart at this width and "
            f"drawn as {bars}."
        )

    def drawn(self, place: int, scale: Scale) -> Markup:
        """One bar, with what it waits for as the places of other bars."""
        stretch = self.stretches[place]
        left, right = max(scale(stretch.start_s), scale.low_px), min(scale(stretch.end_s), scale.high_px)
        width = max(right - left, _NARROWEST_PX)
        colour = KIND_COLOURS[stretch.kind]
        top = TOP_PX + (tuple(Lane).index(stretch.timings[0].lane) + 0.5) * LANE_PX - BAR_PX / 2
        bar = tag(
            "rect",
            tag("title", self._words(stretch)),
            x=left,
            y=top,
            width=width,
            height=BAR_PX,
            fill_opacity=max(_FAINTEST, stretch.busy_frac) if stretch.busy_frac < 1 else None,
            class_=f"bar {'task' if width > _EDGED_ABOVE_PX else 'thin'} fill-{colour}",
            data_after=self._places(place, [t for timing in stretch.timings for t in self._after(timing)]),
            data_earlier=self._places(place, [t for timing in stretch.timings for t in self._earlier(timing)]),
        )
        label = _short_label(stretch)
        if len(label) * _CHARACTER_PX + 3 > width:
            return bar
        return bar + text(left + width / 2, top + BAR_PX / 2, label, anchor="middle", class_=f"mark on-{colour}")

    def _after(self, timing: TaskTiming) -> Sequence[int]:
        return self.waits[timing.task].after if self.waits else ()

    def _earlier(self, timing: TaskTiming) -> Sequence[int]:
        return self.waits[timing.task].earlier if self.waits else ()

    def _places(self, own: int, tasks: Sequence[int]) -> str | None:
        """The bars of these tasks, the last to end first, without the bar itself; None if there are none here."""
        places = dict.fromkeys(self.place_of[task] for task in tasks if task in self.place_of)
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


def _is_within(timing: TaskTiming, scale: Scale) -> bool:
    """Whether any of the task's time is on the axis; of one that takes no time, its instant."""
    begin_s, end_s = max(timing.start_s, scale.low), min(timing.end_s, scale.high)
    return begin_s < end_s or begin_s == end_s == timing.start_s == timing.end_s


def _short_label(stretch: Stretch) -> str:
    """The block or chunk, as it stands in the bar where there is room."""
    subject = subject_of(stretch.timings[0]) if len(stretch.timings) == 1 else None
    return subject[1] if subject is not None else ""

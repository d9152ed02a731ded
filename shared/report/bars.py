"""Bars of the report's lane charts: tasks as they are drawn, thinned where too many, tied to what they wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from ..basics.units import format_bytes, format_seconds
from ..records.chrome_trace import subject_of
from ..records.period import Piece, folded
from ..records.waits import Waits, waits_of
from ..schema.record import Record, TaskTiming
from ..schema.schedule import Lane, Schedule, TaskKind, in_kind_order
from ..tables.labels import kind_name, task_name
from .axes import Scale, room_class
from .svg import share, tag, text

KIND_COLOURS: Final[dict[TaskKind, str]] = {
    TaskKind.FORWARD: "blue",
    TaskKind.RECOMPUTE: "sky",
    TaskKind.BACKWARD: "orange",
    TaskKind.TEACHER_FORWARD: "slate",
    TaskKind.LOSS: "coral",
    TaskKind.GATHER: "green",
    TaskKind.GRADIENT_OFFLOAD: "red",
    TaskKind.GRADIENT_ACCUMULATE: "pink",
    TaskKind.GRADIENT_NORM: "grey",
    TaskKind.ACTIVATION_OFFLOAD: "brown",
    TaskKind.ACTIVATION_FETCH: "teal",
    TaskKind.CPU_ADAM: "gold",
    TaskKind.DEVICE_ADAM: "purple",
    TaskKind.GRADIENT_PROJECTION: "indigo",
    TaskKind.PARAMETER_PROJECTION: "forest",
    TaskKind.HOST_GRADIENT_PROJECTION: "rose",
    TaskKind.HOST_PARAMETER_PROJECTION: "amber",
    TaskKind.ALL_GATHER: "olive",
    TaskKind.REDUCE_SCATTER: "magenta",
    TaskKind.ALL_REDUCE: "navy",
    TaskKind.GRADIENTS_TO_OWNERS: "sand",
    TaskKind.GRADIENTS_FROM_OWNERS: "steel",
    TaskKind.PARAMETERS_TO_OWNERS: "wine",
    TaskKind.PARAMETERS_FROM_OWNERS: "moss",
    TaskKind.SEQUENCE_EXCHANGE: "clay",
    TaskKind.RECEIVE: "mint",
    TaskKind.SEND: "plum",
    TaskKind.DISK_READ: "lime",
    TaskKind.DISK_WRITE: "maroon",
}
"""Of protwin's own kinds; ``kind_colour`` has a colour for all."""
_LANE_COLOURS: Final[dict[Lane, str]] = {
    Lane.COMPUTE: KIND_COLOURS[TaskKind.FORWARD],
    Lane.H2D: KIND_COLOURS[TaskKind.GATHER],
    Lane.D2H: KIND_COLOURS[TaskKind.GRADIENT_OFFLOAD],
    Lane.CPU_OPTIM: KIND_COLOURS[TaskKind.CPU_ADAM],
    Lane.COLLECTIVE: KIND_COLOURS[TaskKind.ALL_GATHER],
    Lane.DISK: KIND_COLOURS[TaskKind.DISK_READ],
}
"""The colour of a lane's most frequent kind."""

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


def kind_colour(kind: TaskKind) -> str:
    """The colour of a kind's bars; of a kind that a training method has added, its lane's."""
    return KIND_COLOURS.get(kind) or _LANE_COLOURS[kind.lane]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive pieces of one lane that are drawn as one bar; nearly always a single one."""

    pieces: tuple[Piece, ...]

    @property
    def start_s(self) -> float:
        """Start of the first."""
        return self.pieces[0].start_s

    @property
    def end_s(self) -> float:
        """End of the last."""
        return max(piece.end_s for piece in self.pieces)

    @property
    def busy_frac(self) -> float:
        """Share of the stretch during which a task runs; how solid its bar is."""
        span_s = self.end_s - self.start_s
        if len(self.pieces) == 1 or span_s <= 0:
            return 1.0
        return min(1.0, sum(piece.end_s - piece.start_s for piece in self.pieces) / span_s)

    @property
    def kind(self) -> TaskKind:
        """The kind that takes the most seconds."""
        seconds: dict[TaskKind, float] = {}
        for piece in self.pieces:
            kind = piece.timing.kind
            seconds[kind] = seconds.get(kind, 0.0) + piece.end_s - piece.start_s
        return max(seconds, key=lambda kind: seconds[kind])

    @property
    def is_neighbours(self) -> bool:
        """Whether all of it is work of a neighbouring iteration."""
        return all(piece.iteration for piece in self.pieces)


def merged(pieces: Sequence[Piece], per_px: float) -> Iterator[Stretch]:
    """The bars of one lane in order of start, neighbours too narrow to be told apart merged; ``per_px`` in seconds."""
    narrow_s, widest_s = MERGED_BELOW_PX * per_px, _MERGED_UP_TO_PX * per_px
    pending: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.start_s, p.end_s, p.timing.task)):
        if piece.end_s - piece.start_s >= narrow_s:
            if pending:
                yield Stretch(tuple(pending))
                pending = []
            yield Stretch((piece,))
            continue
        if pending and (piece.start_s - pending[-1].end_s >= narrow_s or piece.end_s - pending[0].start_s > widest_s):
            yield Stretch(tuple(pending))
            pending = []
        pending.append(piece)
    if pending:
        yield Stretch(tuple(pending))


@dataclass(frozen=True, slots=True)
class Bars:
    """The bars of one chart, and how the tasks behind them wait for each other."""

    stretches: tuple[Stretch, ...]
    """Lane by lane, in order of start."""
    lanes: tuple[Lane, ...]
    """Those that have a row, from the top."""
    waits: dict[int, Waits]
    """Empty without a schedule."""
    schedule: Schedule | None

    @classmethod
    def of(cls, record: Record, scale: Scale, schedule: Schedule | None) -> Bars:
        """The bars of what a record's steady state does within the time axis."""
        shown = [piece for piece in folded(record.tasks, record.iteration_s) if _is_within(piece, scale)]
        stretches: list[Stretch] = []
        for lane in Lane:
            stretches += merged([piece for piece in shown if piece.timing.lane is lane], scale.per_px)
        waits = waits_of(record, schedule) if schedule is not None else {}
        return cls(tuple(stretches), record.lanes_shown, waits, schedule)

    @property
    def num_tasks(self) -> int:
        """Tasks of which anything is within the time axis."""
        return len({piece.timing.task for stretch in self.stretches for piece in stretch.pieces})

    @property
    def num_merged(self) -> int:
        """Tasks that are nowhere drawn one by one."""
        alone = {stretch.pieces[0].timing.task for stretch in self.stretches if len(stretch.pieces) == 1}
        return self.num_tasks - len(alone)

    @property
    def thinning_words(self) -> str:
        """How many tasks are not drawn one by one; empty if all are."""
        num_joint = sum(len(stretch.pieces) > 1 for stretch in self.stretches)
        if not num_joint:
            return ""
        bars = "1 joint bar" if num_joint == 1 else f"{num_joint:,} joint bars"
        return (
            f"{self.num_merged:,} of {self.num_tasks:,} tasks are too short to be told apart at this width and "
            f"drawn as {bars}."
        )

    def drawn(self, place: int, scale: Scale) -> Markup:
        """One bar, with the numbers of its tasks."""
        stretch = self.stretches[place]
        left, right = max(scale(stretch.start_s), scale.low_px), min(scale(stretch.end_s), scale.high_px)
        width = max(right - left, _NARROWEST_PX)
        colour = kind_colour(stretch.kind)
        top = TOP_PX + (self.lanes.index(stretch.pieces[0].timing.lane) + 0.5) * LANE_PX - BAR_PX / 2
        edge = "neighbours" if stretch.is_neighbours else "task" if width > _EDGED_ABOVE_PX else "thin"
        bar = tag(
            "rect",
            tag("title", self._words(stretch)),
            x=share(left),
            y=top,
            width=share(width),
            height=BAR_PX,
            fill_opacity=max(_FAINTEST, stretch.busy_frac) if stretch.busy_frac < 1 else None,
            class_=f"bar {edge} fill-{colour}",
            data_tasks=" ".join(str(piece.timing.task) for piece in stretch.pieces),
        )
        label = _short_label(stretch)
        if room := room_class(label, width, _CHARACTER_PX):
            middle = share(left + width / 2)
            return bar + text(middle, top + BAR_PX / 2, label, anchor="middle", class_=f"{room} on-{colour}")
        return bar

    def _words(self, stretch: Stretch) -> str:
        """What the pointer shows."""
        tasks = self.schedule.tasks if self.schedule is not None else None
        moved_bytes = sum(tasks[piece.timing.task].moved_bytes for piece in stretch.pieces) if tasks is not None else 0
        moved = f"\n{format_bytes(moved_bytes)} moved" if moved_bytes else ""
        if len(stretch.pieces) == 1:
            (piece,) = stretch.pieces
            timing = piece.timing
            name = task_name(timing.name, timing.kind)
            whose = _whose(piece.iteration)
            span = f"{format_seconds(timing.start_s)} to {format_seconds(timing.end_s)}"
            return f"{name}{whose}\n{span} ({format_seconds(timing.duration_s)}){moved}{self._held_up(timing)}"
        span = f"{format_seconds(stretch.start_s)} to {format_seconds(stretch.end_s)}"
        counts = Counter(piece.timing.kind for piece in stretch.pieces)
        kinds = ", ".join(f"{kind_name(kind)} × {counts[kind]}" for kind in in_kind_order(counts))
        seconds = sum(piece.end_s - piece.start_s for piece in stretch.pieces)
        return f"{len(stretch.pieces)} tasks: {kinds}\n{span} (busy {format_seconds(seconds)}){moved}"

    def _held_up(self, timing: TaskTiming) -> str:
        waits = self.waits.get(timing.task)
        if waits is None or waits.held_up_by is None or self.schedule is None:
            return ""
        task = self.schedule.tasks[waits.held_up_by]
        lane = ", the task before it on its lane" if waits.is_held_by_lane else ""
        return f"\nheld up by {task_name(task.name, task.kind)}{lane}"


def _whose(iteration: int) -> str:
    """Whose task it is, where it is not this iteration's."""
    if iteration == 0:
        return ""
    if abs(iteration) == 1:
        return ", of the previous iteration" if iteration < 0 else ", for the next iteration"
    return f", of {-iteration} iterations before" if iteration < 0 else f", for {iteration} iterations later"


def _is_within(piece: Piece, scale: Scale) -> bool:
    """Whether any of the piece's time is on the axis; of one that takes no time, its instant."""
    begin_s, end_s = max(piece.start_s, scale.low), min(piece.end_s, scale.high)
    return begin_s < end_s or begin_s == end_s == piece.start_s == piece.end_s


def _short_label(stretch: Stretch) -> str:
    """The block or chunk, as it stands in the bar where there is room."""
    subject = subject_of(stretch.pieces[0].timing) if len(stretch.pieces) == 1 else None
    return subject[1] if subject is not None else ""

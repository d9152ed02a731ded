"""Tables of the report."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from html import escape
from typing import Final

from ..basics.units import format_bytes, format_seconds
from ..records.comparison import BytesPair, Comparison, TaskComparison, TimePair
from ..schema.record import Record
from ..schema.schedule import Lane, Memory
from ..tables.labels import (
    CONTENT_NAMES,
    KIND_NAMES,
    LANE_NAMES,
    NO_VALUE,
    ORIGIN_NAMES,
    alive_at_peak,
    format_error,
    format_share,
    knobs,
    num_blocks,
    task_name,
)
from ..tables.memory import beyond_the_schedule
from .memory import CONTENT_COLOURS
from .svg import Scale, line, tag

_ERROR_WIDTH: Final = 96.0
_ERROR_FULL_FRAC: Final = 0.25
"""The error that fills half of its little chart; larger ones end there."""


def knob_table(record: Record) -> str:
    """The plan's knobs with what they mean."""
    rows = (
        [
            tag("th", tag("code", escape(knob.name)), scope="row"),
            _number(knob.value),
            tag("td", escape(knob.meaning), class_="wide"),
        ]
        for knob in knobs(record.plan, num_blocks=num_blocks(record))
    )
    return _table("Knobs", None, rows)


def traffic_table(records: Sequence[Record]) -> str:
    """What one iteration moves and steps, and the memory that it pins, per record."""
    measures: list[tuple[str, Callable[[Record], str]]] = [
        ("chunks gathered", lambda r: str(r.num_gathers)),
        ("CPU Adam steps", lambda r: str(r.num_cpu_adam_steps)),
        ("host to device", lambda r: format_bytes(r.lane(Lane.H2D).moved_bytes)),
        ("device to host", lambda r: format_bytes(r.lane(Lane.D2H).moved_bytes)),
        (
            "pinned host memory",
            lambda r: format_bytes(r.peak_pinned_bytes) if r.curve(Memory.PINNED_HOST) else NO_VALUE,
        ),
        ("forward", lambda r: format_seconds(r.forward_s)),
        ("backward", lambda r: format_seconds(r.backward_s)),
        ("optimizer", lambda r: format_seconds(r.optimizer_s)),
    ]
    head = ["", *(ORIGIN_NAMES[record.origin] for record in records)]
    rows = ([_name(name), *(_number(show(record)) for record in records)] for name, show in measures)
    return _table("One iteration", head, rows)


def alive_table(records: Sequence[Record]) -> str:
    """What the stacked bars show in figures; its swatches are their legend."""
    curves = [(record, curve) for record in records if (curve := record.curve(Memory.DEVICE)) and curve.peak_bytes]
    alive = [{row.name: row for row in alive_at_peak(curve)} for _, curve in curves]
    colours: dict[str, str | None] = {CONTENT_NAMES[content]: colour for content, colour in CONTENT_COLOURS.items()}
    names = [*colours, *sorted({name for rows in alive for name in rows} - colours.keys())]
    rows = []
    for name in names:
        if not any(name in found for found in alive):
            continue
        cells = [tag("th", _swatch(colours.get(name)), escape(name), scope="row")]
        for (_, curve), found in zip(curves, alive, strict=True):
            if name in found:
                share = format_share(found[name].size_bytes / curve.peak_bytes)
                cells += [_number(format_bytes(found[name].size_bytes)), _number(share)]
            else:
                cells += [_number(NO_VALUE), _number("")]
        rows.append(cells)
    peaks = "; ".join(f"{ORIGIN_NAMES[record.origin]} in {curve.peak_at}" for record, curve in curves)
    head = ["", *(title for record, _ in curves for title in (ORIGIN_NAMES[record.origin], "share"))]
    return tag("div", _table(f"At the peak: {peaks}", head, rows), class_="narrow")


def beyond_table(record: Record) -> str:
    """What is held beyond what the schedule allocates; empty if the record does not predict it."""
    rows = [
        [_name(row.name), _number(format_bytes(row.size_bytes)), tag("td", escape(row.words))]
        for row in beyond_the_schedule(record)
    ]
    return _table("Beyond what the schedule allocates", ["", "expected", ""], rows) if rows else ""


def comparison_section(comparison: Comparison) -> str:
    """Times, peaks, kinds, lanes and tasks of the comparison."""
    tables = [_totals(comparison), _kinds(comparison), _lanes(comparison)]
    if comparison.largest_differences:
        tables.append(_tasks("Tasks whose durations differ most", comparison.largest_differences))
    sentences = [_parting(comparison)]
    for words, names in (("predicted", comparison.only_predicted), ("measured", comparison.only_measured)):
        if names:
            sentences.append(f"Only {words}: {', '.join(names)}.")
    return "".join(tag("p", escape(sentence)) for sentence in sentences) + tag("div", *tables, class_="columns")


def _parting(comparison: Comparison) -> str:
    tolerance = format_share(comparison.tolerance_frac)
    task = comparison.first_parting
    if task is None:
        return f"No task parts by more than {tolerance}."
    starts = (
        f"start {format_seconds(task.predicted_start_s)} predicted, {format_seconds(task.measured_start_s)} measured"
    )
    durations = (
        f"duration {format_seconds(task.duration.predicted_s)} predicted, "
        f"{format_seconds(task.duration.measured_s)} measured"
    )
    name = task_name(task.name, task.kind)
    return f"The first task that parts by more than {tolerance} is {name}: {starts}; {durations}."


def _totals(comparison: Comparison) -> str:
    rows = [
        [_name("forward"), *_times(comparison.forward)],
        [_name("backward"), *_times(comparison.backward)],
        [_name("optimizer"), *_times(comparison.optimizer)],
        [_name("iteration"), *_times(comparison.iteration)],
        [_name("peak device memory"), *_sizes(comparison.peak_device)],
        [_name("peak pinned host memory"), *_sizes(comparison.peak_pinned)],
    ]
    caption = f"Iteration and peaks; the measurement's noise is ± {format_share(comparison.noise_frac)}"
    return _table(caption, ["", "predicted", "measured", "error", ""], rows, totals={3, 4})


def _kinds(comparison: Comparison) -> str:
    rows = []
    for kind in comparison.kinds:
        count = str(kind.num_predicted)
        if kind.num_measured != kind.num_predicted:
            count = f"{kind.num_predicted} / {kind.num_measured}"
        rows.append([_name(KIND_NAMES[kind.kind]), _number(count), *_times(kind.duration)])
    return _table("Task kinds, seconds together", ["kind", "tasks", "predicted", "measured", "error", ""], rows)


def _lanes(comparison: Comparison) -> str:
    rows = ([_name(LANE_NAMES[lane.lane]), *_times(lane.busy)] for lane in comparison.lanes)
    return _table("Lanes, busy", ["lane", "predicted", "measured", "error", ""], rows)


def _tasks(caption: str, tasks: Iterable[TaskComparison]) -> str:
    rows = ([_name(task_name(task.name, task.kind)), *_times(task.duration)] for task in tasks)
    return _table(caption, ["task", "predicted", "measured", "error", ""], rows)


# -- building --------------------------------------------------------------------------------------------------------


def _table(
    caption: str, head: Sequence[str] | None, rows: Iterable[Sequence[str]], *, totals: Container[int] = ()
) -> str:
    """A table of cells that are markup already; ``totals`` are the rows to stress."""
    parts = [tag("caption", escape(caption))]
    if head is not None:
        cells = (
            tag("th", escape(name), scope="col", class_="number" if place else None) if name else tag("td")
            for place, name in enumerate(head)
        )
        parts.append(tag("thead", tag("tr", *cells)))
    body = (tag("tr", *row, class_="total" if place in totals else None) for place, row in enumerate(rows))
    parts.append(tag("tbody", *body))
    return tag("div", tag("table", *parts), class_="scroll")


def _swatch(colour: str | None) -> str:
    rect = tag("rect", width=12.0, height=12.0, rx=2.0, class_=f"fill-{colour or 'rest'}")
    return tag("svg", rect, width=12.0, height=12.0, aria_hidden="true", class_="swatch")


def _name(words: str) -> str:
    return tag("th", escape(words), scope="row")


def _number(words: str) -> str:
    return tag("td", escape(words), class_="number")


def _times(pair: TimePair) -> list[str]:
    shown = (format_seconds(pair.predicted_s), format_seconds(pair.measured_s), format_error(pair.error_frac))
    return [*map(_number, shown), _error_bar(pair.error_frac)]


def _sizes(pair: BytesPair | None) -> list[str]:
    if pair is None:
        return [*[_number(NO_VALUE)] * 3, tag("td")]
    shown = (format_bytes(pair.predicted_bytes), format_bytes(pair.measured_bytes), format_error(pair.error_frac))
    return [*map(_number, shown), _error_bar(pair.error_frac)]


def _error_bar(error_frac: float | None) -> str:
    """The signed error as a bar left or right of the middle."""
    if error_frac is None:
        return tag("td")
    scale = Scale(-_ERROR_FULL_FRAC, _ERROR_FULL_FRAC, 0.0, _ERROR_WIDTH)
    middle = scale(0.0)
    end = scale(max(-_ERROR_FULL_FRAC, min(_ERROR_FULL_FRAC, error_frac)))
    bar = tag("rect", x=min(middle, end), y=3.0, width=abs(end - middle), height=8.0, class_="error")
    drawing = tag("svg", bar, line(middle, 0, middle, 14, "axis"), width=_ERROR_WIDTH, height=14.0, aria_hidden="true")
    return tag("td", drawing, class_="number")

"""Plans, records and comparisons as tables for a terminal.

Every cell is plain ``Text``: names from models and files are never read as markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from .memory_words import beyond_the_schedule
from .plan import Plan
from .record import MemoryCurve, Record
from .report_words import (
    KIND_NAMES,
    LANE_NAMES,
    MEMORY_NAMES,
    NO_VALUE,
    alive_at_peak,
    bottleneck,
    busy_frac,
    format_error,
    format_share,
    knobs,
    num_blocks,
    task_name,
    title_of,
)
from .schedule import Lane, Memory
from .units import format_bytes, format_seconds

if TYPE_CHECKING:
    from .comparison import BytesPair, Comparison, TaskComparison, TimePair


def as_text(renderable: RenderableType, *, width: int = 100) -> str:
    """The renderable as plain text of at most ``width`` columns; equal input gives equal text on every terminal."""
    out = StringIO()
    console = Console(
        file=out,
        width=width,
        height=25,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(renderable)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


# -- plan ------------------------------------------------------------------------------------------------------------


def plan_table(plan: Plan, *, num_blocks: int | None = None) -> RenderableType:
    """The knobs of a plan, each with its meaning."""
    table = _table("knob", ">value", "meaning")
    for knob in knobs(plan, num_blocks=num_blocks):
        _row(table, knob.name, knob.value, knob.meaning)
    return _titled("Plan", table)


# -- record ----------------------------------------------------------------------------------------------------------


def record_tables(record: Record) -> RenderableType:
    """Everything that a record says: plan, iteration time, throughput, peaks with what was alive, and lanes."""
    parts: list[RenderableType] = [_title(title_of(record))]
    if record.emulated:
        parts.append(Text(f"emulated: {', '.join(record.emulated)}"))
    parts.append(plan_table(record.plan, num_blocks=num_blocks(record)))
    parts.append(iteration_table(record))
    parts.append(memory_table(record))
    device = record.curve(Memory.DEVICE)
    if device is not None and device.alive_at_peak:
        parts.append(alive_table(device))
    parts.append(lane_table(record))
    return _spaced(parts)


def iteration_table(record: Record) -> RenderableType:
    """Iteration time by phase, and throughput."""
    table = _table("phase", ">time", ">share")
    phases = (("forward", record.forward_s), ("backward", record.backward_s), ("optimizer", record.optimizer_s))
    for name, phase_s in phases:
        _row(table, name, format_seconds(phase_s), format_share(phase_s / record.iteration_s))
    table.add_section()
    spread = f"± {format_share(record.iteration_noise_frac)}" if record.iteration_noise_frac else ""
    _row(table, "iteration", format_seconds(record.iteration_s), spread, style="bold")
    _row(table, "tokens per second", f"{record.tokens_per_s:,.4g}", "")
    return _titled("Iteration", table)


def memory_table(record: Record) -> RenderableType:
    """Peaks of every memory of the record, and the bound that no timing can exceed."""
    table = _table("memory", ">peak", "during")
    for curve in record.memory:
        _row(table, MEMORY_NAMES[curve.memory], format_bytes(curve.peak_bytes), curve.peak_at)
    _row(table, "guaranteed device peak", format_bytes(record.guaranteed_peak_device_bytes), "any timing of this plan")
    for row in beyond_the_schedule(record):
        _row(table, row.name, format_bytes(row.size_bytes), row.words)
    return _titled("Memory", table)


def alive_table(curve: MemoryCurve) -> RenderableType:
    """What was alive at the peak of one memory."""
    table = _table("content", ">size", ">share")
    for row in alive_at_peak(curve):
        share = row.size_bytes / curve.peak_bytes if curve.peak_bytes else 0.0
        _row(table, row.name, format_bytes(row.size_bytes), format_share(share))
    table.add_section()
    _row(table, "peak", format_bytes(curve.peak_bytes), "", style="bold")
    return _titled(f"Alive at the {MEMORY_NAMES[curve.memory]} peak ({curve.peak_at})", table)


def lane_table(record: Record) -> RenderableType:
    """What each lane does; the busiest is marked, since no iteration can be shorter than its work."""
    table = _table("lane", ">tasks", ">moved", ">busy", ">of iteration", "")
    busiest = bottleneck(record)
    for lane in Lane:
        use = record.lane(lane)
        is_busiest = lane is busiest
        _row(
            table,
            LANE_NAMES[lane],
            str(use.num_tasks),
            format_bytes(use.moved_bytes) if use.moved_bytes else "",
            format_seconds(use.busy_s),
            format_share(busy_frac(record, lane)),
            "◀ bottleneck" if is_busiest else "",
            style="bold" if is_busiest else "",
        )
    return _titled("Lanes", table)


# -- comparison ------------------------------------------------------------------------------------------------------


def comparison_tables(comparison: Comparison) -> RenderableType:
    """Two records side by side: times and peaks, task kinds, lanes, and where they part."""
    where = comparison.machine or comparison.measured_hardware
    title = f"{comparison.model_name}: predicted for {comparison.predicted_hardware}, measured on {where}"
    parts: list[RenderableType] = [
        _title(title),
        _totals_table(comparison),
        _kinds_table(comparison),
        _lanes_table(comparison),
        _parting_table(comparison),
    ]
    if comparison.largest_differences:
        parts.append(_largest_table(comparison.largest_differences))
    for title, names in (
        ("only predicted", comparison.only_predicted),
        ("only measured", comparison.only_measured),
    ):
        if names:
            parts.append(Text(f"{title}: {', '.join(names)}"))
    return _spaced(parts)


def _totals_table(comparison: Comparison) -> RenderableType:
    table = _pair_table("quantity")
    for name, pair in (
        ("forward", comparison.forward),
        ("backward", comparison.backward),
        ("optimizer", comparison.optimizer),
    ):
        _row(table, name, *_time_cells(pair))
    _row(table, "iteration", *_time_cells(comparison.iteration), style="bold")
    _row(table, "measurement noise", "", "", f"± {format_share(comparison.noise_frac)}")
    table.add_section()
    _row(table, "peak device memory", *_bytes_cells(comparison.peak_device), style="bold")
    _row(table, "peak pinned host memory", *_bytes_cells(comparison.peak_pinned))
    return _titled("Iteration and peaks", table)


def _kinds_table(comparison: Comparison) -> RenderableType:
    table = _pair_table("kind", ">tasks")
    for kind in comparison.kinds:
        count = str(kind.num_predicted)
        if kind.num_measured != kind.num_predicted:
            count = f"{kind.num_predicted} / {kind.num_measured}"
        _row(table, KIND_NAMES[kind.kind], count, *_time_cells(kind.duration))
    return _titled("Task kinds", table)


def _lanes_table(comparison: Comparison) -> RenderableType:
    table = _pair_table("lane")
    for lane in comparison.lanes:
        _row(table, LANE_NAMES[lane.lane], *_time_cells(lane.busy))
    return _titled("Lanes, busy", table)


def _parting_table(comparison: Comparison) -> RenderableType:
    from .comparison import Difference

    tolerance = format_share(comparison.tolerance_frac)
    task = comparison.first_parting
    if task is None:
        return Text(f"No task parts by more than {tolerance}.")
    table = _pair_table("task")
    starts = format_seconds(task.predicted_start_s), format_seconds(task.measured_start_s)
    for name, cells in (
        (Difference.START, (*starts, "")),
        (Difference.DURATION, _time_cells(task.duration)),
    ):
        _row(table, name, *cells, style="bold" if name in task.differs_in else "")
    return _titled(f"First task that parts by more than {tolerance}: {task_name(task.name, task.kind)}", table)


def _largest_table(tasks: Iterable[TaskComparison]) -> RenderableType:
    table = _pair_table("task")
    for task in tasks:
        _row(table, task_name(task.name, task.kind), *_time_cells(task.duration))
    return _titled("Tasks whose durations differ most", table)


def _pair_table(*columns: str) -> Table:
    return _table(*columns, ">predicted", ">measured", ">error")


def _time_cells(pair: TimePair) -> tuple[str, str, str]:
    return format_seconds(pair.predicted_s), format_seconds(pair.measured_s), format_error(pair.error_frac)


def _bytes_cells(pair: BytesPair | None) -> tuple[str, str, str]:
    if pair is None:
        return NO_VALUE, NO_VALUE, NO_VALUE
    return format_bytes(pair.predicted_bytes), format_bytes(pair.measured_bytes), format_error(pair.error_frac)


# -- building --------------------------------------------------------------------------------------------------------


def _table(*columns: str) -> Table:
    """A table whose columns are named by ``columns``; a name that begins with ``>`` holds figures, set right."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1),
        header_style="dim",
    )
    for column in columns:
        justify: JustifyMethod = "right" if column.startswith(">") else "left"
        table.add_column(Text(column.removeprefix(">")), justify=justify, overflow="fold")
    return table


def _row(table: Table, *cells: str, style: str = "") -> None:
    table.add_row(*(Text(cell) for cell in cells), style=style or None)


def _titled(title: str, table: Table) -> Group:
    """A table under its title, which may be wider than the table."""
    return Group(_title(title), table)


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _spaced(parts: Iterable[RenderableType]) -> Group:
    spaced: list[RenderableType] = []
    for part in parts:
        spaced += [part, Text("")]
    return Group(*spaced[:-1])

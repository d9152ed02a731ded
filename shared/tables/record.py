"""Plans, records and comparisons as tables for a terminal.

Every cell is plain ``Text``: names from models and files are never read as markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..basics.units import format_bytes, format_number, format_seconds
from ..schema.plan import Plan
from ..schema.record import MemoryCurve, Record
from ..schema.schedule import Memory
from .labels import (
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
from .memory import beyond_the_schedule
from .style import add_row, least_width, plain_table, spaced, titled

if TYPE_CHECKING:
    from ..records.comparison import BytesPair, Comparison, TaskComparison, TimePair


def as_text(renderable: RenderableType, *, width: int = 100) -> str:
    """The renderable as plain text of ``width`` columns, more where figures need more; equal input, equal text."""
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
    console.width = max(width, least_width(renderable))
    console.print(renderable)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


# -- plan ------------------------------------------------------------------------------------------------------------


def plan_table(plan: Plan, *, num_blocks: int | None = None) -> RenderableType:
    """The knobs of a plan, each with its meaning."""
    table = plain_table("knob", ">value", "meaning")
    for knob in knobs(plan, num_blocks=num_blocks):
        add_row(table, knob.name, knob.value, knob.meaning)
    return titled("Plan", table)


# -- record ----------------------------------------------------------------------------------------------------------


def record_tables(record: Record) -> RenderableType:
    """Everything that a record says: plan, iteration time, throughput, peaks with what was alive, and lanes."""
    parts: list[RenderableType] = [Text(title_of(record), style="bold")]
    if record.emulated:
        parts.append(Text(f"emulated: {', '.join(record.emulated)}"))
    parts.append(plan_table(record.plan, num_blocks=num_blocks(record)))
    parts.append(iteration_table(record))
    parts.append(memory_table(record))
    device = record.curve(Memory.DEVICE)
    if device is not None and device.alive_at_peak:
        parts.append(alive_table(device))
    parts.append(lane_table(record))
    return spaced(parts)


def iteration_table(record: Record) -> RenderableType:
    """Iteration time by phase, and throughput."""
    table = plain_table("phase", ">time", ">share")
    phases = (("forward", record.forward_s), ("backward", record.backward_s), ("optimizer", record.optimizer_s))
    for name, phase_s in phases:
        add_row(table, name, format_seconds(phase_s), format_share(phase_s / record.iteration_s))
    table.add_section()
    spread = f"± {format_share(record.iteration_noise_frac)}" if record.iteration_noise_frac else ""
    add_row(table, "iteration", format_seconds(record.iteration_s), spread, style="bold")
    num_ranks = record.plan.num_ranks
    of_all = f"{num_ranks:,} ranks" if num_ranks > 1 else ""
    add_row(table, "tokens per second", format_number(record.tokens_per_s), of_all)
    if num_ranks > 1:
        add_row(table, "tokens per second and rank", format_number(record.tokens_per_s / num_ranks), "")
    if (cost := record.usd_per_million_tokens) is not None:
        add_row(table, "US dollars a million tokens", f"{cost:.3f}", "")
    return titled("Iteration", table)


def memory_table(record: Record) -> RenderableType:
    """Peaks of every memory of the record, and the bound that no timing can exceed."""
    table = plain_table("memory", ">peak", "during, or of what")
    for curve in record.memory:
        add_row(table, MEMORY_NAMES[curve.memory], format_bytes(curve.peak_bytes), curve.peak_at)
    guaranteed = format_bytes(record.guaranteed_peak_device_bytes)
    add_row(table, "guaranteed device peak", guaranteed, "any timing of this plan")
    for row in beyond_the_schedule(record):
        add_row(table, row.name, format_bytes(row.size_bytes), row.words)
    return titled("Memory", table)


def alive_table(curve: MemoryCurve) -> RenderableType:
    """What was alive at the peak of one memory."""
    table = plain_table("content", ">size", ">share")
    for row in alive_at_peak(curve):
        share = row.size_bytes / curve.peak_bytes if curve.peak_bytes else 0.0
        add_row(table, row.name, format_bytes(row.size_bytes), format_share(share))
    table.add_section()
    add_row(table, "peak", format_bytes(curve.peak_bytes), "", style="bold")
    return titled(f"Alive at the {MEMORY_NAMES[curve.memory]} peak ({curve.peak_at})", table)


def lane_table(record: Record) -> RenderableType:
    """What each lane does; the busiest is marked, since no iteration can be shorter than its work."""
    table = plain_table("lane", ">tasks", ">moved", ">busy", ">of iteration", "")
    busiest = bottleneck(record)
    for lane in record.lanes_shown:
        use = record.lane(lane)
        is_busiest = lane is busiest
        add_row(
            table,
            LANE_NAMES[lane],
            str(use.num_tasks),
            format_bytes(use.moved_bytes) if use.moved_bytes else "",
            format_seconds(use.busy_s),
            format_share(busy_frac(record, lane)),
            "◀ bottleneck" if is_busiest else "",
            style="bold" if is_busiest else "",
        )
    return titled("Lanes", table)


# -- comparison ------------------------------------------------------------------------------------------------------


def comparison_tables(comparison: Comparison) -> RenderableType:
    """Two records side by side: times and peaks, task kinds, lanes, and where they part."""
    where = comparison.machine or comparison.measured_hardware
    title = f"{comparison.model_name}: predicted for {comparison.predicted_hardware}, measured on {where}"
    parts: list[RenderableType] = [
        Text(title, style="bold"),
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
    return spaced(parts)


def _totals_table(comparison: Comparison) -> RenderableType:
    table = _pair_table("quantity")
    for name, pair in (
        ("forward", comparison.forward),
        ("backward", comparison.backward),
        ("optimizer", comparison.optimizer),
    ):
        add_row(table, name, *_time_cells(pair))
    add_row(table, "iteration", *_time_cells(comparison.iteration), style="bold")
    add_row(table, "measurement noise", "", "", f"± {format_share(comparison.noise_frac)}")
    table.add_section()
    add_row(table, "peak device memory", *_bytes_cells(comparison.peak_device), style="bold")
    add_row(table, "peak pinned host memory", *_bytes_cells(comparison.peak_pinned))
    return titled("Iteration and peaks", table)


def _kinds_table(comparison: Comparison) -> RenderableType:
    table = _pair_table("kind", ">tasks")
    for kind in comparison.kinds:
        count = str(kind.num_predicted)
        if kind.num_measured != kind.num_predicted:
            count = f"{kind.num_predicted} / {kind.num_measured}"
        add_row(table, KIND_NAMES[kind.kind], count, *_time_cells(kind.duration))
    return titled("Task kinds", table)


def _lanes_table(comparison: Comparison) -> RenderableType:
    table = _pair_table("lane")
    for lane in comparison.lanes:
        add_row(table, LANE_NAMES[lane.lane], *_time_cells(lane.busy))
    return titled("Lanes, busy", table)


def _parting_table(comparison: Comparison) -> RenderableType:
    from ..records.comparison import Difference

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
        add_row(table, name, *cells, style="bold" if name in task.differs_in else "")
    return titled(f"First task that parts by more than {tolerance}: {task_name(task.name, task.kind)}", table)


def _largest_table(tasks: Iterable[TaskComparison]) -> RenderableType:
    table = _pair_table("task")
    for task in tasks:
        add_row(table, task_name(task.name, task.kind), *_time_cells(task.duration))
    return titled("Tasks whose durations differ most", table)


def _pair_table(*columns: str) -> Table:
    return plain_table(*columns, ">predicted", ">measured", ">error")


def _time_cells(pair: TimePair) -> tuple[str, str, str]:
    return format_seconds(pair.predicted_s), format_seconds(pair.measured_s), format_error(pair.error_frac)


def _bytes_cells(pair: BytesPair | None) -> tuple[str, str, str]:
    if pair is None:
        return NO_VALUE, NO_VALUE, NO_VALUE
    return format_bytes(pair.predicted_bytes), format_bytes(pair.measured_bytes), format_error(pair.error_frac)

"""A comparison of two records as tables."""

from __future__ import annotations

from collections.abc import Sequence

from ..basics.units import format_bytes, format_seconds
from ..records.comparison import BytesPair, Comparison, TaskComparison, TimePair
from ..records.ranks import rank_name
from .labels import (
    LANE_NAMES,
    NO_VALUE,
    format_error,
    format_interval_bytes,
    format_interval_s,
    format_share,
    kind_name,
    task_name,
)
from .table import Heading, Parts, Row, Table

_Pair = TimePair | BytesPair | None


def comparison_tables(comparison: Comparison) -> Parts:
    """Two records side by side: times and peaks, task kinds, lanes, and where they part."""
    where = comparison.machine or comparison.measured_hardware
    title = f"{comparison.model_name}: predicted for {comparison.predicted_hardware}, measured on {where}"
    return (Heading(title), *pair_tables(comparison), *comparison_sentences(comparison))


def pair_tables(comparison: Comparison) -> tuple[Table, ...]:
    """Times and peaks, task kinds, lanes, and the tasks that differ most."""
    tables = [_totals_table(comparison), *_ranks_tables(comparison), _kinds_table(comparison), _lanes_table(comparison)]
    if comparison.largest_differences:
        tables.append(_tasks_table(comparison.largest_differences))
    return tuple(tables)


def comparison_sentences(comparison: Comparison) -> tuple[str, ...]:
    """Whether what was measured was expected, where the records part, and the tasks that one of them lacks."""
    sentences = [*_expected(comparison), _parting(comparison)]
    for words, names in (("predicted", comparison.only_predicted), ("measured", comparison.only_measured)):
        if names:
            sentences.append(f"Only {words}: {', '.join(names)}.")
    return tuple(sentences)


def _expected(comparison: Comparison) -> list[str]:
    """Whether the measured time and peak lie inside the predicted intervals."""
    told = []
    if comparison.iteration.interval_s is not None:
        where = "inside" if comparison.iteration.is_inside else "outside"
        told.append(f"the iteration time lies {where} {format_interval_s(comparison.iteration.interval_s)}")
    peak = comparison.peak_device
    if peak is not None and peak.interval_bytes is not None:
        where = "inside" if peak.is_inside else "outside"
        told.append(f"the device peak {where} {format_interval_bytes(peak.interval_bytes)}")
    return [f"Of the intervals that nine in ten measurements lie in: {', '.join(told)}."] if told else []


def _parting(comparison: Comparison) -> str:
    tolerance, task = format_share(comparison.tolerance_frac), comparison.first_parting
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


def _totals_table(comparison: Comparison) -> Table:
    pairs: list[tuple[Row, _Pair]] = [
        (("forward",), comparison.forward),
        (("backward",), comparison.backward),
        (("optimizer",), comparison.optimizer),
        (("iteration",), comparison.iteration),
        (("peak device memory",), comparison.peak_device),
        (("peak pinned host memory",), comparison.peak_pinned),
    ]
    # A single iteration has no noise that would be known.
    noise = f"; the measurement's noise is ± {format_share(comparison.noise_frac)}" if comparison.noise_frac else ""
    title = f"Iteration and peaks{noise}"
    return _pair_table(title, ("quantity",), pairs, stressed=(3, 4), ruled=frozenset({4}))


def _ranks_tables(comparison: Comparison) -> list[Table]:
    """One row per rank and quantity; nothing where no rank was told from the others."""
    pairs: list[tuple[Row, _Pair]] = []
    first_rows = set()
    with_names = len({one.name for one in comparison.ranks}) > 1
    for one in comparison.ranks:
        first_rows.add(len(pairs))
        name = rank_name(one.rank, name=one.name if with_names else "")
        pairs += [
            ((name, "computing"), one.computing),
            (("", "waiting for ranks"), one.waiting),
            (("", "iteration"), one.iteration),
            (("", "peak device memory"), one.peak_device),
        ]
    if not pairs:
        return []
    title = f"Ranks; the other tables are of rank {comparison.rank}, which waits least for the others"
    return [_pair_table(title, ("rank", "quantity"), pairs, ruled=frozenset(first_rows - {0}))]


def _kinds_table(comparison: Comparison) -> Table:
    pairs: list[tuple[Row, _Pair]] = []
    for kind in comparison.kinds:
        count = str(kind.num_predicted)
        if kind.num_measured != kind.num_predicted:
            count = f"{kind.num_predicted} / {kind.num_measured}"
        pairs.append(((kind_name(kind.kind), count), kind.duration))
    return _pair_table("Task kinds, seconds together", ("kind", ">tasks"), pairs)


def _lanes_table(comparison: Comparison) -> Table:
    return _pair_table("Lanes, busy", ("lane",), [((LANE_NAMES[lane.lane],), lane.busy) for lane in comparison.lanes])


def _tasks_table(tasks: Sequence[TaskComparison]) -> Table:
    pairs = [((task_name(task.name, task.kind),), task.duration) for task in tasks]
    return _pair_table("Tasks whose durations differ most", ("task",), pairs)


def _pair_table(
    title: str,
    columns: Row,
    pairs: Sequence[tuple[Row, _Pair]],
    *,
    stressed: Sequence[int] = (),
    ruled: frozenset[int] = frozenset(),
) -> Table:
    """Names, both sides of every pair, and the signed error."""
    return Table(
        title=title,
        columns=(*columns, ">predicted", ">measured", ">error"),
        rows=[(*names, *_pair_cells(pair)) for names, pair in pairs],
        styles=dict.fromkeys(stressed, "bold"),
        ruled=ruled,
        errors_frac=[pair.error_frac if pair is not None else None for _, pair in pairs],
    )


def _pair_cells(pair: _Pair) -> Row:
    if pair is None:
        return NO_VALUE, NO_VALUE, NO_VALUE
    if isinstance(pair, TimePair):
        return format_seconds(pair.predicted_s), format_seconds(pair.measured_s), format_error(pair.error_frac)
    return format_bytes(pair.predicted_bytes), format_bytes(pair.measured_bytes), format_error(pair.error_frac)

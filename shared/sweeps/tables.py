"""A sweep as tables, and in words where offloading becomes free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..basics.units import format_bytes, format_count, format_duration, format_number, format_seconds
from ..tables.advice import TIGHT_NOTE, short_reason
from ..tables.labels import LANE_NAMES, NO_VALUE, TILED_MARK, format_share, notes_of_plan_words, plan_words
from ..tables.question import positions_words
from ..tables.table import Parts, Row, Table
from .sweep import FREE_FRAC, Sweep, SweepPlan, SweepPoint

_TOKENS: Final = ">tokens\nper step"
_PEAK: Final = ">device\npeak"
_HOST: Final = ">host"
_MFU: Final = ">MFU"
_ITERATION: Final = ">iteration"
_ON_DEVICE: Final = ">on device,\ntokens/s"
_MOST_NAMED: Final = 2
"""Exceptions."""
_COST: Final = ">USD per\nM tokens"


def sweep_tables(sweep: Sweep) -> Parts:
    """Every point with a plan, where offloading becomes free, and what the others lack."""
    parts: list[Table | str] = []
    if sweep.with_plan:
        parts.append(point_table(sweep))
        parts += free_sentences(sweep)
    parts += emulated_sentences(sweep)
    parts += too_long(sweep)
    if missing := missing_table(sweep):
        parts.append(missing)
    parts += price_sentences(sweep)
    if not sweep.is_complete:
        left = sum(not point.is_searched and not point.reason for point in sweep.points)
        parts.append(f"interrupted: {left} of {len(sweep.points)} points were not searched.")
    return tuple(parts)


def emulated_sentences(sweep: Sweep) -> list[str]:
    """What is computed as others do, if anything is."""
    return [f"emulated: {', '.join(sweep.emulated)}."] if sweep.emulated else []


def price_sentences(sweep: Sweep) -> list[str]:
    """What the machine costs, and who says so; nothing where the user does."""
    price = sweep.list_price
    if price is None:
        return []
    return [f"{price.usd_per_hour:.2f} USD an hour: {price.kind.words}, {price.words}. --price states yours."]


def too_long(sweep: Sweep) -> list[str]:
    """A warning of sequences beyond the model's rotary positions, if some are."""
    return [] if sweep.rotary_tokens is None else [f"Warning: {positions_words(sweep.rotary_tokens)}."]


def point_table(sweep: Sweep, title: str | None = None) -> Table:
    """One row for each point with a plan."""
    takes, costs = run_columns = _run_columns(sweep)
    columns: Row = (
        ">sequence",
        ">batch",
        ">tokens\nper s",
        _MFU,
        "plan",
        "binds",
        ">costs of\noffloading",
        ">costs of\nrecompute",
        *run_columns,
        _PEAK,
        _HOST,
        _ITERATION,
        _TOKENS,
        _ON_DEVICE,
        _COST,
    )
    rows = [_cells(point, point.found) for point in sweep.with_plan if point.found is not None]
    has_price = any(one.found and one.found.usd_per_million_tokens for one in sweep.points)
    has_run = _run_tokens(sweep) is not None
    unused = [
        name
        for name, is_used in (
            (_ON_DEVICE, any(point.offloads and point.on_device is not None for point in sweep.points)),
            (_COST, has_price),
            (takes, has_run),
            (costs, has_run and has_price),
        )
        if not is_used
    ]
    kept = [place for place, name in enumerate(columns) if name not in unused]
    ranks = f", {sweep.num_ranks:,} ranks" if sweep.num_ranks > 1 else ""
    batches = f", {sweep.micro_batches:,} micro-batches a step" if sweep.micro_batches > 1 else ""
    return Table(
        title=f"{sweep.model_name} on {sweep.hardware_name}{ranks}{batches}" if title is None else title,
        columns=tuple(columns[place] for place in kept),
        rows=[tuple(row[place] for place in kept) for row in rows],
        always=5,
        notes=[
            *([TIGHT_NOTE] if any(point.found and point.found.survives is False for point in sweep.points) else []),
            *notes_of_plan_words(
                (point.found.plan for point in sweep.points if point.found is not None), tiled=TILED_MARK
            ),
        ],
        expendable=tuple(
            name for name in (_COST, _TOKENS, _ITERATION, _ON_DEVICE, _MFU, _HOST, _PEAK) if name not in unused
        ),
        ruled=frozenset(_first_of_lengths(sweep.with_plan)),
    )


def _run_tokens(sweep: Sweep) -> int | None:
    """The number of tokens whose training is told, if one is."""
    return next((one.found.run.num_tokens for one in sweep.points if one.found and one.found.run), None)


def _run_columns(sweep: Sweep) -> tuple[str, str]:
    """Headings of what training on so many tokens takes, and costs."""
    tokens = format_count(_run_tokens(sweep) or 0)
    return f">{tokens} tokens\ntake", f">{tokens} tokens\ncost, USD"


def free_sentences(sweep: Sweep) -> list[str]:
    """Where offloading becomes free, in words."""
    offloading = [point for point in sweep.points if point.offloads]
    if not offloading:
        return ["No plan has anything on the host: where one fits, everything fits on the device."]
    meaning = (
        "What offloading costs: the plan beside one on a device of unlimited memory that recomputes as much. What "
        "recomputation costs: that one beside the best with unlimited memory."
    )
    return [_free_sentence(sweep, offloading), meaning]


def _free_sentence(sweep: Sweep, offloading: Sequence[SweepPoint]) -> str:
    least = f"{FREE_FRAC * 100:g} %"
    first = sweep.free_from
    if first is None:
        nearest = min(offloading, key=lambda point: point.offloading_cost_frac or 0.0)
        return (
            f"From no number of tokens on is offloading free: the least that it costs is "
            f"{_share(nearest.offloading_cost_frac)}, at {nearest.words} tokens."
        )
    beyond = [point for point in offloading if point.num_tokens >= first.num_tokens]
    before = [point for point in offloading if point.num_tokens < first.num_tokens]
    where = f"From {first.words} tokens on ({first.num_tokens:,} a step)" if before else "At every point that offloads"
    said = f"{where}, offloading costs less than {least}{_exceptions(sweep, len(beyond))}"
    if before:
        dearest = max(before, key=lambda point: point.offloading_cost_frac or 0.0)
        said += f"; with fewer in a step up to {_share(dearest.offloading_cost_frac)}, at {dearest.words}"
    recomputed = [cost for point in beyond if (cost := point.recomputation_cost_frac) is not None]
    low, high = _share(min(recomputed)), _share(max(recomputed))
    return f"{said}. Recomputation costs {low if low == high else f'{low} to {high}'} there."


def _exceptions(sweep: Sweep, num_points: int) -> str:
    """Which of so many points are no part of what is said of them, in words; nothing if there are none."""
    named = [f"{one.words} ({_share(one.offloading_cost_frac)})" for one in sweep.exceptions]
    if len(named) <= _MOST_NAMED:
        return f", but for {' and '.join(named)}" if named else ""
    dearest = max(sweep.exceptions, key=lambda one: one.offloading_cost_frac or 0.0)
    worst = f"{_share(dearest.offloading_cost_frac)}, at {dearest.words}"
    return f", but for {len(named)} of {num_points} points, where it costs up to {worst}"


def missing_table(sweep: Sweep) -> Table | None:
    """What the points lack that no plan fits, the smallest ones; None where every point has a plan."""
    without = [point for point in sweep.points if point.found is None and point.reason]
    rows = [(point.words, short_reason(point.reason)) for point in without if point.is_searched]
    if not rows:
        return None
    num_skipped = sum(not point.is_searched for point in without)
    larger = f"{num_skipped} larger points were not searched: they need no less memory than these."
    return Table(
        title="Points without a plan",
        columns=(">batch x tokens", "what is missing"),
        rows=rows,
        notes=[larger] if num_skipped else [],
    )


def _first_of_lengths(points: Sequence[SweepPoint]) -> list[int]:
    lengths = [point.sequence_length for point in points]
    return [place for place in range(1, len(lengths)) if lengths[place] != lengths[place - 1]]


def _cells(point: SweepPoint, found: SweepPlan) -> Row:
    on_device, cost = point.on_device, found.usd_per_million_tokens
    return (
        f"{point.sequence_length:,}",
        f"{point.batch_size:,}",
        format_number(found.tokens_per_s),
        NO_VALUE if found.mfu_frac is None else f"{found.mfu_frac * 100:.1f} %",
        f"{plan_words(found.plan, found.plan_kind, tiled=TILED_MARK)}{'*' if found.survives is False else ''}",
        NO_VALUE if found.bottleneck is None else LANE_NAMES[found.bottleneck],
        _share(point.offloading_cost_frac),
        _share(point.recomputation_cost_frac),
        NO_VALUE if found.run is None else format_duration(found.run.time_s),
        NO_VALUE if found.run is None or found.run.cost_usd is None else format_number(found.run.cost_usd),
        format_bytes(found.guaranteed_peak_device_bytes),
        format_bytes(found.host_bytes) if found.host_bytes else NO_VALUE,
        format_seconds(found.iteration_s),
        f"{point.num_tokens:,}",
        NO_VALUE if on_device is None else format_number(on_device.tokens_per_s),
        NO_VALUE if cost is None else format_number(cost),
    )


def _share(frac: float | None) -> str:
    """A cost in percent, which may be a gain."""
    if frac is None:
        return NO_VALUE
    return f"−{format_share(-frac)}" if frac <= -0.0005 else format_share(max(0.0, frac))

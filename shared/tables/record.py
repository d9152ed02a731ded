"""Plans and records as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ..basics.units import (
    counted,
    format_bytes,
    format_count,
    format_duration,
    format_flop_per_s,
    format_number,
    format_seconds,
)
from ..records.ranks import name_of_rank, ranks_shown
from ..schema.plan import Plan
from ..schema.record import Factorisation, IterationPhase, MemoryCurve, Record, TrainingRun
from ..schema.schedule import Lane, Memory
from .labels import (
    LANE_NAMES,
    MEMORY_NAMES,
    NO_VALUE,
    ORIGIN_NAMES,
    alive_at_peak,
    bottleneck,
    busy_frac,
    format_interval_bytes,
    format_interval_s,
    format_share,
    knobs,
    num_blocks,
    peak_name,
    phase_parts,
    remedy_sentence,
    title_of,
)
from .memory import beyond_the_schedule
from .question import question_table
from .table import Heading, Parts, Table


def record_tables(record: Record) -> Parts:
    """Everything that a record says: plan, iteration time, throughput, peaks with what was alive, and lanes."""
    parts: list[Table | str] = [Heading(title_of(record))]
    if record.question is not None:
        parts.append(question_table(record.question))
    if record.emulated:
        parts.append(f"emulated: {', '.join(record.emulated)}")
    parts += [plan_table(record.plan, num_blocks=num_blocks(record)), iteration_table(record)]
    if record.factorisation is not None:
        parts.append(factorisation_sentence(record.factorisation))
    if record.ranks:
        parts.append(ranks_table(record))
    if record.run is not None:
        parts.append(run_table(record.run))
    parts.append(memory_table(record))
    device = record.curve(Memory.DEVICE)
    if device is not None and device.alive_at_peak:
        title = f"Alive at the {MEMORY_NAMES[device.memory]} peak ({peak_name(device)})"
        parts.append(alive_table(title, [("size", device)]))
    return (*parts, lane_table(record))


def factorisation_sentence(found: Factorisation) -> str:
    """What comes before the first step."""
    decompositions = f"{found.num_weights:,} singular value decomposition{'s' if found.num_weights > 1 else ''}"
    return (
        f"Before the first step: {decompositions}, {format_seconds(found.host_s)} on "
        f"the host, once, with {format_bytes(found.working_bytes)} of memory on the way."
    )


def plan_table(plan: Plan, *, num_blocks: int | None = None) -> Table:
    """The knobs of a plan, each with its meaning."""
    rows = [(knob.name, knob.value, knob.meaning) for knob in knobs(plan, num_blocks=num_blocks)]
    return Table(title="Plan", columns=("knob", ">value", "meaning"), rows=rows)


def iteration_table(record: Record) -> Table:
    """Iteration time by phase, with what compute waits for, and throughput."""
    rows = [row for phase in IterationPhase for row in _phase_rows(record, phase)]
    num_phase_rows = len(rows)
    spread = f"± {format_share(record.iteration_noise_frac)}" if record.iteration_noise_frac else ""
    if record.iteration_interval_s is not None:
        spread = format_interval_s(record.iteration_interval_s)
    rows.append(("iteration", format_seconds(record.iteration_s), spread))
    num_ranks = record.plan.num_ranks
    of_all = f"{num_ranks:,} ranks" if num_ranks > 1 else ""
    if has_tokens(record):
        rows.append(("tokens per second", format_number(record.tokens_per_s), of_all))
        if num_ranks > 1:
            rows.append(("tokens per second and device", format_number(record.tokens_per_s_per_device), ""))
    rows.append(("samples per second", format_number(record.samples_per_s), of_all))
    rows += _utilisation_rows(record)
    if (cost := record.usd_per_million_tokens) is not None and has_tokens(record):
        rows.append(("US dollars a million tokens", f"{cost:.3f}" if cost >= 0.1 else f"{cost:.3g}", ""))
    return Table(
        title="Iteration",
        columns=("phase", ">time", ">share"),
        rows=rows,
        styles={num_phase_rows: "bold"},
        ruled=frozenset({num_phase_rows}),
    )


def ranks_table(record: Record) -> Table:
    """What each of several ranks computes, waits for the others and holds; the slowest is marked."""
    rows, slowest = [], 0
    for place, one in enumerate(ranks_shown(record)):
        own = record.of_rank(one.rank)
        held_up_s = sum(wait.seconds for wait in own.waits or () if wait.for_ranks)
        curve = own.curve(Memory.DEVICE)
        if one.rank == record.rank:
            slowest = place
        rows.append(
            (
                name_of_rank(record, one),
                format_seconds(own.lane(Lane.COMPUTE).busy_s),
                format_seconds(held_up_s),
                format_share(held_up_s / own.iteration_s),
                format_seconds(one.waited_s),
                format_bytes(curve.peak_bytes) if curve is not None else NO_VALUE,
                "◀ slowest" if one.rank == record.rank else "",
            )
        )
    return Table(
        title="Ranks",
        columns=("rank", ">computing", ">held up\nby ranks", ">share", ">collectives\nheld up", ">device peak", ""),
        rows=rows,
        styles={slowest: "bold"},
        notes=[_whose(record)],
    )


def _whose(record: Record) -> str:
    """Whose times a record has; of many ranks, how many are not shown.  Empty where one stands for all."""
    if not record.ranks:
        return ""
    own = next(one for one in record.ranks if one.rank == record.rank)
    told = f"Times and memory elsewhere are those of {name_of_rank(record, own)}, which waits least for the others."
    num_hidden = len(record.ranks) - len(ranks_shown(record))
    return f"{told} {num_hidden:,} ranks, which wait neither least nor most, are not shown." if num_hidden else told


def has_tokens(record: Record) -> bool:
    """Whether the record's samples are sequences of tokens; so taken where it does not say."""
    return record.question is None or record.question.num_tokens is not None


_SQUARES: Final = "whole squares of scores count, of which kernels leave half out"
"""Why a device seems to compute more than it can ([Note: Model FLOPs] in ``shared/records/flops.py``)."""


def _utilisation_rows(record: Record) -> list[tuple[str, str, str]]:
    """MFU and HFU, and the peak that they are shares of, of one device."""
    if record.mfu_frac is None or record.hfu_frac is None or record.peak_flop_per_s is None:
        return []
    peak = format_flop_per_s(record.peak_flop_per_s / record.plan.num_ranks)
    dtype = f" in {record.question.compute_dtype}" if record.question is not None else ""
    return [
        ("MFU (model FLOPs)", format_share(record.mfu_frac), f"of {peak}{dtype}"),
        ("HFU (with recomputation)", format_share(record.hfu_frac), _SQUARES if record.hfu_frac > 1 else ""),
    ]


def run_table(run: TrainingRun) -> Table:
    """Time, energy and cost of training on the tokens that were asked about."""
    rows = [
        ("time", format_duration(run.time_s), counted(run.num_steps, "step")),
    ]
    if run.energy_kwh is not None:
        rows.append(("energy", f"{format_number(run.energy_kwh)} kWh", "at most, of the devices alone"))
    if run.cost_usd is not None:
        rows.append(("cost", f"{format_number(run.cost_usd)} US dollars", "rent of whole machines"))
    title = f"Training on {format_count(run.num_tokens)} tokens"
    return Table(title=title, columns=("", "", ""), rows=rows)


def _phase_rows(record: Record, phase: IterationPhase) -> Iterator[tuple[str, str, str]]:
    """One phase, and where compute waits in it, what it computes and what it waits for."""
    if phase is IterationPhase.OPTIMIZER and not record.phase_s(phase):
        return  # every step hides behind the backward
    parts = phase_parts(record, phase)
    for name, seconds in ((phase.value, record.phase_s(phase)), *((f"  {part.name}", part.seconds) for part in parts)):
        yield name, format_seconds(seconds), format_share(seconds / record.iteration_s)


def memory_table(record: Record) -> Table:
    """Peaks of every memory of the record, and the bound that no timing can exceed."""
    rows = [(MEMORY_NAMES[curve.memory], format_bytes(curve.peak_bytes), peak_name(curve)) for curve in record.memory]
    if record.peak_interval_bytes is not None:
        rows.insert(1, ("", "", _peak_words(record)))
    guaranteed = format_bytes(record.guaranteed_peak_device_bytes)
    rows.append(("guaranteed device peak", guaranteed, _guarantee_words(record)))
    rows += [(row.name, format_bytes(row.size_bytes), row.words) for row in beyond_the_schedule(record)]
    return Table(title="Memory", columns=("memory", ">peak", "during, or of what"), rows=rows)


def _guarantee_words(record: Record) -> str:
    """What the bound holds for: it knows every timing, but what a phase allocates as well as the memory model does."""
    interval = record.peak_interval_bytes
    is_exceeded = interval is not None and interval.high > record.guaranteed_peak_device_bytes
    return "any timing, if phases hold what is modelled" if is_exceeded else "any timing of this plan"


def _peak_words(record: Record) -> str:
    """Where the device peak is expected, and the chance that it is too high."""
    expected = f"expected {format_interval_bytes(record.peak_interval_bytes)}"
    if not record.chance_oom:
        return expected
    chance = "below 0.1 %" if record.chance_oom < 0.001 else format_share(record.chance_oom)
    return f"{expected}; chance to run out of memory {chance}"


def beyond_table(record: Record) -> Table | None:
    """What is held beyond what the schedule allocates; None if the record does not predict it."""
    rows = [(row.name, format_bytes(row.size_bytes), row.words) for row in beyond_the_schedule(record)]
    title = "Beyond what the schedule allocates"
    return Table(title=title, columns=("", ">expected", ""), rows=rows) if rows else None


def alive_table(title: str, curves: Sequence[tuple[str, MemoryCurve]]) -> Table:
    """What was alive at the peaks of memories, each under its name; the largest of the first one first."""
    alive = [{row.name: row.size_bytes for row in alive_at_peak(curve)} for _, curve in curves]
    rows = []
    for name in dict.fromkeys(name for found in alive for name in found):
        cells = [name]
        for (_, curve), found in zip(curves, alive, strict=True):
            size_bytes = found.get(name)
            if size_bytes is None:
                cells += [NO_VALUE, ""]
            else:
                cells += [format_bytes(size_bytes), format_share(size_bytes / curve.peak_bytes)]
        rows.append(tuple(cells))
    peaks = [cell for _, curve in curves for cell in (format_bytes(curve.peak_bytes), "")]
    return Table(
        title=title,
        columns=("content", *(column for name, _ in curves for column in (f">{name}", ">share"))),
        rows=[*rows, ("peak", *peaks)],
        styles={len(rows): "bold"},
        ruled=frozenset({len(rows)}),
    )


def lane_table(record: Record) -> Table:
    """What each lane does; the busiest is marked, since no iteration can be shorter than its work."""
    busiest, rows = bottleneck(record), []
    for lane in record.lanes_shown:
        use = record.lane(lane)
        rows.append(
            (
                LANE_NAMES[lane],
                str(use.num_tasks),
                format_bytes(use.moved_bytes) if use.moved_bytes else "",
                format_seconds(use.busy_s),
                format_share(busy_frac(record, lane)),
                "◀ bottleneck" if lane is busiest else "",
            )
        )
    return Table(
        title="Lanes",
        columns=("lane", ">tasks", ">moved", ">busy", ">of iteration", ""),
        rows=rows,
        styles={place: "bold" for place, lane in enumerate(record.lanes_shown) if lane is busiest},
        notes=[sentence] if (sentence := remedy_sentence(record)) else [],
    )


def traffic_table(records: Sequence[Record]) -> Table:
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
    return Table(
        title="One iteration",
        columns=("", *(f">{ORIGIN_NAMES[record.origin]}" for record in records)),
        rows=[(name, *map(show, records)) for name, show in measures],
    )

"""Where the time goes in the report: one bar per phase, in it compute at work and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..basics.units import format_seconds
from ..schema.record import IterationPhase, Record
from ..schema.schedule import TaskKind
from ..tables.labels import ORIGIN_NAMES, PhasePart, format_share, phase_parts, remedy_sentence
from .axes import BarRow, Segment, across, bar_rows, time_unit
from .bars import KIND_COLOURS, kind_colour
from .svg import Figure, area_mark, joined, tag

_COMPUTING: Final[dict[IterationPhase, str]] = {
    IterationPhase.FORWARD: KIND_COLOURS[TaskKind.FORWARD],
    IterationPhase.BACKWARD: KIND_COLOURS[TaskKind.BACKWARD],
    IterationPhase.OPTIMIZER: KIND_COLOURS[TaskKind.DEVICE_ADAM],
}
RANKS_COLOUR: Final = "maroon"
"""Of waits for other ranks."""


def phase_chart(records: Sequence[Record]) -> Figure | None:
    """A bar per phase and record, compute's own time first, then its waits; None if no record tells its waits."""
    told = [record for record in records if record.waits is not None]
    if not told:
        return None
    rows, legend = [], dict[str, str]()
    for record in told:
        for phase in IterationPhase:
            parts = _parts(record, phase)
            rows.append(_row(record, phase, parts, with_origin=len(told) > 1))
            legend |= {_legend_words(part, phase): _colour(part, phase) for part in parts if part.seconds > 0}
    longest_s = max(record.phase_s(phase) for record in told for phase in IterationPhase)
    rightwards = across(0.0, longest_s)
    return Figure(
        name="phases",
        is_rows=True,
        drawing=bar_rows(rows, rightwards, time_unit(longest_s), title=""),
        label="Seconds of each phase: " + "; ".join(f"{row.name} {row.words}" for row in rows),
        caption=("Compute at work", ", and what it waits for"),
        legend=tuple((area_mark(colour), words) for words, colour in legend.items()),
        below=joined(tag("p", sentence) for record in told if (sentence := remedy_sentence(record))),
    )


def _parts(record: Record, phase: IterationPhase) -> list[PhasePart]:
    return phase_parts(record, phase) or [PhasePart("computing", record.phase_s(phase), is_waiting=False)]


def _row(record: Record, phase: IterationPhase, parts: Sequence[PhasePart], *, with_origin: bool) -> BarRow:
    bars, end_s = [], 0.0
    for part in parts:
        bars.append(Segment(end_s, end_s + part.seconds, _colour(part, phase)))
        end_s += part.seconds
    total_s = record.phase_s(phase)
    name = f"{phase}, {ORIGIN_NAMES[record.origin]}" if with_origin else str(phase)
    split = "\n".join(f"{part.name}: {format_seconds(part.seconds)}" for part in parts)
    return BarRow(
        name=name,
        words=f"{format_seconds(total_s)}, {format_share(total_s / record.iteration_s)}",
        title=f"{name}: {format_seconds(total_s)}\n{split}",
        bars=tuple(bars),
    )


def _colour(part: PhasePart, phase: IterationPhase) -> str:
    if not part.is_waiting:
        return _COMPUTING[phase]
    if part.for_ranks:
        return RANKS_COLOUR
    return "rest" if part.cause is None else kind_colour(part.cause)


def _legend_words(part: PhasePart, phase: IterationPhase) -> str:
    return part.name if part.is_waiting else f"{phase}: computing"

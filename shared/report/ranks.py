"""The ranks of a record in the report: one bar each, compute at work and what it waits for, the others above all."""

from __future__ import annotations

from collections.abc import Sequence

from ..basics.units import format_seconds
from ..records.ranks import name_of_rank, ranks_shown
from ..schema.record import RankRecord, Record
from ..schema.schedule import Lane, TaskKind
from ..tables.labels import ORIGIN_NAMES, format_share
from .axes import BarRow, Segment, across, bar_rows, time_unit
from .bars import KIND_COLOURS
from .phases import RANKS_COLOUR
from .svg import Figure, area_mark

_COMPUTING = KIND_COLOURS[TaskKind.FORWARD]
_LEGEND = (("computing", _COMPUTING), ("waiting for slower ranks", RANKS_COLOUR), ("waiting for anything else", "rest"))


def rank_charts(records: Sequence[Record]) -> tuple[Figure, ...]:
    """A chart of each record that has several ranks, on one axis."""
    told = [record for record in records if record.ranks]
    longest_s = max((one.iteration_s for record in told for one in record.ranks), default=0.0)
    return tuple(_chart(record, longest_s) for record in told)


def _chart(record: Record, longest_s: float) -> Figure:
    rows = [_row(record, one) for one in ranks_shown(record)]
    origin = ORIGIN_NAMES[record.origin]
    return Figure(
        name=f"ranks-{origin}",
        is_rows=True,
        drawing=bar_rows(rows, across(0.0, longest_s), time_unit(longest_s), title=""),
        label=f"Ranks, {origin}: " + "; ".join(f"{row.name} {row.words}" for row in rows),
        caption=(f"Ranks, {origin}", ", compute at work and waiting; the slowest is stressed"),
        legend=tuple((area_mark(colour), words) for words, colour in _LEGEND),
    )


def _row(record: Record, one: RankRecord) -> BarRow:
    own, name = record.of_rank(one.rank), name_of_rank(record, one)
    busy_s = min(own.lane(Lane.COMPUTE).busy_s, own.iteration_s)
    held_up_s = min(sum(wait.seconds for wait in own.waits or () if wait.for_ranks), own.iteration_s - busy_s)
    ends_s = (busy_s, busy_s + held_up_s, own.iteration_s)
    split = "\n".join(
        f"{words}: {format_seconds(end_s - begin_s)}"
        for (words, _), begin_s, end_s in zip(_LEGEND, (0.0, *ends_s), ends_s, strict=False)
    )
    return BarRow(
        name=name,
        words=f"waits {format_share(held_up_s / own.iteration_s)} for ranks",
        title=f"{name}: {format_seconds(own.iteration_s)}\n{split}",
        bars=tuple(
            Segment(begin_s, end_s, colour)
            for (_, colour), begin_s, end_s in zip(_LEGEND, (0.0, *ends_s), ends_s, strict=False)
            if end_s > begin_s
        ),
        is_stressed=one.rank == record.rank,
    )

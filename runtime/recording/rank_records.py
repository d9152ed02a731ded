"""One Record of all ranks: each measures itself, and all tell each other."""

from __future__ import annotations

from collections.abc import Sequence

from ...shared.schema.record import OF_RANKS, RankRecord, RankWait, Record
from ...shared.schema.schedule import Lane
from ..ranks.agreement import agreed
from ..ranks.world import World, exchanged
from .rank_meetings import Meetings, meetings_of
from .recorder import Recorder


def record_of_ranks(
    recorder: Recorder, world: World, *, hardware_name: str = "", since: int = 0, until: int | None = None
) -> Record:
    """What every rank measured in the same iterations; to be called on all of them, and equal on all.

    Times and memory of the Record itself are those of the rank that waits least for the others.  Raises, on all ranks
    alike, what ``Recorder.record`` raises on one of them, and ProtwinError if no iteration counts on all.
    """
    stamps = agreed(world, lambda: recorder.stamps(since=since, until=until))
    meetings = meetings_of(exchanged(world, stamps), recorder.rank_groups)
    own = agreed(world, lambda: recorder.record_of_rank(meetings, world.rank, hardware_name=hardware_name))
    records: list[Record] = exchanged(world, own)
    slowest = meetings.slowest
    ranks = [_of_rank(world, records, meetings, rank) for rank in range(world.num_ranks)]
    return records[slowest].model_copy(update={"rank": slowest, "ranks": tuple(ranks)})


def _of_rank(world: World, records: Sequence[Record], meetings: Meetings, rank: int) -> RankRecord:
    record = records[rank]
    program = [timing.task for timing in record.tasks if timing.lane is Lane.COLLECTIVE]
    waits = zip(program, meetings.waited_s[rank].tolist(), strict=True)
    begins_s = meetings.begins_s[rank] - meetings.begins_s[meetings.slowest]
    return RankRecord(
        rank=rank,
        name=world.hosts[rank],
        machine=record.machine,
        begins_s=float(begins_s.mean()),
        rank_waits=tuple(RankWait(task=task, seconds=seconds) for task, seconds in waits if seconds > 0),
        **{name: getattr(record, name) for name in OF_RANKS},
    )

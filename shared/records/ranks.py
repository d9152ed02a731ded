"""The ranks of a record in words, and which of many are shown."""

from __future__ import annotations

from typing import Final

from ..schema.record import RankRecord, Record

_MOST_RANKS: Final = 16
"""Shown one by one."""


def rank_name(rank: int, num_alike: int = 1, *, name: str = "") -> str:
    """``"rank 3"``, ``"ranks 0 to 6 (even)"``."""
    numbers = f"rank {rank}" if num_alike == 1 else f"ranks {rank} to {rank + num_alike - 1}"
    return f"{numbers} ({name})" if name else numbers


def ranks_shown(record: Record) -> list[RankRecord]:
    """The ranks of a record, in their order; of many those that wait least for others, and those that wait most."""
    if len(record.ranks) <= _MOST_RANKS:
        return list(record.ranks)
    in_order = sorted(record.ranks, key=lambda one: one.waited_s)
    ends = in_order[: _MOST_RANKS // 2] + in_order[-(_MOST_RANKS // 2) :]
    return sorted(ends, key=lambda one: one.rank)


def name_of_rank(record: Record, one: RankRecord) -> str:
    """As ``rank_name``, with what tells it from others if there is any such thing."""
    names = {other.name for other in record.ranks}
    return rank_name(one.rank, one.num_alike, name=one.name if len(names) > 1 else "")

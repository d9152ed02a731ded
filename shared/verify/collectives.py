"""Collectives: what ranks carry out together, each once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..schema.schedule import ChunkId, Section, TaskKind
from .claim import Claim, reject

Meeting = tuple[TaskKind, ChunkId | None, Section | None, int]
"""A collective: kind, chunk or section, and micro-batch."""


def compare_meetings(claim: Claim, kinds: tuple[TaskKind, ...], expected: Iterable[Meeting]) -> None:
    """Raise ScheduleError unless the collectives of some kinds are the expected ones, each once.

    That every rank enters them in the same order needs no proof: all run one schedule, and it has one lane for them.
    """
    found = Counter((task.kind, task.chunk, task.section, task.micro_batch) for task in claim.tasks_of(*kinds))
    asked = Counter(expected)
    if found != asked:
        missing, extra = asked - found, found - asked
        reject(f"ranks do {_shown(extra)} too much and {_shown(missing)} too little together")


def _shown(meetings: Counter[Meeting]) -> str:
    shown = [
        f"{kind} {f'chunk {chunk}' if section is None else section} of micro-batch {micro_batch}"
        for kind, chunk, section, micro_batch in meetings
    ]
    return ", ".join(shown) or "nothing"

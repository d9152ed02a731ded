"""Buffer slots, assigned at compile time like registers.

Given which chunks each step of the iteration needs, decide when each is gathered, into which slot, and when it goes.
When every slot is taken, the chunk whose next use lies farthest ahead makes room (Belady's rule: the fewest gathers
for a known order of uses), which for a forward followed by a backward keeps the last chunks across the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import PlanError
from .layout import ChunkId


@dataclass(slots=True)
class Residency:
    """One stay of a chunk on the device."""

    chunk: ChunkId
    slot: int
    first_step: int
    """The step that it is gathered for."""
    last_step: int
    """The last step that uses it; it is freed when that step ends."""
    previous: int | None
    """Index of the residency that held the slot before, within the iteration."""


def assign_slots(needed: Sequence[Sequence[ChunkId]], n_buffer: int) -> list[Residency]:
    """The stays of all chunks, in gathering order.

    ``needed[step]`` are the offloaded chunks that a step uses.  Raises PlanError if a step needs more than
    ``n_buffer``.
    """
    most = max(map(len, needed), default=0)
    if most > n_buffer:
        raise PlanError(
            f"one block needs {most} offloaded chunks at once but n_buffer is {n_buffer}. "
            f"Raise n_buffer to {most}, or chunk_bytes."
        )
    uses: dict[ChunkId, list[int]] = {}
    for step, chunks in enumerate(needed):
        for chunk in chunks:
            uses.setdefault(chunk, []).append(step)
    next_use = dict.fromkeys(uses, 0)
    stays: list[Residency] = []
    occupant: list[int | None] = [None] * n_buffer
    current: dict[ChunkId, int] = {}
    for step, chunks in enumerate(needed):
        for chunk in chunks:
            next_use[chunk] += 1
            if chunk in current:
                stays[current[chunk]].last_step = step
                continue
            slot = _choose_slot(occupant, stays, uses, next_use, keep=chunks, current=current)
            previous = occupant[slot]
            if previous is not None and current.get(stays[previous].chunk) == previous:
                del current[stays[previous].chunk]
            current[chunk] = occupant[slot] = len(stays)
            stays.append(Residency(chunk, slot, first_step=step, last_step=step, previous=previous))
        for chunk in chunks:
            if next_use[chunk] == len(uses[chunk]):
                del current[chunk]
    return stays


def _choose_slot(
    occupant: Sequence[int | None],
    stays: Sequence[Residency],
    uses: dict[ChunkId, list[int]],
    next_use: dict[ChunkId, int],
    *,
    keep: Sequence[ChunkId],
    current: dict[ChunkId, int],
) -> int:
    """An empty slot, else the one that fell free first, else the one whose chunk is needed last."""
    best, best_key = -1, (3, 0)
    for slot, index in enumerate(occupant):
        if index is None:
            return slot
        stay = stays[index]
        if current.get(stay.chunk) != index:
            key = (0, stay.last_step)
        elif stay.chunk not in keep:
            key = (1, -uses[stay.chunk][next_use[stay.chunk]])
        else:
            continue
        if key < best_key:
            best, best_key = slot, key
    assert best >= 0, "a step never needs more chunks than there are slots"
    return best

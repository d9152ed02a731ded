"""Buffer slots, assigned at compile time like registers.

Given which chunks each step of the iteration needs, decide when each is gathered, into which slot, and when it goes.
When every slot is taken, the chunk whose next use lies farthest ahead makes room (Belady's rule: the fewest gathers
for a known order of uses), which for a forward followed by a backward keeps the last chunks across the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

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

    ``needed[step]`` are the offloaded chunks that a step uses.  O(uses * log n_buffer).  Raises PlanError if a step
    needs more than ``n_buffer``.
    """
    most = max(map(len, needed), default=0)
    if most > n_buffer:
        raise PlanError(
            f"one block needs {most} offloaded chunks at once but n_buffer is {n_buffer}. "
            f"Raise n_buffer to {most}, or chunk_bytes."
        )
    stays: list[Residency] = []
    current: dict[ChunkId, Residency] = {}
    """The stay of every chunk that is there and still needed."""
    latest: list[int] = []
    """The latest stay in every slot that was ever taken."""
    free: list[tuple[int, int]] = []
    """Slots whose chunk is needed no more: (last step, slot), a heap."""
    taken: list[_Taken] = []
    for step, (chunks, next_uses) in enumerate(zip(needed, _next_uses(needed), strict=True)):
        for chunk, next_use in zip(chunks, next_uses, strict=True):
            stay = current.get(chunk)
            if stay is not None:
                stay.last_step = step
            else:
                # An empty slot, else the one that fell free first, else the one whose chunk is needed last.
                previous = None
                if len(latest) < n_buffer:
                    slot = len(latest)
                    latest.append(len(stays))
                else:
                    slot = heappop(free)[1] if free else current.pop(_evicted(taken, keep=chunks)).slot
                    previous, latest[slot] = latest[slot], len(stays)
                stay = current[chunk] = Residency(chunk, slot, step, step, previous)
                stays.append(stay)
            if next_use is not None:
                heappush(taken, (-next_use, stay.slot, chunk))
        for chunk, next_use in zip(chunks, next_uses, strict=True):
            if next_use is None:
                heappush(free, (step, current.pop(chunk).slot))
    return stays


_Taken = tuple[int, int, ChunkId]
"""(-next use, slot, chunk) of a chunk that is there.  Entries whose use has come stay behind in their heap."""


def _next_uses(needed: Sequence[Sequence[ChunkId]]) -> list[list[int | None]]:
    """For every use the next step that uses the same chunk."""
    upcoming: dict[ChunkId, int] = {}
    found = []
    for step in range(len(needed) - 1, -1, -1):
        chunks = needed[step]
        found.append([upcoming.get(chunk) for chunk in chunks])
        upcoming.update(dict.fromkeys(chunks, step))
    found.reverse()
    return found


def _evicted(taken: list[_Taken], keep: Sequence[ChunkId]) -> ChunkId:
    """The chunk that is needed last, which leaves its slot; never one of ``keep``, the chunks of the step.

    There is one while ``keep`` fits, and its use lies ahead, so that no entry behind it is ever looked at: those whose
    use has come need not be told from others.
    """
    kept = []
    while (entry := heappop(taken))[2] in keep:
        kept.append(entry)
    for one in kept:
        heappush(taken, one)
    return entry[2]

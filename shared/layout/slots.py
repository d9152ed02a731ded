"""Allocation slots, assigned at compile time like registers.

Given which chunks each step of the iteration needs, decide when each is gathered, into which slot, and when it goes.
When every slot is taken, the chunk whose next use lies farthest ahead makes room (Belady's rule: the fewest gathers
for a known order of uses), which for a forward followed by a backward keeps the last chunks across the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ..basics.errors import PlanError
from ..schema.schedule import ChunkId


@dataclass(slots=True)
class Stay:
    """One stay of a chunk on the device."""

    chunk: ChunkId
    slot: int
    first_step: int
    """The step that it is gathered for."""
    last_step: int
    """The last step that uses it; it is freed when that step ends."""
    previous: int | None
    """Index of the residency that held the slot before, within the iteration."""


@dataclass(frozen=True, eq=False)
class Uses:
    """What the steps of an iteration use: the same for any number of buffers."""

    needed: Sequence[Sequence[ChunkId]]
    """The offloaded chunks of every step."""
    following: Sequence[Sequence[int | None]]
    """For each of them the next step that uses it; None if there is none."""
    most_at_once: int
    num_chunks: int

    @classmethod
    def of(cls, needed: Sequence[Sequence[ChunkId]]) -> Uses:
        """With ``needed``, when each use is followed by another one."""
        upcoming: dict[ChunkId, int] = {}
        following: list[list[int | None]] = []
        for step in range(len(needed) - 1, -1, -1):
            chunks = needed[step]
            following.append([upcoming.get(chunk) for chunk in chunks])
            upcoming.update(dict.fromkeys(chunks, step))
        following.reverse()
        return cls(needed, following, max(map(len, needed), default=0), len(upcoming))


def assign_slots(needed: Sequence[Sequence[ChunkId]] | Uses, n_buffer: int) -> list[Stay]:
    """The stays of all chunks, in gathering order.

    ``needed[step]`` are the offloaded chunks that a step uses; ``Uses`` of them spare looking them through again.
    O(uses * log n_buffer).  Raises PlanError if a step needs more than ``n_buffer``.
    """
    uses = needed if isinstance(needed, Uses) else Uses.of(needed)
    if uses.most_at_once > n_buffer:
        raise PlanError(
            f"one section needs {uses.most_at_once} gathered chunks at once but n_buffer is {n_buffer}. "
            f"Raise n_buffer to {uses.most_at_once}, or chunk_bytes."
        )
    num_steps, evicts = len(uses.needed), n_buffer < uses.num_chunks
    stays: list[Stay] = []
    current: dict[ChunkId, Stay] = {}
    """The stay of every chunk that is there and still needed."""
    latest: list[int] = []
    """The latest stay in every slot that was ever taken."""
    free: list[tuple[int, int]] = []
    """Slots whose chunk is needed no more: (last step, slot), a heap."""
    taken: list[int] = []
    """A heap of slots by when their chunk is needed next, latest first: see ``_evicted``.  Only where one must go."""
    for step, (chunks, next_uses) in enumerate(zip(uses.needed, uses.following, strict=True)):
        is_last_use = False
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
                    if free:
                        slot = heappop(free)[1]
                    else:
                        slot = _evicted(taken, stays, latest, keep=chunks)
                        del current[stays[latest[slot]].chunk]
                    previous, latest[slot] = latest[slot], len(stays)
                stay = current[chunk] = Stay(chunk, slot, step, step, previous)
                stays.append(stay)
            if next_use is None:
                is_last_use = True
            elif evicts:
                heappush(taken, (num_steps - next_use) * n_buffer + stay.slot)
        if is_last_use:
            for chunk, next_use in zip(chunks, next_uses, strict=True):
                if next_use is None:
                    heappush(free, (step, current.pop(chunk).slot))
    return stays


def _evicted(taken: list[int], stays: Sequence[Stay], latest: Sequence[int], keep: Sequence[ChunkId]) -> int:
    """The slot whose chunk is needed last, which leaves it; never one of ``keep``, the chunks of the step.

    ``taken``: (steps from the chunk's next use to the end) * slots + slot.  Entries whose use has come stay behind in
    their heap.  There is a chunk to evict while ``keep`` fits, and its use lies ahead, so that no entry behind it is
    ever looked at: those whose use has come need not be told from others.
    """
    kept = []
    while stays[latest[(entry := heappop(taken)) % len(latest)]].chunk in keep:
        kept.append(entry)
    for one in kept:
        heappush(taken, one)
    return entry % len(latest)

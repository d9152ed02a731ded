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

    def check(self, n_buffer: int) -> None:
        """Raise PlanError if a step needs more than ``n_buffer``."""
        if self.most_at_once > n_buffer:
            raise PlanError(
                f"one section needs {self.most_at_once} gathered chunks at once but n_buffer is {n_buffer}. "
                f"Raise n_buffer to {self.most_at_once}, or chunk_bytes."
            )

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
    """The stays of all chunks, in gathering order.  Arguments and errors as of ``stay_columns``."""
    columns = stay_columns(needed, n_buffer)
    return [
        Stay(ChunkId(chunk), slot, first_step, last_step, None if previous < 0 else previous)
        for chunk, slot, first_step, last_step, previous in zip(*columns, strict=True)
    ]


def stay_columns(needed: Sequence[Sequence[ChunkId]] | Uses, n_buffer: int) -> tuple[list[int], ...]:
    """The fields of ``Stay``, one list each, of all stays in gathering order; -1 where no stay held the slot before.

    ``needed[step]`` are the offloaded chunks that a step uses; ``Uses`` of them spare looking them through again.
    O(uses * log n_buffer).  Raises PlanError if a step needs more than ``n_buffer``.
    """
    uses = needed if isinstance(needed, Uses) else Uses.of(needed)
    uses.check(n_buffer)
    num_steps, evicts = len(uses.needed), n_buffer < uses.num_chunks
    chunk_of: list[int] = []
    slot_of: list[int] = []
    first_step: list[int] = []
    last_step: list[int] = []
    previous: list[int] = []
    current: dict[ChunkId, int] = {}
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
                last_step[stay] = step
                slot = slot_of[stay]
            else:
                # An empty slot, else the one that fell free first, else the one whose chunk is needed last.
                current[chunk] = stay = len(chunk_of)
                if len(latest) < n_buffer:
                    slot = len(latest)
                    previous.append(-1)
                    latest.append(stay)
                else:
                    if free:
                        slot = heappop(free)[1]
                    else:
                        slot = _evicted(taken, chunk_of, latest, keep=chunks)
                        del current[ChunkId(chunk_of[latest[slot]])]
                    previous.append(latest[slot])
                    latest[slot] = stay
                chunk_of.append(chunk)
                slot_of.append(slot)
                first_step.append(step)
                last_step.append(step)
            if next_use is None:
                is_last_use = True
            elif evicts:
                heappush(taken, (num_steps - next_use) * n_buffer + slot)
        if is_last_use:
            for chunk, next_use in zip(chunks, next_uses, strict=True):
                if next_use is None:
                    heappush(free, (step, slot_of[current.pop(chunk)]))
    return chunk_of, slot_of, first_step, last_step, previous


def _evicted(taken: list[int], chunk_of: Sequence[int], latest: Sequence[int], keep: Sequence[ChunkId]) -> int:
    """The slot whose chunk is needed last, which leaves it; never one of ``keep``, the chunks of the step.

    ``chunk_of``: of every stay.  ``taken``: (steps from the chunk's next use to the end) * slots + slot.  Entries whose
    use has come stay behind in their heap.  There is a chunk to evict while ``keep`` fits, and its use lies ahead, so
    that no entry behind it is ever looked at: those whose use has come need not be told from others.
    """
    kept = []
    while chunk_of[latest[(entry := heappop(taken)) % len(latest)]] in keep:
        kept.append(entry)
    for one in kept:
        heappush(taken, one)
    return entry % len(latest)

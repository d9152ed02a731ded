"""Buffer slots, assigned at compile time like registers.

Given which chunks each step of the iteration needs, decide when each is gathered, into which slot, and when it goes.
When every slot is taken, the chunk whose next use lies farthest ahead makes room (Belady's rule: the fewest gathers
for a known order of uses), which for a forward followed by a backward keeps the last chunks across the turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
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
    assignment = _Assignment(needed, n_buffer)
    for step, chunks in enumerate(needed):
        if len(chunks) > n_buffer:
            most = max(map(len, needed))
            raise PlanError(
                f"one block needs {most} offloaded chunks at once but n_buffer is {n_buffer}. "
                f"Raise n_buffer to {most}, or chunk_bytes."
            )
        for chunk in chunks:
            assignment.use(chunk, step)
        assignment.end_step(chunks)
    return assignment.stays


class _Assignment:
    """Who is in which slot, step by step."""

    def __init__(self, needed: Sequence[Sequence[ChunkId]], n_buffer: int) -> None:
        self.needed = needed
        self.n_buffer = n_buffer
        self.stays: list[Residency] = []
        self._next_uses: dict[ChunkId, deque[int]] = {}
        for step, chunks in enumerate(needed):
            for chunk in chunks:
                self._next_uses.setdefault(chunk, deque()).append(step)
        self._current: dict[ChunkId, int] = {}
        """The stay of every chunk that is there and still needed."""
        self._latest: list[int] = []
        """The latest stay in every slot that was ever taken."""
        self._free: list[tuple[int, int]] = []
        """Slots whose chunk is needed no more: (last step, slot), a heap."""
        self._taken: list[tuple[int, int, ChunkId]] = []
        """(-next use, slot, chunk), a heap; entries go stale when the chunk is used or leaves."""

    def use(self, chunk: ChunkId, step: int) -> None:
        """``chunk`` is used by ``step``; it is gathered if it is not there."""
        self._next_uses[chunk].popleft()
        index = self._current.get(chunk)
        if index is None:
            slot, previous = self._choose_slot(step)
            index = self._current[chunk] = self._latest[slot] = len(self.stays)
            self.stays.append(Residency(chunk, slot, first_step=step, last_step=step, previous=previous))
        stay = self.stays[index]
        stay.last_step = step
        if self._next_uses[chunk]:
            heappush(self._taken, (-self._next_uses[chunk][0], stay.slot, chunk))

    def end_step(self, chunks: Iterable[ChunkId]) -> None:
        """Those of ``chunks``, used by the step, that nothing needs any more give their slots back."""
        for chunk in chunks:
            if not self._next_uses[chunk]:
                stay = self.stays[self._current.pop(chunk)]
                heappush(self._free, (stay.last_step, stay.slot))

    def _choose_slot(self, step: int) -> tuple[int, int | None]:
        """A slot and the stay that held it before.

        An empty slot, else the one that fell free first, else the one whose chunk is needed last.
        """
        if len(self._latest) < self.n_buffer:
            self._latest.append(-1)
            return len(self._latest) - 1, None
        slot = heappop(self._free)[1] if self._free else self._evict(keep=self.needed[step])
        return slot, self._latest[slot]

    def _evict(self, keep: Sequence[ChunkId]) -> int:
        """The slot of the chunk that is needed last, which leaves it; never one of ``keep``."""
        kept = []
        while True:
            entry = heappop(self._taken)
            negated_use, slot, chunk = entry
            index = self._current.get(chunk)
            if index is None or self.stays[index].slot != slot or -negated_use not in self._next_uses[chunk]:
                continue
            if chunk not in keep:
                break
            kept.append(entry)
        for entry in kept:
            heappush(self._taken, entry)
        del self._current[chunk]
        return slot

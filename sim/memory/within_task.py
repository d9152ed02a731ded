"""The tensors that one compute task makes and frees, from the levels that its phase has.

[Note: What a replay knows]
The schedule says which buffers come and go with which task; a chunk, a block's output and the batch are one tensor
each, optimizer state is known parameter by parameter.  What a compute task makes while it runs is known as a level
over time.  Where its phase lists changes, every rise is one tensor, and every fall is what went between two
operations; otherwise a rise is all that came until a level of the phase's curve.  A fall frees tensors of its size,
those that the task made and those that it is to free ([Note: Which tensors go] in ``sim/memory/freed.py``).  Where
others have the bytes, none goes that is known to stay, as a final gradient, and not the one that was made last, which
the next operation reads.  At its end, what is left of its own is what it leaves behind, the oldest first: saved
activations are made by the way, not at the end.  A buffer that it is to free and to leave again, as a gradient that
every block hands on, keeps the tensors that did not go.  The other reading of ``Inside`` tells how much depends on
this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from .freed import Freed, freed_by


class Inside(StrEnum):
    """How the level within a compute task is read as tensors; see [Note: What a replay knows]."""

    BY_SIZE = "by_size"
    """Falls free the tensors whose sizes they have."""
    AT_ONCE = "at_once"
    """All is one tensor, made anew whenever the level changes; what the task leaves behind is made at its end."""


@dataclass(frozen=True, slots=True)
class TaskRequests:
    """What one task asks of the allocator."""

    requests: list[int]
    """As they are noted (``sim/memory/requests.py``); of a tensor from before the task in place of its distance 0."""
    freed: tuple[tuple[int, int, int], ...]
    """Of each of those the place in ``requests``, how many tensors the task had made, and its number in the task."""
    num_made: int
    changes: tuple[int, ...]
    """How many requests have been made at the task's begin, behind every level, and, last, at its end."""
    left: tuple[tuple[int, ...], ...]
    """The numbers of what is left of every buffer: first come the tensors that the task is to free, then its own."""
    sizes_bytes: tuple[int, ...]
    """By number."""


@lru_cache(maxsize=4096)  # equal blocks ask for the same
def task_requests(
    levels: tuple[tuple[int, bool], ...],
    frees: tuple[int, ...],
    leaves: tuple[tuple[int, range], ...],
    inside: Inside,
) -> TaskRequests:
    """The requests of a task with these levels, relative to that at its start.  Bytes.

    Args:
        levels: In order, each with whether the tensor by which it rises is known to stay.  The last one need not be
            that at the end.
        frees: Sizes of the tensors that it is to free, in the order in which they came.
        leaves: Sizes of the buffers that it leaves behind, those made last first, each with the tensors of ``frees``
            that it may keep.
        inside: How levels are read.
    """
    return _Task(frees, inside).run(levels, leaves)


class _Task:
    def __init__(self, frees: tuple[int, ...], inside: Inside) -> None:
        self._sizes = list(frees)
        """Of all tensors so far."""
        self._leaving = list(range(len(frees)))
        """Numbers of those that it is to free, and of its own."""
        self._own: list[int] = []
        self._staying: set[int] = set()
        """Of its own."""
        self._requests: list[int] = []
        self._freed: list[tuple[int, int, int]] = []
        self._num_before = len(frees)
        self._is_at_once = inside is Inside.AT_ONCE

    def run(self, levels: tuple[tuple[int, bool], ...], leaves: tuple[tuple[int, range], ...]) -> TaskRequests:
        changes = [0]
        before_bytes = 0
        for level_bytes, stays in levels:
            self._change(level_bytes - before_bytes, stays=stays)
            before_bytes = level_bytes
            changes.append(len(self._requests))
        left = self._end(leaves)
        return TaskRequests(
            requests=self._requests,
            freed=tuple(self._freed),
            num_made=len(self._sizes) - self._num_before,
            changes=(*changes, len(self._requests)),
            left=left,
            sizes_bytes=tuple(self._sizes),
        )

    def _make(self, size_bytes: int) -> int:
        self._requests.append(size_bytes)
        self._sizes.append(size_bytes)
        return len(self._sizes) - 1

    def _free(self, number: int) -> None:
        if number < self._num_before:
            self._freed.append((len(self._requests), len(self._sizes) - self._num_before, number))
            self._requests.append(0)
        else:
            self._requests.append(number - len(self._sizes))

    def _free_all(self, numbers: list[int]) -> None:
        for number in numbers:
            self._free(number)
        numbers.clear()

    def _change(self, change_bytes: int, *, stays: bool) -> None:
        if self._is_at_once and self._own:
            change_bytes += self._sizes[self._own[0]]
            self._free_all(self._own)
        if change_bytes > 0:
            self._own.append(self._make(change_bytes))
            if stays:
                self._staying.add(self._own[-1])
        elif change_bytes < 0:
            self._fall(-change_bytes)

    def _fall(self, size_bytes: int) -> None:
        there, freed = self._going(size_bytes)
        gone = {there[place] for place in freed.places}
        for place in freed.places:
            self._free(there[place])
            size_bytes -= self._sizes[there[place]]
        if freed.cut is not None:
            cut = there[freed.cut]
            self._free(cut)
            rest = self._make(self._sizes[cut] - size_bytes)
            for numbers in (self._leaving, self._own):
                numbers[:] = [rest if number == cut else number for number in numbers]
        for numbers in (self._leaving, self._own):
            numbers[:] = [number for number in numbers if number not in gone]

    def _going(self, size_bytes: int) -> tuple[list[int], Freed]:
        """What goes, of which tensors: of all but gradients and the latest if these have the bytes, else of more."""
        every = self._leaving + self._own
        found = every, Freed((), None)
        for kept in (self._staying.union(self._own[-1:]), self._staying, ()):
            there = [number for number in every if number not in kept]
            sizes = tuple(self._sizes[number] for number in there)
            if sum(sizes) >= size_bytes:
                found = there, freed_by(sizes, size_bytes)
                if found[1].cut is None:
                    return found
        return found

    def _end(self, leaves: tuple[tuple[int, range], ...]) -> tuple[tuple[int, ...], ...]:
        left: list[list[int]] = []
        missing: list[tuple[list[int], int]] = []
        for size_bytes, kept in leaves:
            taken, more_bytes = self._taken(size_bytes, kept)
            left.append(taken)
            if more_bytes:
                missing.append((taken, more_bytes))
        self._free_all(self._own)
        self._free_all(self._leaving)
        for taken, more_bytes in missing:
            taken.append(self._make(more_bytes))
        return tuple(map(tuple, left))

    def _taken(self, size_bytes: int, kept: range) -> tuple[list[int], int]:
        """Of tensors that fit into so many bytes the oldest of its own, then what may be kept; and the bytes left."""
        taken: list[int] = []
        if self._is_at_once:
            return taken, size_bytes
        while self._own and self._sizes[self._own[0]] <= size_bytes:
            taken.append(self._own.pop(0))
            size_bytes -= self._sizes[taken[-1]]
        for number in kept:
            if number in self._leaving and self._sizes[number] <= size_bytes:
                self._leaving.remove(number)
                taken.append(number)
                size_bytes -= self._sizes[number]
        return taken, size_bytes

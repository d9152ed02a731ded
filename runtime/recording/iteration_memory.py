"""The device's memory over one iteration, put together from what was counted in it and what operations held.

[Note: Curves of iterations that nobody watched]
A Record's times come from iterations that nobody watched, since watching slows operations and nothing else: beside
slower operations transfers end earlier, and what is on its way is on the device for a shorter time.  So the peak has to
be theirs too.  What transfers allocate is counted in every iteration, as it happens.  What operations allocate repeats
from one iteration to the next, and was watched in another one, task by task: there it is laid over the times that the
tasks took here.  Each watched operation is slower by about as much as any other.  So the time that a task took longer
there is taken off in equal parts, one for every operation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ...shared.schema.record import Holding
from ...shared.schema.schedule import Content, TaskId
from ..devices.ledger import MemoryChange

Held = Mapping[Content | None, int]
"""Bytes by what they hold; None: what operations made."""
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MemoryOverTime:
    """The curve of one iteration, in seconds of ``time.perf_counter``; the level holds until the next time."""

    times_s: Floats
    levels_bytes: Ints
    peak_bytes: int
    peak_at: str
    """The compute task that ran at the peak, or had ended last."""
    alive: tuple[Holding, ...]
    """What was alive at the peak."""


class IterationMemory(ABC):
    """What is known of the memory of one iteration."""

    @abstractmethod
    def over_time(self, spans: Callable[[TaskId], tuple[float, float]]) -> MemoryOverTime:
        """The curve; ``spans`` gives begin and end of each compute task of the iteration."""


# -- counted by the ledger -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WatchedStretch:
    """What operations held from one moment of a watched iteration to another: a task, or the time after it."""

    held: Held
    """When it began."""
    left_bytes: int
    """Of what operations had made: what earlier tasks had left."""
    seconds: float
    """How long it took."""
    num_operations: int
    changes: tuple[tuple[float, int, Content | None, int], ...] = ()
    """(seconds since it began, operations since it began, content, more bytes), in order."""

    @cached_property
    def levels_bytes(self) -> Ints:
        """(changes + 1,): the level at the beginning and after every change."""
        begin_bytes = sum(self.held.values())
        return begin_bytes + np.cumsum([0, *(more for _, _, _, more in self.changes)], dtype=np.int64)

    @cached_property
    def _moments(self) -> tuple[Floats, Ints]:
        return (
            np.array([0.0, *(at for at, _, _, _ in self.changes)]),
            np.array([0, *(number for _, number, _, _ in self.changes)], dtype=np.int64),
        )

    def times_s(self, seconds: float) -> Floats:
        """(changes + 1,): when the levels begin if it takes ``seconds`` where nobody watches."""
        at_s, numbers = self._moments
        longer_s = self.seconds - seconds
        if longer_s > 0 and self.num_operations > 0:
            at_s = np.maximum.accumulate(np.maximum(at_s - numbers * (longer_s / self.num_operations), 0.0))
            return np.minimum(at_s, seconds)
        return at_s * (seconds / self.seconds) if self.seconds > 0 else np.zeros_like(at_s)

    def held_after(self, num_changes: int) -> dict[Content | None, int]:
        """What was held after so many changes."""
        held = dict(self.held)
        for _, _, content, more_bytes in self.changes[:num_changes]:
            held[content] = held.get(content, 0) + more_bytes
        return held


@dataclass(frozen=True)
class Stretch:
    """From one moment of an iteration to the next: which operations ran, and what they hold as far as was watched."""

    begin_s: float
    task: str
    """The compute task that ran, or had ended last."""
    watched: WatchedStretch


@dataclass(frozen=True)
class CountedMemory(IterationMemory):
    """One iteration on a device with a ledger (Note: Curves of iterations that nobody watched)."""

    stretches: Sequence[Stretch]
    """In order, the first from the end of the iteration before."""
    end_s: float
    named: Held
    """What was allocated by name when it began."""
    changes: Sequence[MemoryChange]
    """Those of named allocations."""
    _found: list[MemoryOverTime] = field(default_factory=list, repr=False)

    def over_time(self, spans: Callable[[TaskId], tuple[float, float]] | None = None) -> MemoryOverTime:
        """The curve; moments are the ledger's own, so ``spans`` are not asked for."""
        if not self._found:
            self._found.append(self._over_time())
        return self._found[0]

    def _over_time(self) -> MemoryOverTime:
        ends_s = [stretch.begin_s for stretch in self.stretches[1:]] + [self.end_s]
        made_s, made_bytes, sources = [], [], []
        for number, (stretch, end_s) in enumerate(zip(self.stretches, ends_s, strict=True)):
            times_s = stretch.begin_s + stretch.watched.times_s(max(0.0, end_s - stretch.begin_s))
            made_s.append(times_s)
            made_bytes.append(stretch.watched.levels_bytes)
            sources.append(np.full(len(times_s), number))
        by_operations = np.concatenate(made_s), np.concatenate(made_bytes)
        begin_s = self.stretches[0].begin_s
        named_s = np.array([begin_s, *(change.at_s for change in self.changes)])
        named_bytes = np.cumsum([sum(self.named.values()), *(c.more_bytes for c in self.changes)], dtype=np.int64)
        times_s = np.unique(np.concatenate([by_operations[0], named_s]))
        # The last of several changes at one moment counts: what changes hands there does so at once.
        at_made = np.searchsorted(by_operations[0], times_s, side="right") - 1
        at_named = np.searchsorted(named_s, times_s, side="right") - 1
        levels = by_operations[1][at_made] + named_bytes[at_named]
        peak = int(np.argmax(levels))
        source = int(np.concatenate(sources)[at_made[peak]])
        first = sum(len(times) for times in made_s[:source])
        stretch = self.stretches[source]
        alive = stretch.watched.held_after(int(at_made[peak]) - first)
        for change in self.changes[: int(at_named[peak])]:
            alive[change.content] = alive.get(change.content, 0) + change.more_bytes
        for content, size_bytes in self.named.items():
            alive[content] = alive.get(content, 0) + size_bytes
        holdings = _holdings(alive, stretch.watched.left_bytes)
        return MemoryOverTime(times_s, levels, int(levels[peak]), stretch.task, holdings)


def _holdings(alive: Held, left_bytes: int) -> tuple[Holding, ...]:
    """By content; of what operations made, that of earlier tasks counts as activations."""
    made_bytes = alive.get(None, 0)
    left_bytes = min(made_bytes, left_bytes)
    sizes = {**alive, Content.ACTIVATIONS: alive.get(Content.ACTIVATIONS, 0) + left_bytes}
    found = [Holding(content=content, size_bytes=sizes[content]) for content in Content if sizes.get(content, 0) > 0]
    if made_bytes > left_bytes:
        found.append(Holding(content=None, size_bytes=made_bytes - left_bytes))
    return tuple(found)


# -- counted by the allocator ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AllocatedStretch:
    """What the allocator had given out in a compute task of an iteration whose curve was drawn."""

    task: TaskId
    name: str
    most_bytes: int
    """From the end of the task before to its own."""
    end_bytes: int


@dataclass(frozen=True)
class AllocatedMemory(IterationMemory):
    """One iteration on a device whose allocator counts by itself."""

    peak_bytes: int
    """The allocator's, of this iteration."""
    curve: Sequence[AllocatedStretch]
    """Of the latest iteration of equal shapes whose curve was drawn; memory does not depend on timing there."""

    def over_time(self, spans: Callable[[TaskId], tuple[float, float]]) -> MemoryOverTime:
        """The curve over the tasks' times.

        It is raised or lowered to the iteration's own peak: what the process holds beside the plan's tensors, such as
        losses that a loop keeps, differs from one iteration to the next.
        """
        points = [
            point
            for stretch in self.curve
            for begin_s, end_s in [spans(stretch.task)]
            for point in ((begin_s, stretch.most_bytes), (end_s, stretch.end_bytes))
        ]
        peak = max(self.curve, key=lambda stretch: stretch.most_bytes, default=None)
        more_bytes = 0 if peak is None else self.peak_bytes - peak.most_bytes
        levels = np.array([level for _, level in points], dtype=np.int64)
        return MemoryOverTime(
            np.array([time for time, _ in points]),
            np.maximum(levels + more_bytes, 0),
            self.peak_bytes,
            "" if peak is None else peak.name,
            (),
        )

"""The device's memory over one iteration, put together from what was counted in it and what operations held.

[Note: Curves of iterations that nobody watched]
A Record's times come from iterations that nobody watched, since watching slows operations and nothing else: beside
slower operations transfers end earlier, and what is on its way is on the device for a shorter time.  So the peak has to
be theirs too.  What transfers allocate is counted in every iteration, as it happens.  What operations allocate repeats
from one iteration to the next, and was watched in another one, task by task: there it is laid over the times that the
tasks took here.  Each watched operation is slower by about as much as any other.  So the time that a task took longer
there is taken off in equal parts, one for every operation.

Where a task was much shorter here, several of its moments fall on one time.  Moments that were apart where they were
watched stay apart here, in the order in which they were watched: the level between them was reached in both iterations.
Changes at one watched moment change hands, and have one level wherever the moment is laid.  Named changes at the time
at which one task ends and the next stretch begins belong to that moment: whatever the task did comes before them.
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
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class MemoryOverTime:
    """The curve of one iteration, in seconds of ``time.perf_counter``; the level holds until the next time."""

    times_s: Floats
    """Ascending; of several levels at one time, all but the last held too briefly to be told from no time."""
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
    """(seconds since it began, operations since it began, content, more bytes), in order, all before its end."""

    @cached_property
    def levels_bytes(self) -> Ints:
        """(moments,): the level at the beginning, and after the last of the changes at each later moment."""
        begin_bytes = sum(self.held.values())
        levels = begin_bytes + np.cumsum([0, *(more for _, _, _, more in self.changes)], dtype=np.int64)
        return levels[self._num_changes]

    @cached_property
    def _num_changes(self) -> Ints:
        """(moments,): how many changes there were when each moment had passed."""
        at_s = np.array([0.0, *(at for at, _, _, _ in self.changes)])
        return np.flatnonzero(np.append(np.diff(at_s) > 0, True))

    @cached_property
    def _moments(self) -> tuple[Floats, Ints]:
        at_s = np.array([0.0, *(at for at, _, _, _ in self.changes)])
        numbers = np.array([0, *(number for _, number, _, _ in self.changes)], dtype=np.int64)
        return at_s[self._num_changes], numbers[self._num_changes]

    def times_s(self, seconds: float) -> Floats:
        """(moments,): when the levels begin if it takes ``seconds`` where nobody watches; ascending, from 0 on."""
        at_s, numbers = self._moments
        longer_s = self.seconds - seconds
        if longer_s > 0 and self.num_operations > 0:
            at_s = np.maximum.accumulate(np.maximum(at_s - numbers * (longer_s / self.num_operations), 0.0))
            return np.minimum(at_s, seconds)
        return at_s * (seconds / self.seconds) if self.seconds > 0 else np.zeros_like(at_s)

    def held_after(self, moment: int) -> dict[Content | None, int]:
        """What was held from one of its moments on, counted from 0."""
        held = dict(self.held)
        for _, _, content, more_bytes in self.changes[: self._num_changes[moment]]:
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
        made_s, is_over = self._moments()
        begin_s = self.stretches[0].begin_s
        # A change between the end of the iteration before and the reading of the clock belongs to the beginning.
        named_s = np.maximum([begin_s, *(change.at_s for change in self.changes)], begin_s)
        at_made, at_named = _in_order(made_s, is_over, named_s)
        made_bytes = np.concatenate([stretch.watched.levels_bytes for stretch in self.stretches])
        named_bytes = np.cumsum([sum(self.named.values()), *(c.more_bytes for c in self.changes)], dtype=np.int64)
        levels = made_bytes[at_made] + named_bytes[at_named]
        peak = int(np.argmax(levels))
        stretch, alive = self._held_after(int(at_made[peak]))
        for change in self.changes[: int(at_named[peak])]:
            alive[change.content] = alive.get(change.content, 0) + change.more_bytes
        for content, size_bytes in self.named.items():
            alive[content] = alive.get(content, 0) + size_bytes
        holdings = _holdings(alive, stretch.watched.left_bytes)
        times_s = np.maximum(made_s[at_made], named_s[at_named])
        return MemoryOverTime(times_s, levels, int(levels[peak]), stretch.task, holdings)

    def _moments(self) -> tuple[Floats, Bools]:
        """(moments,) each: when the levels of operations begin here, and whether their stretch is over by then."""
        ends_s = [stretch.begin_s for stretch in self.stretches[1:]] + [self.end_s]
        times_s, is_over = [], []
        for stretch, end_s in zip(self.stretches, ends_s, strict=True):
            own_s = stretch.begin_s + stretch.watched.times_s(end_s - stretch.begin_s)
            times_s.append(np.minimum(own_s, end_s))  # a sum may be rounded to beyond it
            is_over.append(own_s >= end_s)
        return np.concatenate(times_s), np.concatenate(is_over)

    def _held_after(self, moment: int) -> tuple[Stretch, dict[Content | None, int]]:
        """The stretch that a moment of the iteration lies in, and what operations held from there on."""
        for stretch in self.stretches:
            num_moments = len(stretch.watched.levels_bytes)
            if moment < num_moments:
                return stretch, stretch.watched.held_after(moment)
            moment -= num_moments
        raise AssertionError("a moment after the last one")


def _in_order(made_s: Floats, is_over: Bools, named_s: Floats) -> tuple[Ints, Ints]:
    """(levels,) each: the latest moment of operations and the latest of named changes, from one level to the next.

    Every moment of operations has a level of its own, whatever its time.  Named changes at one time have one together,
    and share it with the first moment of operations at that time, those left out whose stretch is over.
    """
    before, until = (np.searchsorted(named_s, made_s, side=side) - 1 for side in ("left", "right"))
    named_of_made = np.where(is_over, np.maximum(before, 0), until)  # 0: what there was at the beginning
    made_of_named = np.searchsorted(made_s, named_s, side="right") - 1
    last_named = np.searchsorted(named_s, named_s, side="right") - 1
    made = np.append(np.arange(len(made_s)), made_of_named)
    named = np.append(named_of_made, last_named)
    at_made, at_named = np.divmod(np.unique(made * len(named_s) + named), len(named_s))
    return at_made, at_named


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

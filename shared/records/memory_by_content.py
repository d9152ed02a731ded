"""What device memory holds over one iteration, by content: a record's curve taken apart with the help of its schedule.

[Note: Taking a curve apart]
A record says how much memory there is at every time, the schedule which buffers a task brings and takes away.  Buffers
of compute tasks come when the task ends and those of copies when it starts; all go when the task that frees them ends
(see [Note: Memory of compute tasks] in ``shared/compile/compile.py``).  The steady state repeats, so every buffer's
stay is also there one iteration earlier and later.  What the curve has beyond all buffers is transient: it belongs to
the compute task that runs.  Where the curve has less, that task has already released a part of what it frees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..schema.record import MemoryCurve, Record
from ..schema.schedule import Content, Lane, Memory, Schedule

Levels = NDArray[np.int64]
Seconds = NDArray[np.float64]

_INSTANT_FRAC: Final = 1e-9
"""Of the iteration: times that are closer are one, but for rounding."""
_MOST_ITERATIONS: Final = 64
"""Tasks wait for those of the previous iteration, so that none can lag by more than a few."""
_ORDER: Final = tuple(Content)


@dataclass(frozen=True, eq=False)
class Stack:
    """Device memory by content, in steps."""

    begins_s: Seconds
    """Ascending; each step lasts until the next one begins, the last until ``end_s``."""
    end_s: float
    levels_bytes: dict[Content | None, Levels]
    """Per content, the bytes of every step; None is what the running task holds beyond buffers.  Nothing that is 0
    all the time.  Together they are the record's curve."""

    @property
    def total_bytes(self) -> Levels:
        """All contents together."""
        return sum(self.levels_bytes.values(), np.zeros(len(self.begins_s), dtype=np.int64))


def memory_stack(record: Record, schedule: Schedule) -> Stack | None:
    """The device curve of a simulated record, by content; see [Note: Taking a curve apart].

    None if the record has no curve of device memory, lacks some of the schedule's tasks, or has tasks that reach
    over more iterations than a schedule allows (it is no record of a steady state then).  Where the simulation did
    not become periodic, a buffer's stay in neighbouring iterations is not known exactly; contents then give way, so
    that all of them together are the curve at any rate.
    """
    curve = record.curve(Memory.DEVICE)
    starts_s, ends_s = np.full(len(schedule.tasks), np.nan), np.full(len(schedule.tasks), np.nan)
    for timing in record.tasks:
        starts_s[timing.task], ends_s[timing.task] = timing.start_s, timing.end_s
    if curve is None or len(curve.times_s) < 2 or np.isnan(starts_s).any():
        return None
    if _reach(starts_s, ends_s, record.iteration_s) > _MOST_ITERATIONS:
        return None
    stays = _Stays.of(schedule, starts_s, ends_s, record.iteration_s)
    begins_s, end_s = _instants(curve, stays, record.iteration_s)
    middles_s = (begins_s + np.append(begins_s[1:], end_s)) / 2
    held = stays.levels(middles_s)
    for buffer in schedule.buffers:
        if buffer.is_static and buffer.memory is Memory.DEVICE:
            held[buffer.content] += buffer.size_bytes
    level = np.array(curve.levels_bytes)[np.searchsorted(np.array(curve.times_s), middles_s, side="right") - 1]
    transient = level - sum(held.values(), np.zeros(len(level), dtype=np.int64))
    _release(held, transient, _releasing(schedule, starts_s, ends_s, record.iteration_s, middles_s))
    found: dict[Content | None, Levels] = {content: held[content] for content in _ORDER if held[content].any()}
    if transient.any():
        found[None] = transient
    return Stack(begins_s, end_s, found)


@dataclass(frozen=True, eq=False)
class _Stays:
    """Stays of buffers on the device, those of neighbouring iterations included."""

    begins_s: Seconds
    ends_s: Seconds
    sizes_bytes: Levels
    contents: NDArray[np.intp]
    """Places in ``Content``."""

    @classmethod
    def of(cls, schedule: Schedule, starts_s: Seconds, ends_s: Seconds, iteration_s: float) -> _Stays:
        maker = {buffer: task for task in schedule.tasks for buffer in task.allocates}
        freed_by = {buffer: task.id for task in schedule.tasks for buffer in task.frees}
        passing = [b for b in schedule.buffers if not b.is_static and b.memory is Memory.DEVICE]
        makers = [maker[buffer.id] for buffer in passing]
        begins = np.array([ends_s[t.id] if t.lane is Lane.COMPUTE else starts_s[t.id] for t in makers], dtype=float)
        ends = np.array([ends_s[freed_by[buffer.id]] for buffer in passing], dtype=float)
        reach = _reach(starts_s, ends_s, iteration_s)
        shifts_s = np.arange(-reach, reach + 1)[:, None] * iteration_s
        rows = len(shifts_s)
        return cls(
            begins_s=(begins + shifts_s).ravel(),
            ends_s=(ends + shifts_s).ravel(),
            sizes_bytes=np.tile(np.array([b.size_bytes for b in passing], dtype=np.int64), rows),
            contents=np.tile(np.array([_ORDER.index(b.content) for b in passing], dtype=np.intp), rows),
        )

    def levels(self, times_s: Seconds) -> dict[Content, Levels]:
        """Bytes per content at ascending times."""
        found = {}
        for place, content in enumerate(_ORDER):
            own = self.contents == place
            changes = np.zeros(len(times_s) + 1, dtype=np.int64)
            np.add.at(changes, np.searchsorted(times_s, self.begins_s[own]), self.sizes_bytes[own])
            np.add.at(changes, np.searchsorted(times_s, self.ends_s[own]), -self.sizes_bytes[own])
            found[content] = np.cumsum(changes[:-1])
        return found


def _reach(starts_s: Seconds, ends_s: Seconds, iteration_s: float) -> int:
    """How many iterations away a stay may still be in the window."""
    return math.ceil(min((float(ends_s.max()) - float(starts_s.min())) / iteration_s, 2.0 * _MOST_ITERATIONS)) + 1


def _instants(curve: MemoryCurve, stays: _Stays, iteration_s: float) -> tuple[Seconds, float]:
    """Where steps begin, and where the last one ends: changes of the curve and of what it consists of."""
    first_s, end_s = curve.times_s[0], curve.times_s[-1]
    inner = np.concatenate([np.array(curve.times_s), stays.begins_s, stays.ends_s])
    times_s = np.sort(inner[(inner >= first_s) & (inner < end_s)])
    apart = np.append(True, np.diff(times_s) > _INSTANT_FRAC * iteration_s)
    times_s = times_s[apart]
    return times_s[end_s - times_s > _INSTANT_FRAC * iteration_s], end_s


def _releasing(
    schedule: Schedule, starts_s: Seconds, ends_s: Seconds, iteration_s: float, times_s: Seconds
) -> dict[int, dict[Content, int]]:
    """What the compute task that runs at each of these times frees as it ends, by content; only where it frees."""
    program = [t for t in schedule.lanes[Lane.COMPUTE] if schedule.tasks[t].frees]
    found: dict[int, dict[Content, int]] = {}
    for task in program:
        freed: dict[Content, int] = {}
        for buffer in (schedule.buffers[b] for b in schedule.tasks[task].frees):
            if buffer.memory is Memory.DEVICE:
                freed[buffer.content] = freed.get(buffer.content, 0) + buffer.size_bytes
        for shift_s in (-iteration_s, 0.0, iteration_s):
            low, high = np.searchsorted(times_s, [starts_s[task] + shift_s, ends_s[task] + shift_s])
            found |= dict.fromkeys(range(int(low), int(high)), freed)
    return found


def _release(held: dict[Content, Levels], transient: Levels, releasing: dict[int, dict[Content, int]]) -> None:
    """Take what is below nothing in ``transient`` off the contents: first of what the running task frees."""
    for place in np.flatnonzero(transient < 0):
        freed = releasing.get(int(place), {})
        _take(held, transient, int(place), freed, (Content.ACTIVATIONS, *_ORDER))
        if transient[place] < 0:
            _take(held, transient, int(place), {c: int(held[c][place]) for c in _ORDER}, (Content.ACTIVATIONS, *_ORDER))


def _take(
    held: dict[Content, Levels], transient: Levels, place: int, at_most: dict[Content, int], order: Sequence[Content]
) -> None:
    left = dict(at_most)
    for content in order:
        taken = min(-int(transient[place]), left.get(content, 0), int(held[content][place]))
        if taken > 0:
            held[content][place] -= taken
            left[content] -= taken
            transient[place] += taken

"""When memory of the device comes and goes where copies run beside compute on streams of their own.

[Note: Memory on one stream]
A caching allocator hands freed memory on at once to whoever asks next on the same stream, since what was queued there
before is over before what is queued there later begins.  A copy on another stream knows nothing of that order.  So all
device memory of chunks, gradients and saved activations is allocated and freed by the compute thread on the compute
stream, and events do the rest:

- Room for a copy to the device is made when the last compute task ends that surely comes before the copy, right before
  that task's event is recorded.  The copy waits for that event, as the schedule says, and with it for whatever may
  still read or write the memory.
- What a copy to the host reads is let go of when the first compute task begins that surely comes after the copy: by
  then the compute stream waits for the copy, and so does whoever gets the memory next.

Nothing is guessed (``Tensor.record_stream`` would keep memory until somebody happens to look whether the other stream
is done), and memory does not depend on timing: it comes as early and goes as late as in any timing of the schedule,
which is what ``shared/verify/guaranteed_peak.py`` accounts for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ...shared.schema.schedule import Lane, Schedule, TaskId, TaskKind
from ...shared.verify.happens_before import HappensBefore, Occurrence

_COMPUTE: Final = tuple(Lane).index(Lane.COMPUTE)
_ITERATIONS: Final = 3
_MIDDLE: Final = 1
_TO_DEVICE: Final = (TaskKind.GATHER, TaskKind.ACTIVATION_FETCH)
_TO_HOST: Final = (TaskKind.GRADIENT_OFFLOAD, TaskKind.ACTIVATION_OFFLOAD)


@dataclass(frozen=True, slots=True)
class Copying:
    """A copy in the iteration of a compute task, or ``iterations_later`` of it (negative: earlier)."""

    task: TaskId
    iterations_later: int


@dataclass(frozen=True, slots=True)
class StreamMemory:
    """What compute tasks do for copies (Note: Memory on one stream)."""

    room_at_end: Mapping[TaskId, Sequence[Copying]]
    """Copies that room is made for when a compute task ends."""
    gone_at_begin: Mapping[TaskId, Sequence[Copying]]
    """Copies whose source is let go of when a compute task has waited for what it waits for."""

    @property
    def room_at_start(self) -> list[TaskId]:
        """Copies of the first iteration that room is made for before anything has run."""
        return [c.task for copies in self.room_at_end.values() for c in copies if c.iterations_later > 0]


def stream_memory(schedule: Schedule) -> StreamMemory:
    """Read off the happens-before relation of ``schedule`` when memory comes and goes."""
    order = HappensBefore(schedule, _ITERATIONS)
    compute = schedule.lanes[Lane.COMPUTE]
    room: dict[TaskId, list[Copying]] = {}
    gone: dict[TaskId, list[Copying]] = {}
    for task in schedule.tasks:
        at = Occurrence(_MIDDLE, task.id)
        if task.kind in _TO_DEVICE:
            ended = order.reached(at)[_COMPUTE]
            assert ended > 0, f"{task.name} waits for no compute task, not even of the iteration before"
            iteration, place = divmod(ended - 1, len(compute))
            room.setdefault(compute[place], []).append(Copying(task.id, _MIDDLE - iteration))
        elif task.kind in _TO_HOST:
            first = _first_after(order, at, compute)
            iteration, place = divmod(first, len(compute))
            gone.setdefault(compute[place], []).append(Copying(task.id, _MIDDLE - iteration))
    return StreamMemory(room, gone)


def _first_after(order: HappensBefore, at: Occurrence, compute: Sequence[TaskId]) -> int:
    """The position of the first compute task that surely begins after ``at`` has ended."""
    low, high = 0, order.num_iterations * len(compute)
    while low < high:
        middle = (low + high) // 2
        occurrence = Occurrence(middle // len(compute), compute[middle % len(compute)])
        if order.before(at, occurrence):
            high = middle
        else:
            low = middle + 1
    assert low < order.num_iterations * len(compute), f"no compute task waits for {order.schedule.tasks[at.task].name}"
    return low

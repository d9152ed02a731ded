"""When memory of the device comes and goes where copies run beside compute on streams of their own.

[Note: Memory on one stream]
A caching allocator hands freed memory on at once to whoever asks next on the same stream, since what was queued there
before is over before what is queued there later begins.  A copy on another stream knows nothing of that order.  So all
device memory of chunks, gradients and saved activations is allocated and freed by the compute thread on the compute
stream, and events do the rest:

- Room for a copy to the device is made when the last compute task ends that is guaranteed to come before the copy,
  right before that task's event is recorded.  The copy waits for that event, as the schedule says, and with it for
  whatever may still read or write the memory.
- What a copy to the host reads is let go of when the first compute task begins that is guaranteed to come after the
  copy: by then the compute stream waits for the copy, and so does whoever gets the memory next.

So the order in which memory is asked for and freed depends on no timing: it is read off the happens-before relation.
The runtime carries it out (``runtime/lanes/transfer_lanes.py``), the simulator replays it
(``sim/memory/requests_of_schedule.py``).

Nothing is guessed (``Tensor.record_stream`` would keep memory until somebody happens to look whether the other stream
is done), and memory does not depend on timing: it comes as early and goes as late as in any timing of the schedule,
which is what ``guaranteed_peak`` accounts for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..schema.schedule import AllocationId, Lane, Memory, Schedule, TaskId
from .happens_before import HappensBefore, Occurrence

_COMPUTE: Final = tuple(Lane).index(Lane.COMPUTE)
_ITERATIONS: Final = 3
_MIDDLE: Final = 1


@dataclass(frozen=True, slots=True)
class Copying:
    """A copy in the iteration of a compute task, or ``iterations_later`` of it (negative: earlier)."""

    task: TaskId
    iterations_later: int


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """What compute tasks do for copies ([Note: Memory on one stream])."""

    room_at_end: Mapping[TaskId, Sequence[Copying]]
    """Copies that room is made for when a compute task ends."""
    gone_at_begin: Mapping[TaskId, Sequence[Copying]]
    """Copies whose source is let go of when a compute task has waited for what it waits for."""

    @property
    def room_at_start(self) -> list[Copying]:
        """Copies that room is made for before anything has run; ``iterations_later`` counts from the first iteration.

        A copy for which a compute task makes room n iterations ahead is there n times.
        """
        return [
            Copying(copy.task, later)
            for copies in self.room_at_end.values()
            for copy in copies
            for later in range(copy.iterations_later)
        ]


def memory_events(schedule: Schedule, order: HappensBefore | None = None) -> MemoryEvents:
    """Read off the happens-before relation of ``schedule`` when device memory of its copies comes and goes.

    ``order`` spares computing the relation again; one over fewer than three iterations is not enough.
    """
    if order is None or order.num_iterations < _ITERATIONS:
        order = HappensBefore(schedule, _ITERATIONS)
    compute = schedule.lanes[Lane.COMPUTE]
    room: dict[TaskId, list[Copying]] = {}
    gone: dict[TaskId, list[Copying]] = {}
    for task in schedule.tasks:
        if task.lane is Lane.COMPUTE:
            continue
        at = Occurrence(_MIDDLE, task.id)
        if any(_comes_and_goes(schedule, buffer) for buffer in task.allocates):
            ended = order.reached(at)[_COMPUTE]
            assert ended > 0, f"{task.name} waits for no compute task, not even of the iteration before"
            iteration, place = divmod(ended - 1, len(compute))
            room.setdefault(compute[place], []).append(Copying(task.id, _MIDDLE - iteration))
        if any(_comes_and_goes(schedule, buffer) for buffer in task.frees):
            first = order.first_after(at, Lane.COMPUTE)
            assert first < order.num_iterations * len(compute), f"no compute task waits for {task.name}"
            iteration, place = divmod(first, len(compute))
            gone.setdefault(compute[place], []).append(Copying(task.id, _MIDDLE - iteration))
    return MemoryEvents(room, gone)


def _comes_and_goes(schedule: Schedule, buffer: AllocationId) -> bool:
    found = schedule.buffers[buffer]
    return found.memory is Memory.DEVICE and not found.is_static

"""What a device peak consists of: what the task that runs then works on, which no plan takes away, and all else.

[Note: What cannot leave]
A task computes on the device, so that everything it works on is there while it runs: the weights that it reads, the
activations that were saved for it, its output's gradient, and what its operations make on the way.  Module buffers and
the batch have no other place.  Nor have the outputs of sections that backward begins with: no plan moves those to the
host.  Everything else can leave: gradients once they are made, other weights (those too whose gradient a task adds to
without reading them), activations of other sections, and all optimizer state.  A step or a projection on the device
could be one on the host: the weights that it reads, and what it makes on the way, can leave too.  So no plan of the
same chunk size has a peak below what cannot leave under another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..schema.schedule import Allocation, AllocationId, Content, Schedule, Section, TaskId, TaskKind

_NEVER_LEAVES: Final = (Content.RESIDENT, Content.OUTPUT, Content.LOSS, Content.INCOMING_GRADIENT)
_OF_WORK: Final = (Content.PARAMETERS, Content.ACTIVATIONS, Content.KEPT_RESULTS, Content.SWAPPED)
"""What stays while a task of its section runs."""
_ELSEWHERE: Final = (TaskKind.DEVICE_ADAM, TaskKind.GRADIENT_PROJECTION, TaskKind.PARAMETER_PROJECTION)
"""What another plan does on the host."""


@dataclass(frozen=True, slots=True)
class PeakPart:
    """One content of device memory at a peak."""

    content: Content | None
    """None is what the running task's operations make on the way."""
    can_leave: bool
    """Whether another plan could have it elsewhere; see [Note: What cannot leave]."""
    size_bytes: int


def peak_parts(
    schedule: Schedule, task: TaskId, alive: Sequence[AllocationId], transient_bytes: int
) -> tuple[PeakPart, ...]:
    """The memory of ``alive`` and ``transient_bytes`` by content: first what cannot leave, each the largest first.

    ``task``, of compute, runs at the peak, or next after it.  Nothing of 0 bytes; together all of the peak.
    """
    running = schedule.tasks[task]
    is_elsewhere = running.kind in _ELSEWHERE
    read = () if is_elsewhere else [schedule.buffers[number] for number in running.reads]
    chunks = frozenset(buffer.chunk for buffer in read if buffer.content is Content.PARAMETERS)
    sizes: dict[tuple[bool, Content | None], int] = {(is_elsewhere, None): transient_bytes}
    for buffer in (schedule.buffers[number] for number in alive):
        key = (not _stays(buffer, running.section, chunks), buffer.content)
        sizes[key] = sizes.get(key, 0) + buffer.size_bytes
    parts = [PeakPart(content, can_leave, size) for (can_leave, content), size in sizes.items() if size]
    return tuple(sorted(parts, key=lambda part: (part.can_leave, -part.size_bytes)))


def _stays(buffer: Allocation, section: Section | None, chunks: frozenset[int | None]) -> bool:
    if buffer.content in _NEVER_LEAVES:
        return True
    is_worked_on = buffer.chunk in chunks if buffer.chunk is not None else buffer.section == section
    return buffer.content in _OF_WORK and is_worked_on

"""What FSDP2 does on the device so that weights are gathered in float8.

[Note: Gathers in float8]
torchao 0.18 casts a rank's part of a weight before it is gathered (``fsdp_pre_all_gather`` in its ``fsdp_utils.py``),
from what is stepped, operation by operation, since hooks of FSDP are not compiled.  In bytes of one element:

* the part is widened to float32 unless it has it (read 2, write 4), multiplied by the scale (4 and 4), clamped (4 and
  4) and cast (4 and 1);
* a scale found by the gather itself (``dynamic``) needs absolute values (read and write one) and their largest (read
  one), and an all-reduce of one number for each weight;
* ``precomputed`` scales are found behind the step: one read of all parts, one all-reduce of a number for each weight.

What is copied out of the gather is what was gathered ([Note: Copies around collectives] in ``runtimes.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Self

from ...shared.phases.operations import Float8Gather
from ...shared.schema.schedule import ChunkId, Content, Memory, Schedule, Task, TaskKind
from ...shared.schema.workload import DType, Workload

_NARROW: Final = DType.FLOAT8_E4M3FN.item_bytes
_FLOAT32: Final = DType.FLOAT32.item_bytes
_SCALE_BYTES: Final = 4
"""Of the largest element of one weight."""


@dataclass(frozen=True, slots=True)
class Float8Gathers:
    """The weights of a workload that are gathered in float8; see [Note: Gathers in float8]."""

    scales: Float8Gather
    num_weights: int

    @classmethod
    def of(cls, workload: Workload) -> Self | None:
        """None where none is."""
        if workload.float8_gather is None:
            return None
        narrow = sum(parameter.gathered_dtype is not None for parameter in workload.parameters)
        return cls(workload.float8_gather, narrow)

    def cast_bytes(self, stepped: DType) -> int:
        """Moved to cast one element of this type, and to find its scale if the gather does."""
        widened = 0 if stepped.item_bytes >= _FLOAT32 else stepped.item_bytes + _FLOAT32
        scaled = 3 * stepped.item_bytes if self.scales is Float8Gather.DYNAMIC else 0
        return scaled + widened + 4 * _FLOAT32 + _FLOAT32 + _NARROW

    def added_s(
        self, schedule: Schedule, stepped: DType, bytes_per_s: float, task_s: Callable[[Task], float]
    ) -> Iterator[tuple[int, float]]:
        """(index, seconds) of tasks that take longer: gathers, and the step where it finds the scales.

        ``stepped``: the type of parts; ``task_s``: seconds of a collective.
        """
        narrow = narrow_elements(schedule)
        num_elements, first = sum(narrow.values()), None
        for index, task in enumerate(schedule.tasks):
            own = narrow.get(task.chunk, 0) if task.kind is TaskKind.ALL_GATHER else 0
            if own:
                first = first or task
                yield index, self.cast_bytes(stepped) * own / bytes_per_s
                if self.scales is Float8Gather.DYNAMIC:
                    count = max(1, round(self.num_weights * own / num_elements))
                    yield index, count * task_s(_reduction(task, 1))
        if first is None or self.scales is Float8Gather.DYNAMIC:
            return
        found_s = num_elements * stepped.item_bytes / bytes_per_s + task_s(_reduction(first, self.num_weights))
        yield from ((index, found_s) for index, of in enumerate(schedule.tasks) if of.kind is TaskKind.DEVICE_ADAM)


def _reduction(gather: Task, num_weights: int) -> Task:
    """The all-reduce of the largest elements of so many weights, among the ranks of a gather."""
    return Task(
        id=gather.id,
        kind=TaskKind.ALL_REDUCE,
        moved_bytes=_SCALE_BYTES * num_weights,
        num_ranks=gather.num_ranks,
        axis=gather.axis,
    )


def narrow_elements(schedule: Schedule) -> dict[ChunkId | None, int]:
    """Elements of a rank's part of each chunk that are gathered in one byte where they have two."""
    parts = {
        buffer.chunk: buffer.size_bytes
        for buffer in schedule.buffers
        if buffer.is_static and buffer.content is Content.PARAMETERS and buffer.memory is Memory.DEVICE
    }
    return {
        task.chunk: parts[task.chunk] - task.moved_bytes // task.num_ranks
        for task in schedule.tasks
        if task.kind is TaskKind.ALL_GATHER and task.chunk in parts
    }

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

    def reduced_with(self, gather: Task, share_frac: float) -> tuple[int, Task]:
        """How many all-reduces of the largest elements there are, and one of them; of this share of all weights."""
        count = max(1, round(self.num_weights * share_frac))
        is_alone = self.scales is Float8Gather.DYNAMIC
        return (count if is_alone else 1), Task(
            id=gather.id,
            kind=TaskKind.ALL_REDUCE,
            moved_bytes=_SCALE_BYTES * (1 if is_alone else count),
            num_ranks=gather.num_ranks,
            axis=gather.axis,
        )


def narrow_elements(schedule: Schedule) -> dict[ChunkId, int]:
    """Elements of a rank's part of each chunk that are gathered in one byte where they have two."""
    parts = {
        buffer.chunk: buffer.size_bytes
        for buffer in schedule.buffers
        if buffer.is_static and buffer.content is Content.PARAMETERS and buffer.memory is Memory.DEVICE
    }
    return {
        task.chunk: parts[task.chunk] - task.moved_bytes // task.num_ranks
        for task in schedule.tasks
        if task.kind is TaskKind.ALL_GATHER and task.chunk is not None and task.chunk in parts
    }

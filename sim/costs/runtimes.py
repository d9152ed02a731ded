"""What other systems do on the device around their collectives, and how they step, where they carry a plan out.

[Note: Copies around collectives]
Here a gather writes parameters where they are used, and gradients are laid flat beside computations before they are
scattered (``CostModel._laying_flat_s``).  Others copy as their code has it (torch 2.13, DeepSpeed 0.18):

* FSDP (``torch/distributed/fsdp/_runtime_utils.py``) gathers into a flat parameter of which weights are views.
  Autograd joins the gradients of these views, which copies them once; behind backward, on a stream of its own, they are
  cast to the type that is reduced in, and divided.  With ``BackwardPrefetch.BACKWARD_POST``, which Composer sets, the
  next block is gathered when the backward of this one has ended (``GatheredBehind`` in ``shared/compile``).
* FSDP2 (``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``) copies what was gathered out to the weights,
  before a block's forward and backward, and joins its gradients by ``_chunk_cat`` in the type that is reduced in.
* DDP (``torch/csrc/distributed/c10d/reducer.cpp``) copies each gradient into its bucket, and back from it.
* ZeRO-3 (``deepspeed/runtime/zero/partition_parameters.py``, ``stage3.py``) joins every weight of its parts; on a
  stream of its own it copies gradients into a bucket, divides them, and joins them again to be reduced.

FSDP, FSDP2 and ZeRO keep parameters in float32 where there are masters, and cast their part before each gather.

Not counted, for want of a source: Python in hooks of modules, waits of the host for the device (FSDP's limiter of
gathers), and what DeepSpeed's own CPU Adam takes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Final, Self

from ...shared.methods.runtime_profile import OUR_RUNTIME, Runtime, RuntimeProfile
from ...shared.schema.schedule import Lane, Schedule, Task, TaskKind
from ...shared.schema.workload import DType, Workload
from .streams import elements_s
from .task_costs import CostModel

FUSED_BYTES: Final = 28
"""Moved for one float32 scalar: parameter, gradient and two moments are read, all but the gradient written."""
LOOPED_BYTES: Final = 80
"""Where every step of the update is an operation of its own: decay 8, first moment 12, second moment 8 and 12, square
root 8, bias correction 8, epsilon 8, update 16 (``torch.optim.AdamW`` with ``foreach=False``)."""
LOOPED_OPERATIONS: Final = 8
"""Of one tensor."""
_MASTER_BYTES: Final = 4
"""Of a float32 parameter."""


@dataclass(frozen=True, slots=True)
class _Copies:
    """How often a system reads and writes what collectives move; see [Note: Copies around collectives]."""

    gathered: float = 0.0
    """Reads and writes of what was gathered, before the computation that needs it."""
    reduced: float = 0.0
    """Reads and writes of gradients, before they are reduced, between computations."""
    beside: float = 0.0
    """Reads and writes of gradients in the type that is reduced in, before they are reduced, beside computations."""
    casts_part: bool = True
    """Whether a rank's part is cast before it is gathered."""
    joins_by_elements: bool = False
    """Whether gradients are joined and cast by one kernel, which is not vectorized."""
    casts_beside: bool = False
    """Whether gradients are cast by a kernel of its own, beside computations."""


_COPIES: Final = {
    Runtime.FSDP: _Copies(reduced=2.0, beside=2.0, casts_beside=True),
    Runtime.FSDP_BACKWARD_POST: _Copies(reduced=2.0, beside=2.0, casts_beside=True),
    Runtime.FSDP2: _Copies(gathered=2.0, joins_by_elements=True),
    Runtime.DDP: _Copies(reduced=4.0, casts_part=False),
    Runtime.DEEPSPEED_ZERO3: _Copies(gathered=2.0, beside=6.0),
}
"""Reads and writes, counted in the code that [Note: Copies around collectives] names."""


@dataclass(frozen=True)
class RuntimeCosts(CostModel):
    """Seconds of every task where another runtime carries the schedule out."""

    profile: RuntimeProfile = OUR_RUNTIME
    dtype: DType = DType.BFLOAT16
    """Of parameters and their gradients."""
    num_trained: int = 0
    """Tensors that are trained."""

    @classmethod
    def like(cls, costs: CostModel, profile: RuntimeProfile, workload: Workload) -> Self:
        """``costs``, where ``profile`` tells who carries out schedules of ``workload``."""
        shared = {field.name: getattr(costs, field.name) for field in fields(CostModel) if field.init}
        trained: Counter[DType] = Counter()
        for parameter in workload.parameters:
            if parameter.trainable:
                trained[parameter.dtype] += parameter.num_elements
        dtype = trained.most_common(1)[0][0] if trained else workload.compute_dtype
        num_trained = sum(parameter.trainable for parameter in workload.parameters)
        return cls(**shared, profile=profile, dtype=dtype, num_trained=num_trained)

    def durations_s(self, schedule: Schedule) -> tuple[float, ...]:
        """Seconds of every task of ``schedule``, in its order, with the copies of the runtime."""
        seconds = list(super().durations_s(schedule))
        if self.profile.loops_over_tensors:
            for index, task in enumerate(schedule.tasks):
                if task.kind is TaskKind.DEVICE_ADAM and task.num_stepped:
                    seconds[index] = self._looping_s(task)
        if self.profile.recomputes_whole:
            whole = {task.section: task.phase for task in schedule.tasks if task.kind is TaskKind.FORWARD}
            for index, task in enumerate(schedule.tasks):
                phase = whole.get(task.section)
                if task.kind is TaskKind.RECOMPUTE and task.phase is not None and phase is not None:
                    rest_s = self.phase_s(phase, task.kind) - self.phase_s(task.phase, task.kind)
                    seconds[index] += max(0.0, rest_s)
        copies = _COPIES.get(self.profile.runtime)
        if copies is None:
            return tuple(seconds)
        priced = self.among(schedule.num_ranks, schedule.shard_ranks)
        users = _first_users(schedule)
        index_of = {task.id: index for index, task in enumerate(schedule.tasks)}
        casts_part = copies.casts_part and self.dtype.item_bytes < _MASTER_BYTES
        for index, task in enumerate(schedule.tasks):
            if task.kind is TaskKind.ALL_GATHER:
                if casts_part:
                    part_bytes = task.moved_bytes / task.num_ranks
                    seconds[index] += (
                        part_bytes * (1 + _MASTER_BYTES / self.dtype.item_bytes) / self._streamed_bytes_per_s
                    )
                user = users.get(task.id)
                if user is not None:
                    seconds[user] += copies.gathered * task.moved_bytes / self._streamed_bytes_per_s
            elif task.kind in (TaskKind.REDUCE_SCATTER, TaskKind.ALL_REDUCE) and task.moved_bytes:
                reduced_bytes = task.moved_bytes * self._widening
                wide = Task(
                    id=task.id,
                    kind=task.kind,
                    moved_bytes=round(reduced_bytes),
                    num_ranks=task.num_ranks,
                    axis=task.axis,
                )
                seconds[index] = priced.task_s(wide) + copies.beside * reduced_bytes / self._streamed_bytes_per_s
                if copies.casts_beside and reduced_bytes > task.moved_bytes:
                    seconds[index] += (task.moved_bytes + reduced_bytes) / self._streamed_bytes_per_s
                made = [index_of[of] for of in task.after if schedule.tasks[index_of[of]].lane is Lane.COMPUTE]
                if made:
                    seconds[made[-1]] += self._joining_s(copies, task.moved_bytes, reduced_bytes)
        return tuple(seconds)

    def _laying_flat_s(self, kind: TaskKind, size_bytes: int) -> float:
        """As here, where nobody else carries the plan out."""
        return super()._laying_flat_s(kind, size_bytes) if self.profile.runtime is Runtime.OURS else 0.0

    @property
    def _widening(self) -> float:
        """Bytes of a gradient that is reduced over those that backward made."""
        reduced_in = self.profile.reduce_dtype
        return 1.0 if reduced_in is None else reduced_in.item_bytes / self.dtype.item_bytes

    def _looping_s(self, task: Task) -> float:
        """Seconds of an update whose every step is an operation of its own, on every tensor."""
        streaming_s = LOOPED_BYTES / FUSED_BYTES * task.stepped_bytes / self._streamed_bytes_per_s
        return max(streaming_s, LOOPED_OPERATIONS * self.num_trained * self._dispatch_s)

    def _joining_s(self, copies: _Copies, made_bytes: int, reduced_bytes: float) -> float:
        """Seconds of joining a chunk's gradients, between computations."""
        if not copies.joins_by_elements:
            return copies.reduced * made_bytes / self._streamed_bytes_per_s
        streaming_s = (made_bytes + reduced_bytes) / self._streamed_bytes_per_s
        return max(streaming_s, elements_s(made_bytes / self.dtype.item_bytes, self.hardware.device))


def _first_users(schedule: Schedule) -> dict[int, int]:
    """For every gather, the place of the first computation that waits for it."""
    gathers = {task.id for task in schedule.tasks if task.kind is TaskKind.ALL_GATHER}
    found: dict[int, int] = {}
    for index, task in enumerate(schedule.tasks):
        if task.lane is Lane.COMPUTE:
            for waited in (*task.after, *task.after_previous):
                if waited in gathers:
                    found.setdefault(waited, index)
    return found

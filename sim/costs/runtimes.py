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
* ZeRO-1 and ZeRO-2 (``deepspeed/runtime/zero/stage_1_and_2.py``) copy gradients into a bucket between computations,
  divide it, join it again and all-reduce it (``allreduce_and_scatter``): every rank receives all, and copies its own
  part out twice; ZeRO-2 adds it to that of the micro-batch before.  ZeRO-1 reduces once per step, behind the last
  backward.  One rank makes the same copies of gradients, between computations, and runs the same hooks; its weights are
  views of its part (``_no_gather_coalesced``).

FSDP and FSDP2 keep parameters in float32 where there are masters, and cast their part before each gather.  ZeRO keeps
its part in both types; its step joins and widens the part's gradients, scales them, takes their norm, and casts the
part.

[Note: Steps of the host elsewhere]
Where nothing overlaps with a step (``RuntimeProfile.steps_alone``), new values are cast and copied to the device by the
thread that steps, chunk by chunk: seconds of the step.  Where devices keep parts of what hosts step, a part is copied
once per step, and never where it is frozen.

DeepSpeed with offload_optimizer adds gradients of several micro-batches up on the device: what lies on the host comes
for it and goes again; the last time a float32 copy leaves too.  The norm is taken on the device.  Of several ranks each
steps with one thread: torchrun and accelerate set OMP_NUM_THREADS to 1 where a node has several ranks and nobody set
it (``torch/distributed/run.py``, ``accelerate/commands/launch.py``); DeepSpeed's own launcher leaves all cores to
every rank, and nobody has published what that takes.

[Note: Hooks]
Python in hooks takes the host's time, beside operations ([Note: Launches] in ``sim/operations/roofline.py``): so much
for every module, for every parameter and for every block, forward and backward.  ``benchmarks/runtime_hooks.py``
measures it in operations of a model, each DISPATCHES_PER_LAUNCH launches.  Under ZeRO-3 recomputed blocks run the hooks
of forward.

Not counted, for want of a source: waits of the host for the device (FSDP's limiter of gathers, ZeRO-2's
synchronization behind every backward), and buckets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Final, Self

from ...shared.methods.runtime_profile import OUR_RUNTIME, Runtime, RuntimeProfile
from ...shared.optimizers.state import stepped_dtype
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.schedule import ChunkId, Content, Lane, OuterSection, Schedule, Section, Task, TaskKind
from ...shared.schema.workload import BlockId, DType, Workload
from ..operations.efficiency import CORE_BYTES_PER_S, DISPATCHES_PER_LAUNCH
from ..operations.roofline import operation_s
from ..operations.streams import elements_s, launched, loss_metric
from .float8_gathers import Float8Gathers, narrow_elements
from .task_costs import CostModel, host_adam_bytes_per_s

FUSED_BYTES: Final = 28
"""Moved for one float32 scalar: parameter, gradient and two moments are read, all but the gradient written."""
LOOPED_BYTES: Final = 80
"""Where every step of the update is an operation of its own: decay 8, first moment 12, second moment 8 and 12, square
root 8, bias correction 8, epsilon 8, update 16 (``torch.optim.AdamW`` with ``foreach=False``)."""
LOOPED_OPERATIONS: Final = 8
"""Of one tensor."""
_LOOPED: Final = (Optimizer.ADAMW, Optimizer.ADAM, Optimizer.ADAMW_BF16)
"""Whose steps are loops there; others step as here."""
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
    own_part: float = 0.0
    """Reads and writes of a rank's own part, behind its reduction."""
    adds_part: float = 0.0
    """The same where a part is added to that of the micro-batch before."""
    is_whole: bool = False
    """Whether every rank receives all reduced gradients: an all-reduce in the place of a reduce-scatter."""
    step_bytes: int = 0
    """Moved besides the step itself for every scalar that the device steps, where it has a master."""


_ZERO_12: Final = _Copies(
    reduced=2.0, beside=4.0, casts_part=False, own_part=4.0, adds_part=3.0, is_whole=True, step_bytes=24
)
"""A bucket between computations; beside them a division and a join, two copies of the own part, and its addition.  Of a
step: 8 bytes to scale a gradient, 4 and 6 to join and to widen it, 2 of its norm, 4 to cast the scalar.  Counted in
DeepSpeed's stage_1_and_2.py ([Note: Copies around collectives])."""
_ZERO_3: Final = _Copies(gathered=2.0, beside=6.0, casts_part=False, own_part=2.0, adds_part=1.0, step_bytes=24)
"""Weights are joined of parts; a bucket, a division and a join, all beside, and a copy of the own part, or its
addition; the same step.  Counted in DeepSpeed's stage3.py ([Note: Copies around collectives])."""
_COPIES: Final = {
    Runtime.FSDP: _Copies(reduced=2.0, beside=2.0, casts_beside=True),
    Runtime.FSDP2: _Copies(gathered=2.0, joins_by_elements=True),
    Runtime.DDP: _Copies(reduced=4.0, casts_part=False),
    Runtime.DEEPSPEED_ZERO1: _ZERO_12,
    Runtime.DEEPSPEED_ZERO2: _ZERO_12,
    Runtime.DEEPSPEED_ZERO3: _ZERO_3,
}
"""Reads and writes, counted in the code that [Note: Copies around collectives] names."""
_REFRESH_BYTES: Final = 8
"""Of host memory for every scalar that is stepped, besides the step: a float32 value is read to be cast, and two bytes
are read and written on their way to the device, from memory that is not pinned (``_reassign_or_swap_out_partitioned_
parameters`` in DeepSpeed's stage3.py copies between types and devices at once, which PyTorch does by way of a cast)."""


@dataclass(frozen=True, slots=True)
class _Hooks:
    """Operations of a model that hooks take as long as; see [Note: Hooks]."""

    per_module: float = 0.0
    per_parameter: float = 0.0
    per_block: float = 0.0


_HOOKS: Final = {
    Runtime.DDP: (_Hooks(), _Hooks(per_parameter=0.2)),
    Runtime.FSDP: (_Hooks(per_parameter=0.3, per_block=11.5), _Hooks(per_parameter=0.1, per_block=12.0)),
    Runtime.FSDP2: (_Hooks(per_parameter=0.4, per_block=10.0), _Hooks(per_parameter=0.9, per_block=15.0)),
    Runtime.DEEPSPEED_ZERO1: (_Hooks(), _Hooks(per_parameter=1.8, per_block=4.0)),
    Runtime.DEEPSPEED_ZERO2: (_Hooks(), _Hooks(per_parameter=1.8, per_block=4.0)),
    Runtime.DEEPSPEED_ZERO3: (
        _Hooks(per_module=7.5, per_parameter=1.0, per_block=10.0),
        _Hooks(per_module=3.6, per_parameter=3.8, per_block=20.0),
    ),
}
"""Forward and backward, of torch 2.13 and DeepSpeed 0.19 on one core (``benchmarks/runtime_hooks.py``)."""


@dataclass(frozen=True)
class RuntimeCosts(CostModel):
    """Seconds of every task where another runtime carries the schedule out."""

    profile: RuntimeProfile = OUR_RUNTIME
    dtype: DType = DType.BFLOAT16
    """Of parameters and their gradients."""
    num_trained: int = 0
    """Tensors that are trained."""
    sections: Mapping[Section, SectionParts] = field(default_factory=dict)
    """What hooks of every section meet."""
    loss_metric_s: float = 0.0
    """Of one metric of a micro-batch's logits ([Note: Metrics of losses] in ``streams.py``)."""
    float8_gathers: Float8Gathers | None = None
    """Weights that are gathered in float8; None: none is."""

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
        metric = loss_metric(workload) if profile.num_loss_metrics else ()
        return cls(
            **shared,
            profile=profile,
            dtype=dtype,
            num_trained=num_trained,
            sections=sections_of(workload),
            loss_metric_s=sum(operation_s(one, costs.hardware.device) for one in metric),
            float8_gathers=Float8Gathers.of(workload),
        )

    def durations_s(self, schedule: Schedule) -> tuple[float, ...]:
        """Seconds of every task of ``schedule``, in its order, with the copies of the runtime."""
        seconds = list(super().durations_s(schedule))
        if (self.profile.steps_in_loops or self.profile.temporary_lists) and schedule.optimizer in _LOOPED:
            for index, task in enumerate(schedule.tasks):
                if task.kind is TaskKind.DEVICE_ADAM and task.num_stepped:
                    seconds[index] = self._looping_s(task, schedule.optimizer)
        if self.profile.recomputes_whole:
            whole = {task.section: task.phase for task in schedule.tasks if task.kind is TaskKind.FORWARD}
            for index, task in enumerate(schedule.tasks):
                phase = whole.get(task.section)
                if task.kind is TaskKind.RECOMPUTE and task.phase is not None and phase is not None:
                    rest_s = self.phase_s(phase, task.kind) - self.phase_s(task.phase, task.kind)
                    seconds[index] += max(0.0, rest_s)
        if self.profile.num_loss_metrics:
            last_backwards = {
                task.micro_batch: index for index, task in enumerate(schedule.tasks) if task.kind is TaskKind.BACKWARD
            }
            for index in last_backwards.values():
                seconds[index] += self.profile.num_loss_metrics * self.loss_metric_s
        self._add_hooks(schedule, seconds)
        self._step_on_hosts(schedule, seconds)
        if self.profile.runtime is Runtime.OFFLOADED_STATES:
            self._move_moments(schedule, seconds)
        copies = _COPIES.get(self._engine)
        if copies is not None:
            self._copy(schedule, seconds, copies)
        return tuple(seconds)

    def _copy(self, schedule: Schedule, seconds: list[float], copies: _Copies) -> None:
        """Add what is copied around collectives, or where one rank makes the same copies."""
        priced = self.among(schedule.num_ranks, schedule.shard_ranks)
        users = _first_users(schedule)
        index_of = {task.id: index for index, task in enumerate(schedule.tasks)}
        casts_part = copies.casts_part and self.dtype.item_bytes < _MASTER_BYTES
        if schedule.num_ranks == 1 and copies in (_ZERO_12, _ZERO_3):
            self._copy_alone(schedule, seconds, copies)
        narrow: Mapping[ChunkId | None, int] = {}
        if self.float8_gathers is not None:
            stepped, rate = stepped_dtype(self.dtype, schedule.optimizer), self._streamed_bytes_per_s
            narrow = narrow_elements(schedule)
            for index, more_s in self.float8_gathers.added_s(schedule, stepped, rate, priced.task_s):
                seconds[index] += more_s
        for index, task in enumerate(schedule.tasks):
            if task.kind is TaskKind.DEVICE_ADAM and self.dtype.item_bytes < _MASTER_BYTES:
                seconds[index] += copies.step_bytes * task.num_stepped / self._streamed_bytes_per_s
            if task.kind is TaskKind.ALL_GATHER:
                if copies.is_whole and self._trained_frac < 1:
                    # What is frozen is whole everywhere, and never gathered.
                    trained_bytes = round(task.moved_bytes * self._trained_frac)
                    seconds[index] = priced.task_s(replace(task, moved_bytes=trained_bytes)) if trained_bytes else 0.0
                if casts_part:
                    part_bytes = task.moved_bytes / task.num_ranks - narrow.get(task.chunk, 0)
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
                    kind=TaskKind.ALL_REDUCE if copies.is_whole else task.kind,
                    moved_bytes=round(reduced_bytes),
                    num_ranks=task.num_ranks,
                    axis=task.axis,
                )
                seconds[index] = priced.task_s(wide) + copies.beside * reduced_bytes / self._streamed_bytes_per_s
                if copies.casts_beside and reduced_bytes > task.moved_bytes:
                    seconds[index] += (task.moved_bytes + reduced_bytes) / self._streamed_bytes_per_s
                own_part = copies.own_part + (copies.adds_part if task.micro_batch else 0.0)
                seconds[index] += own_part * reduced_bytes / task.num_ranks / self._streamed_bytes_per_s
                made = [index_of[of] for of in task.after if schedule.tasks[index_of[of]].lane is Lane.COMPUTE]
                if made:
                    seconds[made[-1]] += self._joining_s(copies, task.moved_bytes, reduced_bytes)
        if self.profile.runtime is Runtime.DEEPSPEED_ZERO1:
            _reduce_once(schedule, seconds)

    def _copy_alone(self, schedule: Schedule, seconds: list[float], copies: _Copies) -> None:
        """Add what one rank copies of its gradients behind every backward, or once per step."""
        once = self.profile.runtime is Runtime.DEEPSPEED_ZERO1
        for index, task in enumerate(schedule.tasks):
            if task.kind is TaskKind.BACKWARD and task.section is not None:
                if once and task.micro_batch < schedule.micro_batches - 1:
                    continue
                passes = copies.reduced + copies.beside + copies.own_part
                passes += copies.adds_part if task.micro_batch and not once else 0.0
                made_bytes = self.sections[task.section].gradient_bytes
                seconds[index] += passes * made_bytes / self._streamed_bytes_per_s

    def _add_hooks(self, schedule: Schedule, seconds: list[float]) -> None:
        """Add what Python in hooks takes, where the host is slower than the device ([Note: Hooks])."""
        is_zero_3 = self._engine is Runtime.DEEPSPEED_ZERO3
        hooks = _HOOKS.get(self._engine)
        if hooks is None:
            return
        forward, backward = hooks
        of_kinds = {TaskKind.FORWARD: forward, TaskKind.BACKWARD: backward}
        if is_zero_3:
            of_kinds[TaskKind.RECOMPUTE] = forward
        device = self.hardware.device
        operation_s = DISPATCHES_PER_LAUNCH * device.launch_overhead_s
        for index, task in enumerate(schedule.tasks):
            of_kind = of_kinds.get(task.kind)
            if of_kind is None or task.section is None or task.phase is None:
                continue
            more_s = self.sections[task.section].operations(of_kind) * operation_s
            if device.kind is DeviceKind.CPU:
                seconds[index] += self._calibrated(more_s, task.kind)
                continue
            num_launches = sum(operation.count for operation in launched(task.phase.operations))
            host_s = self._calibrated(num_launches * operation_s + more_s, task.kind)
            seconds[index] = max(seconds[index], host_s)

    @property
    def _engine(self) -> Runtime:
        """Whose copies and hooks these are: with offloading those of ZeRO-2 on one rank, else those of ZeRO-3."""
        runtime = self.profile.runtime
        if runtime is not Runtime.DEEPSPEED_OFFLOAD:
            return Runtime.FSDP if runtime in (Runtime.FSDP_BACKWARD_POST, Runtime.COMPOSER) else runtime
        return Runtime.DEEPSPEED_ZERO3 if self.num_ranks > 1 else Runtime.DEEPSPEED_ZERO2

    def _move_moments(self, schedule: Schedule, seconds: list[float]) -> None:
        """Add the copies of moments to the device and back, which nothing overlaps with."""
        size_bytes = sum(b.size_bytes for b in schedule.buffers if b.is_static and b.content is Content.PAGED_STATE)
        links = (self.hardware.host_to_device, self.hardware.device_to_host)
        for index, task in enumerate(schedule.tasks):
            if task.kind is TaskKind.DEVICE_ADAM and size_bytes:
                seconds[index] += sum(self.copy_s(size_bytes, link) for link in links)

    def _step_on_hosts(self, schedule: Schedule, seconds: list[float]) -> None:
        """Price the hosts' steps, and what passes between hosts and devices for them.

        See [Note: Steps of the host elsewhere].
        """
        profile = self.profile
        if not (profile.steps_alone or profile.parts_stay):
            return
        stepped = {task.chunk for task in schedule.tasks if task.kind is TaskKind.CPU_ADAM}
        is_deepspeed, seen = profile.runtime.is_deepspeed, set[ChunkId | None]()
        for index, task in enumerate(schedule.tasks):
            match task.kind:
                case TaskKind.CPU_ADAM if profile.steps_alone:
                    if is_deepspeed:
                        seconds[index] = self._deepspeed_step_s(task)
                    refreshed_bytes = task.num_stepped * self.dtype.item_bytes
                    seconds[index] += self.copy_s(refreshed_bytes, self.hardware.host_to_device)
                case TaskKind.GATHER if profile.steps_alone or task.chunk not in stepped or task.chunk in seen:
                    seconds[index] = 0.0
                case TaskKind.GATHER:
                    seen.add(task.chunk)
                case TaskKind.GRADIENT_OFFLOAD if is_deepspeed:
                    seconds[index] = self._deepspeed_offload_s(schedule, task)
                case TaskKind.GRADIENT_ACCUMULATE | TaskKind.GRADIENT_NORM if is_deepspeed:
                    seconds[index] = 0.0

    def _deepspeed_step_s(self, task: Task) -> float:
        """Seconds of a step by DeepSpeed's CPU Adam, with the cast of what it stepped."""
        rate = host_adam_bytes_per_s(self.hardware.host)
        if self.num_ranks > 1:
            rate = min(rate, CORE_BYTES_PER_S)
        more_bytes = _REFRESH_BYTES if self.dtype.item_bytes < _MASTER_BYTES else 0
        return (task.stepped_bytes + more_bytes * task.num_stepped) / rate

    def _deepspeed_offload_s(self, schedule: Schedule, task: Task) -> float:
        """Seconds in which gradients of one micro-batch leave, and come to be added to."""
        is_last = task.micro_batch == schedule.micro_batches - 1
        out_bytes = task.moved_bytes if schedule.micro_batches > 1 or schedule.num_ranks > 1 else 0
        if is_last:
            out_bytes += round(task.moved_bytes * _MASTER_BYTES / self.dtype.item_bytes)
        seconds = self.copy_s(out_bytes, self.hardware.device_to_host)
        return seconds + (self.copy_s(task.moved_bytes, self.hardware.host_to_device) if task.micro_batch else 0.0)

    def _laying_flat_s(self, kind: TaskKind, size_bytes: int) -> float:
        """As here, where nobody else carries the plan out."""
        return super()._laying_flat_s(kind, size_bytes) if self._engine not in _COPIES else 0.0

    @property
    def _trained_frac(self) -> float:
        """Share of the parameters' bytes that is trained."""
        trained_bytes = sum(section.gradient_bytes for section in self.sections.values())
        return trained_bytes / max(1, sum(section.parameter_bytes for section in self.sections.values()))

    @property
    def _widening(self) -> float:
        """Bytes of a gradient that is reduced over those that backward made."""
        reduced_in = self.profile.reduce_dtype
        return 1.0 if reduced_in is None else reduced_in.item_bytes / self.dtype.item_bytes

    def _looping_s(self, task: Task, optimizer: Optimizer) -> float:
        """Seconds of an update whose every step is an operation of its own, on every tensor."""
        # What is moved besides the update, of a norm that is limited, stays as it is.
        stepped = stepped_dtype(self.dtype, optimizer)
        more_bytes = (LOOPED_BYTES - FUSED_BYTES) * stepped.item_bytes / DType.FLOAT32.item_bytes
        streamed_bytes = task.stepped_bytes + more_bytes * task.num_stepped
        streaming_s = streamed_bytes / self._streamed_bytes_per_s
        # Over lists a kernel of a GPU takes many tensors; a CPU has none for lists and goes tensor by tensor
        # (foreach_tensor_*_slow in aten/src/ATen/native/ForeachOpsKernels.cpp).
        takes_lists = self.profile.temporary_lists > 0 and self.hardware.device.kind is DeviceKind.CUDA
        num_loops = 0 if takes_lists else self.num_trained
        return max(streaming_s, LOOPED_OPERATIONS * num_loops * self._dispatch_s)

    def _joining_s(self, copies: _Copies, made_bytes: int, reduced_bytes: float) -> float:
        """Seconds of joining a chunk's gradients, between computations."""
        if not copies.joins_by_elements:
            return copies.reduced * made_bytes / self._streamed_bytes_per_s
        streaming_s = (made_bytes + reduced_bytes) / self._streamed_bytes_per_s
        return max(streaming_s, elements_s(made_bytes / self.dtype.item_bytes, self.hardware.device))


@dataclass(frozen=True, slots=True)
class SectionParts:
    """What a section consists of, as hooks see it."""

    num_modules: int = 0
    num_parameters: int = 0
    """That are trained."""
    gradient_bytes: int = 0
    parameter_bytes: int = 0
    """With those that are frozen."""
    is_block: bool = False

    def operations(self, hooks: _Hooks) -> float:
        """Operations of a model that its hooks take as long as."""
        per_block = hooks.per_block if self.is_block else 0.0
        return hooks.per_module * self.num_modules + hooks.per_parameter * self.num_parameters + per_block


def sections_of(workload: Workload) -> dict[Section, SectionParts]:
    """Every section of ``workload``: modules from the names of parameters, and the modules around them."""
    names: dict[Section, set[str]] = {}
    trained: dict[Section, list[int]] = {}
    sizes: dict[Section, int] = {}
    sections: list[Section] = [*OuterSection, *(BlockId(block) for block in range(workload.num_blocks))]
    for section in sections:
        names[section], trained[section], sizes[section] = set(), [], 0
    for parameter in workload.parameters:
        if parameter.block is not None:
            section = BlockId(parameter.block)
        else:
            ends = parameter.uses.gradient if parameter.uses is not None else OuterSection.PROLOGUE
            section = ends if isinstance(ends, OuterSection) else BlockId(ends)
        names[section].add(parameter.name.rpartition(".")[0])
        sizes[section] += parameter.size_bytes
        if parameter.trainable:
            trained[section].append(parameter.size_bytes)
    return {
        section: SectionParts(
            num_modules=_num_modules(names[section]) if isinstance(section, int) else len(names[section]),
            num_parameters=len(trained[section]),
            gradient_bytes=sum(trained[section]),
            parameter_bytes=sizes[section],
            is_block=isinstance(section, int),
        )
        for section in sections
    }


def _num_modules(paths: set[str]) -> int:
    """Modules of these paths, and those that hold them, up to the one that holds all."""
    split = [path.split(".") for path in paths]
    if not split:
        return 0
    common = 0
    while all(len(path) > common and path[common] == split[0][common] for path in split):
        common += 1
    return len({tuple(path[:end]) for path in split for end in range(max(1, common), len(path) + 1)})


def _reduce_once(schedule: Schedule, seconds: list[float]) -> None:
    """Gradients are reduced behind the last backward alone; where devices step, nothing hides it."""
    reduced_s, step = 0.0, None
    hosts_step = any(task.kind is TaskKind.CPU_ADAM for task in schedule.tasks)
    for index, task in enumerate(schedule.tasks):
        if task.kind is TaskKind.DEVICE_ADAM:
            step = index
        if task.kind is not TaskKind.REDUCE_SCATTER:
            continue
        if task.micro_batch == schedule.micro_batches - 1:
            reduced_s += seconds[index]
            if hosts_step:
                continue
        seconds[index] = 0.0
    if step is not None and not hosts_step:
        seconds[step] += reduced_s


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

"""How long a task takes alone on its lane: the one place that durations come from.

[Note: Paged state]
The moments of a paged optimizer lie in memory that the driver moves between host and device as it is used.  A plan
counts none of it on the device, so a step has them come and go: two bytes per scalar in each direction, one direction
after the other.  Where the device has room to spare they stay, and the step is faster than predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Self

from ...shared.basics.errors import CalibrationError, HardwareError, ScheduleError, WorkloadError
from ...shared.basics.units import format_bytes
from ...shared.catalogue.rank_share import machine_of_rank
from ...shared.optimizers.work import PAGED_BYTES_PER_SCALAR, device_operations_per_tensor, host_kernels
from ...shared.records.calibrated import check_figures
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import DeviceKind, Disk, Hardware, Host, Link
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.schedule import ALL_TO_ALLS, OF_OWNERS, Memory, RankAxis, Schedule, Section, Task, TaskKind
from ...shared.schema.workload import OperationClass, Phase, Workload
from ...shared.workloads.check import check_kernels, check_lowering
from ..operations.efficiency import (
    CORE_BYTES_PER_S,
    CPU_ADAM_FRAC,
    efficiency_frac,
)
from ..operations.roofline import roofline_s
from ..operations.streams import DEVICE_STEP_FRAC
from .collectives import Collective
from .copies import copy_time_s
from .fabrics import machine_collective, passing_s
from .projections import device_projection_s, host_projection_s
from .rank_lines import RankLine

OF_PHASES: Final = frozenset(
    {TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.TEACHER_FORWARD, TaskKind.LOSS}
)
"""Kinds whose seconds are timed phases, or follow from operations where none were timed."""
FLAT_PASSES: Final = 3
"""Over gradients that are laid flat, counted in ``runtime/chunks/sharded_chunk.py``."""


def swapping_sections(schedule: Schedule) -> set[Section | None]:
    """Blocks in mode SWAP, whose every saved tensor is watched; of a recomputed block an input alone travels."""
    kinds = (TaskKind.ACTIVATION_OFFLOAD, TaskKind.RECOMPUTE)
    travelling, recomputed = ({task.section for task in schedule.tasks if task.kind is kind} for kind in kinds)
    return travelling - recomputed


@dataclass(frozen=True)
class CostModel:
    """Seconds of every task on one machine, without contention.

    ``use_measured``: take a phase's measured seconds where it has them.  They hold on the machine that measured them
    alone, so whoever sets it has compared ``Workload.measured_on`` with the machine, as ``CostModel.of`` does.
    Raises CalibrationError if the calibration belongs to another machine.
    """

    hardware: Hardware
    """The machine of one rank."""
    calibration: Calibration | None = None
    use_measured: bool = field(default=False, kw_only=True)
    together: Hardware | None = field(default=None, kw_only=True)
    """The machine of all ranks, if there are several."""
    optimizer: Optimizer = field(default=Optimizer.ADAMW, kw_only=True)
    """What CPU Adam and device Adam step with."""
    num_ranks: int = field(default=1, kw_only=True)
    """Of all ranks that have the same schedule."""
    shard_ranks: int | None = field(default=None, kw_only=True)
    """Ranks of a shard group; None where they form none."""
    num_stages: int = field(default=1, kw_only=True)
    """Stages of a pipeline, one of which these ranks are; all have ranks on the machine."""
    _collective_s: dict[tuple[TaskKind, int, RankLine], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Collectives seen so far."""
    _modelled: dict[int, tuple[Phase, float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Phases seen so far by ``id``, since equal blocks share theirs; held here, a phase's id is not used again."""

    def __post_init__(self) -> None:
        if self.calibration is not None and self.calibration.hardware_name != self.hardware.name:
            raise CalibrationError(
                f"the calibration was made on {self.calibration.hardware_name} but the machine is "
                f"{self.hardware.name}. Calibrate on this machine, or predict without a calibration."
            )

    @classmethod
    def of(
        cls, workload: Workload, hardware: Hardware, calibration: Calibration | None = None, *, num_ranks: int = 1
    ) -> Self:
        """The costs of ``workload`` on ``hardware``, by its measured seconds if they were measured there.

        Of ``num_ranks`` equal ranks, each has its share of the machine (``shared/catalogue/rank_share.py``), and so has
        each of the other stages' where the workload is a stage of a pipeline.
        Raises WorkloadError if its blocks carry nothing but seconds of another machine, or were traced with kernels
        that ``hardware`` does not have, HardwareError if it has fewer devices than ranks, and CalibrationError if the
        calibration is of other figures than ``hardware`` has (``check_figures``).
        """
        if calibration is not None:
            check_figures(calibration, hardware)
        check_kernels(workload, hardware)
        check_lowering(workload, hardware)
        use_measured = workload.measured_on == hardware.name
        if not use_measured and not any(profile.forward.operations for profile in workload.profiles):
            origin = f"seconds measured on {workload.measured_on}" if workload.measured_on is not None else "no seconds"
            raise WorkloadError(
                f"the blocks of {workload.model_name} list no operations and carry {origin}, which say nothing about "
                f"{hardware.name}. Trace the model again, or measure it on {hardware.name}."
            )
        num_stages = workload.num_stages
        if num_ranks * num_stages == 1:
            return cls(hardware, calibration, use_measured=use_measured)
        own = machine_of_rank(hardware, num_ranks * num_stages)
        return cls(
            own,
            calibration,
            use_measured=use_measured,
            together=hardware,
            num_ranks=num_ranks,
            num_stages=num_stages,
        )

    def durations_s(self, schedule: Schedule) -> tuple[float, ...]:
        """Seconds of every task of ``schedule``, in its order.

        Raises HardwareError if the machine has no disk, or too small a one, for what lies there.
        """
        check_disk(schedule, self.hardware)
        priced = self.stepping(schedule.optimizer).among(schedule.num_ranks, schedule.shard_ranks)
        swapping = swapping_sections(schedule)
        return tuple(
            [
                priced.task_s(task) + (self.swap_s(task.kind) if task.section in swapping else 0.0)
                for task in schedule.tasks
            ]
        )

    def stepping(self, optimizer: Optimizer) -> CostModel:
        """The costs on the same machine with this optimizer."""
        return self if optimizer is self.optimizer else replace(self, optimizer=optimizer)

    def among(self, num_ranks: int, shard_ranks: int | None) -> CostModel:
        """The costs on the same machine of ranks in such shard groups."""
        shard_ranks = None if shard_ranks == num_ranks else shard_ranks
        if (num_ranks, shard_ranks) == (self.num_ranks, self.shard_ranks):
            return self
        return replace(self, num_ranks=num_ranks, shard_ranks=shard_ranks)

    def task_s(self, task: Task) -> float:
        """Seconds of ``task`` alone on its lane: modelled, measured or stated seconds * factor + overhead of its kind.

        And what the bytes that have come for it cost (``arrival_s_per_byte``).

        Raises ScheduleError if its kind has no price here and it states no seconds.
        """
        seconds = self._task_s(task)
        return seconds + self.arrival_s_per_byte(task.kind) * task.arrived_bytes if task.arrived_bytes else seconds

    def arrival_s_per_byte(self, kind: TaskKind) -> float:
        """What a task of ``kind`` pays for every byte that it is the first to read on the device; calibrated."""
        return 0.0 if self.calibration is None else self.calibration.arrival(kind)

    def overhead_s(self, kind: TaskKind) -> float:
        """What every task of ``kind`` costs alike; calibrated."""
        return 0.0 if self.calibration is None else self.calibration.overhead(kind)

    def swap_s(self, kind: TaskKind) -> float:
        """What a task of ``kind`` takes longer because its block is in mode SWAP; calibrated."""
        return 0.0 if self.calibration is None else self.calibration.swap_s(kind)

    def _task_s(self, task: Task) -> float:
        if task.stated_s is not None:
            return self._calibrated(task.stated_s, task.kind)
        match task.kind:
            case kind if kind in OF_PHASES:
                assert task.phase is not None
                return self.phase_s(task.phase, task.kind)
            case TaskKind.GATHER | TaskKind.ACTIVATION_FETCH:
                return self._calibrated(self.copy_s(task.moved_bytes, self.hardware.host_to_device), task.kind)
            case TaskKind.GRADIENT_OFFLOAD | TaskKind.ACTIVATION_OFFLOAD:
                return self._calibrated(self.copy_s(task.moved_bytes, self.hardware.device_to_host), task.kind)
            case TaskKind.GRADIENT_ACCUMULATE | TaskKind.GRADIENT_NORM:
                # They stream through host memory as CPU Adam does; a norm has read what stays on the device there.
                seconds = task.stepped_bytes / host_adam_bytes_per_s(self.hardware.host)
                return self._calibrated(seconds + task.moved_bytes / self._streamed_bytes_per_s, task.kind)
            case TaskKind.CPU_ADAM | TaskKind.DEVICE_ADAM:
                return self.adam_s(task.num_stepped, task.stepped_bytes, task.num_tensors, task.kind)
            case TaskKind.GRADIENT_PROJECTION | TaskKind.PARAMETER_PROJECTION:
                done = task.flops, task.stepped_bytes, task.num_tensors
                return self._calibrated(device_projection_s(self.hardware.device, *done), task.kind)
            case TaskKind.HOST_GRADIENT_PROJECTION | TaskKind.HOST_PARAMETER_PROJECTION:
                done = task.flops, task.stepped_bytes, task.num_tensors
                return self._calibrated(host_projection_s(self.hardware, *done), task.kind)
            case TaskKind.ALL_GATHER | TaskKind.REDUCE_SCATTER | TaskKind.ALL_REDUCE:
                return self._calibrated(self._meeting_s(task), task.kind)
            case kind if kind in OF_OWNERS:
                return self._calibrated(self._meeting_s(task), task.kind)
            case TaskKind.SEQUENCE_EXCHANGE:
                return self._calibrated(self._exchanges_s(task), task.kind)
            case TaskKind.RECEIVE | TaskKind.SEND:
                return self._calibrated(self._passing_s(task.moved_bytes), task.kind)
            case TaskKind.DISK_READ:
                disk = disk_of(self.hardware)
                return self._calibrated(disk.latency_s + task.moved_bytes / disk.read_bytes_per_s, task.kind)
            case TaskKind.DISK_WRITE:
                disk = disk_of(self.hardware)
                return self._calibrated(disk.latency_s + task.moved_bytes / disk.write_bytes_per_s, task.kind)
            case _:
                raise ScheduleError(
                    f"{task.name} states no seconds, and no task of kind {task.kind} has a price. Let the schedule "
                    f"state its seconds (Task.stated_s)."
                )

    def phase_s(self, phase: Phase, kind: TaskKind) -> float:
        """Seconds of a compute phase that runs as a task of ``kind``; calibrated."""
        seen = self._modelled.get(id(phase))
        if seen is None or seen[0] is not phase:
            measured = self.use_measured and phase.measured_s is not None
            seconds = phase.measured_s if measured else roofline_s(phase, self.hardware.device)
            assert seconds is not None
            if phase.looked_up_bytes:
                seconds += self.lookup_s(phase.looked_up_bytes)
            seen = self._modelled[id(phase)] = (phase, seconds)
        return self._calibrated(seen[1], kind)

    def lookup_s(self, size_bytes: int) -> float:
        """Seconds of looking rows of so many bytes up on the host and of their copy, before calibration.

        Rows are kilobytes that lie anywhere: they stream through host memory, read and written once, at the rate of CPU
        Adam.  The phase waits for both, since nobody knows the rows before it begins.
        """
        staging_s = 2 * size_bytes / host_adam_bytes_per_s(self.hardware.host)
        return staging_s + self.copy_s(size_bytes, self.hardware.host_to_device)

    def copy_s(self, size_bytes: int, link: Link) -> float:
        """Seconds of one copy over an otherwise idle link, before calibration."""
        return copy_time_s(size_bytes, link)

    def _meeting_s(self, task: Task) -> float:
        """Seconds of a collective, before calibration.

        On hosts, one over all ranks of several shard groups goes by way of both axes: what a reduce-scatter in every
        group leaves is all-reduced over the groups and gathered in them again ([Note: Shard groups] in
        ``shared/compile/compile.py``).
        """
        is_world = task.axis is RankAxis.WORLD
        if self.shard_ranks is None or (is_world and self.hardware.device.kind is not DeviceKind.CPU):
            line = RankLine.of(RankAxis.WORLD, task.num_ranks, None, self.num_stages)
            return self.collective_s(task.kind, task.moved_bytes, line)
        if not is_world:
            line = RankLine.of(task.axis, self.num_ranks, self.shard_ranks, self.num_stages)
            return self.collective_s(task.kind, task.moved_bytes, line)
        within, across = (
            RankLine.of(axis, self.num_ranks, self.shard_ranks, self.num_stages)
            for axis in (RankAxis.SHARD, RankAxis.REPLICA)
        )
        part_bytes = -(-task.moved_bytes // within.num_ranks)
        return (
            self.collective_s(TaskKind.REDUCE_SCATTER, task.moved_bytes, within)
            + self.collective_s(TaskKind.ALL_REDUCE, part_bytes, across)
            + self.collective_s(TaskKind.ALL_GATHER, task.moved_bytes, within)
        )

    def _exchanges_s(self, task: Task) -> float:
        """Seconds of all-to-alls of the ranks that share a sequence, one after the other, before calibration.

        ``num_tensors`` of them have ``moved_bytes`` together; each is taken to have an equal part.
        """
        number = max(1, task.num_tensors)
        line = RankLine(task.num_ranks)
        if task.num_ranks < self.num_ranks:
            line = RankLine.of(task.axis, self.num_ranks, task.num_ranks, self.num_stages)
        return number * self.collective_s(task.kind, -(-task.moved_bytes // number), line)

    def _passing_s(self, size_bytes: int) -> float:
        """Seconds of sending so many bytes to a neighbour and receiving as many, before calibration."""
        assert self.together is not None, "stages have a machine together"
        return passing_s(size_bytes, self.together, self.num_ranks * self.num_stages)

    def collective_s(self, kind: TaskKind, size_bytes: int, line: RankLine) -> float:
        """Seconds of a collective of the ranks of ``line`` on otherwise idle links, before calibration.

        The fastest way that the links allow (``sim/costs/fabrics.py``); ``size_bytes`` is the whole buffer.
        """
        key = (kind, size_bytes, line)
        seconds = self._collective_s.get(key)
        if seconds is None:
            assert self.together is not None, "several ranks have a machine together"
            collective = Collective.ALL_TO_ALL if kind in ALL_TO_ALLS else Collective(kind.value)
            found = machine_collective(collective, size_bytes, self.together, line)
            seconds = self._collective_s[key] = found.seconds + self._laying_flat_s(kind, size_bytes)
        return seconds

    def _laying_flat_s(self, kind: TaskKind, size_bytes: int) -> float:
        """Seconds of laying gradients flat on an accelerator before they are scattered: zeros, a read, a write.

        ``ShardedChunk.flattened`` in the runtime does it.  A CPU has it in what its collectives were measured to take.
        """
        if kind is not TaskKind.REDUCE_SCATTER or self.hardware.device.kind is DeviceKind.CPU:
            return 0.0
        return FLAT_PASSES * size_bytes / self._streamed_bytes_per_s

    def adam_s(self, num_stepped: int, stepped_bytes: int, num_tensors: int, kind: TaskKind) -> float:
        """Seconds of a step over ``num_stepped`` scalars that moves ``stepped_bytes``; calibrated.

        Adam does about a dozen operations per element for 28 to 32 bytes of traffic, so memory bounds it: bytes over
        the rate of the memory that holds the state.  On the host, kernels that pass over whole tensors move more, no
        step is faster than the cores' arithmetic, and each of ``num_tensors`` takes dispatches of its own ([Note: Steps
        on a host] in ``shared/optimizers/work.py``).  Where the machine states seconds per scalar of the optimizer,
        these count instead.  Paged moments come to the device and go back ([Note: Paged state]).  Nothing to step costs
        the calibrated overhead alone.
        """
        if num_stepped == 0:
            return self._calibrated(0.0, kind)
        if kind is TaskKind.CPU_ADAM or self.hardware.device.kind is DeviceKind.CPU:
            return self._calibrated(self._host_step_s(num_stepped, stepped_bytes, num_tensors), kind)
        return self._calibrated(self._device_step_s(num_stepped, stepped_bytes, num_tensors), kind)

    def _host_step_s(self, num_stepped: int, stepped_bytes: int, num_tensors: int) -> float:
        """Seconds of a step by the host's cores, with the optimizer's own factor."""
        named, host = _unpaged(self.optimizer), self.hardware.host
        kernels, stated, factor, tensor_s = host_kernels(named), host.optimizer_s_per_scalar.get(named), 1.0, None
        if self.calibration is not None:
            factor = self.calibration.host_optimizer_factors.get(named, 1.0)
            tensor_s = self.calibration.host_optimizer_tensor_s.get(named)
        if tensor_s is None:
            tensor_s = kernels.operations_per_tensor * self._dispatch_s
        if stated is not None:
            return factor * stated * num_stepped + tensor_s * num_tensors
        moving_s = max(stepped_bytes, kernels.bytes_per_scalar * num_stepped) / host_adam_bytes_per_s(host)
        arithmetic_s = kernels.core_s_per_scalar * num_stepped / step_cores(self.hardware)
        return factor * max(moving_s, arithmetic_s) + tensor_s * num_tensors

    def _device_step_s(self, num_stepped: int, stepped_bytes: int, num_tensors: int) -> float:
        """Seconds of a step by an accelerator, with the optimizer's own factor."""
        named, device = _unpaged(self.optimizer), self.hardware.device
        stated, factor, tensor_s = device.optimizer_s_per_scalar.get(named), 1.0, None
        if self.calibration is not None:
            factor = self.calibration.device_optimizer_factors.get(named, 1.0)
            tensor_s = self.calibration.device_optimizer_tensor_s.get(named)
        if tensor_s is None:
            tensor_s = device_operations_per_tensor(named) * self._dispatch_s
        moving_s = stepped_bytes / self._stepped_bytes_per_s if stated is None else stated * num_stepped
        stepping_s, dispatching_s = factor * (device.launch_overhead_s + moving_s), tensor_s * num_tensors
        # Who waits for every kernel dispatches the next one afterwards; the others run ahead ([Note: Launches]
        # in ``sim/operations/roofline.py``).
        seconds = stepping_s + dispatching_s if named.is_of_bitsandbytes else max(stepping_s, dispatching_s)
        if named is not self.optimizer:
            links = (self.hardware.host_to_device, self.hardware.device_to_host)
            seconds += sum(self.copy_s(PAGED_BYTES_PER_SCALAR * num_stepped, link) for link in links)
        return seconds

    @property
    def _streamed_bytes_per_s(self) -> float:
        """Bytes of device memory per second that element-wise operations move."""
        device = self.hardware.device
        return device.memory_bandwidth_bytes_per_s * efficiency_frac(device, OperationClass.ELEMENTWISE)

    @property
    def _stepped_bytes_per_s(self) -> float:
        """Bytes of device memory per second that optimizers move."""
        device = self.hardware.device
        share = device.efficiency.get(OperationClass.ELEMENTWISE, DEVICE_STEP_FRAC)
        return device.memory_bandwidth_bytes_per_s * share

    @property
    def _dispatch_s(self) -> float:
        """Seconds in which the host dispatches one operation of a step, which no module and no autograd is around."""
        return self.hardware.device.launch_overhead_s

    def _calibrated(self, seconds: float, kind: TaskKind) -> float:
        if self.calibration is None:
            return seconds
        return seconds * self.calibration.factor(kind) + self.calibration.overhead(kind)


def _unpaged(optimizer: Optimizer) -> Optimizer:
    """A paged optimizer steps as the other does."""
    return Optimizer.ADAMW_8BIT if optimizer is Optimizer.PAGED_ADAMW_8BIT else optimizer


def step_cores(hardware: Hardware) -> int:
    """Cores that operations of a step on the host are spread over.

    All of them, or those that one thread's operations have where the CPU is the device ([Note: A core for the lanes]).
    """
    cores = hardware.host.num_cores
    return cores if hardware.device.kind is DeviceKind.CUDA else max(1, cores - 1)


def host_adam_bytes_per_s(host: Host) -> float:
    """Bytes of memory per second that CPU Adam moves on ``host``: measured, else a share of its memory bandwidth."""
    if host.adam_bytes_per_s is not None:
        return host.adam_bytes_per_s
    return min(host.memory_bandwidth_bytes_per_s * CPU_ADAM_FRAC, host.num_cores * CORE_BYTES_PER_S)


def disk_of(hardware: Hardware) -> Disk:
    """The disk that chunks lie on.  Raises HardwareError if the machine has none."""
    if hardware.disk is None:
        raise HardwareError(
            f"{hardware.name} has no disk, but the plan has chunks on one (n_disk_state). Name one with "
            f"--set disk=NAME (protwin hardware parts lists them), measure one with protwin hardware probe "
            f"--disk-folder FOLDER, or set n_disk_state to 0."
        )
    return hardware.disk


def check_disk(schedule: Schedule, hardware: Hardware) -> None:
    """Raise HardwareError unless ``hardware`` has a disk for what ``schedule`` keeps there."""
    if (size_bytes := schedule.static_bytes(Memory.DISK)) and size_bytes > disk_of(hardware).capacity_bytes:
        raise HardwareError(
            f"chunks take {format_bytes(size_bytes)} of the disk {disk_of(hardware).name}, which has "
            f"{format_bytes(disk_of(hardware).capacity_bytes)} for files (disk.capacity_bytes). Lower n_disk_state, or "
            f"use a larger disk."
        )

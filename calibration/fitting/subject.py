"""What is measured: a model, its batch, and the machine that trains it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ...runtime.devices.chunk_file import check_folder
from ...runtime.devices.cpu_device import CpuDevice
from ...runtime.devices.device import TrainingDevice
from ...runtime.model.batches import Batch, Loss, loss_of
from ...runtime.model.snapshot import left_as_found
from ...runtime.optimizers.chunk_optimizer import MakeOptimizer, default_optimizer
from ...runtime.ranks.agreement import agreed
from ...runtime.ranks.world import World, exchanged
from ...runtime.training.carry_out import carry_out
from ...runtime.training.training import Training
from ...shared.basics.errors import CalibrationError
from ...shared.catalogue.rank_share import machine_of_rank
from ...shared.schema.hardware import Hardware
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
from ...shared.schema.workload import DType, Workload
from .measurement_plans import bootstrap_plans

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """A model on a machine, ready to be measured.  Runs train copies of the model."""

    model: nn.Module
    batch: Batch
    workload: Workload
    """Of this model and batch."""
    hardware: Hardware
    make_device: Callable[[], TrainingDevice] = CpuDevice
    """Gives a fresh device for each run."""
    make_optimizer: MakeOptimizer = default_optimizer
    loss: Loss | None = None
    """Of the model's output and a batch; None: the output has its own."""
    disk_folder: Path | None = None
    """On the hardware's disk, where chunks may lie; None: nothing is measured of a disk."""
    world: World | None = None
    """The ranks that all measure, each a model of its own on its part of the hardware; None: this process alone.

    Its collective lane is open.  Plans are for one workload: ``on_workload_of_first`` gives all ranks that of rank 0.
    """
    optimizer: Optimizer = Optimizer.ADAMW
    """What plans step with; ``make_optimizer`` makes it."""
    autocast: DType | None = None
    """The element type that forward computes in; None: that of the parameters."""

    def plans(self) -> tuple[Plan, ...]:
        """Those that a calibration is fitted to (``bootstrap_plans``)."""
        chosen = bootstrap_plans(self.workload, has_disk=self.measures_disk, num_ranks=self.num_ranks)
        return tuple(Plan.model_validate(plan.model_dump() | {"optimizer": self.optimizer}) for plan in chosen)

    def left_as_found(self) -> AbstractContextManager[Any]:
        """Within the block plans are run; the model is afterwards what it was."""
        return left_as_found(self.model)

    def begin(self, plan: Plan, *, disk_folder: Path | None = None) -> Training:
        """A training of a copy of the model by ``plan``, on a device of its own; a context manager."""
        return carry_out(
            copy.deepcopy(self.model),
            plan,
            self.workload,
            optimizer=self.make_optimizer,
            device=self.make_device(),
            disk_folder=disk_folder,
        )

    def run_step(self, training: Training) -> None:
        """One step of ``training`` on as many micro-batches as its plan has, each the subject's batch."""
        device_type, dtype = training.device.torch_device.type, self.autocast
        for _ in range(training.plan.micro_batches):
            with nullcontext() if dtype is None else torch.autocast(device_type, dtype=getattr(torch, dtype)):
                loss = loss_of(training.model, self.batch, self.loss)
            loss.backward()  # type: ignore[no-untyped-call]
        training.step()

    def plain_step(self) -> Callable[[], None] | None:
        """A step on the same batch without a plan, that plans are held against; None: there is none."""
        return None

    @property
    def num_ranks(self) -> int:
        """Ranks that plans are for."""
        return 1 if self.world is None else self.world.num_ranks

    @property
    def hardware_of_rank(self) -> Hardware:
        """The part of the machine that this process has."""
        return self.hardware if self.world is None else machine_of_rank(self.hardware, self.world.num_ranks)

    def of_all(self, value: T) -> list[T]:
        """What every rank gives for ``value``, by rank; to be called on all of them."""
        return [value] if self.world is None else exchanged(self.world, value)

    def of_first(self, work: Callable[[], T]) -> T:
        """What rank 0's ``work`` gives, on all ranks; what it raises, all raise."""
        leads = self.world is None or self.world.rank == 0
        found = agreed(self.world, lambda: [work()] if leads else [])
        return next(value for of_rank in self.of_all(found) for value in of_rank)

    def on_workload_of_first(self) -> Subject:
        """The same with the workload that rank 0 has timed while all did, filed under the machine of all ranks."""
        traced = self.of_first(lambda: self.workload)
        workload = traced.model_copy(update={"measured_on": traced.measured_on and self.hardware.name})
        return replace(self, workload=workload)

    @property
    def measures_disk(self) -> bool:
        """Whether there is a folder on the disk.  Raises CalibrationError if the hardware has none, or FileError."""
        if self.disk_folder is not None:
            check_disk_described(self.hardware, self.disk_folder)
            if self.num_ranks > 1:
                raise CalibrationError(
                    f"{self.num_ranks} ranks have no chunks on a disk so far: one rank alone knows them. Measure the "
                    f"disk without --ranks, or leave --disk-folder out."
                )
        return self.disk_folder is not None


def check_disk_described(hardware: Hardware, disk_folder: Path) -> None:
    """Raise CalibrationError unless ``hardware`` has a disk, and FileError if ``disk_folder`` is no folder."""
    if hardware.disk is None:
        raise CalibrationError(
            f"{hardware.name} has no disk, so there is nothing that measurements in {disk_folder} could be compared "
            f"with. Describe it: protwin hardware probe --disk-folder {disk_folder} --output machine.toml"
        )
    check_folder(disk_folder)

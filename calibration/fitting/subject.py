"""What is measured: a model, its batch, and the machine that trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ...runtime.devices.chunk_file import check_folder
from ...runtime.devices.cpu_device import CpuDevice
from ...runtime.devices.device import TrainingDevice
from ...runtime.model.batches import Batch, Loss
from ...runtime.optimizers.chunk_optimizer import MakeOptimizer, default_optimizer
from ...shared.basics.errors import CalibrationError
from ...shared.schema.hardware import Hardware
from ...shared.schema.workload import Workload


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

    @property
    def measures_disk(self) -> bool:
        """Whether there is a folder on the disk.  Raises CalibrationError if the hardware has none, or FileError."""
        if self.disk_folder is not None:
            check_disk_described(self.hardware, self.disk_folder)
        return self.disk_folder is not None


def check_disk_described(hardware: Hardware, disk_folder: Path) -> None:
    """Raise CalibrationError unless ``hardware`` has a disk, and FileError if ``disk_folder`` is no folder."""
    if hardware.disk is None:
        raise CalibrationError(
            f"{hardware.name} has no disk, so there is nothing that measurements in {disk_folder} could be compared "
            f"with. Describe it: protwin hardware probe --disk-folder {disk_folder} --output machine.toml"
        )
    check_folder(disk_folder)

"""What is measured: a model, its batch, and the machine that trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ...runtime.devices.cpu_device import CpuDevice
from ...runtime.devices.device import TrainingDevice
from ...runtime.model.batches import Batch, Loss
from ...runtime.optimizers.chunk_optimizer import MakeOptimizer, default_optimizer
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

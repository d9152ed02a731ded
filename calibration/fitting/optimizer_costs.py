"""How much longer the steps of every optimizer take than the cost model says, measured where they can be made.

AdamW has factors that are fitted to what plans measured; the others are stepped by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch

from ...runtime.devices.device import TrainingDevice
from ...runtime.devices.probe import seconds_on, worker
from ...runtime.optimizers.named import named_optimizer
from ...shared.basics.errors import PlanError
from ...shared.optimizers.work import traffic_bytes
from ...shared.schema.hardware import Hardware
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.schedule import Lane, TaskKind
from ...shared.schema.workload import DType
from ...sim.costs.task_costs import CostModel

_SHAPE: Final = (1024, 4096)
"""A matrix, of which Adafactor keeps factors."""
_CUDA_SHAPE: Final = (8192, 8192)
MEASURED: Final[tuple[Optimizer, ...]] = tuple(
    optimizer for optimizer in Optimizer if optimizer not in (Optimizer.ADAMW, Optimizer.PAGED_ADAMW_8BIT)
)
"""A paged optimizer does what the other does, once its pages are there."""
OptimizerFactors = dict[Optimizer, float]


def optimizer_factors(
    device: TrainingDevice, hardware: Hardware, *, seconds: float = 4.0
) -> tuple[OptimizerFactors, OptimizerFactors]:
    """Measured over modelled seconds of a step: on the host's lane of CPU Adam, and on a CUDA device.

    The model is that of ``hardware`` without a calibration.  Optimizers of a library that is not there are left out.
    """
    is_cuda = device.torch_device.type == "cuda"
    share_s = seconds / (len(MEASURED) * (2 if is_cuda else 1))
    on_host: OptimizerFactors = {}
    on_device: OptimizerFactors = {}
    with worker(Lane.CPU_OPTIM, device) as timed:
        for optimizer in MEASURED:
            with suppress(PlanError):
                measured_s = timed(_step(optimizer, torch.device("cpu"), _SHAPE), share_s)
                on_host[optimizer] = measured_s / _modelled_s(optimizer, hardware, TaskKind.CPU_ADAM, _SHAPE)
    for optimizer in on_host if is_cuda else ():
        measured_s = seconds_on(_step(optimizer, device.torch_device, _CUDA_SHAPE), device.torch_device, share_s)
        on_device[optimizer] = measured_s / _modelled_s(optimizer, hardware, TaskKind.DEVICE_ADAM, _CUDA_SHAPE)
    return on_host, on_device


def _modelled_s(optimizer: Optimizer, hardware: Hardware, kind: TaskKind, shape: tuple[int, int]) -> float:
    moved_bytes = traffic_bytes((_dtype(optimizer), shape), optimizer)
    return CostModel(hardware, optimizer=optimizer).adam_s(shape[0] * shape[1], moved_bytes, kind)


def _dtype(optimizer: Optimizer) -> DType:
    return DType.BFLOAT16 if optimizer is Optimizer.ADAMW_BF16 else DType.FLOAT32


def _step(optimizer: Optimizer, place: torch.device, shape: tuple[int, int]) -> Callable[[], None]:
    """One step of a weight of ``shape``.  Raises PlanError if the library that steps it is not there."""
    make = named_optimizer(optimizer)
    weight = torch.zeros(shape, dtype=getattr(torch, _dtype(optimizer)), device=place, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    stepper = make([{"params": [weight]}])
    return lambda: stepper.step()

"""How much longer the steps of every optimizer take than the cost model says, measured where they can be made.

AdamW has factors that are fitted to what plans measured; the others are stepped by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Final

import torch

from ...runtime.devices.device import TrainingDevice
from ...runtime.devices.probe import seconds_on, worker
from ...runtime.optimizers.named import named_optimizer
from ...shared.basics.errors import PlanError
from ...shared.optimizers.work import host_kernels, traffic_bytes
from ...shared.schema.hardware import Hardware
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.schedule import Lane, TaskKind
from ...shared.schema.workload import DType
from ...sim.costs.task_costs import CostModel

_SHAPE: Final = (1024, 4096)
"""A matrix, of which Adafactor keeps factors."""
_CUDA_SIDE: Final = 8192
"""Of the same on an accelerator, or less where a budget is smaller."""
_SCALAR_BYTES: Final = 64
"""On the device: weight, gradient, moments, and as much room beside them."""
MEASURED: Final[tuple[Optimizer, ...]] = tuple(
    optimizer for optimizer in Optimizer if optimizer not in (Optimizer.ADAMW, Optimizer.PAGED_ADAMW_8BIT)
)
"""A paged optimizer does what the other does, once its pages are there."""
_SMALL_SHAPE: Final = (64, 64)
"""The smallest matrix whose 8-bit moments are quantized."""
_NUM_SMALL: Final = 8


@dataclass(frozen=True)
class OptimizerCosts:
    """What steps of each optimizer take in one place."""

    factors: dict[Optimizer, float] = field(default_factory=dict)
    """Measured over modelled seconds of the scalars."""
    tensor_s: dict[Optimizer, float] = field(default_factory=dict)
    """Seconds for every tensor on top, of optimizers that step one by one."""


def optimizer_costs(
    device: TrainingDevice, hardware: Hardware, *, seconds: float = 4.0
) -> tuple[OptimizerCosts, OptimizerCosts]:
    """What steps take on the host's lane of CPU Adam, and on a CUDA device.

    The model is that of ``hardware`` without a calibration.  Optimizers of a library that is not there are left out.
    """
    is_cuda = device.torch_device.type == "cuda"
    share_s = seconds / (2 * len(MEASURED) * (2 if is_cuda else 1))
    on_host, on_device = OptimizerCosts(), OptimizerCosts()
    with worker(Lane.CPU_OPTIM, device) as timed:
        for optimizer in MEASURED:
            with suppress(PlanError):
                place = torch.device("cpu")
                large_s = timed(_step(optimizer, place, [_SHAPE]), share_s)
                small_s = timed(_step(optimizer, place, [_SMALL_SHAPE] * _NUM_SMALL), share_s)
                _note(on_host, optimizer, hardware, TaskKind.CPU_ADAM, _SHAPE, large_s, small_s)
    for optimizer in on_host.factors if is_cuda else ():
        place, shape = device.torch_device, _cuda_shape(device)
        large_s = seconds_on(_step(optimizer, place, [shape]), place, share_s)
        small_s = seconds_on(_step(optimizer, place, [_SMALL_SHAPE] * _NUM_SMALL), place, share_s)
        _note(on_device, optimizer, hardware, TaskKind.DEVICE_ADAM, shape, large_s, small_s)
    return on_host, on_device


def _cuda_shape(device: TrainingDevice) -> tuple[int, int]:
    """A matrix whose step is long, and within the device's budget."""
    side = _CUDA_SIDE
    while device.limit_bytes is not None and _SCALAR_BYTES * side * side > device.limit_bytes and side > _SHAPE[0]:
        side //= 2
    return side, side


def _note(
    costs: OptimizerCosts,
    optimizer: Optimizer,
    hardware: Hardware,
    kind: TaskKind,
    shape: tuple[int, int],
    large_s: float,
    small_s: float,
) -> None:
    """Tell seconds of scalars from those of tensors: a step takes so much for each of both.

    AdamW's seconds for a tensor are within what its plans measured, and other fused optimizers are taken to have them.
    """
    scalars, few = prod(shape), prod(_SMALL_SHAPE)
    tensor_s = 0.0
    if host_kernels(optimizer).operations_per_tensor:
        tensor_s = max(0.0, (small_s / _NUM_SMALL - large_s * few / scalars) / (1 - few / scalars))
        # Small steps that were disturbed must leave the scalars of the large one something.
        tensor_s = costs.tensor_s[optimizer] = min(tensor_s, large_s / 2)
    costs.factors[optimizer] = (large_s - tensor_s) / _modelled_s(optimizer, hardware, kind, shape)


def _modelled_s(optimizer: Optimizer, hardware: Hardware, kind: TaskKind, shape: tuple[int, int]) -> float:
    """Seconds of the scalars alone."""
    moved_bytes = traffic_bytes((_dtype(optimizer), shape), optimizer)
    return CostModel(hardware, optimizer=optimizer).adam_s(prod(shape), moved_bytes, 0, kind)


def _dtype(optimizer: Optimizer) -> DType:
    return DType.BFLOAT16 if optimizer is Optimizer.ADAMW_BF16 else DType.FLOAT32


def _step(optimizer: Optimizer, place: torch.device, shapes: Sequence[tuple[int, int]]) -> Callable[[], None]:
    """One step of weights of these shapes.  Raises PlanError if the library that steps them is not there."""
    make = named_optimizer(optimizer)
    dtype = getattr(torch, _dtype(optimizer))
    weights = [torch.zeros(shape, dtype=dtype, device=place, requires_grad=True) for shape in shapes]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    stepper = make([{"params": weights}])
    return lambda: stepper.step()

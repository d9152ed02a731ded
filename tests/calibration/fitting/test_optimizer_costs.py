"""Steps of optimizers, measured: a prediction with the factors gives the measured seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from protwin.calibration.fitting import optimizer_costs
from protwin.calibration.fitting.optimizer_costs import MEASURED, OptimizerCosts
from protwin.runtime import CpuDevice
from protwin.shared.optimizers.work import traffic_bytes
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import DType
from protwin.sim.costs.task_costs import CostModel
from tests.sim.hand_made import machine

SMALL = (16, 32)
LARGE = (64, 128)
BOX = machine(kind=DeviceKind.CPU)


def calibration_of(costs: OptimizerCosts) -> Calibration:
    return Calibration(
        hardware_name=BOX.name,
        machine="",
        host_optimizer_factors=costs.factors,
        host_optimizer_tensor_s=costs.tensor_s,
    )


def predicted_s(costs: OptimizerCosts, optimizer: Optimizer, shapes: list[tuple[int, int]]) -> float:
    """Seconds of a step of these weights on the host."""
    moved = sum(traffic_bytes((DType.FLOAT32, shape), optimizer) for shape in shapes)
    scalars = sum(rows * columns for rows, columns in shapes)
    model = CostModel(BOX, calibration_of(costs), optimizer=optimizer)
    return model.adam_s(scalars, moved, len(shapes), TaskKind.CPU_ADAM)


def test_predictions_are_what_was_measured_of_large_and_of_many_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a made-up machine, whose steps take so much for a tensor and so much for a scalar."""
    monkeypatch.setattr(optimizer_costs, "_SHAPE", LARGE)
    monkeypatch.setattr(optimizer_costs, "_SMALL_SHAPE", SMALL)

    def taken_s(weights: list[torch.Tensor], is_fused: bool) -> float:
        return sum((0 if is_fused else 3e-5) + 4e-9 * weight.numel() for weight in weights)

    steps: list[float] = []

    class Timed:
        def __init__(self, make: Any, groups: list[dict[str, Any]]) -> None:
            (weights,) = (group["params"] for group in groups)
            keywords = make.keywords if isinstance(make, partial) else {}
            self.seconds = taken_s(weights, bool(keywords.get("fused")))

        def step(self) -> None:
            steps.append(self.seconds)

    named = optimizer_costs.named_optimizer
    monkeypatch.setattr(optimizer_costs, "named_optimizer", lambda optimizer: partial(Timed, named(optimizer)))

    @contextmanager
    def worker(*_: Any) -> Iterator[Callable[[Callable[[], None], float], float]]:
        def timed(work: Callable[[], None], _: float) -> float:
            work()
            return steps[-1]

        yield timed

    monkeypatch.setattr(optimizer_costs, "worker", worker)
    found, on_device = optimizer_costs_of(CpuDevice())
    assert set(found.factors) == set(MEASURED)
    assert on_device == OptimizerCosts()
    assert set(found.tensor_s) == {Optimizer.ADAFACTOR, Optimizer.LION, Optimizer.ADAMW_8BIT}
    for optimizer in (Optimizer.SGD, Optimizer.LION, Optimizer.ADAMW_8BIT):
        for shapes in ([LARGE], [SMALL] * 8, [SMALL] * 100):
            expected = sum((3e-5 if optimizer in found.tensor_s else 0) + 4e-9 * rows * cols for rows, cols in shapes)
            # Blocks of 256 scalars round the traffic of 8-bit state.
            assert predicted_s(found, optimizer, shapes) == pytest.approx(expected, rel=2e-2)
    # The wrong variant: many small tensors are a large one.
    alone = OptimizerCosts(found.factors)
    zero = OptimizerCosts(found.factors, dict.fromkeys(found.tensor_s, 0.0))
    assert predicted_s(zero, Optimizer.LION, [SMALL] * 100) < 0.1 * predicted_s(found, Optimizer.LION, [SMALL] * 100)
    # Without a measurement every operation of a tensor takes a dispatch.
    launches = predicted_s(alone, Optimizer.LION, [SMALL] * 2) - predicted_s(zero, Optimizer.LION, [SMALL] * 2)
    assert launches == pytest.approx(2 * 9 * BOX.device.launch_overhead_s)


def test_quantizing_takes_longer_than_a_fused_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine: ten times and more of AdamW's seconds for a scalar, and operations for every tensor."""
    shape = (256, 512)
    monkeypatch.setattr(optimizer_costs, "_SHAPE", shape)
    found, _ = optimizer_costs_of(CpuDevice())
    seconds = {o: predicted_s(found, o, [shape]) for o in (Optimizer.ADAM, Optimizer.ADAMW_8BIT)}
    assert seconds[Optimizer.ADAMW_8BIT] > 2 * seconds[Optimizer.ADAM]


def test_optimizers_of_an_absent_library_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_costs, "_SHAPE", (8, 16))
    monkeypatch.setattr(optimizer_costs, "_SMALL_SHAPE", (4, 4))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    found, _ = optimizer_costs_of(CpuDevice())
    assert set(found.factors) == {optimizer for optimizer in MEASURED if not optimizer.is_of_bitsandbytes}


def optimizer_costs_of(device: CpuDevice) -> tuple[OptimizerCosts, OptimizerCosts]:
    return optimizer_costs.optimizer_costs(device, BOX, seconds=0.01)

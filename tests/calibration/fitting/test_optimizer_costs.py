"""Steps of optimizers, measured: a prediction with the factors gives the measured seconds."""

from __future__ import annotations

import sys

import pytest

from protwin.calibration.fitting import optimizer_costs
from protwin.calibration.fitting.optimizer_costs import MEASURED, optimizer_factors
from protwin.runtime import CpuDevice
from protwin.shared.optimizers.work import traffic_bytes
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import DType
from protwin.sim.costs.task_costs import CostModel
from tests.sim.hand_made import machine


def test_factors_turn_the_model_into_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_costs, "_SHAPE", (64, 128))
    box = machine(kind=DeviceKind.CPU)
    found, on_device = optimizer_factors(CpuDevice(), box, seconds=0.01)
    assert set(found) == set(MEASURED)
    assert on_device == {}
    # Quantizing takes ten times as long as fused AdamW and more, on any machine.
    per_scalar = {}
    for optimizer in (Optimizer.ADAM, Optimizer.ADAMW_8BIT):
        factors = Calibration(hardware_name=box.name, machine="", host_optimizer_factors=found)
        moved = traffic_bytes((DType.FLOAT32, (64, 128)), optimizer)
        bare = CostModel(box, optimizer=optimizer).adam_s(8192, moved, TaskKind.CPU_ADAM)
        known = CostModel(box, factors, optimizer=optimizer).adam_s(8192, moved, TaskKind.CPU_ADAM)
        assert known == pytest.approx(found[optimizer] * bare)
        per_scalar[optimizer] = known
    assert per_scalar[Optimizer.ADAMW_8BIT] > 2 * per_scalar[Optimizer.ADAM]


def test_optimizers_of_an_absent_library_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_costs, "_SHAPE", (8, 16))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    found, _ = optimizer_factors(CpuDevice(), machine(kind=DeviceKind.CPU), seconds=0.01)
    assert set(found) == {optimizer for optimizer in MEASURED if not optimizer.is_of_bitsandbytes}

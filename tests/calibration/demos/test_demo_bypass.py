"""The demo of a distillation does what it shows: a searched plan, carried out, in files that read back."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from protwin.calibration.demos.demo_bypass import CONFIGURATION, BypassDemo, run_bypass_demo
from protwin.calibration.fitting.measurement_plans import bootstrap_plans
from protwin.runtime.bypass.loop import HISTORY
from protwin.runtime.bypass.losses import BypassHistory
from protwin.runtime.runs.run_folder import read_state
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.plan import Plan, TrainingMethod
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from protwin.sim.engine.simulator import simulate

SMALL = BypassDemo(
    configuration={**CONFIGURATION, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4},
    batch_size=2,
    sequence_length=32,
    teacher_steps=10,
    steps=12,
    validate_every=6,
    probe_seconds=0.5,
    repeats=1,
    calibration_steps=3,
    slowdown_seconds=0.5,
)


@pytest.mark.slow
def test_the_demo_of_a_distillation(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    found = run_bypass_demo(tmp_path, console, SMALL)
    reports = BypassHistory.load(tmp_path / "run" / HISTORY).reports
    assert len(reports) == SMALL.steps
    for first, last in zip(reports[1].losses, reports[-1].losses, strict=True):
        assert first is not None
        assert last is not None
        assert last < first, "every block learns"
    assert found["measured_peak_device_bytes"] <= found["device_budget_bytes"] < found["weights_bytes"]
    assert json.loads((tmp_path / "comparison.json").read_text()) == found

    plan, measured = Plan.load(tmp_path / "plan.json"), Record.load(tmp_path / "measured.json")
    assert plan.method is TrainingMethod.BYPASS
    assert measured.num_cpu_adam_steps > 0, "weights were offloaded"
    workload, machine = Workload.load(tmp_path / "workload.json"), load_hardware(str(tmp_path / "hardware.toml"))
    calibration = Calibration.load(tmp_path / "calibration.json")
    assert calibration.num_runs == len(bootstrap_plans(workload))
    assert simulate(plan, workload, machine, calibration).iteration_s == found["predicted_iteration_s"], (
        "the files are the inputs"
    )
    state = read_state(tmp_path / "run")
    assert state is not None
    assert state.model is not None
    page = (tmp_path / "report.html").read_text()
    assert 'id="figure-block-losses"' in page
    assert page.count("model.layers.") >= 4
    assert "trained student" in page

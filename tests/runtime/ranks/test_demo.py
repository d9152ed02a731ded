"""The demo of two ranks does what it shows: a plan for both, carried out, beside DDP, in files that read back."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from protwin.calibration.demos.demo import CONFIGURATION
from protwin.calibration.demos.demo_ranks import RanksDemo, run_ranks_demo
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from protwin.sim.engine.simulator import simulate
from tests.runtime.ranks.beside_ddp import in_default_group
from tests.runtime.ranks.processes import Ranks

SMALL = RanksDemo(
    configuration={**CONFIGURATION, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    | {"num_attention_heads": 2, "num_key_value_heads": 2},
    batch_size=2,
    sequence_length=32,
    steps=6,
    probe_seconds=0.5,
    repeats=1,
    calibration_steps=2,
    slowdown_seconds=0.5,
)


@in_default_group
def shown(rank: int, folder: Path) -> tuple[dict[str, object], str]:
    console = Console(file=io.StringIO(), width=120)
    found = run_ranks_demo(folder, console, SMALL)
    return found, console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_demo_of_two_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    (found, told), (same, silence) = two_ranks.run(shown, tmp_path)
    assert found == same
    assert silence == ""
    assert found["losses_identical"] is found["weights_identical"] is True
    assert found["measured_peak_device_bytes"] <= found["device_budget_bytes"]  # type: ignore[operator]
    assert told.count("bit for bit DDP's") == 2
    assert "rank 1: peak device memory" in told

    assert json.loads((tmp_path / "comparison.json").read_text()) == found
    plan, measured = Plan.load(tmp_path / "plan.json"), Record.load(tmp_path / "measured.json")
    assert plan.num_ranks == 2
    assert [one.rank for one in measured.ranks] == [0, 1]
    workload, machine = Workload.load(tmp_path / "workload.json"), load_hardware(str(tmp_path / "machine.toml"))
    calibration = Calibration.load(tmp_path / "calibration.json")
    assert simulate(plan, workload, machine, calibration).iteration_s == found["predicted_iteration_s"], (
        "the files are the inputs"
    )
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses["planned"] == losses["DDP"]
    assert losses["DDP"][0] != losses["DDP"][1], "ranks see other data"
    trace = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in trace if event["name"] == "process_name"]
    assert names == [f"{name}: demo-llama" for name in ("simulated", "measured, rank 0", "measured, rank 1")]
    assert 'id="figure-ranks-measured"' in (tmp_path / "report.html").read_text()

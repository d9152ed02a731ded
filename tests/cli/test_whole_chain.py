"""From a configuration to a comparison, command by command, each reading what the one before it wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from protwin.calibration import calibrate
from protwin.shared.records.comparison import Comparison
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Origin, Record
from protwin.shared.schema.workload import Workload
from tests.cli.conftest import Protwin

BUDGET_BYTES = 12 * 2**20
"""Below the 16 bytes per parameter that plain training keeps on the device, for a million parameters."""
MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Many of them on a machine that is busy measure each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_a_model_goes_through_every_command(
    protwin: Protwin, protwin_here: Protwin, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What trains is a process of its own, what predicts knows no torch; what only measures need not start Python."""
    # What is measured counts for nothing here.
    monkeypatch.setitem(calibrate.__kwdefaults__, "slowdown_seconds", 1.0)
    (work / "config.json").write_text(json.dumps(MODEL))
    shape = ("--batch-size", "2", "--sequence-length", "32")
    searched = ("--model", "workload.json", "--hardware", "machine.toml", "--calibration", "calibration.json")
    budget = ("--device-budget", str(BUDGET_BYTES))
    run = ("--plan", "plan.json", "--workload", "workload.json", "--model", "config.json", "--steps", "6", *budget)
    for arguments in (
        ("trace", "--model", "config.json", *shape, "--output", "traced.json"),
        ("hardware", "probe", "--seconds", "0.5", "--output", "machine.toml"),
        (
            *("calibrate", "--model", "config.json", *shape, "--hardware", "machine.toml", "--steps", "2"),
            *("--workload-output", "workload.json", "--output", "calibration.json"),
        ),
        ("search", *searched, *budget, "--output", "plan.json"),
        ("simulate", "--plan", "plan.json", *searched, "--output", "predicted.json"),
        ("run", *run, "--output", "measured.json"),
        ("compare", "predicted.json", "measured.json", "--output", "comparison.json", "--timeline", "timeline.json"),
    ):
        measures = arguments[0] in ("trace", "hardware", "calibrate")
        result = protwin_here(*arguments) if measures else protwin(*arguments, OMP_NUM_THREADS="1")
        assert result.returncode == 0, f"{arguments}: {result.stderr}"

    workload = Workload.load(work / "workload.json")
    assert Workload.load(work / "traced.json").identity == workload.identity
    assert 16 * workload.num_parameters > BUDGET_BYTES, "plain training would not fit"
    machine = Hardware.load(work / "machine.toml")
    assert Calibration.load(work / "calibration.json").hardware_name == machine.name
    plan = Plan.load(work / "plan.json")
    predicted, measured = Record.load(work / "predicted.json"), Record.load(work / "measured.json")
    assert predicted.plan == measured.plan == plan
    assert (predicted.origin, measured.origin) == (Origin.SIMULATED, Origin.MEASURED)
    assert predicted.num_gathers == measured.num_gathers > 0
    assert predicted.num_cpu_adam_steps == measured.num_cpu_adam_steps > 0
    assert measured.peak_device_bytes <= measured.guaranteed_peak_device_bytes <= BUDGET_BYTES
    assert Comparison.load(work / "comparison.json").peak_device is not None
    assert len(json.loads((work / "timeline.json").read_text())["traceEvents"]) > len(predicted.tasks)

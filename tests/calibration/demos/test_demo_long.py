"""The demo of long sequences: what its tolerance lets through and what not, and a run of it in files that read back."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from protwin.calibration.demos import demo_long
from protwin.calibration.demos.demo_long import STANDARD, run_long_demo
from protwin.runtime.model.configurations import build_model
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload

SMALL = replace(
    STANDARD,
    configuration={**STANDARD.configuration, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 256},
    sequence_length=256,
    steps=6,
)


def test_another_order_of_sums_is_within_the_tolerance_and_wrong_gradients_are_not() -> None:
    """The first release of a public system divided gradients of tiles by their number: such a run is far out."""
    torch.manual_seed(0)
    model = build_model(dict(SMALL.configuration), "long", torch.float32, device="cpu")
    tokens = torch.randint(0, 256, (4, 1, 64), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": row, "labels": row} for row in tokens]
    plain = demo_long._plainly(model, batches)
    itself = demo_long._distance(demo_long._plainly(demo_long._moved(model), batches), plain)
    assert 0 < itself.weight < 1e-4

    def trained(factor: float) -> demo_long._Trained:
        changed = copy.deepcopy(model)
        for layer in changed.model.layers:
            layer.mlp.down_proj.weight.register_hook(lambda gradient: gradient * factor)
        optimizer = demo_long._MAKE_OPTIMIZER(changed.parameters())
        losses = []
        for batch in batches:
            flipped = {name: value for name, value in batch.items() if name == "input_ids"}
            logits = changed(**flipped).logits[:, :-1].flatten(0, 1)
            # Two tiles, summed in the other order.
            sums = [
                torch.nn.functional.cross_entropy(part, wanted, reduction="sum")
                for part, wanted in zip(logits.split(32), batch["labels"][:, 1:].flatten().split(32), strict=True)
            ]
            loss = (sums[1] + sums[0]) / len(logits)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return demo_long._Trained(changed, tuple(losses))

    assert demo_long._distance(trained(1.0), plain).is_within(itself)
    # Adam divides by the gradients' size, all but its epsilon: a factor alone is told by the weights.
    assert not demo_long._distance(trained(1 / 8), plain).is_within(itself)


@pytest.mark.slow
def test_the_demo_of_long_sequences(tmp_path: Path) -> None:
    size = replace(SMALL, probe_seconds=0.5, repeats=1, calibration_steps=3, slowdown_seconds=0.5)
    console = Console(file=io.StringIO(), width=120)
    comparison = run_long_demo(tmp_path, console, size)
    assert comparison["plain_peak_device_bytes"] >= 6 * comparison["device_budget_bytes"]
    assert comparison["measured_peak_device_bytes"] <= comparison["device_budget_bytes"]
    assert comparison["peak_error_frac"] == pytest.approx(0, abs=0.05)
    assert comparison["same_tiles_identical"]
    assert comparison["is_within_tolerance"]
    assert comparison["loss_tiles"] > 1
    assert json.loads((tmp_path / "comparison.json").read_text()) == comparison
    workload = Workload.load(tmp_path / "workload.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.workload_id == workload.identity
    for name in ("predicted", "measured"):
        assert Record.load(tmp_path / f"{name}.json").plan_id == plan.identity
    page = (tmp_path / "report.html").read_text()
    assert "Plain training under this budget ends with" in page
    assert "loss whole" in page

"""The demo of all methods in one path: every part by a plan, and each the same as without one."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from protwin.calibration.demos.demo_all import STANDARD, run_whole_demo
from protwin.calibration.demos.long_on_ranks import LongSize
from protwin.shared.schema.plan import ParallelMode, Plan

SMALL = replace(
    STANDARD,
    # All parameters fit within 0.5 of what so short a sequence needs, and nothing would be gathered.
    long=LongSize(sequence_length=128, num_tiles=2, lora_rank=4, steps=10, probe_seconds=0.2, budget_fracs=(0.3, 0.4)),
    bypass=replace(
        STANDARD.bypass,
        configuration={**STANDARD.bypass.configuration, "hidden_size": 64, "intermediate_size": 256},
        sequence_length=32,
        teacher_steps=10,
        steps=12,
        validate_every=6,
        probe_seconds=0.3,
        repeats=1,
        slowdown_seconds=0.3,
    ),
    osft_steps=6,
)


@pytest.mark.slow
def test_all_methods_in_one_path(tmp_path: Path) -> None:
    found = run_whole_demo(tmp_path, Console(file=io.StringIO(), width=120), SMALL)
    long, osft = found["long"], found["osft"]
    assert long["is_identical"]
    assert long["losses"] == long["losses_in_one_go"]
    assert osft["is_identical"]
    plans = [Plan.load(tmp_path / f"plan-{number}.json") for number in (1, 2)]
    assert [plan.parallel for plan in plans] == [ParallelMode.SHARDED, ParallelMode.REPLICATED]
    assert all(plan.mlp_tiles == plan.loss_tiles == 2 for plan in plans)
    for part, budget_bytes in zip((*long["parts"], osft), (*long["budgets_bytes"], osft["budget_bytes"]), strict=True):
        assert part["measured_peak_device_bytes"] <= budget_bytes
        assert part["num_gathers"] > 0
    for folder in (tmp_path, tmp_path / "distillation"):
        assert (folder / "report.html").stat().st_size > 10_000
    assert found["distillation"]["trained_loss"] < found["distillation"]["untrained_loss"]

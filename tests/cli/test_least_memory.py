"""``--goal least-memory`` counts every plan that a search would find for a smaller budget."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protwin.shared.basics.errors import WorkloadError
from protwin.shared.schema.workload import Workload
from protwin.shared.workloads.source import WorkloadRequest, resolve_workload
from protwin.sim.commands import model_choice
from tests.cli.conftest import Protwin

ASKED = ("search", "--model=qwen2.5-0.5b", "--hardware=l4", "--batch-size=3", "--sequence-length=777", "--json")


def test_no_budget_below_the_least_is_enough(protwin_here: Protwin) -> None:
    """Tiles of the loss are among the plans: without them the least is 1.7 GiB more, where a search finds them."""
    found = json.loads(protwin_here(*ASKED, "--goal=least-memory").stdout)
    assert found["plan"]["loss_tiles"] > 1
    least_bytes = found["prediction"]["guaranteed_peak_device_bytes"]
    refused = protwin_here(*ASKED, f"--device-budget={least_bytes - 1}")
    assert refused.returncode == 2
    assert "no plan fits, for device memory is too small" in refused.stderr
    whole = json.loads(protwin_here(*ASKED, "--goal=least-memory", "--mlp-tiles=1", "--loss-tiles=1").stdout)
    assert whole["prediction"]["guaranteed_peak_device_bytes"] > least_bytes + 2**30


def unknown(monkeypatch: pytest.MonkeyPatch, *, is_traceable: bool) -> None:
    """Make the model one whose tiles nobody knows without a trace, which nobody can make unless ``is_traceable``."""

    def resolved(asked: WorkloadRequest, **how: Any) -> Workload:
        if (asked.mlp_tiles or asked.loss_tiles) and not is_traceable:
            raise WorkloadError("there is no torch")
        return resolve_workload(asked, **how)

    monkeypatch.setattr(model_choice, "untraced_workload", lambda _: None)
    monkeypatch.setattr(model_choice, "resolve_workload", resolved)


def test_tiles_that_take_a_trace_are_among_the_plans(protwin_here: Protwin, monkeypatch: pytest.MonkeyPatch) -> None:
    known = json.loads(protwin_here(*ASKED, "--goal=least-memory").stdout)
    unknown(monkeypatch, is_traceable=True)
    traced = json.loads(protwin_here(*ASKED, "--goal=least-memory").stdout)
    assert traced["plan"] == known["plan"]
    assert traced["goal_words"] == known["goal_words"]


def test_an_answer_says_where_tiles_were_not_tried(protwin_here: Protwin, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown(monkeypatch, is_traceable=False)
    found = json.loads(protwin_here(*ASKED, "--goal=least-memory").stdout)
    assert "loss_tiles" not in found["plan"]
    assert found["goal_words"].startswith("no plan that runs MLPs and the loss whole has a guaranteed device peak")

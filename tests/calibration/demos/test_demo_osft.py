"""The demo of orthogonal subspace fine-tuning: fair contestants, and a run of it in files that read back."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from protwin.calibration.demos.demo_osft import OsftDemo, run_osft_demo
from protwin.calibration.demos.forgetting import (
    CONFIGURATION,
    Lesson,
    Way,
    documentation,
    equal_rank,
    held_out_loss,
    learned,
    learned_first,
    num_trained,
    prepared,
    source_code,
    sums_of_numbers,
)
from protwin.runtime.osft.orthogonal_model import orthogonal_maps
from protwin.shared.report.losses import BeforeAndAfter, forgetting_chart
from protwin.shared.schema.plan import Plan, TrainingMethod
from protwin.shared.schema.record import Record
from protwin.shared.schema.workload import Workload
from tests.runtime.models import differences

SMALL = Lesson(
    configuration={**CONFIGURATION, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
    batch_size=2,
    sequence_length=32,
    first_steps=3,
    steps=3,
    rates=(1e-3, 1e-2),
    num_validation=8,
    num_tests=12,
)


def test_no_sequence_is_both_trained_on_and_held_out() -> None:
    """Nor are rates chosen by what is told; a text that repeats itself may."""
    text = documentation(SMALL)
    parts = [{bytes(row.tolist()) for row in part} for part in (text.training, text.validation, text.tests)]
    assert [len(part) for part in parts[1:]] == [8, 12]
    assert sum(map(len, parts)) == len(parts[0] | parts[1] | parts[2])
    for other in (source_code(SMALL), sums_of_numbers(SMALL)):
        assert len(other.training) > 1000
        assert not torch.equal(other.tests, text.tests)
    assert bytes(sums_of_numbers(SMALL).training[0].tolist()).strip(b"0123456789+=\n") == b""


def test_ways_begin_alike_and_train_as_much_as_is_said() -> None:
    """LoRA's rank is the one whose size is nearest to what OSFT trains: one more or less is further away."""
    base = learned_first(SMALL, documentation(SMALL), 0)
    models = {way: prepared(base, way, SMALL, 0) for way in Way}
    losses = [held_out_loss(model, documentation(SMALL).tests) for model in (base, *models.values())]
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-5)
    full, lora, osft = (num_trained(models[way]) for way in Way)
    assert full == sum(parameter.numel() for parameter in base.parameters())
    thinnest = lora / equal_rank(base, SMALL)
    assert abs(osft - lora) <= thinnest / 2
    assert lora > thinnest, "the rank is no least one"
    trained = {name for name, one in models[Way.OSFT].named_parameters() if one.requires_grad}
    assert trained
    assert all(name.rpartition(".")[2] in ("u_low", "s_low", "v_low") for name in trained)


def test_what_a_way_learns_is_of_its_own_copy() -> None:
    """The next way begins with the same weights, and sees the same batches."""
    first, second = documentation(SMALL), sums_of_numbers(SMALL)
    base = learned_first(SMALL, first, 0)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    outcomes = {way: learned(base, way, 1e-2, first, second, SMALL, 0) for way in Way}
    assert differences(base, before) == []
    assert len({outcome.losses[0] for outcome, _ in outcomes.values()}) <= 2, "but for the rounding of factors"
    for way, (outcome, model) in outcomes.items():
        assert outcome.first_after == held_out_loss(model, first.tests)
        assert outcome.second_after < outcome.second_before, way
    frozen = orthogonal_maps(outcomes[Way.OSFT][1])
    anew = orthogonal_maps(prepared(base, Way.OSFT, SMALL, 0))
    for path, module in frozen.items():
        assert module.u_high is not None
        assert torch.equal(module.u_high, anew[path].u_high), "frozen factors are as they were"  # type: ignore[arg-type]


def test_the_chart_has_every_way_on_both_texts() -> None:
    losses = {
        "full": (BeforeAndAfter(1.0, 3.0), BeforeAndAfter(4.0, 2.0)),
        "<OSFT>": (BeforeAndAfter(1.0, 1.5), BeforeAndAfter(4.0, 2.5)),
    }
    figure = forgetting_chart(losses, ("words", "sums"))
    for shown in ("full: words", "full: sums", "&lt;OSFT&gt;: words", "1.000 → 1.500", "4.000 → 2.500"):
        assert shown in figure.drawing
    assert "<OSFT>" not in figure.drawing


@pytest.mark.slow
def test_the_demo_of_osft(tmp_path: Path) -> None:
    lesson = replace(SMALL, steps=10, first_steps=10)
    size = OsftDemo(lesson=lesson, probe_seconds=0.5, repeats=1, calibration_steps=3, slowdown_seconds=0.5)
    found = run_osft_demo(tmp_path, Console(file=io.StringIO(), width=120), size)
    assert json.loads((tmp_path / "comparison.json").read_text()) == json.loads(json.dumps(found))
    assert found["device_budget_bytes"] < found["full_fine_tuning_needs_bytes"]
    for way, one in found["ways"].items():
        assert one["losses_identical"], "plans change nothing"
        assert one["measured_peak_device_bytes"] <= found["device_budget_bytes"]
        within = tmp_path / way.lower()
        plan, measured = Plan.load(within / "plan.json"), Record.load(within / "measured.json")
        assert measured.plan == plan
        assert (plan.method is TrainingMethod.OSFT) == (way == Way.OSFT)
        assert Workload.load(within / "workload.json").identity == plan.workload_id
        predicted = Record.load(within / "predicted.json")
        assert predicted.iteration_s == one["predicted_iteration_s"]
    assert set(found["third"]) == {"documentation", "sums", "source code"}
    page = (tmp_path / "report.html").read_text()
    assert 'id="figure-forgetting"' in page
    assert "OSFT goes on to a third text" in page

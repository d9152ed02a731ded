"""Questions from Python: names, files and objects mean the same, and sizes may be text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import protwin.sim
from protwin.shared import Hardware, PlanError, WorkloadError, load_hardware, load_workload
from protwin.shared.basics.errors import HardwareError, ProtwinError
from protwin.shared.schema.calibration import Calibration
from protwin.sim import SearchRequest, SearchSpace, search, simulate

SHAPE: dict[str, Any] = {"batch_size": 2, "sequence_length": 128}
SPACE = SearchSpace(chunk_bytes=(64 * 2**20,), prefetch_depth=(1,))


@pytest.fixture(scope="module")
def machine() -> Hardware:
    return load_hardware("rtx-3090")


def test_names_files_and_objects_mean_the_same(machine: Hardware, tmp_path: Path) -> None:
    workload = load_workload("gpt2", hardware=machine, **SHAPE)
    workload.save(tmp_path / "workload.json")
    machine.save(tmp_path / "machine.json")
    Calibration(hardware_name=machine.name, machine="ours").save(tmp_path / "calibration.json")
    budget_bytes = 3 * 2**30
    request = SearchRequest(
        workload=workload, hardware=machine, device_budget_bytes=budget_bytes, space=SPACE, baselines=()
    )
    expected = search(request)
    for model, hardware, options in (
        ("gpt2", "rtx-3090", SHAPE | {"device_budget_bytes": "3GiB"}),
        ("openai-community/gpt2", "RTX 3090", SHAPE | {"device_budget_bytes": budget_bytes}),
        (workload, machine, {"device_budget_bytes": "3 GiB"}),
        (tmp_path / "workload.json", str(tmp_path / "machine.json"), {"device_budget_bytes": "3GiB"}),
    ):
        assert search(model, hardware, space=SPACE, **options) == expected

    expected.plan.save(tmp_path / "plan.json")
    record = simulate(expected.plan, workload, machine)
    assert record.iteration_s == pytest.approx(expected.prediction.iteration_s, rel=1e-4)
    assert simulate(tmp_path / "plan.json", "gpt2", "RTX-3090", **SHAPE) == record
    factors = Calibration.load(tmp_path / "calibration.json")
    by_file = simulate(expected.plan, tmp_path / "workload.json", machine, tmp_path / "calibration.json")
    assert by_file == simulate(expected.plan, workload, machine, factors)


def test_a_shape_that_is_left_out(machine: Hardware) -> None:
    """One sample of 2,048 tokens, or of as many as the model takes."""
    for model, length in (("qwen2.5-0.5b", 2048), ("gpt2", 1024)):
        found = search(model, machine, space=SPACE, dtype="bf16")
        assert found.prediction.num_tokens == length


def test_a_global_batch_searches_every_size(machine: Hardware) -> None:
    found = search("gpt2", machine, global_batch_size=4, sequence_length=64, space=SPACE)
    plan = found.plan
    assert found.prediction.num_tokens == 4 * 64
    assert plan.micro_batches in (1, 2, 4)


def test_text_is_a_budget(machine: Hardware) -> None:
    request = SearchRequest(
        workload=load_workload("gpt2", **SHAPE),
        hardware=machine,
        device_budget_bytes="50MiB",  # type: ignore[arg-type]
        host_budget_bytes="8GiB",  # type: ignore[arg-type]
    )
    assert request.budgets_bytes() == (50 * 2**20, 8 * 2**30)
    for wrong in ("50 apples", "0MiB", "-1GiB"):
        with pytest.raises(ProtwinError, match=r"Write (one|a size) such as|known are"):
            search("gpt2", machine, device_budget_bytes=wrong, **SHAPE)


def test_what_makes_no_question_is_refused(machine: Hardware) -> None:
    workload = load_workload("gpt2", hardware=machine, **SHAPE)
    request = SearchRequest(workload=workload, hardware=machine)
    ask: Any = search
    with pytest.raises(PlanError, match="the whole question, but hardware, batch_size is given besides"):
        ask(request, machine, batch_size=1)
    with pytest.raises(HardwareError, match="no machine is named"):
        ask("gpt2")
    with pytest.raises(WorkloadError, match=r"has its shape\. Leave batch_size out"):
        ask(workload, machine, batch_size=1)
    with pytest.raises(WorkloadError, match="Trace a module first"):
        ask(object(), machine)
    with pytest.raises(PlanError, match="exclude each other"):
        ask("gpt2", machine, batch_size=1, global_batch_size=2)
    with pytest.raises(PlanError, match="needs a model by name"):
        ask(workload, machine, global_batch_size=2)
    with pytest.raises(TypeError, match="no_such_option"):
        ask("gpt2", machine, no_such_option=1)


def test_the_face_has_both_forms() -> None:
    assert protwin.sim.search is search
    assert protwin.sim.simulate is simulate

"""A model, a batch and a budget become a workload, a machine and a plan that trains the model as a plain loop would."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out
from protwin.runtime.planning.planned import Planned, planned
from protwin.runtime.planning.request import PlanRequest
from protwin.shared.basics.errors import InfeasibleError, PlanError, WorkloadError
from protwin.shared.basics.units import parse_bytes
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.calibration.fitting.test_budgeted import HERE
from tests.runtime.models import SEED, Case, adamw, differences, gpt2, llama, snapshot, token_batches

CASE = Case(partial(llama, num_layers=2), token_batches(3))
PEAK_BYTES = 220_000


def answer(model: nn.Module, **fields: Any) -> Planned:
    asked: dict[str, Any] = {"hardware": HERE, "name": "llama"} | fields
    return planned(model, CASE.batches[0], PlanRequest(**asked))


def test_what_is_planned_trains_to_the_bits_of_the_plain_loop_within_the_budget() -> None:
    model = CASE.build()
    found = answer(model, budget_bytes=PEAK_BYTES)
    assert found.result is not None
    assert found.result.plan == found.plan
    assert found.prediction.plan == found.plan
    assert guaranteed_device_peak(compile_schedule(found.plan, found.workload)).size_bytes <= PEAK_BYTES
    assert found.plan != answer(CASE.build()).plan, "without a budget more stays on the device"
    assert found.device.budget_bytes == PEAK_BYTES
    losses = []
    with carry_out(model, found.plan, found.workload, optimizer=adamw, device=found.device) as training:
        torch.manual_seed(SEED)
        for batch in CASE.batches:
            loss = model(**batch).loss
            loss.backward()
            training.step()
            losses.append(loss.item())
        assert training.counts.bytes_host_to_device > 0
    assert losses == CASE.plain.losses
    assert differences(model, CASE.plain.weights[-1]) == []


def test_the_model_stays_as_it_was() -> None:
    """Dropout draws, gradients add up and timing steps nothing: all of it is put back."""
    model = gpt2()
    model(**CASE.batches[1]).loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    before, state = snapshot(model), torch.get_rng_state()
    planned(model, CASE.batches[0], PlanRequest(hardware=HERE, budget_bytes="1MiB"))
    assert torch.equal(torch.get_rng_state(), state)
    assert differences(model, before) == []
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters() if p.grad is not None)
    assert model.training


def test_the_machine_is_measured_where_none_is_named() -> None:
    told: list[str] = []
    request = PlanRequest(probe_s=0.1, workload=CASE.workload, knobs={"n_persist": 0, "chunk_bytes": 10_000})
    found = planned(CASE.build(), CASE.batches[0], request, device=CpuDevice("1MiB"), tell=told.append)
    assert found.hardware.device.memory_bytes > parse_bytes("1MiB"), "the budget is the training's, not the machine's"
    assert found.request.budget_bytes == parse_bytes("1MiB")
    assert told == ["tracing the model", "measuring this machine", "searching a plan"]


def test_a_given_plan_is_predicted_and_not_searched(tmp_path: Path) -> None:
    first = answer(CASE.build(), budget_bytes=PEAK_BYTES)
    first.plan.save(tmp_path / "plan.json")
    again = answer(CASE.build(), budget_bytes=PEAK_BYTES, plan=tmp_path / "plan.json", workload=first.workload)
    assert (again.plan, again.result) == (first.plan, None)
    assert again.prediction.iteration_s == first.prediction.iteration_s


def test_knobs_and_the_step_are_what_was_asked() -> None:
    found = answer(CASE.build(), knobs={"n_persist": 1, "n_checkpoint": 2}, micro_batches=3, max_gradient_norm=0.5)
    plan = found.plan
    assert (plan.n_persist, plan.n_checkpoint, plan.micro_batches, plan.max_gradient_norm) == (1, 2, 3, 0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"micro_batches": 4}, "micro_batches = 1, but training asks for 4"),
        ({"max_gradient_norm": 1.0}, "max_gradient_norm = None, but training asks for 1.0"),
        ({"optimizer": "sgd"}, "optimizer = adamw, but training asks for sgd"),
    ],
)
def test_a_plan_with_another_step_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    plan = Plan(workload_id=CASE.workload.identity, chunk_bytes=4096, n_persist=0, n_buffer=4)
    with pytest.raises(PlanError, match=message):
        answer(CASE.build(), plan=plan, **fields)


def test_what_cannot_be_planned_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="n_presist is no knob"):
        answer(CASE.build(), workload=CASE.workload, knobs={"n_presist": 1})
    with pytest.raises(PlanError, match="n_persist"):
        answer(CASE.build(), workload=CASE.workload, knobs={"n_persist": -1})
    plan = Plan(workload_id=CASE.workload.identity, chunk_bytes=4096, n_persist=0, n_buffer=4)
    with pytest.raises(PlanError, match="a plan is given, and n_persist beside it"):
        answer(CASE.build(), plan=plan, knobs={"n_persist": 1})
    with pytest.raises(PlanError, match="the plan belongs to workload"):
        planned(gpt2(), CASE.batches[0], PlanRequest(hardware=HERE, plan=plan))
    with pytest.raises(InfeasibleError):
        answer(CASE.build(), workload=CASE.workload, budget_bytes=1000)
    with pytest.raises(WorkloadError, match="refuses the batch"):
        planned(CASE.build(), {"inputs": torch.zeros(2, 3)}, PlanRequest(hardware=HERE))
    with pytest.raises(PlanError, match="plan is a int"):
        PlanRequest(plan=3)  # type: ignore[arg-type]

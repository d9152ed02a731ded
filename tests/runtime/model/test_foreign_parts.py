"""Plans, workloads, groups and devices that do not belong together are refused, and the model is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, CudaDevice, Training, carry_out
from protwin.shared.basics.errors import HardwareError, PlanError, ProtwinError
from protwin.shared.schema.plan import Plan
from tests.runtime.life_cycle import check_ordinary, ordinary_facts, plan_for
from tests.runtime.misuse import check_goes_on
from tests.runtime.models import Case, adamw, copy_of, gpt2, llama
from tests.runtime.watchdog import ends_in_time


def refused(model: nn.Module, plan: Plan, case: Case, error: type[ProtwinError], message: str, **settings: Any) -> None:
    facts = ordinary_facts(model)
    with ends_in_time(), pytest.raises(error, match=message):
        carry_out(model, plan, case.workload, **settings)
    check_ordinary(model, facts)


def test_the_plan_of_another_workload(case: Case, model: nn.Module) -> None:
    plan = plan_for(case.workload).model_copy(update={"workload_id": "0123456789abcdef"})
    refused(model, plan, case, PlanError, "0123456789abcdef")


def test_the_workload_of_another_model(case: Case) -> None:
    refused(gpt2(), plan_for(case.workload), case, PlanError, "traced from another model.*Trace this model again")
    refused(llama(num_layers=5), plan_for(case.workload), case, PlanError, "traced from another model")
    refused(llama().double(), plan_for(case.workload), case, PlanError, "traced from another model")


def test_requires_grad_that_changed_since_the_trace(case: Case, model: nn.Module) -> None:
    model.model.layers[0].requires_grad_(False)
    refused(
        model,
        plan_for(case.workload),
        case,
        PlanError,
        r"requires_grad of model\.layers\.0\.self_attn\.q_proj\.weight was True",
    )


def test_knobs_that_the_workload_cannot_follow(case: Case, model: nn.Module) -> None:
    good = plan_for(case.workload)
    for change, message in (
        ({"n_persist": 1_000}, "n_persist is 1000"),
        ({"n_buffer": 0}, "n_buffer"),
        ({"n_checkpoint": 5}, "n_checkpoint is 5"),
    ):
        refused(model, good.model_copy(update=change), case, PlanError, message)


@pytest.mark.parametrize("meter_every", [0, -1])
def test_metering_never(case: Case, model: nn.Module, meter_every: int) -> None:
    refused(model, plan_for(case.workload), case, PlanError, f"meter_every is {meter_every}", meter_every=meter_every)


def groups_without_one(model: nn.Module) -> Any:
    return [{"params": list(model.parameters())[1:]}]


def groups_with_one_twice(model: nn.Module) -> Any:
    return [{"params": list(model.parameters())}, {"params": [next(model.parameters())]}]


def groups_of_a_copy(model: nn.Module) -> Any:
    return [{"params": list(copy_of(model).parameters())}]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (groups_without_one, "1 trainable parameters are in no parameter group, model.embed_tokens.weight"),
        (groups_with_one_twice, "model.embed_tokens.weight is in two parameter groups"),
        (groups_of_a_copy, "no parameter of the model"),
        (lambda model: list(model.parameters()), "no table with 'params'"),
        (lambda model: [{"parameters": list(model.parameters())}], "no table with 'params'"),
        (lambda model: [{"params": ["model.embed_tokens.weight"]}], "no parameter of the model"),
    ],
)
def test_parameter_groups(case: Case, model: nn.Module, groups: Callable[[nn.Module], Any], message: str) -> None:
    refused(model, plan_for(case.workload), case, PlanError, message, parameter_groups=groups(model))


def test_an_optimizer_that_is_made_already(case: Case, model: nn.Module) -> None:
    made: Any = adamw([{"params": list(model.parameters())}])
    refused(model, plan_for(case.workload), case, PlanError, "parameter_groups=optimizer.param_groups", optimizer=made)


def test_two_trainings_of_one_model(case: Case, model: nn.Module, training: Training) -> None:
    with pytest.raises(PlanError, match=r"being carried out on this model already. Close that training first"):
        carry_out(model, plan_for(case.workload), case.workload)
    check_goes_on(case, model, training)


@pytest.mark.parametrize("budget_bytes", [0, -1, float("nan"), float("inf")])
def test_budgets_of_a_device(budget_bytes: Any) -> None:
    with pytest.raises(HardwareError, match=r"budget_bytes is .* must be positive"):
        CpuDevice(budget_bytes)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("link", ["host_to_device", "device_to_host"])
def test_rates_of_a_link(link: str, rate: float) -> None:
    with pytest.raises(HardwareError, match=f"{link}_bytes_per_s is .* must be positive and finite"):
        CpuDevice(**{f"{link}_bytes_per_s": rate})  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_where_there_is_none() -> None:
    with pytest.raises(HardwareError, match=r"no CUDA device. Use CpuDevice"):
        CudaDevice()


def test_a_model_without_memory(case: Case) -> None:
    with torch.device("meta"):
        model = llama()
    with pytest.raises(PlanError, match="every parameter is on the meta device"):
        carry_out(model, plan_for(case.workload), case.workload)

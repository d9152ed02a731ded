"""What the runtime cannot carry out yet is refused before anything is touched; what it carries out, it explains."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from protwin.runtime import carry_out
from protwin.shared.basics.errors import PlanError
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode
from tests.runtime.life_cycle import plan_for
from tests.runtime.models import Case, differences


@pytest.mark.parametrize("mode", [ParallelMode.REPLICATED, ParallelMode.SHARDED])
def test_plans_of_several_ranks_are_refused_by_one_alone(case: Case, model: nn.Module, mode: ParallelMode) -> None:
    plan = plan_for(case.workload).model_copy(update={"parallel": mode, "num_ranks": 2})
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PlanError, match=r"for 2 ranks, but 1 process was started .* torchrun --nproc-per-node 2"):
        carry_out(model, plan, case.workload, optimizer=case.make_optimizer)
    assert differences(model, weights) == []


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_what_is_explained_names_the_optimizer(case: Case, model: nn.Module, kind: type[torch.optim.Optimizer]) -> None:
    make = partial(kind, lr=1e-3)
    with carry_out(model, plan_for(case.workload), case.workload, optimizer=make) as training:
        told = training.explain()
    for place in ("CPU", "device"):
        assert f"{place} {kind.__name__}" in told
    assert ("Adam" in told) == (kind is torch.optim.AdamW)


def test_names_stand_for_their_values_in_a_copied_plan(case: Case, model: nn.Module) -> None:
    plan = plan_for(case.workload).model_copy(update={"optimizer": "sgd"})
    with carry_out(model, plan, case.workload) as training:
        assert training.plan.optimizer is Optimizer.SGD
        assert "device SGD" in training.explain()


@pytest.mark.parametrize(
    ("knob", "value"),
    [("max_gradient_norm", -1.0), ("micro_batches", 0), ("optimizer", "adamm"), ("n_buffer", -1), ("shard_ranks", 3)],
)
def test_impossible_values_of_a_copied_plan_are_named(case: Case, model: nn.Module, knob: str, value: object) -> None:
    plan = plan_for(case.workload).model_copy(update={knob: value})
    with pytest.raises(PlanError, match=knob):
        carry_out(model, plan, case.workload)


def test_what_is_no_plan_is_named(case: Case, model: nn.Module) -> None:
    plan = plan_for(case.workload)
    for given, name in (
        (("gpt2", plan, case.workload), "model"),
        ((model, "plan.json", case.workload), "plan"),
        ((model, plan, "workload.json"), "workload"),
    ):
        with pytest.raises(PlanError, match=f"^{name} is a str"):
            carry_out(*given)  # type: ignore[arg-type]

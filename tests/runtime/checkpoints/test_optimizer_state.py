"""``training.optimizer.state_dict()`` is the plain loop's, and goes from one to the other in both directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from protwin.runtime import Training, carry_out
from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.schema.plan import Plan
from tests.runtime.life_cycle import plan_for
from tests.runtime.misuse import check_goes_on
from tests.runtime.models import SEED, Case, cases, differences, snapshot
from tests.runtime.optimizing import CASE, OPTIMIZERS, MakeOptimizer, single_plans, two_groups
from tests.runtime.watchdog import ends_in_time

HALF = 3
"""Steps before the state is handed over, and after."""


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, case: Case = CASE) -> None:
    for batch in batches:
        case.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def plan_steps(model: nn.Module, training: Training, batches: Any, case: Case = CASE) -> None:
    for batch in batches:
        case.loss(model, batch).backward()
        training.optimizer.step()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def planned(model: nn.Module, plan: Plan, make_optimizer: MakeOptimizer) -> Training:
    return carry_out(model, plan, CASE.workload, optimizer=make_optimizer, parameter_groups=two_groups(model))


@settings(max_examples=6)
@given(plan=single_plans(CASE.workload), name=st.sampled_from(sorted(OPTIMIZERS)))
def test_the_state_is_the_plain_optimizers_in_both_directions(plan: Plan, name: str) -> None:
    make_optimizer = OPTIMIZERS[name]
    first, second = CASE.batches[:HALF], CASE.batches[HALF:]
    plain = CASE.build()
    optimizer = make_optimizer(two_groups(plain))
    torch.manual_seed(SEED)
    plain_steps(plain, optimizer, first)
    weights, random, expected = snapshot(plain), torch.get_rng_state(), optimizer.state_dict()

    ours = CASE.build()
    with ends_in_time(), planned(ours, plan, make_optimizer) as training:
        assert training.optimizer.state_dict()["state"] == {}
        torch.manual_seed(SEED)
        plan_steps(ours, training, first)
        state = training.optimizer.state_dict()
        assert equal(state, expected)
        plan_steps(ours, training, second)
        assert equal(state, expected), "it is a copy"

    # From the plan to the plain loop, and from the plain loop to the plan.
    other, theirs = CASE.build(), CASE.build()
    for model in (other, theirs):
        model.load_state_dict(weights)
    from_plan = make_optimizer(two_groups(other))
    from_plan.load_state_dict(state)
    torch.set_rng_state(random)
    plain_steps(other, from_plan, second)
    with ends_in_time(), planned(theirs, plan, make_optimizer) as training:
        for group in training.optimizer.param_groups:
            group["lr"] = 0.5
        training.optimizer.load_state_dict(expected)
        torch.set_rng_state(random)
        plan_steps(theirs, training, second)
    for model in (other, theirs):
        assert differences(model, ours.state_dict()) == []


def test_narrow_parameters_take_their_masters_along() -> None:
    case = cases()["llama in bfloat16"]
    plan = plan_for(case.workload)
    model = case.build()
    with ends_in_time(), carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training:
        plan_steps(model, training, case.batches[:2], case)
        state, weights = training.optimizer.state_dict(), training.state_dict()
        plan_steps(model, training, case.batches[2:], case)
    assert {kept["master_param"].dtype for kept in state["state"].values()} == {torch.float32}
    other = case.build()
    with (
        ends_in_time(),
        carry_out(other, plan, case.workload, optimizer=case.make_optimizer) as training,
        pytest.raises(PlanError, match="is not rounded to the weight that the model has"),
    ):
        training.optimizer.load_state_dict(state)
    other.load_state_dict(weights)
    with ends_in_time(), carry_out(other, plan, case.workload, optimizer=case.make_optimizer) as training:
        training.optimizer.load_state_dict(state)
        plan_steps(other, training, case.batches[2:], case)
    assert differences(other, model.state_dict()) == []


def test_what_does_not_belong_is_refused_and_changes_nothing(case: Case, model: nn.Module, training: Training) -> None:
    optimizer = training.optimizer
    state = optimizer.state_dict()
    (group,) = state["param_groups"]
    bad_rate = {**state, "param_groups": [{**group, "lr": float("nan")}]}
    bad_shape = {**state, "state": {**state["state"], 3: {**state["state"][3], "exp_avg": torch.ones(5, 5)}}}
    unknown = {**state, "state": {**state["state"], 999: state["state"][0]}}
    for wrong, message in (
        ({}, "has no 'state'"),
        ({**state, "param_groups": [group, group]}, "parameter groups of"),
        ({**state, "param_groups": [{**group, "params": group["params"][1:]}]}, "parameter groups of"),
        (bad_rate, "learning rate"),
        (bad_shape, r"exp_avg of shape \(5, 5\) for parameter model\.layers\.0"),
        (unknown, "parameter 999, which is in none"),
    ):
        with pytest.raises(PlanError, match=message):
            optimizer.load_state_dict(wrong)
    check_goes_on(case, model, training)


def test_only_between_two_steps(case: Case, model: nn.Module, training: Training) -> None:
    state = training.optimizer.state_dict()
    loss = case.loss(model, case.batches[1])
    for attempt in (training.optimizer.state_dict, lambda: training.optimizer.load_state_dict(state)):
        with pytest.raises(ScheduleError, match=r"between step\(\) and the next forward alone"):
            attempt()
    loss.backward()
    with pytest.raises(ScheduleError, match=r"between step\(\) and the next forward alone"):
        training.optimizer.state_dict()
    training.step()
    plan_steps(model, training, case.batches[2:], case)
    training.close()
    assert differences(model, case.plain.weights[-1]) == []


def test_hooks_of_torch_run(training: Training) -> None:
    optimizer, seen = training.optimizer, []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before reading"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state.pop("extra")))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after writing"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before reading", 1, "after writing"]

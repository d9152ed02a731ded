"""A plan whose steps compute something else takes a checkpoint over only if that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protwin.shared.basics.errors import FileError
from protwin.shared.schema.plan import Plan
from tests.runtime.models import SEED, Case, cases, differences, uncached
from tests.runtime.resuming import kept, offloaded, other_weights, start
from tests.runtime.watchdog import ends_in_time

Knobs = dict[str, Any]

CHANGES: list[tuple[Knobs, Knobs, str]] = [
    ({"micro_batches": 2}, {}, "saved under a plan with micro_batches 2; this plan has micro_batches 1,"),
    ({}, {"max_gradient_norm": 0.05}, "saved under a plan with max_gradient_norm None; .* max_gradient_norm 0.05,"),
    (
        {"micro_batches": 2, "max_gradient_norm": 0.05},
        {"micro_batches": 1, "max_gradient_norm": 0.1},
        "saved under a plan with micro_batches 2, max_gradient_norm 0.05; .* micro_batches 1, max_gradient_norm 0.1,",
    ),
]


def plan_with(case: Case, base: Any, knobs: Knobs) -> Plan:
    plan: Plan = base(case.workload).model_copy(update=knobs)
    return plan


def steps(case: Case, model: Any, training: Any, plan: Plan, number: int) -> None:
    for _ in range(number):
        for batch in case.batches[: plan.micro_batches]:
            case.loss(model, batch).backward()
        training.step()


def save_two_steps(case: Case, knobs: Knobs, folder: Path) -> None:
    model, plan = case.build(), plan_with(case, offloaded, knobs)
    with ends_in_time(), start(case, model, plan) as training:
        torch.manual_seed(SEED)
        steps(case, model, training, plan, 2)
        training.save(folder)


def plain_with_change(case: Case, before: Knobs, after: Knobs) -> Any:
    """Two plain steps of one kind, two of the other."""
    model = uncached(case.build())
    optimizer = case.make_optimizer(case.groups(model))
    torch.manual_seed(SEED)
    for knobs in (before, before, after, after):
        for batch in case.batches[: knobs.get("micro_batches", 1)]:
            case.loss(model, batch).backward()
        if knobs.get("max_gradient_norm") is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), knobs["max_gradient_norm"])
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(("before", "after", "message"), CHANGES)
def test_other_steps_are_refused_unless_they_are_asked_for(
    before: Knobs, after: Knobs, message: str, tmp_path: Path
) -> None:
    case = cases()["llama"]
    save_two_steps(case, before, tmp_path / "saved")
    model, plan = other_weights(case.build()), plan_with(case, kept, after)
    with ends_in_time(), start(case, model, plan) as training:
        with pytest.raises(FileError, match=message):
            training.resume(tmp_path / "saved")
        assert training.num_steps == 0
        assert training.resume(tmp_path / "saved", allow_changed_step=True).step == 2
        steps(case, model, training, plan, 2)
    assert differences(model, plain_with_change(case, before, after).state_dict()) == []
    assert differences(model, plain_with_change(case, before, before).state_dict()) != [], "the knobs make a difference"


def test_a_refusal_changes_nothing(tmp_path: Path) -> None:
    case = cases()["llama"]
    save_two_steps(case, {"micro_batches": 2}, tmp_path / "saved")
    model = case.build()
    with ends_in_time(), start(case, model, kept(case.workload)) as training:
        with pytest.raises(FileError, match="allow_changed_step=True"):
            training.resume(tmp_path / "saved")
        torch.manual_seed(SEED)
        for batch in case.batches:
            case.loss(model, batch).backward()
            training.step()
    assert differences(model, case.plain.weights[-1]) == []


def test_the_same_steps_go_on_under_any_plan(tmp_path: Path) -> None:
    case = cases()["llama"]
    knobs: Knobs = {"micro_batches": 2, "max_gradient_norm": 0.05}
    save_two_steps(case, knobs, tmp_path / "saved")
    model, plan = other_weights(case.build()), plan_with(case, kept, knobs)
    with ends_in_time(), start(case, model, plan) as training:
        assert training.resume(tmp_path / "saved").step == 2
        steps(case, model, training, plan, 2)
    assert differences(model, plain_with_change(case, knobs, knobs).state_dict()) == []

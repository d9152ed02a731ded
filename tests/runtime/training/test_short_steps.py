"""Loops as people have them: an epoch whose last step is short, an optimizer that is made already, a GradScaler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import LossScaling, Training, carry_out, fill_step
from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.sim import search as search_plan
from tests.runtime.life_cycle import plan_for
from tests.runtime.models import SEED, Case, cases, differences, uncached
from tests.runtime.watchdog import ends_in_time

STEPS = ((0, 1, 2), (3,), (1, 2), (0, 3, 1), (2,))
"""Batches of each step; a plan has three micro-batches."""
DROPOUT, STATISTICS = "gpt2 with dropout, tied", "hand-written, batch statistics"


def plain(case: Case, limit: float | None) -> tuple[nn.Module, list[float], torch.Tensor]:
    """The loop that steps early; its losses, and the random state that it ends in."""
    model, losses = uncached(case.build()), []
    optimizer = case.make_optimizer(case.groups(model))
    torch.manual_seed(SEED)
    for step in STEPS:
        for index in step:
            loss = case.loss(model, case.batches[index]) / 3
            loss.backward()
            losses.append(loss.item())
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
    return model, losses, torch.get_rng_state()


def of_three(case: Case, model: nn.Module, limit: float | None = None, **options: Any) -> Training:
    plan = plan_for(case.workload).model_copy(update={"micro_batches": 3, "max_gradient_norm": limit})
    return carry_out(model, plan, case.workload, **({"optimizer": case.make_optimizer} | options))


@pytest.mark.parametrize(
    ("name", "limit", "scaling"),
    [(DROPOUT, None, None), (STATISTICS, 0.5, None), (STATISTICS, 0.5, LossScaling(initial_scale=2.0**10))],
)
def test_short_steps_are_those_of_the_plain_loop(name: str, limit: float | None, scaling: LossScaling | None) -> None:
    """Dropout draws the plain loop's numbers, and batch statistics see each batch once.

    A scale that is a power of two changes no bit in float32.
    """
    case = cases()[name]
    assert case.workload.num_blocks, "traced before the seed"
    model, losses = case.build(), []
    groups = case.groups(model)
    torch.manual_seed(SEED)
    with ends_in_time(), of_three(case, model, limit, parameter_groups=groups, loss_scaling=scaling) as training:
        for step in STEPS:
            for index in step:
                loss = case.loss(model, case.batches[index]) / 3
                (loss if scaling is None else training.scale(loss)).backward()
                losses.append(loss.item())
            again = case.batches[step[-1]]
            assert fill_step(training, lambda again=again: case.loss(model, again)) == 3 - len(step)
            training.step()
    state = torch.get_rng_state()
    expected, expected_losses, expected_state = plain(case, limit)
    assert losses == expected_losses
    assert differences(model, expected.state_dict()) == []
    assert torch.equal(state, expected_state)


def test_where_a_step_cannot_be_filled_up() -> None:
    case = cases()["llama"]
    model = case.build()
    with ends_in_time(), of_three(case, model) as training:
        with pytest.raises(ScheduleError, match=r"step\(\) without a forward"):
            fill_step(training, lambda: case.loss(model, case.batches[0]))
        loss = case.loss(model, case.batches[0])
        with pytest.raises(ScheduleError, match="before backward has ended"):
            fill_step(training, lambda: case.loss(model, case.batches[0]))
        loss.backward()
        with pytest.raises(ScheduleError, match=r"after 1 of 3 micro-batches.*fill_step\(training"):
            training.step()
        assert fill_step(training, lambda: case.loss(model, case.batches[0])) == 2
        assert fill_step(training, lambda: case.loss(model, case.batches[0])) == 0
        training.step()


def test_an_optimizer_that_is_made_already() -> None:
    """It is refused; what the message asks for instead keeps groups, rates and weight decay of the plain loop."""
    case = cases()["llama, groups"]
    plain_model, model = uncached(case.build()), case.build()
    made = torch.optim.AdamW(case.groups(model), betas=(0.8, 0.9), fused=True)
    ready = torch.optim.AdamW(case.groups(plain_model), betas=(0.8, 0.9), fused=True)
    with pytest.raises(
        PlanError, match=r"optimizer=AdamW, parameter_groups=optimizer\.param_groups.*training\.optimizer"
    ):
        of_three(case, model, optimizer=made)
    for batch in case.batches:
        case.loss(plain_model, batch).backward()
        ready.step()
        ready.zero_grad()
    plan = plan_for(case.workload)
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "parameter_groups": made.param_groups}
    with ends_in_time(), carry_out(model, plan, case.workload, **options) as training:
        for batch in case.batches:
            case.loss(model, batch).backward()
            training.step()
    assert differences(model, plain_model.state_dict()) == []


def test_a_gradient_scaler_of_torch() -> None:
    case = cases()["llama"]
    model, scaler = case.build(), torch.amp.GradScaler("cpu")
    with ends_in_time(), of_three(case, model, 1.0) as training:
        for index in range(3):
            scaler.scale(case.loss(model, case.batches[index])).backward()
        with pytest.raises(ScheduleError, match=r"GradScaler.*LossScaling\(\).*max_gradient_norm"):
            scaler.unscale_(training.optimizer)


def test_the_answer_of_a_search_in_the_place_of_its_plan() -> None:
    case = cases()["llama"]
    answer = search_plan(case.workload, "rtx-3090")
    with pytest.raises(PlanError, match=r"plan is a SearchResult; it must be a Plan\. It has one: pass its \.plan\."):
        carry_out(case.build(), answer, case.workload)  # type: ignore[arg-type]


def test_averages_of_the_weights_by_a_copy_of_the_model() -> None:
    """As docs/how-to/own-model.md does: torch's own averaging, of a copy that gets the weights after every step."""
    case = cases()["gpt2 with dropout, tied"]
    plain_model, model = uncached(case.build()), case.build()
    averaging = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    expected = torch.optim.swa_utils.AveragedModel(plain_model, multi_avg_fn=averaging)
    optimizer = case.make_optimizer(case.groups(plain_model))
    torch.manual_seed(SEED)
    for batch in case.batches:
        case.loss(plain_model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.update_parameters(plain_model)
    copied = copy.deepcopy(model)
    average = torch.optim.swa_utils.AveragedModel(copied, multi_avg_fn=averaging)
    plan = plan_for(case.workload)
    torch.manual_seed(SEED)
    with (
        ends_in_time(),
        carry_out(model, plan, case.workload, optimizer=case.make_optimizer) as training,
    ):
        for batch in case.batches:
            case.loss(model, batch).backward()
            training.step()
            copied.load_state_dict(training.state_dict())
            average.update_parameters(copied)
    assert differences(average.module, expected.module.state_dict()) == []

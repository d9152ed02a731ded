"""``clip_grad_norm_`` of torch in the loop: the norm of the step that the plan clips, or an error before harm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from protwin.runtime import LossScaling, Training, carry_out
from protwin.runtime.chunks.gradient_stand_ins import GradientStandIns
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.schema.plan import Plan
from tests.runtime.life_cycle import plan_for
from tests.runtime.models import SEED, Case, cases, differences
from tests.runtime.optimizing import CASE, persistent, single_plans
from tests.runtime.watchdog import ends_in_time

LIMIT = 0.05


def clipped(case: Case, plan: Plan, clip: Callable[[nn.Module], Any]) -> tuple[list[Any], nn.Module]:
    """Train, with ``clip`` between the last backward and each step; gives what that gave."""
    model = case.build()
    found = []
    with (
        ends_in_time(),
        carry_out(
            model, plan, case.workload, optimizer=case.make_optimizer, parameter_groups=case.groups(model)
        ) as training,
    ):
        torch.manual_seed(SEED)
        for batches in case.steps(plan.micro_batches):
            for batch in batches:
                case.loss(model, batch).backward()
            found.append(clip(model))
            training.step()
    return found, model


@settings(max_examples=10)
@given(
    plan=st.one_of(single_plans(CASE.workload), st.just(persistent(CASE.workload))),
    micro_batches=st.integers(1, 2),
    foreach=st.sampled_from((None, False)),
)
def test_the_norm_and_the_step_are_the_plain_loops(plan: Plan, micro_batches: int, foreach: bool | None) -> None:
    plan = plan.model_copy(update={"micro_batches": micro_batches, "max_gradient_norm": LIMIT})
    norms, model = clipped(CASE, plan, lambda m: clip_grad_norm_(m.parameters(), LIMIT, foreach=foreach).item())
    plain = CASE.plain_with(micro_batches, LIMIT)
    assert norms == plain.norms
    assert max(norms) > LIMIT, "something was clipped"
    assert differences(model, plain.weights[-1]) == []


def test_a_loop_that_multiplies_itself_does_what_clip_grad_norm_does() -> None:
    """As ``p.grad *= scale`` and with the result of ``mul_``; both put what they give where a gradient was."""

    def by_hand(model: nn.Module) -> float:
        learning = [one for one in model.parameters() if one.grad is not None]
        norm = torch.nn.utils.get_total_norm([one.grad for one in learning if one.grad is not None])
        scale = torch.clamp(LIMIT / (norm + 1e-6), max=1.0)
        for number, one in enumerate(learning):
            assert one.grad is not None
            if number % 2:
                one.grad *= scale
            else:
                one.grad = one.grad.mul_(scale)
        return norm.item()

    plan = plan_for(CASE.workload).model_copy(update={"max_gradient_norm": LIMIT})
    norms, model = clipped(CASE, plan, by_hand)
    plain = CASE.plain_with(1, LIMIT)
    assert norms == plain.norms
    assert differences(model, plain.weights[-1]) == []


def test_a_second_clipping_would_have_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: gradients that stay on the device are clipped by the loop and by the step."""
    monkeypatch.setattr(GradientStandIns, "show", lambda *_, **__: None)
    plan = persistent(CASE.workload).model_copy(update={"max_gradient_norm": LIMIT})

    def twice(model: nn.Module) -> float:
        clip_grad_norm_(model.parameters(), LIMIT)
        return clip_grad_norm_(model.parameters(), LIMIT / 2).item()

    _, model = clipped(CASE, plan, twice)
    assert differences(model, CASE.plain_with(1, LIMIT).weights[-1]) != []


def test_parameters_of_several_dtypes() -> None:
    case = cases()["hand-written, partly narrow"]
    plan = plan_for(case.workload).model_copy(update={"max_gradient_norm": LIMIT})
    norms, model = clipped(case, plan, lambda model: clip_grad_norm_(model.parameters(), LIMIT).item())
    plain = case.plain_with(1, LIMIT)
    assert norms == plain.norms
    assert differences(model, plain.weights[-1]) == []


def test_the_norm_alone_is_asked_for_by_an_infinite_limit() -> None:
    plan = plan_for(CASE.workload).model_copy(update={"max_gradient_norm": LIMIT})

    def ask(model: nn.Module) -> list[float]:
        norms = [clip_grad_norm_(model.parameters(), math.inf) for _ in range(2)]
        return [norm.item() for norm in norms]

    norms, model = clipped(CASE, plan, ask)
    plain = CASE.plain_with(1, LIMIT)
    assert norms == [[norm, norm] for norm in plain.norms]
    assert differences(model, plain.weights[-1]) == []


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (lambda m: clip_grad_norm_(m.parameters(), 3.0), "to a norm of 3 under a plan that clips them to 0.05.*max_gr"),
        (lambda m: clip_grad_norm_(m.stack.parameters(), LIMIT), "20 of 24 gradients was to be limited"),
        (lambda m: clip_grad_norm_(m.exit.weight, LIMIT), "the norm of 1 of"),
        (lambda m: clip_grad_norm_(m.parameters(), LIMIT, norm_type=1.0), "order 2"),
        (lambda m: clip_grad_norm_(m.parameters(), LIMIT, norm_type=math.inf, foreach=False), "order 2"),
        (lambda m: clip_grad_value_(m.parameters(), 1.0), "were to be read or changed.*max_gradient_norm"),
        (lambda m: m.exit.weight.grad.mul_(0.5), "were to be read or changed.*max_gradient_norm"),
        (lambda m: m.entry.weight.grad.data.zero_(), "were to be read or changed.*max_gradient_norm"),
        (lambda m: m.entry.weight.grad.sum(), "were to be read or changed.*max_gradient_norm"),
    ],
)
def test_anything_else_is_refused_and_the_step_goes_on(clip: Callable[[nn.Module], Any], message: str) -> None:
    def refused(model: nn.Module) -> None:
        with torch.no_grad(), pytest.raises(ScheduleError, match=message):
            clip(model)

    plan = plan_for(CASE.workload).model_copy(update={"max_gradient_norm": LIMIT})
    _, model = clipped(CASE, plan, refused)
    assert differences(model, CASE.plain_with(1, LIMIT).weights[-1]) == []


@pytest.mark.parametrize(
    "clip",
    [
        lambda m: clip_grad_norm_(m.parameters(), 1.0),
        lambda m: clip_grad_value_(m.parameters(), 1.0),
        lambda m: m.lm_head.weight.grad.mul_(2),
        lambda m: m.model.embed_tokens.weight.grad.sum(),
    ],
)
def test_without_a_limit_the_error_names_the_knob(
    case: Case, model: nn.Module, training: Training, clip: Callable[[nn.Module], Any]
) -> None:
    case.loss(model, case.batches[1]).backward()
    with pytest.raises(ScheduleError, match=r"max_gradient_norm of the plan"):
        clip(model)
    # Nothing was harmed: this step and those after it are the plain loop's.
    training.step()
    for batch in case.batches[2:]:
        case.loss(model, batch).backward()
        training.step()
    training.close()
    assert differences(model, case.plain.weights[-1]) == []


def test_a_given_up_iteration_leaves_no_stand_in(case: Case, model: nn.Module) -> None:
    plan = plan_for(case.workload).model_copy(update={"max_gradient_norm": LIMIT})
    with (
        ends_in_time(),
        carry_out(model, plan, case.workload, optimizer=case.make_optimizer, keep_last_step=True) as training,
    ):
        for batch in case.batches[:2]:
            case.loss(model, batch).backward()
            assert all("handed over" in repr(p.grad) for p in model.parameters())
            training.skip_step()
            assert all(p.grad is None for p in model.parameters())
        case.loss(model, case.batches[0]).backward()
        training.step()
        assert all(p.grad is None for p in model.parameters())
    assert differences(model, case.plain_with(1, LIMIT).weights[1]) == []


def test_with_scaled_losses_the_step_alone_clips(case: Case, model: nn.Module) -> None:
    plan = plan_for(case.workload).model_copy(update={"max_gradient_norm": LIMIT})
    with (
        ends_in_time(),
        carry_out(
            model, plan, case.workload, optimizer=case.make_optimizer, loss_scaling=LossScaling(initial_scale=8.0)
        ) as training,
    ):
        training.scale(case.loss(model, case.batches[0])).backward()
        with pytest.raises(ScheduleError, match="losses are scaled here"):
            clip_grad_norm_(model.parameters(), LIMIT)
        training.step()
    assert differences(model, case.plain_with(1, LIMIT).weights[1]) == []

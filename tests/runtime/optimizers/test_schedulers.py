"""Schedulers of torch on the optimizer of a training, also while CPU Adam still runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from protwin.runtime import Training, carry_out
from protwin.runtime.optimizers.step_options import StepOptions
from protwin.shared.schema.plan import Plan
from tests.runtime.models import SEED, differences, uncached
from tests.runtime.optimizing import (
    CASE,
    OPTIMIZERS,
    SCHEDULERS,
    STEPS,
    MakeOptimizer,
    MakeScheduler,
    half_offloaded,
    single_plans,
    two_groups,
)
from tests.runtime.watchdog import ends_in_time


def advance(scheduler: Any, loss: float) -> None:
    """What a loop does with a scheduler after a step."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()


def trained_plainly(make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler) -> tuple[list[float], nn.Module]:
    model = uncached(CASE.build())
    optimizer = make_optimizer(two_groups(model))
    scheduler = make_scheduler(optimizer)
    losses = []
    torch.manual_seed(SEED)
    for batch in CASE.batches:
        loss = CASE.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        advance(scheduler, loss.item())
        losses.append(loss.item())
    return losses, model


def trained(
    make_optimizer: MakeOptimizer,
    make_scheduler: MakeScheduler,
    plan: Plan,
    *,
    before_backward: Callable[[Training], None] = lambda _: None,
    after_step: Callable[[Training], None] = lambda _: None,
) -> tuple[list[float], nn.Module]:
    model = CASE.build()
    losses = []
    with (
        ends_in_time(),
        carry_out(model, plan, CASE.workload, optimizer=make_optimizer, parameter_groups=two_groups(model)) as training,
    ):
        scheduler = make_scheduler(training.optimizer)
        torch.manual_seed(SEED)
        for number, batch in enumerate(CASE.batches):
            loss = CASE.loss(model, batch)
            before_backward(training)
            loss.backward()
            if number % 2:
                training.step()
            else:
                training.optimizer.step()
                training.optimizer.zero_grad()
            advance(scheduler, loss.item())
            after_step(training)
            losses.append(loss.item())
    return losses, model


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_schedulers_of_torch_equal_the_plain_loop(optimizer: str, scheduler: str, data: st.DataObject) -> None:
    plan = data.draw(single_plans(CASE.workload))
    losses, model = trained(OPTIMIZERS[optimizer], SCHEDULERS[scheduler], plan)
    expected, plain = trained_plainly(OPTIMIZERS[optimizer], SCHEDULERS[scheduler])
    assert losses == expected
    assert differences(model, plain.state_dict()) == []


def test_rates_that_are_tensors_are_changed_in_place_by_schedulers() -> None:
    rates = [torch.tensor(1e-2), torch.tensor(1e-2)]
    plain, ours = (partial(torch.optim.AdamW, lr=rate, fused=True) for rate in rates)
    expected, model = trained_plainly(plain, SCHEDULERS["lambda"])
    losses, other = trained(ours, SCHEDULERS["lambda"], half_offloaded(CASE.workload))
    assert losses == expected
    assert differences(other, model.state_dict()) == []


# -- options change while CPU Adam still runs ------------------------------------------------------------------------


class Gate:
    """Holds CPU Adam back until somebody opens it."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(groups, lr=1e-2, fused=True)

        def hold(*_: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                assert self.open.wait(timeout=30)

        made.register_step_pre_hook(hold)
        return made


def trained_with_late_steps(plan: Plan) -> tuple[list[float], nn.Module, list[int]]:
    """Train so that no CPU Adam of an iteration runs before the scheduler has set the rates of the next one."""
    gate = Gate()
    counts = []

    def shut(training: Training) -> None:
        training.synchronize()
        gate.open.clear()

    def release(training: Training) -> None:
        counts.append(training.num_cpu_adam_steps)
        gate.open.set()

    make_scheduler = SCHEDULERS["warm up, then cosine"]
    losses, model = trained(gate.optimizer, make_scheduler, plan, before_backward=shut, after_step=release)
    return losses, model, counts


def test_a_step_that_runs_late_takes_the_options_of_its_iteration() -> None:
    """And nobody waits for it, though the rate changes at every step."""
    losses, model, counts = trained_with_late_steps(half_offloaded(CASE.workload))
    expected, plain = trained_plainly(OPTIMIZERS["AdamW"], SCHEDULERS["warm up, then cosine"])
    assert losses == expected
    assert differences(model, plain.state_dict()) == []
    num_offloaded = counts[1]
    assert num_offloaded > 1
    assert counts == [number * num_offloaded for number in range(STEPS)], "CPU Adam of an iteration ran before its end"


def test_options_that_are_read_when_the_step_runs_are_those_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: every chunk looks at the groups as they are by then."""
    facades: list[Any] = []
    original = StepOptions.plan_step

    def plan_step(self: StepOptions, param_groups: Any) -> None:
        facades.append(param_groups)
        original(self, param_groups)

    monkeypatch.setattr(StepOptions, "plan_step", plan_step)
    monkeypatch.setattr(
        StepOptions,
        "of_step",
        lambda *_: tuple({k: v for k, v in group.items() if k != "params"} for group in facades[-1]),
    )
    _, model, _ = trained_with_late_steps(half_offloaded(CASE.workload))
    _, plain = trained_plainly(OPTIMIZERS["AdamW"], SCHEDULERS["warm up, then cosine"])
    assert differences(model, plain.state_dict()) != []

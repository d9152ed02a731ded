"""The optimizer of a training: what it shows, what it refuses, and gradients that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import Training, carry_out
from protwin.runtime.optimizers.non_finite import NonFiniteGradientError, non_finite
from protwin.shared.basics.errors import PlanError, ScheduleError
from tests.runtime.models import SEED, Case, differences, uncached
from tests.runtime.optimizing import (
    CASE,
    OPTIMIZERS,
    STEPS,
    half_offloaded,
    persistent,
    two_groups,
)
from tests.runtime.watchdog import ends_in_time


@pytest.fixture
def model() -> nn.Module:
    return CASE.build()


@pytest.fixture
def training(model: nn.Module) -> Iterator[Training]:
    """One step done, most of the model offloaded."""
    with ends_in_time():
        started = carry_out(
            model,
            half_offloaded(CASE.workload),
            CASE.workload,
            optimizer=OPTIMIZERS["AdamW"],
            parameter_groups=two_groups(model),
        )
        one_step(model, started, 0)
        yield started
        started.close()


def one_step(model: nn.Module, training: Training, number: int) -> None:
    CASE.loss(model, CASE.batches[number]).backward()
    training.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_show_every_option_as_the_plain_optimizer_does(name: str) -> None:
    model, plain = CASE.build(), CASE.build()
    expected = OPTIMIZERS[name](two_groups(plain))
    names = {id(p): n for n, p in model.named_parameters()} | {id(p): n for n, p in plain.named_parameters()}
    with carry_out(
        model,
        half_offloaded(CASE.workload),
        CASE.workload,
        optimizer=OPTIMIZERS[name],
        parameter_groups=two_groups(model),
    ) as training:
        assert isinstance(training.optimizer, torch.optim.Optimizer)
        assert training.optimizer.defaults == expected.defaults
        for group, other in zip(training.optimizer.param_groups, expected.param_groups, strict=True):
            assert {k: v for k, v in group.items() if k != "params"} == {
                k: v for k, v in other.items() if k != "params"
            }
            assert [names[id(p)] for p in group["params"]] == [names[id(p)] for p in other["params"]]


def test_a_group_without_trainable_parameters_shows_its_options_too() -> None:
    model = CASE.build()
    model.exit.requires_grad_(False)
    case = Case(lambda: model, CASE.batches, has_loss=False)
    inner = [p for n, p in model.named_parameters() if not n.startswith("exit")]
    groups = [{"params": model.exit.parameters(), "lr": 0.5}, {"params": inner}]
    with carry_out(
        model, persistent(case.workload), case.workload, optimizer=OPTIMIZERS["AdamW"], parameter_groups=groups
    ) as training:
        frozen, rest = training.optimizer.param_groups
        assert [p.requires_grad for p in frozen["params"]] == [False, False]
        assert len(rest["params"]) == len(inner)
        assert (frozen["lr"], rest["lr"], frozen["betas"]) == (0.5, 1e-2, (0.9, 0.999))


def test_hooks_on_the_step_run_however_it_is_called(model: nn.Module, training: Training) -> None:
    calls = []
    training.optimizer.register_step_post_hook(lambda *_: calls.append(training.num_iterations))
    one_step(model, training, 1)
    CASE.loss(model, CASE.batches[2]).backward()
    training.optimizer.step()
    assert calls == [2, 3]


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr", float("nan"), r"learning rate nan of parameter group 1 is not finite and at least 0"),
        ("lr", -1e-3, r"learning rate -0.001 of parameter group 1"),
        ("lr", float("inf"), r"learning rate inf"),
        ("lr", torch.tensor(float("nan")), r"learning rate nan"),
        ("lr", "fast", r"learning rate 'fast'"),
        ("weight_decay", -1.0, r"weight_decay -1.0"),
        ("betas", (0.9, 1.0), r"betas \(0.9, 1.0\) of parameter group 1 is not at least 0 and less than 1"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_stepped(
    model: nn.Module, training: Training, option: str, value: Any, message: str
) -> None:
    good = training.optimizer.param_groups[1][option]
    training.optimizer.param_groups[1][option] = value
    stepped = training.num_iterations
    with pytest.raises(PlanError, match=message):
        model(CASE.batches[1]["points"])
    training.optimizer.param_groups[1][option] = good
    one_step(model, training, 1)
    training.synchronize()
    assert training.num_iterations == stepped + 1


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rate", [float("nan"), -1.0])
def test_a_factory_with_such_an_option_is_refused(name: str, rate: float) -> None:
    model = CASE.build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with ends_in_time(), pytest.raises(PlanError, match=r"[Ll]earning rate"):
        carry_out(
            model,
            half_offloaded(CASE.workload),
            CASE.workload,
            optimizer=lambda groups: OPTIMIZERS[name]([{**group, "lr": rate} for group in groups]),
        )
    assert differences(model, before) == []


def test_options_changed_within_an_iteration_are_refused_and_nothing_is_lost() -> None:
    def run(*, is_careless: bool) -> nn.Module:
        model = CASE.build()
        plan = half_offloaded(CASE.workload)
        with ends_in_time(), carry_out(model, plan, CASE.workload, optimizer=OPTIMIZERS["AdamW"]) as training:
            for number in range(STEPS):
                CASE.loss(model, CASE.batches[number]).backward()
                if is_careless and number == 2:
                    training.optimizer.param_groups[0]["lr"] = 0.5
                    with pytest.raises(ScheduleError, match=r"between step\(\) and the next forward; for this step"):
                        training.step()
                    training.optimizer.param_groups[0]["lr"] = 1e-2
                training.step()
        return model

    torch.manual_seed(SEED)
    expected = run(is_careless=False).state_dict()
    torch.manual_seed(SEED)
    assert differences(run(is_careless=True), expected) == []


def test_where_nothing_is_stepped_ahead_options_may_change_up_to_the_step() -> None:
    model, plain = CASE.build(), uncached(CASE.build())
    optimizer = OPTIMIZERS["AdamW"](two_groups(plain))
    with (
        ends_in_time(),
        carry_out(
            model,
            persistent(CASE.workload),
            CASE.workload,
            optimizer=OPTIMIZERS["AdamW"],
            parameter_groups=two_groups(model),
        ) as training,
    ):
        for number, batch in enumerate(CASE.batches):
            for trained_model, of in ((model, training.optimizer), (plain, optimizer)):
                torch.manual_seed(number)
                CASE.loss(trained_model, batch).backward()
                of.param_groups[0]["lr"] = 0.01 * (number + 1)
                of.step()
                of.zero_grad()
        assert training.num_cpu_adam_steps == 0
    assert differences(model, plain.state_dict()) == []


def test_zero_grad_does_nothing_or_refuses(model: nn.Module, training: Training) -> None:
    training.optimizer.zero_grad()
    loss = CASE.loss(model, CASE.batches[1])
    training.optimizer.zero_grad()
    with pytest.raises(ScheduleError, match="keep gradients of zeros"):
        training.optimizer.zero_grad(set_to_none=False)
    loss.backward()
    with pytest.raises(ScheduleError, match=r"zero_grad\(\) between backward and step\(\) would lose"):
        training.optimizer.zero_grad()
    training.step()
    training.optimizer.zero_grad()
    assert training.num_iterations == 2


def test_zero_grad_between_micro_batches_would_lose_the_first_ones() -> None:
    model = CASE.build()
    plan = half_offloaded(CASE.workload).model_copy(update={"micro_batches": 2})
    with ends_in_time(), carry_out(model, plan, CASE.workload) as training:
        for batch in CASE.batches[:2]:
            CASE.loss(model, batch).backward()
            with pytest.raises(ScheduleError, match="would lose gradients"):
                training.optimizer.zero_grad()
        training.optimizer.step()
        training.optimizer.zero_grad()
        assert training.num_iterations == 1


def test_what_would_not_reach_the_chunks_is_refused(model: nn.Module, training: Training) -> None:
    optimizer = training.optimizer
    with pytest.raises(PlanError, match="parameter group cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ScheduleError, match=r"step\(closure\)"):
        optimizer.step(lambda: 0.0)
    one_step(model, training, 1)
    training.close()
    with pytest.raises(ScheduleError, match="closed"):
        optimizer.step()


# -- gradients that are not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("stack.0.up.bias", r"stack\.0\.up\.bias \(block stack\.0\)"),
        ("stack.2.down.weight", r"stack\.2\.down\.weight \(block stack\.2\)"),
        ("exit.weight", r"exit\.weight \(outside every block\)"),
    ],
)
def test_a_gradient_that_is_not_finite_is_named_and_not_stepped(name: str, whose: str, bad: float) -> None:
    model = CASE.build()
    with ends_in_time(), pytest.raises(NonFiniteGradientError, match=f"the gradient of {whose} is not finite"):
        train_with_bad_gradient(model, model.get_parameter(name), bad)
    assert all(value.isfinite().all() for value in model.state_dict().values())


def train_with_bad_gradient(model: nn.Module, parameter: nn.Parameter, bad: float) -> None:
    """One good step, then one with a gradient full of ``bad``."""
    with carry_out(model, half_offloaded(CASE.workload), CASE.workload, optimizer=OPTIMIZERS["AdamW"]) as training:
        one_step(model, training, 0)
        training.synchronize()
        handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, bad))
        try:
            one_step(model, training, 1)
            training.synchronize()
        finally:
            handle.remove()


def test_unchecked_gradients_go_through_as_in_the_plain_loop() -> None:
    model = CASE.build()
    handle = model.get_parameter("stack.2.down.weight").register_hook(lambda gradient: gradient * float("nan"))
    with (
        ends_in_time(),
        carry_out(model, half_offloaded(CASE.workload), CASE.workload, check_gradients=False) as training,
    ):
        one_step(model, training, 0)
    handle.remove()
    not_finite = [name for name, value in model.state_dict().items() if not value.isfinite().all()]
    assert not_finite == ["stack.2.down.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_finite_gradients_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    with_nan = largest.clone()
    with_nan[7] = float("nan")
    both = torch.zeros(10, dtype=dtype)
    both[3], both[5] = float("inf"), -float("inf")
    assert not largest.sum().isfinite()
    assert non_finite([largest, None, with_nan, torch.empty(0, dtype=dtype), both]) == [2, 4]

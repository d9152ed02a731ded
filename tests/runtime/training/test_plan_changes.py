"""A training whose plan changes between two steps goes on, bit for bit, as if it had not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from protwin.runtime import CpuDevice, LossScaling, Training, carry_out
from protwin.runtime.checkpoints import plan_change
from protwin.runtime.checkpoints.optimizer_state import OptimizerState
from protwin.runtime.training.assembly import Assembly
from protwin.shared.basics.errors import DeviceOutOfMemoryError, PlanError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.equality import first
from tests.runtime.models import SEED, Case, cases, differences, held, llama, token_batches
from tests.runtime.resuming import kept, mixed, offloaded, on_disk, same_bits, sgd
from tests.strategies.plans import plans

_STEPS = 5


def need_bytes(case: Case, plan: Plan) -> int:
    return guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes


class Followed:
    """A training by the first of ``at``'s plans, and by each of the others from its step on."""

    def __init__(
        self, case: Case, at: Sequence[tuple[int, Plan]], steps: int = _STEPS, *, has_budget: bool = True
    ) -> None:
        model, (_, plan), self.losses = case.build(), at[0], []
        need = need_bytes(case, plan)
        device = CpuDevice(need if has_budget else None)
        ledger, calls = device.ledger, []
        with carry_out(
            model,
            plan,
            case.workload,
            optimizer=case.make_optimizer,
            parameter_groups=case.groups(model),
            device=device,
        ) as training:
            scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, step_size=2, gamma=0.5)
            training.optimizer.register_step_post_hook(lambda *_: calls.append(1))
            torch.manual_seed(SEED)
            rows = [*case.batches] * plan.micro_batches * steps
            for step in range(steps):
                for _, other in (one for one in at[1:] if one[0] == step):
                    more = need_bytes(case, other)
                    ledger.budget_bytes = max(need, more) if has_budget else None
                    training.change_plan(other)
                    # What the plan before had on the device is gone.
                    need = more
                    ledger.budget_bytes = more if has_budget else None
                    assert training.plan == other
                    # Else gathers that are earlier than the first task would find no room, now and then.
                    assert ledger.claim_bytes == 0
                for batch in held(case, rows[step * plan.micro_batches : (step + 1) * plan.micro_batches]):
                    loss = case.loss(model, batch)
                    loss.backward()
                    self.losses.append(loss.item())
                training.step()
                scheduler.step()
                assert training.num_steps == training.num_iterations == step + 1
            self.optimizer = training.optimizer.state_dict()
            self.rates = [group["lr"] for group in training.optimizer.param_groups]
            self.random = torch.get_rng_state()
            self.num_gathers, self.num_host_steps = training.num_gathers, training.num_cpu_adam_steps
            assert len(calls) == steps
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert ledger.named_bytes == 0

    def differences(self, other: Followed) -> list[str]:
        names = ("losses", "optimizer", "rates", "random", "weights")
        return [name for name in names if not same_bits(getattr(self, name), getattr(other, name))]


@settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_random_plans_follow_each_other(data: st.DataObject) -> None:
    check_random_plans(data, ["hand-written, partly narrow", "hand-written, batch statistics"])


@pytest.mark.slow
@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_random_plans_of_all_models_follow_each_other(data: st.DataObject) -> None:
    check_random_plans(data, sorted(cases()))


def check_random_plans(data: st.DataObject, names: list[str]) -> None:
    case = cases()[data.draw(st.sampled_from(names))]
    one = data.draw(plans(case.workload).map(first))
    knobs = {"micro_batches": one.micro_batches, "max_gradient_norm": one.max_gradient_norm}
    same_steps = plans(case.workload).map(first).map(lambda plan: plan.model_copy(update=knobs))
    changes = data.draw(st.lists(st.tuples(st.integers(0, _STEPS - 1), same_steps), min_size=1, max_size=3))
    never = Followed(case, [(0, one)])
    assert Followed(case, [(0, one), *sorted(changes, key=lambda change: change[0])]).differences(never) == []


def test_there_and_back_moves_what_both_plans_move() -> None:
    case = cases()["llama in bfloat16"]
    away, here = offloaded(case.workload), kept(case.workload)
    never = Followed(case, [(0, here)])
    both = Followed(case, [(0, here), (1, away), (3, here)])
    assert both.differences(never) == []
    assert never.num_host_steps == 0
    assert both.num_host_steps == 2 * Followed(case, [(0, away)], steps=1).num_host_steps > 2
    assert both.num_gathers > 2
    assert differences(case.build(), both.weights) != []


def test_state_that_stays_behind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: weights move alone."""
    case = cases()["llama"]
    at = [(0, kept(case.workload)), (2, offloaded(case.workload))]
    never = Followed(case, at[:1])
    monkeypatch.setattr(OptimizerState, "set_taken", lambda self, states: states.clear())
    assert Followed(case, at).differences(never) == ["losses", "optimizer", "weights"]


@pytest.mark.parametrize("make_optimizer", [sgd, partial(torch.optim.Adam, lr=0.01, amsgrad=True, foreach=False)])
def test_state_of_any_optimizer(make_optimizer: Any) -> None:
    case = Case(partial(llama, num_layers=2), token_batches(), make_optimizer=make_optimizer)
    at = [(0, mixed(case.workload)), (1, kept(case.workload)), (3, offloaded(case.workload))]
    # What they keep is not what the plan accounts for.
    found, never = (Followed(case, plans, has_budget=False) for plans in (at, at[:1]))
    assert found.differences(never) == []


def begun(case: Case, plan: Plan, **changes: Any) -> tuple[nn.Module, Training]:
    model = case.build()
    return model, carry_out(model, plan, case.workload, optimizer=case.make_optimizer, **changes)


def step(case: Case, model: nn.Module, training: Training, number: int) -> float:
    loss = case.loss(model, case.batches[number])
    (training.scale(loss) if training.loss_scaler is not None else loss).backward()
    training.step()
    return float(loss.item())


def test_a_loss_scaler_stays_the_same_and_goes_on() -> None:
    case = cases()["llama"]
    limited = [plan(case.workload).model_copy(update={"max_gradient_norm": 1.0}) for plan in (kept, offloaded)]
    losses = []
    for changes in (False, True):
        model, training = begun(case, limited[0], loss_scaling=LossScaling(initial_scale=2.0**10, growth_interval=2))
        with training:
            scaler = training.loss_scaler
            found = [step(case, model, training, number) for number in range(2)]
            if changes:
                training.change_plan(limited[1])
            found += [step(case, model, training, number) for number in range(2, 4)]
            assert training.loss_scaler is scaler
            assert scaler.scale == 2.0**12
            losses.append(found)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"workload_id": "0" * 16}, "another workload"),
        ({"micro_batches": 2}, "micro_batches = 2"),
        ({"max_gradient_norm": 1.0}, "max_gradient_norm = 1.0"),
        ({"optimizer": Optimizer.SGD}, "optimizer = sgd"),
        ({"n_persist": 99}, "n_persist"),
    ],
)
def test_what_would_compute_something_else_is_refused(changed: dict[str, Any], told: str) -> None:
    case = cases()["llama"]
    model, training = begun(case, kept(case.workload))
    with training:
        torch.manual_seed(SEED)
        losses = [step(case, model, training, 0)]
        with pytest.raises(PlanError, match=told):
            training.change_plan(offloaded(case.workload).model_copy(update=changed))
        losses += [step(case, model, training, number) for number in range(1, 4)]
    assert losses == Case(case.build, case.batches).plain.losses


def test_what_is_not_known_so_far_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases()["llama"]
    model, training = begun(case, kept(case.workload))
    with training:
        with pytest.raises(PlanError, match="on a disk"):
            training.change_plan(on_disk(case.workload))
        with pytest.raises(PlanError, match="2 ranks"):
            training.change_plan(kept(case.workload).model_copy(update={"num_ranks": 2, "parallel": "ddp"}))
        loss = case.loss(model, case.batches[0])
        with pytest.raises(ScheduleError, match="the plan can be changed between step"):
            training.change_plan(offloaded(case.workload))
        loss.backward()
        training.step()
        monkeypatch.setattr(plan_change, "host_memory_bytes", lambda: 1)
        with pytest.raises(PlanError, match="host's memory for weights and optimizer state"):
            training.change_plan(offloaded(case.workload))


def test_a_device_that_is_too_small_is_known_before_anything_moves() -> None:
    case = cases()["llama"]
    small = offloaded(case.workload)
    model, training = begun(case, small, device=CpuDevice(need_bytes(case, small)))
    with training:
        before = training.schedule
        with pytest.raises(PlanError, match="device memory may reach"):
            training.change_plan(kept(case.workload))
        assert training.schedule is before
        step(case, model, training, 0)


def test_without_room_after_all_training_goes_on_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases()["llama"]
    at = [offloaded(case.workload), kept(case.workload)]
    build = Assembly.build

    def fails_once(self: Assembly) -> Any:
        if self.plan == at[1]:
            raise DeviceOutOfMemoryError("no room")
        return build(self)

    model, training = begun(case, at[0])
    with training:
        losses = [step(case, model, training, number) for number in range(2)]
        monkeypatch.setattr(Assembly, "build", fails_once)
        with pytest.raises(DeviceOutOfMemoryError, match="no room"):
            training.change_plan(at[1])
        assert training.plan == at[0]
        losses += [step(case, model, training, number) for number in range(2, 4)]
    assert losses == case.plain.losses
    assert differences(model, case.plain.weights[-1]) == []


def test_a_change_that_fails_for_good_leaves_a_model_with_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases()["llama"]

    def fail(self: Assembly) -> Any:
        raise DeviceOutOfMemoryError("no room")

    model, training = begun(case, offloaded(case.workload))
    with training:
        for number in range(4):
            step(case, model, training, number)
        monkeypatch.setattr(Assembly, "build", fail)
        with pytest.raises(DeviceOutOfMemoryError, match="no room"):
            training.change_plan(kept(case.workload))
        with pytest.raises(ScheduleError, match="has failed: no room"):
            training.step()
    assert differences(model, case.plain.weights[-1]) == []


def test_a_record_is_of_the_plan_that_is_carried_out() -> None:
    case = Case(partial(llama, num_layers=2), token_batches(14))
    at: list[Workload | Plan] = [kept(case.workload), offloaded(case.workload)]
    model, training = begun(case, at[0])
    with training:
        for number in range(6):
            step(case, model, training, number)
        assert training.record().plan == at[0]
        training.change_plan(at[1])
        for number in range(6, 14):
            step(case, model, training, number)
        record = training.record()
        assert record.plan == at[1]
        assert record.num_iterations == 4
        assert training.record(since=10, until=11).num_iterations == 1

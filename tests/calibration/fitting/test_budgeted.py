"""A model that does not fit is measured within the device's budget, by the model itself, and is then what it was."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from protwin.calibration import BudgetedSubject, calibrate
from protwin.calibration.fitting import budgeted, slowdowns
from protwin.calibration.fitting import calibrate as calibrating
from protwin.calibration.fitting.budget_plans import plans_within, working_kinds
from protwin.calibration.fitting.measurement_plans import bootstrap_plans
from protwin.calibration.fitting.optimizer_costs import OptimizerCosts
from protwin.runtime import CpuDevice, MemoryLedger, parameters_on_meta
from protwin.runtime.devices.machine import machine_name
from protwin.runtime.model.adapters import add_lora, freeze
from protwin.runtime.timing.within_budget import least_plan
from protwin.runtime.training.plain_loop import train_plainly
from protwin.shared.basics.errors import CalibrationError, DeviceOutOfMemoryError, FileError, InfeasibleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.calibration.fitting import test_fit
from tests.runtime.models import gpt2, llama, token_batches
from tests.runtime.timing.held import Held
from tests.strategies.plans import planned_workloads

HERE = test_fit.MACHINE.model_copy(update={"name": machine_name()})


def peak_bytes(plan: Plan, workload: Workload) -> int:
    return guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes


# -- the plans -------------------------------------------------------------------------------------------------------


@given(drawn=planned_workloads(max_blocks=4), more_frac=st.floats(0.0, 1.5))
def test_plans_within_a_budget_do_whatever_a_plan_within_it_does(drawn: Any, more_frac: float) -> None:
    """Of any plan that fits: each kind of its tasks is one of theirs, unless a norm or a disk was not asked for."""
    workload, plan = drawn.workload, drawn.plan
    _, least_bytes = least_plan(workload)
    budget_bytes = round(max(least_bytes, peak_bytes(plan, workload)) * (1 + more_frac))
    found = plans_within(workload, budget_bytes, optimizer=plan.optimizer, has_disk=plan.n_disk_state > 0)
    assert 1 <= len(found) <= 6
    assert all(peak_bytes(one, workload) <= budget_bytes for one in found)
    kinds = frozenset().union(*(working_kinds(compile_schedule(one, workload)) for one in found))
    assert working_kinds(compile_schedule(plan, workload)) <= kinds
    assert plans_within(workload, least_bytes - 1) == () or min(peak_bytes(p, workload) for p in found) < least_bytes


def test_three_plans_for_a_device_that_holds_everything_lack_kinds() -> None:
    """What the property above would find."""
    workload = test_fit.a_workload()

    def kinds(plan: Plan) -> frozenset[TaskKind]:
        return working_kinds(compile_schedule(plan, workload))

    of_three = frozenset().union(*map(kinds, bootstrap_plans(workload)))
    of_all = frozenset().union(*map(kinds, plans_within(workload, 2**40)))
    assert of_all - of_three >= {TaskKind.GRADIENT_NORM, TaskKind.GRADIENT_ACCUMULATE}
    assert max(peak_bytes(plan, workload) for plan in bootstrap_plans(workload)) > least_plan(workload)[1]


# -- calibrating -----------------------------------------------------------------------------------------------------


@contextmanager
def in_short() -> Iterator[None]:
    """One round of small pieces, and no steps of other optimizers."""
    one_round = partial(slowdowns.measure_slowdowns, rounds=1)
    nothing = (OptimizerCosts(), OptimizerCosts())
    with (
        patch.object(slowdowns, "_COPY_BYTES", 2**16),
        patch.object(slowdowns, "_ADAM_SCALARS", 2**12),
        patch.object(calibrating, "measure_slowdowns", one_round),
        patch.object(calibrating, "optimizer_costs", lambda *_, **__: nothing),
    ):
        yield


def measured(model: nn.Module, budget_bytes: int, hardware: Hardware = HERE, **fields: Any) -> Calibration:
    batch = token_batches()[0]
    with in_short():
        subject = BudgetedSubject.of(model, batch, hardware, budget_bytes, repeats=1, **fields)
        return calibrate(subject, steps=2, slowdown_seconds=0.05)


def plain_need_bytes(model: nn.Module) -> int:
    """What plain training needs: weights, gradients and moments, and what forward saves."""
    return train_plainly(model, token_batches()[:2], torch.optim.AdamW, ledger=MemoryLedger()).peak_bytes


def test_within_a_quarter_of_what_plain_training_needs() -> None:
    """Enforced, by plans of which none fits a smaller device; no parameter is ever copied whole."""
    need_bytes = plain_need_bytes(llama(num_layers=8))
    model, devices = llama(num_layers=8), []

    def device() -> CpuDevice:
        devices.append(CpuDevice(need_bytes // 4))
        return devices[-1]

    with patch.object(nn.Parameter, "__deepcopy__", _refusing_copies(nn.Parameter.__deepcopy__)):
        found = measured(model, need_bytes // 4, make_device=device)
    assert {TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.GATHER, TaskKind.CPU_ADAM} <= set(
        found.factors
    )
    assert {TaskKind.ACTIVATION_OFFLOAD, TaskKind.ACTIVATION_FETCH, TaskKind.GRADIENT_NORM} <= set(found.factors)
    peaks = [one.ledger.peak_bytes for one in devices if one.ledger.peak_bytes]
    assert len(peaks) > 3
    assert need_bytes // 8 < max(peaks) <= need_bytes // 4
    with pytest.raises(DeviceOutOfMemoryError):
        train_plainly(llama(num_layers=8), token_batches()[:2], torch.optim.AdamW, ledger=MemoryLedger(need_bytes // 4))


def _refusing_copies(copied: Any) -> Any:
    def refuse(self: nn.Parameter, memo: Any) -> Any:
        assert self.is_meta or type(self.data).__name__ == "FakeTensor", "a parameter is copied"
        return copied(self, memo)

    return refuse


def _with_lora() -> nn.Module:
    model = llama()
    add_lora(model, rank=2)
    return model


def _frozen() -> nn.Module:
    model = gpt2()
    freeze(model, ("transformer.h.0.*", "transformer.wpe*"))
    return model


@pytest.mark.parametrize(
    ("build", "optimizer", "autocast"),
    [
        (_with_lora, Optimizer.SGD, None),
        (_frozen, Optimizer.ADAFACTOR, None),
        (llama, Optimizer.ADAM, DType.BFLOAT16),
    ],
)
def test_methods_optimizers_and_autocast(build: Callable[[], nn.Module], optimizer: Optimizer, autocast: Any) -> None:
    model = build()
    held = Held.of(model)
    seen: list[Plan] = []
    begin = BudgetedSubject.begin

    def noting(self: BudgetedSubject, plan: Plan, **given: Any) -> Any:
        seen.append(plan)
        return begin(self, plan, **given)

    with patch.object(BudgetedSubject, "begin", noting):
        found = measured(model, 2**21, optimizer=optimizer, autocast=autocast)
    held.check(model)
    assert {plan.optimizer for plan in seen} == {optimizer}
    assert found.num_runs == len(seen) > 2
    assert TaskKind.CPU_ADAM in found.factors


# -- too little ------------------------------------------------------------------------------------------------------


def test_the_least_budget_is_said_and_is_enough() -> None:
    model = llama()
    with pytest.raises(InfeasibleError, match=r"too small to measure.*needs .*Raise it to") as refused:
        measured(model, 1000)
    assert len(str(refused.value).splitlines()) == 1
    subject = BudgetedSubject.of(model, token_batches()[0], HERE, 2**30, repeats=1)
    _, least_bytes = least_plan(subject.workload)
    assert measured(model, least_bytes).num_runs >= 1
    with pytest.raises(InfeasibleError):
        measured(model, least_bytes - 1)


def test_a_device_without_the_budget_is_refused() -> None:
    with pytest.raises(CalibrationError, match="does not keep to the budget"):
        BudgetedSubject.of(llama(), token_batches()[0], HERE, 2**20, make_device=CpuDevice)


# -- left as found ---------------------------------------------------------------------------------------------------


class _Stop(Exception):
    """Injected."""


@contextmanager
def failing_at(step: int) -> Iterator[list[int]]:
    """Within the block the ``step``-th operation of a torch function fails; gives how many there were."""
    begun = [0]

    def counting(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun[0] += 1
            if begun[0] == step:
                raise _Stop
            return function(*args, **kwargs)

        return call

    with (
        patch.object(nn.functional, "linear", counting(nn.functional.linear)),
        patch.object(torch.optim.AdamW, "step", counting(torch.optim.AdamW.step)),
        patch.object(CpuDevice, "copy", counting_method(CpuDevice.copy, begun, step)),
        patch.object(budgeted, "trace_within", counting(budgeted.trace_within)),
    ):
        yield begun


def counting_method(method: Any, begun: list[int], step: int) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun[0] += 1
        if begun[0] == step:
            raise _Stop
        return method(self, *args, **kwargs)

    return call


def _begun() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in the middle of a training of its own: gradients, moments, a block in evaluation."""
    model = gpt2(num_layers=2)
    optimizer = torch.optim.Adam(model.parameters())
    model(**token_batches()[0]).loss.backward()
    optimizer.step()
    model.transformer.h[0].eval()
    random.seed(3)
    return model, optimizer


def test_everything_is_as_found_whatever_fails() -> None:
    """A failure is injected at each of the steps that a calibration takes: products, copies and optimizer steps."""
    model, optimizer = _begun()
    with failing_at(-1) as begun:
        measured(model, 2**20)
    held = Held.of(model, optimizer)
    steps = random.Random(0).sample(range(1, begun[0] + 1), 12)
    for step in steps:
        with failing_at(step), pytest.raises(_Stop):
            measured(model, 2**20)
        held.check(model, optimizer)


def test_what_is_not_put_back_is_seen(tmp_path: Path) -> None:
    """The wrong variant: nobody wants the model back."""
    model, optimizer = _begun()
    held = Held.of(model, optimizer)
    measured(model, 2**20)
    held.check(model, optimizer)
    measured(model, 2**20, is_kept=False)
    with pytest.raises(AssertionError, match="weights"):
        held.check(model, optimizer)


def test_weights_in_a_folder_are_read_and_stay_there(tmp_path: Path) -> None:
    save_file({name: tensor.clone() for name, tensor in llama().state_dict().items()}, tmp_path / "model.safetensors")
    with parameters_on_meta():
        model = llama()
    held = Held.of(model)
    assert measured(model, 2**20, weights=tmp_path).num_runs > 2
    assert all(parameter.is_meta for parameter in model.parameters())
    held.check(model)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_folder_without_room_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    model = llama()
    held = Held.of(model)
    with pytest.raises(FileError, match=r"cannot be kept in .*Name another folder"):
        measured(model, 2**20, scratch_folder=tmp_path / "absent")
    held.check(model)
    assert measured(model, 2**20, scratch_folder=tmp_path).num_runs > 2
    assert os.listdir(tmp_path) == []

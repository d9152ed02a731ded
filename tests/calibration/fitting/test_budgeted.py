"""A model that does not fit is measured within the device's budget, by the model itself, and is then what it was."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from protwin.calibration import BudgetedSubject, calibrate
from protwin.calibration.fitting import calibrate as calibrating
from protwin.calibration.fitting import slowdowns
from protwin.calibration.fitting.budget_plans import plans_within, working_kinds
from protwin.calibration.fitting.measurement_plans import bootstrap_plans
from protwin.calibration.fitting.optimizer_costs import OptimizerCosts
from protwin.calibration.validation.drawing import Draw, draw_plans
from protwin.runtime import CpuDevice, MemoryLedger, parameters_on_meta
from protwin.runtime.devices import probe
from protwin.runtime.devices.machine import machine_name
from protwin.runtime.model.adapters import add_lora, freeze
from protwin.runtime.optimizers.chunk_optimizer import ChunkOptimizer
from protwin.runtime.timing.plain_loop import train_plainly
from protwin.runtime.timing.within_budget import least_plan
from protwin.shared.basics.errors import CalibrationError, DeviceOutOfMemoryError, FileError, InfeasibleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import DType, Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.calibration.fitting import test_fit
from tests.full_disk import largest_file
from tests.proof_size import some_quick
from tests.runtime.timing.held import Held
from tests.runtime.timing.test_within_budget import Model

BATCH = {"x": torch.linspace(-1, 1, 4 * 64).view(4, 64)}
HERE = test_fit.MACHINE.model_copy(update={"name": machine_name()})


def peak_bytes(plan: Plan, workload: Workload) -> int:
    return guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes


def swappable(workload: Workload) -> Workload:
    """Blocks save tensors that may go to the host."""
    profiles = [profile.model_copy(update={"swappable_bytes": 50_000}) for profile in workload.profiles]
    return workload.model_copy(update={"profiles": tuple(profiles)})


# -- the plans -------------------------------------------------------------------------------------------------------


def test_plans_within_a_budget_do_whatever_a_plan_within_it_does() -> None:
    """A plan by chance, and just its memory: each kind of its tasks is one of theirs."""
    workload = swappable(test_fit.a_workload(5))
    kinds_seen: set[TaskKind] = set()
    for drawn in draw_plans(workload, Draw(most_micro_batches=2), number=9):
        budget_bytes = max(peak_bytes(drawn, workload), least_plan(workload)[1])
        found = plans_within(workload, budget_bytes)
        assert 1 <= len(found) <= 5
        assert all(peak_bytes(one, workload) <= budget_bytes for one in found)
        kinds = working_kinds(compile_schedule(drawn, workload))
        assert kinds <= frozenset().union(*(working_kinds(compile_schedule(one, workload)) for one in found))
        kinds_seen |= kinds
    assert {TaskKind.ACTIVATION_FETCH, TaskKind.GRADIENT_NORM, TaskKind.GRADIENT_ACCUMULATE} <= kinds_seen


def test_three_plans_for_a_device_that_holds_everything_lack_kinds() -> None:
    """What the property above would find."""
    workload = test_fit.a_workload()

    def kinds(plan: Plan) -> frozenset[TaskKind]:
        return working_kinds(compile_schedule(plan, workload))

    of_three = frozenset().union(*map(kinds, bootstrap_plans(workload)[:3]))
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
        patch.object(probe, "_COPIED_BYTES", 2**22),
        patch.object(slowdowns, "_ADAM_SCALARS", 2**12),
        patch.object(calibrating, "measure_slowdowns", one_round),
        patch.object(calibrating, "optimizer_costs", lambda *_, **__: nothing),
    ):
        yield


def small(num_blocks: int = 3) -> tuple[Model, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Model(num_blocks), BATCH


def subject_of(model: nn.Module, budget_bytes: int = 2**20, **fields: Any) -> BudgetedSubject:
    return BudgetedSubject.of(model, BATCH, HERE, budget_bytes, repeats=0, **fields)


def measured(subject: BudgetedSubject, on_progress: Callable[[int, int], None] | None = None) -> Calibration:
    with in_short():
        return calibrate(subject, steps=2, slowdown_seconds=0.05, on_progress=on_progress)


def _refusing_copies(copied: Any) -> Any:
    def refuse(self: nn.Parameter, memo: Any) -> Any:
        assert self.is_meta or type(self.data).__name__ == "FakeTensor", "a parameter is copied"
        return copied(self, memo)

    return refuse


def test_within_a_quarter_of_what_plain_training_needs() -> None:
    """Enforced, by plans that swap, limit norms and accumulate too; no parameter is ever copied."""
    (model, batch), devices = small(8), []
    batches = [batch] * 2
    need_bytes = train_plainly(small(8)[0], batches, torch.optim.AdamW, ledger=MemoryLedger()).peak_bytes
    with pytest.raises(DeviceOutOfMemoryError):
        train_plainly(small(8)[0], batches, torch.optim.AdamW, ledger=MemoryLedger(need_bytes // 4))

    def device() -> CpuDevice:
        devices.append(CpuDevice(need_bytes // 4))
        return devices[-1]

    with patch.object(nn.Parameter, "__deepcopy__", _refusing_copies(nn.Parameter.__deepcopy__)):
        found = measured(subject_of(model, need_bytes // 4, make_device=device))
    compute = {TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD}
    steps = {TaskKind.CPU_ADAM, TaskKind.GRADIENT_NORM, TaskKind.GRADIENT_ACCUMULATE}
    copies = {TaskKind.GATHER, TaskKind.GRADIENT_OFFLOAD, TaskKind.ACTIVATION_OFFLOAD, TaskKind.ACTIVATION_FETCH}
    assert compute | steps | copies <= set(found.factors)
    peaks = [one.ledger.peak_bytes for one in devices if one.ledger.peak_bytes]
    assert len(peaks) == 1 + found.num_runs, "the trace has one too"
    assert need_bytes // 8 < max(peaks) <= need_bytes // 4


@some_quick(
    ("way", "optimizer", "autocast"),
    [("lora", Optimizer.SGD, None), ("frozen", Optimizer.ADAFACTOR, None), ("", Optimizer.ADAM, DType.BFLOAT16)],
    quick=1,
)
def test_methods_optimizers_and_autocast(way: str, optimizer: Optimizer, autocast: DType | None) -> None:
    model, _ = small()
    if way == "lora":
        add_lora(model, rank=2)
    if way == "frozen":
        freeze(model, ("layers.0.*",))
    held = Held.of(model)
    subject = subject_of(model, optimizer=optimizer, autocast=autocast)
    assert {plan.optimizer for plan in subject.plans()} == {optimizer}
    found = measured(subject)
    assert held.changed(model) == []
    assert found.num_runs == len(subject.plans()) > 2
    assert TaskKind.CPU_ADAM in found.factors


# -- too little ------------------------------------------------------------------------------------------------------


def test_the_least_budget_is_said_and_is_enough() -> None:
    model, _ = small()
    with pytest.raises(InfeasibleError, match=r"too small to measure.*needs .*Raise it to") as refused:
        subject_of(model, 1000)
    assert len(str(refused.value).splitlines()) == 1
    _, least_bytes = least_plan(subject_of(model).workload)
    assert measured(subject_of(model, least_bytes)).num_runs >= 1
    with pytest.raises(InfeasibleError):
        replace(subject_of(model), device_budget_bytes=least_bytes - 1).plans()


def test_a_device_without_the_budget_is_refused() -> None:
    with pytest.raises(CalibrationError, match="does not keep to the budget"):
        subject_of(small()[0], make_device=CpuDevice)


# -- left as found ---------------------------------------------------------------------------------------------------


class _Stop(Exception):
    """Injected."""


@contextmanager
def failing_at(step: int) -> Iterator[list[int]]:
    """Within the block the ``step``-th product, copy or step of an optimizer fails; gives how many have begun."""
    begun = [0]

    def counting(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun[0] += 1
            if begun[0] == step:
                raise _Stop
            return function(*args, **kwargs)

        return call

    with (
        patch.object(nn.Linear, "forward", counting(nn.Linear.forward)),
        patch.object(CpuDevice, "copy", counting(CpuDevice.copy)),
        patch.object(ChunkOptimizer, "step", counting(ChunkOptimizer.step)),
    ):
        yield begun


def _begun() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in the middle of a training of its own: gradients, moments, a block in evaluation."""
    model, batch = small(2)
    optimizer = torch.optim.Adam(model.parameters())
    model(**batch).backward()
    optimizer.step()
    model.layers[0].eval()
    random.seed(3)
    return model, optimizer


@pytest.mark.slow
def test_everything_is_as_found_whatever_fails() -> None:
    """A failure is injected at steps of every plan, between them, and while lanes are measured."""
    model, optimizer = _begun()
    held = Held.of(model, optimizer)
    subject = subject_of(model)
    assert held.changed(model, optimizer) == []
    # As many steps each time: lanes that are measured take as many as there is time for.
    with patch.object(slowdowns, "measure_slowdowns", lambda *_, **__: ()):
        with failing_at(-1) as begun:
            measured(subject)
        assert held.changed(model, optimizer) == []
        assert begun[0] > 200
        # The last copies are ahead of an iteration that never comes.
        for step in (1, 2, *random.Random(0).sample(range(3, begun[0] * 9 // 10), 6)):
            with failing_at(step), pytest.raises(_Stop):
                measured(subject)
            assert held.changed(model, optimizer) == []
    for report in (1, 13):
        with pytest.raises(_Stop):
            measured(subject, _failing_report(report))
        assert held.changed(model, optimizer) == []


def _failing_report(number: int) -> Callable[[int, int], None]:
    told = count(1)

    def report(done: int, total: int) -> None:
        if next(told) == number:
            raise _Stop

    return report


@pytest.mark.slow
def test_what_is_not_put_back_is_seen() -> None:
    """The wrong variant: nobody wants the model back."""
    model, optimizer = _begun()
    held = Held.of(model, optimizer)
    measured(subject_of(model, is_kept=False))
    assert "weights" in held.changed(model, optimizer)


def test_weights_in_a_folder_are_read_and_stay_there(tmp_path: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in small()[0].state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    with parameters_on_meta():
        model = Model(3)
    held = Held.of(model)
    assert measured(subject_of(model, weights=tmp_path)).num_runs > 2
    assert held.changed(model) == []
    assert all(parameter.is_meta for parameter in model.parameters())
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_folder_without_room_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    model, _ = small()
    held = Held.of(model)
    subject = subject_of(model, scratch_folder=tmp_path / "absent")
    with pytest.raises(FileError, match=r"cannot be kept in .*Name another folder"), subject.left_as_found():
        pass
    room = replace(subject, scratch_folder=tmp_path)
    with largest_file(1000), pytest.raises(FileError, match="with room for them"), room.left_as_found():
        pass
    assert held.changed(model) == []
    with room.left_as_found():
        assert os.listdir(tmp_path) == []

"""Every plan distils, bit for bit, what each block learns alone, and really moves what it says it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from protwin.runtime import CpuDevice, carry_out, training_of
from protwin.runtime.distillation import pairs as pairs_module
from protwin.runtime.distillation.distil import distil
from protwin.shared.basics.errors import DeviceOutOfMemoryError, PlanError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import Content, Schedule, TaskKind
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import IS_PROOF, examples
from tests.runtime.accounts import BAR, RESIDENCIES, error_frac
from tests.runtime.distillation.cases import adamw, changed, expected, mse, quiet, snapshot, unlike
from tests.runtime.distillation.distilling import (
    beginning,
    distilled,
    is_offloading,
    measured_peak_bytes,
    miscounted,
    plan_in,
    random_bypass_plans,
    workload_of,
)
from tests.runtime.distillation.families import families
from tests.runtime.eager_lanes import eager_peak

STEPS = 10


@pytest.mark.slow
@pytest.mark.parametrize("name", families())
def test_random_plans_distil_what_each_block_learns_alone(name: str) -> None:
    number, steps = examples(25, 2 if name in ("llama", "dicts") else 1), examples(STEPS, 4)
    chosen = random_bypass_plans(name, 4 * number, seed=len(name))
    offloading = [plan for plan in chosen if is_offloading(name, plan)][: max(1, number - number // 3)]
    for plan in [*offloading, *(plan for plan in chosen if plan not in offloading)][:number]:
        outcome = distilled(name, plan, steps)
        assert outcome.wrong == [], plan.model_dump(exclude_defaults=True)
        assert miscounted(name, plan, outcome, steps) == [], plan.model_dump(exclude_defaults=True)


# -- wrong variants --------------------------------------------------------------------------------------------------


class ReadsItsOwn(pairs_module._Stitch):
    """A student's block reads what the student's block before it has made."""

    def _learn(self, index: int, given: Any, target: torch.Tensor) -> None:
        made: list[torch.Tensor] = []
        block = self._pairs.student_blocks[index].module
        handle = block.register_forward_hook(lambda *args: made.append(pairs_module.first_tensor(args[2], "").detach()))
        instead = given if index == 0 else ((self._made, *given[0][1:]), given[1])
        super()._learn(index, instead, target)
        handle.remove()
        self._made = made[0]

    def _check_unwritten(self, given: Any, who: str) -> None:
        pass


class WrongPair(pairs_module._Stitch):
    """The target is the output of the pair before."""

    def _learn(self, index: int, given: Any, target: torch.Tensor) -> None:
        super()._learn(index, given, pairs_module.first_tensor(given, ""))


class ForgetsGradients(pairs_module._Stitch):
    """Gradients of a micro-batch take the place of those of the one before."""

    def _learn(self, index: int, given: Any, target: torch.Tensor) -> None:
        for parameter in self._pairs.student_blocks[index].module.parameters():
            parameter.grad = None
        super()._learn(index, given, target)


@pytest.mark.parametrize("wrong", [ReadsItsOwn, WrongPair, ForgetsGradients])
def test_wrong_distillations_are_noticed(wrong: type, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_in("dicts", "persistent", micro_batches=2)
    assert distilled("dicts", plan, 3, CpuDevice()).wrong == []
    monkeypatch.setattr(pairs_module, "_Stitch", wrong)
    assert distilled("dicts", plan, 3, CpuDevice()).wrong


def test_counts_that_are_not_those_of_the_plan_are_noticed() -> None:
    kept = plan_in("dicts", "persistent")
    outcome = distilled("dicts", kept, 3)
    assert miscounted("dicts", kept, outcome, 3) == []
    assert len(miscounted("dicts", plan_in("dicts", "offloaded"), outcome, 3)) == 4


# -- memory ----------------------------------------------------------------------------------------------------------


@lru_cache
def measured_and_accounted(name: str, residency: str, micro_batches: int) -> tuple[int, Schedule]:
    plan = plan_in(name, residency, micro_batches=micro_batches)
    return measured_peak_bytes(name, plan), compile_schedule(plan, workload_of(name))


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("name", families() if IS_PROOF else ["llama", "dicts"])
def test_the_peak_is_the_schedules_own(name: str, residency: str) -> None:
    measured_bytes, schedule = measured_and_accounted(name, residency, 2 if name == "dicts" else 1)
    assert error_frac(measured_bytes, eager_peak(schedule)) == pytest.approx(0, abs=BAR)


@pytest.mark.parametrize(
    ("content", "residency"),
    [
        (Content.PARAMETERS, "offloaded"),
        (Content.GRADIENTS, "persistent"),
        (Content.ACTIVATIONS, "offloaded"),
        (Content.OUTPUT, "offloaded"),
    ],
)
def test_an_account_that_leaves_something_out_is_noticed(content: Content, residency: str) -> None:
    measured_bytes, schedule = measured_and_accounted("llama", residency, 1)
    buffers = tuple(replace(b, size_bytes=0) if b.content is content else b for b in schedule.buffers)
    assert abs(error_frac(measured_bytes, eager_peak(replace(schedule, buffers=buffers)))) > BAR


def test_less_memory_than_the_plan_needs_is_refused() -> None:
    family, plan = families()["dicts"], plan_in("dicts", "offloaded")
    least_bytes = guaranteed_device_peak(compile_schedule(plan, workload_of("dicts"))).size_bytes
    teacher, student = family.teacher(), family.student()
    with pytest.raises((PlanError, DeviceOutOfMemoryError), match="device memory may reach"):
        distil(teacher, student, plan, workload_of("dicts"), mse, device=CpuDevice(least_bytes - 1))
    assert training_of(teacher) is None


# -- independence, and what is left behind ---------------------------------------------------------------------------


def test_changing_a_block_of_the_student_changes_no_other() -> None:
    reference, plan = expected("llama", 1, 3), plan_in("llama", "offloaded")
    teacher, student = reference.family.teacher(), reference.family.student()
    with torch.no_grad():
        for parameter in student.get_submodule(reference.family.blocks[0]).parameters():
            parameter.add_(0.25)
    losses = []
    with beginning(teacher, student, plan, workload_of("llama"), CpuDevice()) as training:
        for (batch,) in reference.steps:
            losses.append(training(**batch).tolist())
            training.step()
    for index, (block, alone) in enumerate(zip(reference.family.blocks, reference.learnt, strict=True)):
        is_same = [[[one[index]] for one in losses] == alone.losses, not unlike(alone, student.get_submodule(block))]
        assert is_same == [index != 0] * 2


def test_both_models_are_given_back() -> None:
    family, plan = families()["llama"], plan_in("llama", "offloaded")
    teacher, student = family.teacher().train(), family.student()
    outside = {name: t for name, t in snapshot(student).items() if not name.startswith("model.layers")}
    before = snapshot(teacher)
    flags = [parameter.requires_grad for model in (teacher, student) for parameter in model.parameters()]
    with beginning(teacher, student, plan, workload_of("llama"), CpuDevice()) as training:
        assert training_of(teacher) is training_of(student) is training
        training(**family.batches(1)[0])
        training.step()
    assert training_of(teacher) is training_of(student) is None
    assert changed(teacher, before) == []
    assert all(torch.equal(student.state_dict()[name], tensor) for name, tensor in outside.items())
    assert [p.requires_grad for model in (teacher, student) for p in model.parameters()] == flags
    assert all(module.training for module in teacher.modules())
    for model in (teacher, student):
        assert model.config.use_cache
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        model(**family.batches(1)[0])


@pytest.mark.parametrize("resumed", ["persistent", "offloaded"])
def test_a_distillation_goes_on_from_its_checkpoint(resumed: str, tmp_path: Path) -> None:
    reference = expected("llama", 2, 4)
    family, workload = reference.family, workload_of("llama")
    losses = []
    for residency, steps in (("mixed", reference.steps[:2]), (resumed, reference.steps[2:])):
        teacher, student = family.teacher(), family.student()
        plan = plan_in("llama", residency, micro_batches=2)
        with beginning(teacher, student, plan, workload, CpuDevice()) as training:
            if residency != "mixed":
                assert training.resume(tmp_path / "saved").step == 2
            for batches in steps:
                losses.append([training(**batch).tolist() for batch in batches])
                training.step()
            if residency == "mixed":
                training.save(tmp_path / "saved")
    for index, (block, alone) in enumerate(zip(family.blocks, reference.learnt, strict=True)):
        assert [[of_pairs[index] for of_pairs in step] for step in losses] == alone.losses
        assert unlike(alone, student.get_submodule(block)) == []


def test_an_iteration_that_failed_can_be_given_up() -> None:
    """The teacher fails in the middle of a forward; the step begins anew, and nothing shows of it."""
    reference = expected("dicts", 1, 3)
    family = reference.family
    teacher, student = family.teacher(), family.student()
    with beginning(teacher, student, plan_in("dicts", "persistent"), workload_of("dicts"), CpuDevice()) as training:
        for number, (batch,) in enumerate(reference.steps):
            if number == 1:
                handle = teacher.stack[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(OSError("lost")))
                with pytest.raises(OSError, match="lost"):
                    training(**batch)
                handle.remove()
                training.skip_step()
            training(**batch)
            training.step()
    for block, alone in zip(family.blocks, reference.learnt, strict=True):
        assert unlike(alone, student.get_submodule(block)) == []


def test_lanes_and_kinds_of_a_schedule_are_carried_out_in_its_order() -> None:
    schedule = compile_schedule(plan_in("dicts", "offloaded"), workload_of("dicts"))
    kinds = [task.kind for task in schedule.tasks if task.kind in (TaskKind.TEACHER_FORWARD, TaskKind.LOSS)]
    assert (kinds.count(TaskKind.TEACHER_FORWARD), kinds.count(TaskKind.LOSS)) == (4, 3)


# -- refusals --------------------------------------------------------------------------------------------------------


def other_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().mean()


def full_plan() -> Plan:
    return Plan(workload_id=workload_of("dicts").identity, chunk_bytes=2**20, n_persist=1, n_buffer=0)


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (lambda t, s: distil(t, s, full_plan(), workload_of("dicts"), mse), "method full.*method bypass"),
        (lambda t, s: distil(t, s, None, workload_of("dicts"), mse), "plan is None"),
        (
            lambda t, s: distil(t, s, plan_in("dicts", "mixed"), workload_of("dicts"), other_loss),
            "traced with the loss mse, and this one is other_loss",
        ),
        (
            lambda t, s: distil(s, s, plan_in("dicts", "mixed"), workload_of("dicts"), mse),
            "the student's own tensor|teacher's own tensor",
        ),
        (
            lambda t, s: distil(t, t.__class__(20), plan_in("dicts", "mixed"), workload_of("dicts"), mse),
            "traced from another model",
        ),
        (
            lambda t, s: carry_out(s, plan_in("dicts", "mixed"), workload_of("dicts")),
            "traced from another model",
        ),
    ],
)
def test_what_does_not_belong_together_is_refused(begin: Callable[..., Any], message: str) -> None:
    teacher, student = families()["dicts"].teacher(), families()["dicts"].student()
    before, flags = snapshot(student), [p.requires_grad for p in teacher.parameters()]
    with pytest.raises(Exception, match=message):
        begin(teacher, student)
    assert changed(student, before) == []
    assert [p.requires_grad for p in teacher.parameters()] == flags


def test_a_model_that_is_being_distilled_is_not_carried_out_as_well() -> None:
    family = families()["dicts"]
    teacher, student = family.teacher(), family.student()
    with beginning(teacher, student, plan_in("dicts", "mixed"), workload_of("dicts"), CpuDevice()) as training:
        with pytest.raises(PlanError, match="a plan is being carried out on this model already"):
            distil(teacher, family.student(), plan_in("dicts", "mixed"), workload_of("dicts"), mse, optimizer=adamw)
        with pytest.raises(ScheduleError, match="nobody scales a loss by hand"):
            training.scale(torch.ones(()))
        with quiet(), pytest.raises(ScheduleError, match="without gradients"), torch.no_grad():
            training(**family.batches(1)[0])

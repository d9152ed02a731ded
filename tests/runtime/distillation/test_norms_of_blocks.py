"""Every block keeps the limit of its norm by itself, and is held by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice
from protwin.runtime.chunks.clipping import Clipping
from protwin.runtime.chunks.placed_model import PlacedModel
from protwin.runtime.distillation.distil import Distilling, distil
from protwin.runtime.optimizers.gradient_norms import ClippedNorm
from protwin.runtime.optimizers.non_finite import NonFiniteGradientError
from protwin.runtime.recording.summaries import StepSummary
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.schedule import TaskKind
from tests.runtime.distillation.cases import adamw, expected, mse, steps_of, unlike, unlike_moments
from tests.runtime.distillation.distilling import (
    CLIPPED_NORM,
    beginning,
    distilled,
    plan_in,
    state_by_name,
    workload_of,
)
from tests.runtime.distillation.families import families
from tests.runtime.distillation.reference import Learnt, learn_alone, seen_by_teacher
from tests.runtime.equality import FAST_FOLDER

BLOCK = 1
"""The block of the student whose loss goes wrong."""
BAD_STEP = 1
STEPS = 4


def limited(residency: str, *, micro_batches: int = 1, **knobs: Any) -> Plan:
    """A plan of the family of dicts with a limit of the norms; "disk": everything lies there that can."""
    plan = plan_in("dicts", "offloaded" if residency == "disk" else residency, micro_batches=micro_batches)
    knobs |= {"max_gradient_norm": CLIPPED_NORM}
    if residency == "disk":
        num_chunks = len(layout_of(workload_of("dicts"), plan.chunk_bytes).chunks)
        knobs |= {"n_disk_state": num_chunks, "n_disk": num_chunks, "n_staging": 2}
    return Plan(**(plan.model_dump() | knobs))


# -- clipped ---------------------------------------------------------------------------------------------------------


def test_norms_lie_on_both_sides_of_the_limit() -> None:
    """Else nothing here says whether anything is clipped."""
    norms = [
        torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
        for learnt in expected("dicts", 1, STEPS).learnt
        for gradients in learnt.gradients
        if gradients
    ]
    assert min(norms) < CLIPPED_NORM < max(norms)


def test_one_norm_for_all_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: every block is scaled as if its limit were that of all of them."""
    plan = limited("persistent")
    assert distilled("dicts", plan, STEPS, CpuDevice()).wrong == []
    monkeypatch.setattr(Clipping, "members", lambda self, parameters, section: list(parameters))
    assert distilled("dicts", plan, STEPS, CpuDevice()).wrong


def test_a_block_is_stepped_while_later_ones_have_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = threading.Event()
    original = PlacedModel.step_on_host

    def step(self: PlacedModel, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        stepped.set()

    monkeypatch.setattr(PlacedModel, "step_on_host", step)
    family = families()["dicts"]
    teacher, student = family.teacher(), family.student()
    before = teacher.stack[2].register_forward_pre_hook(lambda *_: wait_for(stepped))
    with beginning(teacher, student, limited("offloaded"), workload_of("dicts"), CpuDevice()) as training:
        training(**family.batches(1)[0])
        training.step()
    before.remove()


def wait_for(event: threading.Event) -> None:
    assert event.wait(60), "nothing was stepped"


def test_gradients_cannot_be_clipped_together() -> None:
    family = families()["dicts"]
    teacher, student = family.teacher(), family.student()
    with beginning(teacher, student, limited("persistent"), workload_of("dicts"), CpuDevice()) as training:
        training(**family.batches(1)[0])
        with pytest.raises(ScheduleError, match=r"each block's gradients by itself.*Leave clip_grad_norm_ out"):
            nn.utils.clip_grad_norm_(student.parameters(), CLIPPED_NORM)
        training.step()


# -- held ------------------------------------------------------------------------------------------------------------


class GoesWrong(torch.autograd.Function):
    """Passes a value on; its gradient is multiplied by what is not finite."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


class Sometimes:
    """A loss that is wrong in one of its calls: "nan" is its value, or "inf" are its gradients."""

    def __init__(self, how: str, bad_call: int) -> None:
        self.how, self.bad_call, self.calls = how, bad_call, 0
        self.__name__ = "mse"

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        is_bad, self.calls = self.calls == self.bad_call, self.calls + 1
        value = mse(output, target)
        if not is_bad:
            return value
        return value * float("nan") if self.how == "nan" else GoesWrong.apply(value, float("inf"))


@lru_cache
def held_alone(how: str, micro_batches: int) -> list[Learnt]:
    """The reference: each block goes through all steps by itself, so that the calls of the bad one come first."""
    family = families()["dicts"]
    batches = steps_of(family, micro_batches, STEPS)
    teacher, student = family.teacher(), family.student()
    seen = [[seen_by_teacher(teacher, family.blocks, batch) for batch in step] for step in batches]
    bad_call = (BLOCK * STEPS + BAD_STEP) * micro_batches
    learnt = learn_alone(student, family.blocks, seen, Sometimes(how, bad_call), adamw, max_norm=CLIPPED_NORM)
    assert [one.is_held for one in learnt] == [
        [block == BLOCK and step == BAD_STEP for step in range(STEPS)] for block in range(len(learnt))
    ]
    return learnt


@contextmanager
def going_wrong(plan: Plan, how: str, **options: Any) -> Iterator[tuple[Distilling, nn.Module]]:
    """A distillation in which the first micro-batch of one step has a bad loss in one block."""
    family = families()["dicts"]
    teacher, student = family.teacher(), family.student()
    bad_call = BAD_STEP * plan.micro_batches * len(family.blocks) + BLOCK
    with (
        TemporaryDirectory(dir=FAST_FOLDER) as folder,
        distil(
            teacher,
            student,
            plan,
            workload_of("dicts"),
            Sometimes(how, bad_call),
            optimizer=adamw,
            device=CpuDevice(),
            disk_folder=folder,
            **options,
        ) as training,
    ):
        yield training, student


def wrong_ones(learnt: Sequence[Learnt], student: nn.Module, state: dict[str, dict[str, torch.Tensor]]) -> list[str]:
    """What of the student's blocks and their moments is not what they learn alone."""
    found = []
    for block, alone in zip(families()["dicts"].blocks, learnt, strict=True):
        prefix = f"student.{block}."
        own = {name.removeprefix(prefix): moments for name, moments in state.items() if name.startswith(prefix)}
        found += [f"{block}.{tensor}" for tensor in unlike(alone, student.get_submodule(block))]
        found += unlike_moments(alone, own)
    return found


def held_run(plan: Plan, how: str, **options: Any) -> tuple[list[str], list[tuple[str, ...]]]:
    """What is not as the reference has it, and the blocks that each step has held."""
    held = []
    with going_wrong(plan, how, **options) as (training, student):
        for batches in steps_of(families()["dicts"], plan.micro_batches, STEPS):
            for batch in batches:
                training(**batch)
            training.step()
            held.append(training.held_blocks)
        state = state_by_name(training)
    return wrong_ones(held_alone(how, plan.micro_batches), student, state), held


HELD = [("student.stack.1",) if step == BAD_STEP else () for step in range(STEPS)]


@pytest.mark.parametrize("how", ["nan", "inf"])
@pytest.mark.parametrize("residency", ["persistent", "offloaded", "host-stepped", "mixed", "disk"])
def test_a_block_whose_norm_is_not_finite_is_held_and_the_others_go_on(residency: str, how: str) -> None:
    plan = limited(residency, micro_batches=2 if how == "nan" else 1)
    assert held_run(plan, how) == ([], HELD)


def test_gradients_that_are_not_checked_are_held_as_well() -> None:
    assert held_run(limited("mixed"), "nan", check_gradients=False) == ([], HELD)


@pytest.mark.parametrize("residency", ["persistent", "offloaded"])
def test_blocks_that_are_stepped_all_the_same_are_noticed(residency: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: gradients are multiplied by a factor that is not a number."""
    monkeypatch.setattr(ClippedNorm, "or_held", lambda self: self)
    wrong, held = held_run(limited(residency), "nan")
    assert wrong
    assert held != HELD


@pytest.mark.parametrize("residency", ["persistent", "offloaded"])
def test_without_a_limit_nothing_is_held(residency: str) -> None:
    plan = limited(residency).model_copy(update={"max_gradient_norm": None})
    # A lane that found it after the last call tells it again when training is closed.
    with suppress(NonFiniteGradientError), going_wrong(plan, "nan") as (training, _):
        (first,), (second,), *_ = steps_of(families()["dicts"], 1, STEPS)
        training(**first)
        training.step()
        with pytest.raises(NonFiniteGradientError, match=r"stack\.1"):
            whole_step(training, second)


def whole_step(training: Distilling, batch: dict[str, torch.Tensor]) -> None:
    """With all that the host steps."""
    training(**batch)
    training.step()
    training.synchronize()


def test_a_step_with_a_held_block_can_be_given_up() -> None:
    """Steps of the other blocks are taken back, and the held one goes on where it was."""
    plan = limited("offloaded")
    reference = expected("dicts", 1, STEPS, CLIPPED_NORM)
    with going_wrong(plan, "nan", keep_last_step=True) as (training, student):
        for number, (batch,) in enumerate(reference.steps):
            training(**batch)
            if number == BAD_STEP:
                training.skip_step()
                assert training.held_blocks == ()
                training(**batch)
            training.step()
        state = state_by_name(training)
    assert wrong_ones(reference.learnt, student, state) == []


def test_a_step_of_blocks_cannot_be_given_up_once_one_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    with going_wrong(limited("offloaded"), "nan") as (training, _):
        ((batch,), *_) = steps_of(families()["dicts"], 1, STEPS)
        training(**batch)
        adams = [task.id for task in training.schedule.tasks if task.kind is TaskKind.CPU_ADAM]
        training._lanes.mark(0, adams[0]).wait()
        with pytest.raises(ScheduleError, match="cannot be given up") as caught:
            training.skip_step()
        assert "steps nothing before backward has ended" not in str(caught.value)
        training.step()


def test_summaries_tell_which_blocks_were_held() -> None:
    told: list[StepSummary] = []
    with going_wrong(limited("mixed"), "nan") as (training, _):
        training.report_every(2, to=told.append)
        for (batch,) in steps_of(families()["dicts"], 1, STEPS):
            training(**batch)
            training.step()
    assert [dict(summary.held_blocks) for summary in told] == [{"student.stack.1": 1}, {}]
    assert str(told[0]).endswith("; 1 blocks held, gradients not finite: student.stack.1 (1 of 2 steps)")
    assert "held" not in str(told[1])

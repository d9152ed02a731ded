"""Every block keeps the limit of its norm by itself, is held by itself, and has the scale of its loss for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, LossScaling
from protwin.runtime.chunks.clipping import Clipping
from protwin.runtime.chunks.placed_model import PlacedModel
from protwin.runtime.distillation.distil import Distilling, distil
from protwin.runtime.distillation.tracing import trace_distillation
from protwin.runtime.optimizers.gradient_norms import ClippedNorm
from protwin.runtime.optimizers.loss_scaling import LossScaler
from protwin.runtime.optimizers.non_finite import NonFiniteGradientError
from protwin.runtime.recording.summaries import StepSummary
from protwin.shared.basics.errors import FileError, PlanError, ScheduleError
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.optimizer import HostGradients
from protwin.shared.schema.plan import Plan, TrainingMethod
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import Workload
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
    with going_wrong(plan, "nan") as (training, _):
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


# -- narrow: bfloat16, and float16 with scaled losses ----------------------------------------------------------------


class Masters:
    """Steps float32 copies of narrow parameters."""

    def __init__(self, block: nn.Module) -> None:
        self.pairs = [(p, p.detach().float()) for p in block.parameters() if p.requires_grad]

    def take(self) -> None:
        """Gradients are widened."""
        for parameter, master in self.pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    def add(self) -> None:
        """Gradients are widened and added to those that are there."""
        for parameter, master in self.pairs:
            if parameter.grad is not None:
                widened = parameter.grad.float()
                master.grad = widened if master.grad is None else master.grad + widened
            parameter.grad = None

    def give(self) -> None:
        """Weights are narrowed."""
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)


SCALING = LossScaling(initial_scale=2.0**19, growth_interval=2)
"""So high that some blocks overflow in their first steps, others later, and that it grows again."""


@dataclass
class Scaled:
    """What a student learns with scaled losses."""

    scales: list[list[float]]
    """Of every step, of every block."""
    student: nn.Module


def narrow_batches(dtype: torch.dtype, micro_batches: int, steps: int) -> list[list[dict[str, torch.Tensor]]]:
    found = steps_of(families()["dicts"], micro_batches, steps)
    return [[{name: value.to(dtype) for name, value in batch.items()} for batch in step] for step in found]


def wide_mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target.float()).square().mean()


@lru_cache
def narrow_workload(dtype: torch.dtype) -> Workload:
    family = families()["dicts"]
    models = family.teacher().to(dtype), family.student().to(dtype)
    return trace_distillation(*models, narrow_batches(dtype, 1, 1)[0][0], wide_mse, repeats=0)


SCALED_STEPS = 8


@lru_cache
def scaled_alone(micro_batches: int) -> Scaled:
    """One of torch's scalers per block: scale, backward, unscale, clip, step, update."""
    family = families()["dicts"]
    teacher, student = family.teacher().to(torch.float16), family.student().to(torch.float16).train()
    steps = narrow_batches(torch.float16, micro_batches, SCALED_STEPS)
    seen = [[seen_by_teacher(teacher, family.blocks, batch) for batch in step] for step in steps]
    of_blocks = []
    for index, name in enumerate(family.blocks):
        block, scales = student.get_submodule(name), []
        masters = Masters(block)
        trained = [master for _, master in masters.pairs]
        optimizer = adamw([{"params": trained}])
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALING.initial_scale, growth_interval=SCALING.growth_interval)
        for step in seen:
            scales.append(scaler.get_scale())
            for calls in step:
                call = calls[index]
                loss = wide_mse(block(*call.args, **call.kwargs)["hidden"], call.output)
                scaler.scale(loss / micro_batches).backward()
            masters.take()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(trained, CLIPPED_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            masters.give()
        of_blocks.append(scales)
    return Scaled([list(row) for row in zip(*of_blocks, strict=True)], student)


def scaled_plan(residency: str, micro_batches: int) -> Plan:
    workload = narrow_workload(torch.float16)
    chunk_bytes = 2_000
    layout = layout_of(workload, chunk_bytes)
    num_chunks = len(layout.chunks)
    n_persist = {"persistent": num_chunks, "offloaded": 0, "mixed": num_chunks // 2}[residency]
    return Plan(
        workload_id=workload.identity,
        method=TrainingMethod.BYPASS,
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_buffer=layout.min_buffers(n_persist) + 1,
        prefetch_depth=2,
        micro_batches=micro_batches,
        max_gradient_norm=CLIPPED_NORM,
    )


@contextmanager
def scaling(plan: Plan, scales: LossScaling = SCALING) -> Iterator[tuple[Distilling, nn.Module]]:
    family = families()["dicts"]
    teacher, student = (model().to(torch.float16) for model in (family.teacher, family.student))
    workload = narrow_workload(torch.float16)
    options: dict[str, Any] = {"optimizer": adamw, "device": CpuDevice(), "loss_scaling": scales}
    with distil(teacher, student, plan, workload, wide_mse, **options) as training:
        yield training, student


def scales_of(training: Distilling) -> list[float]:
    assert training.block_scalers is not None
    return list(training.block_scalers.scales.values())


def scaled(plan: Plan) -> Scaled:
    scales = []
    with scaling(plan) as (training, student):
        for step in narrow_batches(torch.float16, plan.micro_batches, SCALED_STEPS):
            scales.append(scales_of(training))
            for batch in step:
                training(**batch)
            training.step()
            now = scales_of(training)
            assert len(training.held_blocks) == sum(
                after < before for before, after in zip(scales[-1], now, strict=True)
            )
    return Scaled(scales, student)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    there = other.state_dict()
    return all(torch.equal(tensor, there[name]) for name, tensor in one.state_dict().items())


def test_the_oracle_overflows_block_by_block_and_recovers() -> None:
    by_block = list(zip(*scaled_alone(1).scales, strict=True))
    assert len(set(by_block)) > 1, "every block has the same scales"
    for scales in by_block:
        assert any(after < before for before, after in pairwise(scales)), "a block never overflows"
        assert any(after > before for before, after in pairwise(scales)), "a scale never grows"


@pytest.mark.parametrize(("residency", "micro_batches"), [("persistent", 2), ("offloaded", 1), ("mixed", 2)])
def test_scaled_losses_of_blocks_equal_those_of_torch(residency: str, micro_batches: int) -> None:
    found, reference = scaled(scaled_plan(residency, micro_batches)), scaled_alone(micro_batches)
    assert found.scales == reference.scales
    assert same_weights(found.student, reference.student)


def test_gradients_that_are_clipped_before_they_are_unscaled_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def factor(self: LossScaler, scaled_norm: torch.Tensor, max_norm: float, refuse: Callable[[], None]) -> Any:
        found = original(self, scaled_norm, max_norm, refuse)
        return found if found.isnan() else torch.clamp(max_norm / (scaled_norm + 1e-6), max=1.0) / self.scale

    original = LossScaler._factor
    monkeypatch.setattr(LossScaler, "_factor", factor)
    assert not same_weights(scaled(scaled_plan("mixed", 1)).student, scaled_alone(1).student)


def test_one_scale_for_all_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LossScaler.end_step
    seen: list[LossScaler] = []

    def end_step(self: LossScaler) -> None:
        """The wrong variant: the first block's overflows lower everybody's scale."""
        if self not in seen:
            seen.append(self)
        self._has_overflowed = seen[0]._has_overflowed if self is not seen[0] else self._has_overflowed
        original(self)

    monkeypatch.setattr(LossScaler, "end_step", end_step)
    plan = scaled_plan("mixed", 1)
    with scaling(plan) as (training, _):
        scales = []
        for (batch,) in narrow_batches(torch.float16, 1, SCALED_STEPS):
            scales.append(scales_of(training))
            training(**batch)
            training.step()
    assert scales != scaled_alone(1).scales


@pytest.mark.parametrize("stop", [1, 5])
def test_scales_of_blocks_are_saved_and_resumed(stop: int, tmp_path: Path) -> None:
    """Under another plan, in the middle of overflows and after them."""
    steps, scales = narrow_batches(torch.float16, 1, SCALED_STEPS), []
    for batches, residency in ((steps[:stop], "mixed"), (steps[stop:], "offloaded")):
        with scaling(scaled_plan(residency, 1)) as (training, student):
            if scales:
                training.resume(tmp_path / "saved")
            for (batch,) in batches:
                scales.append(scales_of(training))
                training(**batch)
                training.step()
            training.save(tmp_path / "saved")
    reference = scaled_alone(1)
    assert scales == reference.scales
    assert same_weights(student, reference.student)
    models = [model().to(torch.float16) for model in (families()["dicts"].teacher, families()["dicts"].student)]
    plan, workload = scaled_plan("mixed", 1), narrow_workload(torch.float16)
    with (
        distil(*models, plan, workload, wide_mse, optimizer=adamw, device=CpuDevice()) as training,
        pytest.raises(FileError, match="saved with loss_scaling"),
    ):
        training.resume(tmp_path / "saved")


def test_a_block_that_never_is_finite_keeps_the_least_scale_and_stops_nobody() -> None:
    scaler = LossScaler(LossScaling(initial_scale=2.0**-12), micro_batches=1, holds=True)
    scales = []
    for _ in range(4):
        assert scaler.factor_for([torch.tensor([float("nan")])], 1.0, ["bad"]).isnan()
        scaler.end_step()
        scales.append(scaler.scale)
    assert scales == [2.0**-13, 2.0**-14, 2.0**-14, 2.0**-14]


def test_loss_scaling_of_blocks_needs_a_limit() -> None:
    plan = scaled_plan("mixed", 1).model_copy(update={"max_gradient_norm": None})
    with pytest.raises(PlanError, match="needs a plan with max_gradient_norm"), scaling(plan):
        pass


@pytest.mark.parametrize("host_gradients", [HostGradients.PARAMETERS, HostGradients.FLOAT32])
def test_narrow_blocks_are_clipped_as_their_masters_are(host_gradients: HostGradients) -> None:
    """bfloat16 with float32 masters; the norm is that of the gradients as they are added up."""
    family, dtype = families()["dicts"], torch.bfloat16
    workload = narrow_workload(dtype)
    plan = scaled_plan("offloaded", 2).model_copy(
        update={"workload_id": workload.identity, "host_gradients": host_gradients}
    )
    steps = narrow_batches(dtype, 2, STEPS)
    teacher, student = family.teacher().to(dtype), family.student().to(dtype).train()
    seen = [[seen_by_teacher(teacher, family.blocks, batch) for batch in step] for step in steps]
    is_wide = host_gradients is HostGradients.FLOAT32
    for index, name in enumerate(family.blocks):
        block = student.get_submodule(name)
        masters = Masters(block)
        optimizer = adamw([{"params": [master for _, master in masters.pairs]}])
        for step in seen:
            for call in (calls[index] for calls in step):
                loss = wide_mse(block(*call.args, **call.kwargs)["hidden"], call.output)
                (loss / 2).backward()
                if is_wide:
                    masters.add()
            clipped = [(m if is_wide else p) for p, m in masters.pairs]
            nn.utils.clip_grad_norm_(clipped, CLIPPED_NORM)
            if not is_wide:
                masters.take()
            optimizer.step()
            optimizer.zero_grad()
            masters.give()
    own_teacher, own = family.teacher().to(dtype), family.student().to(dtype)
    with distil(own_teacher, own, plan, workload, wide_mse, optimizer=adamw, device=CpuDevice()) as training:
        for step in steps:
            for batch in step:
                training(**batch)
            training.step()
    assert same_weights(own, student)

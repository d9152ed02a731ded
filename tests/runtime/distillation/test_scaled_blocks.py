"""Narrow student blocks beside torch: float32 masters, a limited norm and, in float16, a scaler for each block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, LossScaling
from protwin.runtime.distillation.distil import Distilling, distil
from protwin.runtime.distillation.tracing import trace_distillation
from protwin.runtime.optimizers.loss_scaling import LossScaler
from protwin.shared.basics.errors import FileError, PlanError
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.optimizer import HostGradients
from protwin.shared.schema.plan import Plan, TrainingMethod
from protwin.shared.schema.workload import Workload
from tests.runtime.distillation.cases import adamw, steps_of
from tests.runtime.distillation.distilling import (
    CLIPPED_NORM,
)
from tests.runtime.distillation.families import families
from tests.runtime.distillation.reference import seen_by_teacher


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
    steps = narrow_batches(dtype, 2, 4)
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

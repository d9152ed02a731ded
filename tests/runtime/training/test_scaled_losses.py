"""Training in float16 with scaled losses, against torch's own scaler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from protwin.runtime import carry_out
from protwin.runtime.optimizers.chunk_optimizer import ChunkOptimizer
from protwin.runtime.optimizers.loss_scaling import LossScaler, LossScaling
from protwin.runtime.optimizers.non_finite import NonFiniteGradientError
from protwin.shared.basics.errors import FileError, PlanError, ScheduleError
from protwin.shared.schema.plan import Plan
from tests.runtime.models import (
    Case,
    Masters,
    adamw,
    differences,
    llama,
    three_groups,
    token_batches,
    uncached,
)
from tests.runtime.optimizing import half_offloaded, single_plans
from tests.runtime.training.test_precision import autocast_cases
from tests.runtime.watchdog import ends_in_time

SCALING = LossScaling(initial_scale=2.0**21, growth_interval=2)
"""So high that the first steps overflow, and that it grows into another overflow."""
MAX_NORM = 0.5


def narrow_llama() -> nn.Module:
    return llama(num_layers=3).to(torch.float16)


@lru_cache
def float16_case() -> Case:
    return Case(narrow_llama, token_batches(10), groups=three_groups)


@dataclass(frozen=True)
class ScaledRun:
    losses: list[float]
    scales: list[float]
    model: nn.Module


@lru_cache
def scaled_plainly(micro_batches: int) -> ScaledRun:
    """torch's own GradScaler over float32 masters: unscale, then clip, then step."""
    case = float16_case()
    model = uncached(case.build())
    masters = Masters(model)
    optimizer = adamw(masters.groups(three_groups(model)))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALING.initial_scale, growth_interval=SCALING.growth_interval)
    # In the order of the model's parameters, in which their norms are added up.
    of_name = {id(p): master for p, master in masters._pairs}
    in_order = [of_name[id(p)] for p in model.parameters()]
    losses, scales = [], []
    for start in range(0, len(case.batches), micro_batches):
        scales.append(scaler.get_scale())
        for batch in case.batches[start : start + micro_batches]:
            loss = case.loss(model, batch)
            scaler.scale(loss).backward()
            losses.append(loss.item())
        masters.take_gradients()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(in_order, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        masters.give_weights()
    return ScaledRun(losses, scales, model)


def scaled(plan: Plan, *, scaling: LossScaling = SCALING) -> ScaledRun:
    case = float16_case()
    model = case.build()
    losses, scales = [], []
    with (
        ends_in_time(),
        carry_out(
            model,
            plan,
            case.workload,
            optimizer=adamw,
            parameter_groups=three_groups(model),
            loss_scaling=scaling,
        ) as training,
    ):
        assert training.loss_scaler is not None
        for start in range(0, len(case.batches), plan.micro_batches):
            scales.append(training.loss_scaler.scale)
            for batch in case.batches[start : start + plan.micro_batches]:
                loss = case.loss(model, batch)
                training.scale(loss).backward()
                losses.append(loss.item())
            training.step()
    return ScaledRun(losses, scales, model)


def limited(plan: Plan, *, micro_batches: int = 1) -> Plan:
    return plan.model_copy(update={"max_gradient_norm": MAX_NORM, "micro_batches": micro_batches})


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_scaled_losses_equal_those_of_torch(micro_batches: int, data: st.DataObject) -> None:
    plan = limited(data.draw(single_plans(float16_case().workload)), micro_batches=micro_batches)
    found, expected = scaled(plan), scaled_plainly(micro_batches)
    assert found.scales == expected.scales
    assert found.losses == expected.losses
    assert differences(found.model, expected.model.state_dict()) == []


def test_the_oracle_overflows_and_recovers() -> None:
    scales = scaled_plainly(1).scales
    steps = list(pairwise(scales))
    assert sum(after < before for before, after in steps) >= 2, "too few overflows"
    assert sum(after > before for before, after in steps) >= 1, "the scale never grows"


def test_an_overflow_that_stops_some_chunks_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: every chunk looks at its own gradients, and steps where these are finite."""

    def step(self: ChunkOptimizer, gradients: Any, *, factor: torch.Tensor | None = None) -> None:
        assert factor is not None
        bad = any(gradient is not None and not gradient.isfinite().all() for gradient in gradients)
        is_skipped = factor.isnan() and not bad
        original(self, gradients, factor=torch.tensor(2.0**-20) if is_skipped else factor)

    original = ChunkOptimizer.step
    monkeypatch.setattr(ChunkOptimizer, "step", step)
    found = scaled(limited(half_offloaded(float16_case().workload)))
    assert differences(found.model, scaled_plainly(1).model.state_dict()) != []


@pytest.mark.parametrize("stop", [2, 6])
def test_a_scale_is_saved_and_resumed(stop: int, tmp_path: Path) -> None:
    """Under another plan, in the middle of overflows and after them."""
    case = float16_case()
    plan = limited(half_offloaded(case.workload))
    other = plan.model_copy(update={"chunk_bytes": 2**20, "n_persist": 0, "n_buffer": 1})
    scales, losses = [], []
    model = case.build()
    for batches, chosen in ((case.batches[:stop], plan), (case.batches[stop:], other)):
        with carry_out(
            model, chosen, case.workload, optimizer=adamw, parameter_groups=three_groups(model), loss_scaling=SCALING
        ) as training:
            assert training.loss_scaler is not None
            if scales:
                training.resume(tmp_path / "checkpoint")
            for batch in batches:
                scales.append(training.loss_scaler.scale)
                loss = case.loss(model, batch)
                training.scale(loss).backward()
                training.step()
                losses.append(loss.item())
            training.save(tmp_path / "checkpoint")
    expected = scaled_plainly(1)
    assert (scales, losses) == (expected.scales, expected.losses)
    assert differences(model, expected.model.state_dict()) == []
    with carry_out(model, plan, case.workload, optimizer=adamw, parameter_groups=three_groups(model)) as training:
        with pytest.raises(FileError, match=r"saved with loss_scaling. Pass it to carry_out\(\)"):
            training.resume(tmp_path / "checkpoint")
        training.save(tmp_path / "unscaled")
    with (
        carry_out(
            model, plan, case.workload, optimizer=adamw, parameter_groups=three_groups(model), loss_scaling=SCALING
        ) as training,
        pytest.raises(FileError, match="saved without loss_scaling"),
    ):
        training.resume(tmp_path / "unscaled")


def test_loss_scaling_needs_the_norm_of_all_gradients() -> None:
    case = float16_case()
    with pytest.raises(PlanError, match="needs a plan with max_gradient_norm"):
        carry_out(case.build(), half_offloaded(case.workload), case.workload, loss_scaling=SCALING)


def test_a_loss_that_is_not_scaled_is_noticed_before_anything_is_stepped() -> None:
    case = float16_case()
    model = case.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def run() -> None:
        plan = limited(half_offloaded(case.workload))
        with carry_out(model, plan, case.workload, loss_scaling=SCALING) as training:
            case.loss(model, case.batches[0]).backward()
            training.step()

    with ends_in_time(), pytest.raises(ScheduleError, match=r"0 losses were scaled.*training.scale\(loss\).backward"):
        run()
    assert differences(model, before) == []


def test_what_overflows_at_every_scale_is_named() -> None:
    """And nothing is stepped: a step on the way that is given up leaves every weight as it is."""
    case = float16_case()
    model = case.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    handle = weight.register_hook(lambda gradient: gradient * float("nan"))
    scaling = LossScaling(initial_scale=2.0**-12)

    def run() -> None:
        with carry_out(model, limited(half_offloaded(case.workload)), case.workload, loss_scaling=scaling) as training:
            for batch in case.batches:
                training.scale(case.loss(model, batch)).backward()
                training.step()

    with (
        ends_in_time(),
        pytest.raises(NonFiniteGradientError, match=r"up_proj\.weight \(block model\.layers\.1\) is not finite"),
    ):
        run()
    handle.remove()
    assert differences(model, before) == []


def test_without_loss_scaling_nothing_is_scaled() -> None:
    case = autocast_cases()["llama"]
    model = case.build()
    with carry_out(model, half_offloaded(case.workload), case.workload) as training:
        with pytest.raises(ScheduleError, match="Pass loss_scaling"):
            training.scale(torch.ones(()))
        assert training.loss_scaler is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"initial_scale": float("inf")}, "initial_scale of the loss scaling is inf; it must be positive and finite"),
        ({"growth_factor": 1.0}, "growth_factor"),
        ({"backoff_factor": 1.0}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval"),
    ],
)
def test_scales_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        LossScaling(**change)


def test_a_scaler_goes_on_where_another_was_saved() -> None:
    scaling = LossScaling(initial_scale=3.0, growth_factor=1.7, growth_interval=3)
    torchs = torch.amp.GradScaler("cpu", init_scale=3.0, growth_factor=1.7, growth_interval=3)
    first = LossScaler(scaling, micro_batches=1)
    for number in range(20):
        assert first.scale == torchs.get_scale()
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        bad = number in (4, 5, 12)
        loss = parameter.sum() * (float("inf") if bad else 1.0)
        torchs.scale(loss).backward()
        torchs.step(optimizer)
        torchs.update()
        gradient = torch.full((2,), float("inf") if bad else 1.0)
        first.scale_loss(torch.ones(()))
        assert first.factor_for([gradient], 1e9, ["parameter"]).isnan() == bad
        first.end_step()
        second = LossScaler(scaling, micro_batches=1)
        second.load_state_dict(first.state_dict())
        first = second
    assert first.num_skipped_steps == 3

"""Narrow types: autocast, float32 masters of narrow parameters, and what they must not change."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import protwin.runtime.hooks.recomputation as recomputation_module
import protwin.runtime.hooks.swapping as swapping_module
import protwin.runtime.model.batches as batches_module
import protwin.runtime.tracing.tracing as tracing_module
from protwin.runtime import carry_out, trace
from protwin.runtime.optimizers import device_steps
from protwin.runtime.optimizers.chunk_optimizer import ChunkOptimizer
from protwin.runtime.optimizers.loss_scaling import LossScaler, LossScaling
from protwin.runtime.optimizers.non_finite import NonFiniteGradientError
from protwin.shared.basics.errors import FileError, PlanError, ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.runtime.models import (
    SEED,
    Case,
    Masters,
    adamw,
    differences,
    gpt2,
    hand_written,
    llama,
    point_batches,
    three_groups,
    token_batches,
    uncached,
)
from tests.runtime.optimizing import half_offloaded, single_plans
from tests.runtime.watchdog import ends_in_time


@lru_cache
def autocast_cases() -> dict[str, Case]:
    """Models with float32 parameters."""
    return {
        "llama": Case(llama, token_batches()),
        "gpt2 with dropout, tied": Case(gpt2, token_batches()),
        "hand-written, batch statistics": Case(
            lambda: hand_written(has_statistics=True), point_batches(), has_loss=False
        ),
    }


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def contexts(*, is_wide: bool) -> tuple[Any, Any]:
    """What goes around the whole loop, and what around each forward: autocast on one of the two."""
    return (autocast, nullcontext) if is_wide else (nullcontext, autocast)


@lru_cache
def trained_plainly(name: str, *, is_wide: bool, micro_batches: int = 1) -> tuple[list[float], nn.Module]:
    """The plain loop.  Autocast keeps casts of weights until it ends, so around a whole loop they have to be dropped:
    plain training would go on with the weights of its first step."""
    case = autocast_cases()[name]
    model = uncached(case.build())
    optimizer = adamw([{"params": list(model.parameters())}])
    around_loop, around_forward = contexts(is_wide=is_wide)
    losses = []
    torch.manual_seed(SEED)
    with around_loop():
        for number, batch in enumerate(case.batches, start=1):
            with around_forward():
                loss = case.loss(model, batch)
            loss.backward()
            losses.append(loss.item())
            if number % micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad()
                torch.clear_autocast_cache()
    return losses, model


def trained(name: str, plan: Plan, *, is_wide: bool) -> tuple[list[float], nn.Module]:
    case = autocast_cases()[name]
    model = case.build()
    around_loop, around_forward = contexts(is_wide=is_wide)
    losses = []
    with ends_in_time(), carry_out(model, plan, case.workload, optimizer=adamw) as training, around_loop():
        torch.manual_seed(SEED)
        for number, batch in enumerate(case.batches, start=1):
            with around_forward():
                loss = case.loss(model, batch)
            loss.backward()
            losses.append(loss.item())
            if number % plan.micro_batches == 0:
                training.step()
    return losses, model


@pytest.mark.slow
@pytest.mark.parametrize("is_wide", [False, True], ids=["around forward", "around the loop"])
@pytest.mark.parametrize("name", autocast_cases())
@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_autocast_equals_the_plain_loop(name: str, is_wide: bool, data: st.DataObject) -> None:
    micro_batches = data.draw(st.sampled_from((1, 2)))
    plan = data.draw(single_plans(autocast_cases()[name].workload))
    plan = plan.model_copy(update={"micro_batches": micro_batches})
    losses, model = trained(name, plan, is_wide=is_wide)
    expected, plain = trained_plainly(name, is_wide=is_wide, micro_batches=micro_batches)
    assert losses == expected
    assert differences(model, plain.state_dict()) == []


def test_autocast_computes_in_the_narrow_type() -> None:
    case = autocast_cases()["llama"]
    losses, _ = trained_plainly("llama", is_wide=False)
    assert losses != case.plain.losses
    assert losses == pytest.approx(case.plain.losses, rel=2**-6)


def peaks_under_autocast(n_checkpoint: int, n_swap: int = 0) -> tuple[int, int]:
    """The measured peak of a training within autocast, and the most that a plan traced within it allows."""
    case = autocast_cases()["llama"]
    model = case.build()
    with autocast():
        workload = trace(case.build(), case.batches[0], repeats=0)
        plan = half_offloaded(workload).model_copy(update={"n_checkpoint": n_checkpoint, "n_swap": n_swap})
        with ends_in_time(), carry_out(model, plan, workload, optimizer=adamw) as training:
            for batch in case.batches:
                case.loss(model, batch).backward()
                training.step()
            return training.peak_device_bytes, guaranteed_device_peak(training.schedule).size_bytes


@pytest.mark.parametrize(("n_checkpoint", "n_swap"), [(0, 0), (2, 0), (4, 0), (0, 4), (0, 2), (2, 1)])
def test_a_trace_within_autocast_accounts_for_casts(n_checkpoint: int, n_swap: int) -> None:
    measured_bytes, guaranteed_bytes = peaks_under_autocast(n_checkpoint, n_swap)
    assert measured_bytes <= 1.005 * guaranteed_bytes


@pytest.mark.parametrize("is_wide", [False, True], ids=["around forward", "around the loop"])
def test_casts_of_a_recomputation_go_with_it(is_wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant keeps them in autocast's cache, as it is within autocast that goes on through backward."""
    case = autocast_cases()["llama"]

    def guaranteed_and_measured() -> tuple[int, int]:
        with autocast():
            workload = trace(case.build(), case.batches[0], repeats=0)
        plan = half_offloaded(workload).model_copy(update={"n_checkpoint": 4, "n_swap": 0})
        plan = plan.model_copy(update={"n_persist": num_chunks(plan, workload), "n_buffer": 0})
        around_loop, around_forward = contexts(is_wide=is_wide)
        model = case.build()
        with ends_in_time(), carry_out(model, plan, workload, optimizer=adamw) as training, around_loop():
            for batch in case.batches:
                with around_forward():
                    loss = case.loss(model, batch)
                loss.backward()
                training.step()
            return guaranteed_device_peak(training.schedule).size_bytes, training.peak_device_bytes

    guaranteed_bytes, measured_bytes = guaranteed_and_measured()
    assert measured_bytes <= guaranteed_bytes
    monkeypatch.setattr(recomputation_module, "torch", SimpleNamespace(clear_autocast_cache=lambda: None))
    assert guaranteed_and_measured()[0] > 1.02 * guaranteed_bytes


def test_casts_of_checkpointed_blocks_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant never frees what autocast keeps until the end of forward: each micro-batch adds it again."""

    def growth_bytes() -> int:
        case = autocast_cases()["llama"]
        with autocast():
            workload = trace(case.build(), case.batches[0], repeats=0)
        plan = half_offloaded(workload).model_copy(update={"n_checkpoint": 4, "n_swap": 0})
        peaks = []
        for micro_batches in (2, 8):
            schedule = compile_schedule(plan.model_copy(update={"micro_batches": micro_batches}), workload)
            peaks.append(guaranteed_device_peak(schedule).size_bytes)
        return peaks[1] - peaks[0]

    assert growth_bytes() < 1_000
    monkeypatch.setattr(
        tracing_module, "_casts_until_backward", lambda seen: {mode: found.sections for mode, found in seen.items()}
    )
    assert growth_bytes() > 100_000


def num_chunks(plan: Plan, workload: Workload) -> int:
    """Of the plan's layout."""
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
    return len(layout.chunks)


def test_a_trace_that_reuses_casts_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: the casts of a first iteration serve the one that is looked at, and stay all the time."""
    measured_bytes, guaranteed_bytes = peaks_under_autocast(0)
    assert measured_bytes == pytest.approx(guaranteed_bytes, rel=0.005)
    forgetful = SimpleNamespace(**{**vars(torch), "clear_autocast_cache": lambda: None})
    for module in (batches_module, swapping_module):
        monkeypatch.setattr(module, "torch", forgetful)
    measured_bytes, guaranteed_bytes = peaks_under_autocast(0)
    assert measured_bytes != pytest.approx(guaranteed_bytes, rel=0.02)


def test_casts_that_autocast_keeps_from_an_earlier_forward_would_be_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant keeps them: their gradients then come when chunks have left, which is noticed."""
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    name = "llama"
    try:
        with pytest.raises(ScheduleError, match="got a gradient after backward had left its block"):
            trained(name, half_offloaded(autocast_cases()[name].workload), is_wide=True)
    finally:
        monkeypatch.undo()
        torch.clear_autocast_cache()


def test_casts_that_autocast_keeps_are_stale_in_plain_training_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a plain loop within one autocast is no oracle: it never sees a step."""
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    case = autocast_cases()["llama"]
    model = case.build()
    optimizer = torch.optim.SGD(model.model.layers.parameters(), lr=10.0)
    try:
        with autocast():
            case.loss(model, case.batches[0]).backward()
            optimizer.step()
            hidden = torch.ones(1, 3, 32)
            kept = model.model.layers[0].mlp(hidden)
    finally:
        monkeypatch.undo()
        torch.clear_autocast_cache()
    with autocast():
        fresh = model.model.layers[0].mlp(hidden)
    assert not torch.equal(kept, fresh)


# -- narrow parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_schedulers_reach_every_piece_of_a_narrow_parameter(
    monkeypatch: pytest.MonkeyPatch, is_offloaded: bool
) -> None:
    """Persistent parameters are stepped in pieces of 500 scalars, each with an optimizer of its own."""
    monkeypatch.setattr(device_steps, "PIECE_SCALARS", 500)
    case = Case(lambda: llama(num_layers=2).to(torch.bfloat16), token_batches())
    plan = half_offloaded(case.workload)
    if not is_offloaded:
        plan = plan.model_copy(update={"chunk_bytes": 2**20, "n_persist": 3, "n_buffer": 0})
    one_cycle = partial(lr_scheduler.OneCycleLR, max_lr=3e-2, total_steps=len(case.batches) + 1)

    model, plain = case.build(), uncached(case.build())
    masters = Masters(plain)
    optimizer = adamw(masters.groups([{"params": list(plain.parameters())}]))
    scheduler = one_cycle(optimizer)
    with ends_in_time(), carry_out(model, plan, case.workload, optimizer=adamw) as training:
        other = one_cycle(training.optimizer)
        for batch in case.batches:
            losses = [case.loss(trained, batch) for trained in (model, plain)]
            assert losses[0].item() == losses[1].item()
            for loss in losses:
                loss.backward()
            training.step()
            other.step()
            masters.take_gradients()
            optimizer.step()
            masters.give_weights()
            scheduler.step()
    assert differences(model, plain.state_dict()) == []


# -- float16 with scaled losses --------------------------------------------------------------------------------------

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

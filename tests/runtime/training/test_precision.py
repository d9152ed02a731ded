"""Narrow types: autocast, float32 masters of narrow parameters, and what they must not change."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
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
import protwin.runtime.tracing.facts as facts_module
from protwin.runtime import carry_out, trace
from protwin.runtime.optimizers import device_steps
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import some_quick
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


@lru_cache
def traced_within(name: str) -> Workload:
    """The workload of an autocast case as it is trained."""
    case = autocast_cases()[name]
    with autocast():
        return replace(case).workload


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
    with ends_in_time(), carry_out(model, plan, traced_within(name), optimizer=adamw) as training, around_loop():
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


@pytest.mark.parametrize("is_trained", [False, True], ids=["trained without", "trained within"])
@pytest.mark.parametrize("is_traced", [False, True], ids=["traced without", "traced within"])
def test_autocast_around_one_of_trace_and_forward_is_said_once(is_traced: bool, is_trained: bool) -> None:
    case = autocast_cases()["llama"]
    workload, model = traced_within("llama") if is_traced else case.workload, case.build()
    with carry_out(model, half_offloaded(workload), workload) as training, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with training.evaluation(), torch.no_grad():
            case.loss(model, case.batches[0])
        assert not told
        for batch in case.batches[:2]:
            with autocast() if is_trained else nullcontext():
                loss = case.loss(model, batch)
            loss.backward()
            training.step()
    words = [str(one.message) for one in told]
    assert len(words) == (is_traced != is_trained)
    for word in words:
        assert word.startswith(f"forwards run {'under' if is_trained else 'without'} torch.autocast")
        assert f"were traced in {'bfloat16' if is_traced else 'float32'}" in word


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


@some_quick(("n_checkpoint", "n_swap"), [(0, 0), (2, 0), (4, 0), (0, 4), (0, 2), (2, 1)], quick=1)
def test_a_trace_within_autocast_accounts_for_casts(n_checkpoint: int, n_swap: int) -> None:
    measured_bytes, guaranteed_bytes = peaks_under_autocast(n_checkpoint, n_swap)
    assert measured_bytes <= 1.005 * guaranteed_bytes


@some_quick("is_wide", [False, True], quick=1, ids=["around forward", "around the loop"])
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
    without = {"clear_autocast_cache": lambda: None}
    monkeypatch.setattr(recomputation_module, "torch", SimpleNamespace(**vars(torch) | without))
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
    monkeypatch.setattr(facts_module, "held_to_the_end", lambda *_: ())
    monkeypatch.setattr(
        facts_module, "_casts_until_backward", lambda seen, _: {mode: found.sections for mode, found in seen.items()}
    )
    assert growth_bytes() > 100_000


def num_chunks(plan: Plan, workload: Workload) -> int:
    """Of the plan's layout."""
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=plan.chunk_bytes)
    return len(layout.chunks)


@pytest.mark.slow
def test_a_trace_that_reuses_casts_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: the casts of a first iteration serve the one that is looked at, and stay all the time."""
    measured_bytes, guaranteed_bytes = peaks_under_autocast(0)
    assert measured_bytes == pytest.approx(guaranteed_bytes, rel=0.005)
    forgetful = SimpleNamespace(**{**vars(torch), "clear_autocast_cache": lambda: None})
    for module in (batches_module, swapping_module):
        monkeypatch.setattr(module, "torch", forgetful)
    measured_bytes, guaranteed_bytes = peaks_under_autocast(0)
    assert measured_bytes != pytest.approx(guaranteed_bytes, rel=0.01)


def test_casts_that_autocast_keeps_from_an_earlier_forward_would_be_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant keeps them: their gradients then come when chunks have left, which is noticed."""
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    name = "llama"
    try:
        with pytest.raises(ScheduleError, match="got a gradient after backward had left the sections"):
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

"""Models that read images and sounds train by a plan as in the plain loop, within the memory that was accounted for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from protwin.runtime import CpuDevice, carry_out, freeze, trace
from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import some_quick
from tests.runtime import accounts
from tests.runtime.eager_lanes import eager_peak
from tests.runtime.equality import offloaded_chunks, trained
from tests.runtime.modalities import model_and_batch
from tests.runtime.models import Case, adamw, differences, snapshot
from tests.runtime.resuming import plan_of

TOWERS = {"gemma3": "*vision_tower*", "qwen2_vl": "*visual*", "qwen3_vl": "*visual*", "idefics3": "*vision_model*"}
CASES = [(name, False) for name in ("clip", "whisper", *TOWERS)] + [(name, True) for name in TOWERS]


def case_of(name: str, is_frozen: bool = False) -> Case:
    def build() -> nn.Module:
        model: nn.Module = model_and_batch(name)[0]
        if is_frozen:
            freeze(model, [TOWERS[name]])
        return model

    return Case(build, [model_and_batch(name)[1]] * 2)


@some_quick("name,is_frozen", CASES, quick=[("gemma3", True)])
def test_a_plan_that_offloads_equals_the_plain_loop(name: str, is_frozen: bool) -> None:
    case = case_of(name, is_frozen)
    plan = plan_of(case.workload, chunk_bytes=9_000, n_persist=1, n_checkpoint=2)
    assert offloaded_chunks(case.workload, plan)
    outcome = trained(case, plan)
    assert outcome.losses == case.plain.losses
    assert outcome.different == []
    assert outcome.num_gathers > 0
    assert outcome.num_cpu_adam_steps > 0


@some_quick("mixture", ["checkpointed", "swapped"], quick=1)
@some_quick("name,is_frozen", CASES, quick=[("qwen2_vl", False)])
def test_the_peak_is_the_schedules_own(name: str, is_frozen: bool, mixture: str) -> None:
    """The tower's part of it is counted, trained or frozen."""
    case = case_of(name, is_frozen)
    plan = accounts.plan_of(case, mixture, "offloaded")
    measured_bytes = accounts.measured_peak_bytes(case, plan)
    accounted = eager_peak(compile_schedule(plan, case.workload))
    assert accounts.error_frac(measured_bytes, accounted) == pytest.approx(0, abs=accounts.BAR)


def text_of(batch: dict[str, Any]) -> dict[str, Any]:
    """The same batch without a picture."""
    tokens = torch.randint(5, 50, batch["input_ids"].shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def test_a_batch_without_the_picture_is_refused_and_training_goes_on() -> None:
    model, batch = model_and_batch("qwen2_vl")
    workload = trace(model, batch, repeats=0)
    plan = plan_of(workload, chunk_bytes=9_000, n_persist=1, n_checkpoint=2)
    plain = copy.deepcopy(model)
    optimizer = adamw([{"params": list(plain.parameters())}])
    with carry_out(model, plan, workload, optimizer=adamw) as training:
        for _ in range(2):
            with pytest.raises(ScheduleError, match="without the images or sounds that the traced one had"):
                model(**text_of(batch))
            training.skip_step()
            model(**batch).loss.backward()
            training.step()
            plain(**batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert differences(model, snapshot(plain)) == []


@some_quick("n_persist", [0, None], ids=["offloaded", "persistent"], quick=1)
def test_text_alone_has_a_plan_without_the_tower(n_persist: int | None) -> None:
    """A picture beyond it trains as in the plain loop where there is memory; within the budget it is refused."""
    model, batch = model_and_batch("qwen2_vl")
    text = text_of(batch)
    workload = trace(model, text, repeats=0)
    assert all("language_model" in block.name for block in workload.blocks)
    assert workload.num_blocks == 3
    plan = plan_of(workload, chunk_bytes=9_000, n_persist=n_persist, n_checkpoint=2)
    guaranteed_bytes = guaranteed_device_peak(compile_schedule(plan, workload)).size_bytes

    def train(device: CpuDevice, steps: list[dict[str, Any]]) -> Callable[[], nn.Module]:
        trained_model = copy.deepcopy(model)
        with carry_out(trained_model, plan, workload, optimizer=adamw, device=device) as training:
            for given in steps:
                trained_model(**given).loss.backward()
                training.step()
        return lambda: trained_model

    with pytest.raises(torch.OutOfMemoryError, match="while running forward prologue"):
        train(CpuDevice(guaranteed_bytes), [text, text, batch])
    plain = copy.deepcopy(model)
    optimizer = adamw([{"params": list(plain.parameters())}])
    for given in (text, text, batch, text):
        plain(**given, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert differences(train(CpuDevice(), [text, text, batch, text])(), snapshot(plain)) == []

"""Models that PEFT adapts, trained by plans: the bits of the plain loop, the bytes of the plan, the account's peak."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from protwin.runtime.model.blocks import find_blocks
from protwin.shared.compile.compile import compile_schedule
from tests.proof_size import some_quick
from tests.runtime.accounts import BAR, error_frac, measured_peak_bytes, plan_of
from tests.runtime.adapters.peft_kinds import (
    NUM_STEPS,
    peft_cases,
    plain_course,
    planned_course,
    with_steps_of,
)
from tests.runtime.eager_lanes import eager_peak
from tests.runtime.equality import offloaded_chunks, random_plans, swapped_bytes
from tests.runtime.models import Case, llama

NAMES = [*peft_cases(1)]
random.Random(8).shuffle(NAMES)
ALWAYS = ("DoRA", "head and embedding saved", "mixtral, experts")


@lru_cache
def case_of(name: str) -> Case:
    return peft_cases(NUM_STEPS)[name]


@some_quick("name", NAMES, quick=[*ALWAYS, *(name for name in NAMES if name not in ALWAYS)][:3])
def test_adapted_models_have_the_bits_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    """Ten steps with accumulation, clipping, a scheduler and evaluations; resumed in the middle under another plan."""
    case = case_of(name)
    before, other = random_plans(case.workload, 2, seed=NAMES.index(name))
    after = with_steps_of(other, before)
    found = planned_course(case, before, after, tmp_path)
    expected = plain_course(case, before.micro_batches, before.max_gradient_norm)
    assert found.losses == expected.losses
    assert [key for key, value in found.weights.items() if not torch.equal(value, expected.weights[key])] == []
    assert found.peak_over_guaranteed_bytes <= 0
    halves = (NUM_STEPS // 2, NUM_STEPS - NUM_STEPS // 2)
    plans = tuple(zip((before, after), halves, strict=True))
    to_host_bytes = num_steps = 0
    for plan, steps in plans:
        trained = [chunk for chunk in offloaded_chunks(case.workload, plan) if chunk.is_trainable]
        members = [case.workload.parameters[placed.index] for chunk in trained for placed in chunk.parameters]
        gradient_bytes = sum(p.size_bytes for p in members if p.trainable)
        to_host_bytes += steps * plan.micro_batches * (gradient_bytes + swapped_bytes(case.workload, plan))
        num_steps += steps * len(trained)
    assert found.to_host_bytes == to_host_bytes
    assert found.num_cpu_adam_steps == num_steps


def test_a_loop_that_forgets_a_matrix_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The wrong variant: the model that resumes has an adapter of another scale, which no saved weight says."""
    case = case_of("LoRA")
    plan = random_plans(case.workload, 1, seed=3)[0]
    expected = plain_course(case, plan.micro_batches, plan.max_gradient_norm)
    original, models = case.build, []

    def wrong() -> Any:
        models.append(original())
        if len(models) == 2:
            models[-1].base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] *= 1.001
        return models[-1]

    monkeypatch.setattr(case, "build", wrong)
    found = planned_course(case, plan, plan, tmp_path)
    assert found.losses[:5] == expected.losses[:5]
    assert found.losses != expected.losses


@some_quick("name", NAMES, quick=["DoRA"])
def test_the_peak_of_adapted_models_is_the_accounts(name: str) -> None:
    case = case_of(name)
    plan = plan_of(case, "mixed", "mixed")
    measured_bytes = measured_peak_bytes(case, plan)
    assert error_frac(measured_bytes, eager_peak(compile_schedule(plan, case.workload))) == pytest.approx(0, abs=BAR)


def test_blocks_are_found_through_pefts_wrapping() -> None:
    for name in ("LoRA", "prompt", "P-tuning", "VB-LoRA", "replicated layers"):
        prefix = "base_model.model.layers" if name in ("prompt", "P-tuning") else "base_model.model.model.layers"
        num_blocks = 5 if name == "replicated layers" else 4
        assert [block.name for block in find_blocks(case_of(name).build())] == [
            f"{prefix}.{number}" for number in range(num_blocks)
        ]


def test_a_course_is_not_the_same_without_an_adapter() -> None:
    """What is compared depends on the matrices: those of zeros would hide a wrong gradient."""
    model = case_of("LoRA").build()
    assert all(p.any() for p in model.parameters() if p.requires_grad)
    batch = case_of("LoRA").batches[0]
    assert model.eval()(**batch).loss.item() != llama().eval()(**batch).loss.item()

"""The peak that is measured is the one that the schedule accounts for, whatever travels, at one timing of the lanes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from protwin.shared.basics.errors import ScheduleError
from protwin.shared.compile.activation_levels import ActivationAccount, SharedBytes
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.phases.shared_inputs import SharedInput
from protwin.shared.schema.schedule import Content, Schedule, TaskKind
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.verify import verify_schedule
from tests.proof_size import some_quick
from tests.runtime.accounts import BAR, MIXTURES, RESIDENCIES, error_frac, measured_peak_bytes, plan_of
from tests.runtime.eager_lanes import eager_peak
from tests.runtime.families import family_cases
from tests.runtime.models import SEED, Case, HandWritten, cases, gpt2, llama, token_batches

NAMES = ("llama, groups", "gpt2 with dropout, tied", "hand-written, frozen tail", "llama in bfloat16")


@lru_cache
def measured_and_accounted(name: str, mixture: str, residency: str) -> tuple[int, Schedule]:
    case = cases()[name]
    plan = plan_of(case, mixture, residency)
    return measured_peak_bytes(case, plan), compile_schedule(plan, case.workload)


QUICK = ("gpt2 with dropout, tied", "llama in bfloat16")


@some_quick(
    ("name", "mixture", "residency"),
    product(NAMES, MIXTURES, RESIDENCIES),
    quick=[
        (QUICK[(one // 2 + other // 2) % 2], mixture, residency)
        for one, mixture in enumerate(MIXTURES)
        for other, residency in enumerate(RESIDENCIES)
        if (one + other) % 2 == 0
    ],
)
def test_the_peak_is_the_schedules_own(name: str, mixture: str, residency: str) -> None:
    measured_bytes, schedule = measured_and_accounted(name, mixture, residency)
    assert error_frac(measured_bytes, eager_peak(schedule)) == pytest.approx(0, abs=BAR)


@pytest.mark.parametrize("content", [Content.PARAMETERS, Content.GRADIENTS, Content.ACTIVATIONS, Content.SWAPPED])
def test_an_account_that_leaves_something_out_is_noticed(content: Content) -> None:
    """The wrong variant: buffers of one kind count for nothing."""
    errors = []
    for mixture, residency in (("kept", "offloaded"), ("swapped", "offloaded"), ("swapped", "persistent")):
        measured_bytes, schedule = measured_and_accounted("llama, groups", mixture, residency)
        buffers = tuple(replace(b, size_bytes=0) if b.content is content else b for b in schedule.buffers)
        errors.append(error_frac(measured_bytes, eager_peak(replace(schedule, buffers=buffers))))
    assert max(abs(error) for error in errors) > BAR


# -- shared inputs ---------------------------------------------------------------------------------------------------

EXACT = 1e-4
LOSSES_NOT_HELD = 3 * 4
"""The account has four float32 numbers that loops hold; the loop here holds its loss alone."""


def error_with(name: str, mixture: str, shared_inputs: tuple[SharedInput, ...]) -> float:
    """Of the account if these were the shared inputs."""
    case = subject(name)
    plan = plan_of(case, mixture, "offloaded")
    workload = case.workload.model_copy(update={"shared_inputs": shared_inputs})
    accounted, measured_bytes = eager_peak(compile_schedule(plan, workload)), peak_of(name, mixture)
    errors = [error_frac(measured_bytes + more, accounted) for more in (0, LOSSES_NOT_HELD)]
    return min(errors, key=abs)


def subject(name: str) -> Case:
    return cases()[name] if name in cases() else family_cases()[name]


@lru_cache
def peak_of(name: str, mixture: str) -> int:
    case = subject(name)
    return measured_peak_bytes(case, plan_of(case, mixture, "offloaded"))


@some_quick("mixture", MIXTURES, quick=2)
@some_quick("name", ["llama in bfloat16", "gemma2", "t5"], quick=1)
def test_what_sections_share_goes_with_the_last_that_needs_it(name: str, mixture: str) -> None:
    """The embedded input of a narrow model, masks of two kinds, biases of an encoder and of a decoder."""
    shared = subject(name).workload.shared_inputs
    assert shared
    assert abs(error_with(name, mixture, shared)) <= EXACT


@pytest.mark.parametrize("name", ["llama in bfloat16", "gemma2", "t5"])
def test_one_answer_for_all_mixtures_is_noticed(name: str) -> None:
    """Wrong variants: shared inputs that no block holds, and ones that the first block holds in any mode."""
    shared = subject(name).workload.shared_inputs
    made = tuple(s for s in shared if s.made_by is not None)
    held = made + tuple(
        s.model_copy(update={"kept_by": (0,), "checkpointed_by": (0,), "freed_in_checkpointed": (0,)})
        for s in shared
        if s.made_by is None
    )
    assert max(error_with(name, mixture, made) for mixture in MIXTURES) > BAR
    assert min(error_with(name, mixture, held) for mixture in MIXTURES) < -BAR


# -- what goes before its own backward -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "forgotten"), [("llama in bfloat16", "passing"), ("t5", "between")], ids=["passing", "between"]
)
def test_what_goes_before_its_own_backward_is_not_counted_until_then(
    name: str, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedded inputs that the head's forward lets go of; norm and embeddings between an encoder and a decoder.

    The wrong variants keep them until the backward of the section that made them; the verifier refuses these.
    """
    case = subject(name)
    plan = plan_of(case, "swapped", "persistent")
    measured_bytes = measured_peak_bytes(case, plan)
    schedule = compile_schedule(plan, case.workload)
    verify_schedule(schedule, plan, case.workload)
    assert abs(error_frac(measured_bytes, eager_peak(schedule))) <= EXACT
    assert measured_bytes <= guaranteed_device_peak(schedule).size_bytes
    if forgotten == "passing":
        of = SharedBytes.of
        monkeypatch.setattr(SharedBytes, "of", lambda *args: replace(of(*args), gone=np.zeros(1, dtype=np.int64)))
    else:
        monkeypatch.setattr(ActivationAccount, "_between_blocks", lambda account: 0 * account.saved)
    wrong = compile_schedule(plan, case.workload)
    assert error_frac(measured_bytes, eager_peak(wrong)) < -1e-3
    with pytest.raises(ScheduleError, match="is unsafe"):
        verify_schedule(wrong, plan, case.workload)


# -- device Adam -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residency", ["persistent", "offloaded"])
def test_device_adam_holds_one_gradient_in_float32(residency: str) -> None:
    """Of an embedding so large that this is the peak; the wrong variant knows nothing of it."""
    case = Case(lambda: llama(vocab_size=4096).to(torch.bfloat16), token_batches(batch=1, length=4))
    plan = plan_of(case, "checkpointed", residency)
    if residency == "offloaded":
        # All but the embedding, the first chunk.
        plan = plan.model_copy(update={"n_persist": 1})
    schedule = compile_schedule(plan, case.workload)
    measured_bytes = measured_peak_bytes(case, plan)
    assert abs(error_frac(measured_bytes, eager_peak(schedule))) <= EXACT
    assert measured_bytes <= guaranteed_device_peak(schedule).size_bytes
    tasks = (replace(task, phase=None) if task.kind is TaskKind.DEVICE_ADAM else task for task in schedule.tasks)
    narrow = replace(schedule, tasks=tuple(tasks))
    assert error_frac(measured_bytes, eager_peak(narrow)) > BAR
    assert measured_bytes > guaranteed_device_peak(narrow).size_bytes


# -- gradients -------------------------------------------------------------------------------------------------------


def _with_unused_parameters() -> nn.Module:
    model = gpt2()
    for block in model.transformer.h:
        block.unused = nn.Parameter(torch.randn(700))
    return model


def test_parameters_that_nothing_uses_leave_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for their gradients; the wrong variant takes it for gradients that have left the level.

    That shows where a tied head's gradient passes through all blocks until the embedding's completes it.
    """
    case = Case(_with_unused_parameters, token_batches(batch=1, length=4))
    plans = {mixture: plan_of(case, mixture, "offloaded") for mixture in MIXTURES}
    measured = {mixture: measured_peak_bytes(case, plan) for mixture, plan in plans.items()}

    def worst_error() -> float:
        accounted = {mixture: eager_peak(compile_schedule(plan, case.workload)) for mixture, plan in plans.items()}
        return max(error_frac(measured[mixture], accounted[mixture]) for mixture in MIXTURES)

    assert worst_error() < 1e-3
    monkeypatch.setattr(
        "protwin.shared.compile.activation_levels.ActivationAccount.own_gradient_bytes",
        lambda account, is_later: np.maximum(account.room_bytes, account.stated_bytes * is_later),
    )
    assert worst_error() > 2e-3


class _FrozenByContext(HandWritten):
    """Its first blocks run under ``torch.no_grad()``; what they hold is trainable all the same."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """(batch, 5) to (batch, classes)."""
        with torch.no_grad():
            hidden = self.stack[:3](self.entry(points))
        return self.exit(self.stack[3:](hidden))


def _with_blocks_under_no_grad() -> nn.Module:
    torch.manual_seed(SEED)
    model = _FrozenByContext()
    model.exit = nn.Linear(24, 400)
    return model


def test_no_gradients_are_not_the_same_as_gradients_that_nobody_counted() -> None:
    """Blocks that say that they leave none have room for some, which counts for nothing."""
    generator = torch.Generator().manual_seed(SEED)
    points, classes = torch.randn(100, 5, generator=generator), torch.arange(100) % 3
    case = Case(_with_blocks_under_no_grad, [{"points": points, "classes": classes}] * 6, has_loss=False)
    assert [case.workload.profile_of(block).backward.gradient_bytes for block in range(3)] == [0, 0, 0]
    plan = plan_of(case, "kept", "offloaded", micro_batches=2)
    measured_bytes = measured_peak_bytes(case, plan)

    def guaranteed_bytes() -> int:
        return guaranteed_device_peak(compile_schedule(plan, case.workload)).size_bytes

    head_bytes = sum(p.size_bytes for p in case.workload.parameters if p.name.startswith("exit"))
    assert guaranteed_bytes() - head_bytes / 2 < measured_bytes <= guaranteed_bytes()
    modes = np.zeros((2, 1, case.workload.num_blocks), dtype=np.bool_)
    account = ActivationAccount(case.workload, *modes, modes[0].astype(np.int64))
    # After the prologue; where blocks did not say, all of the room would count.
    assert account.room_bytes[1:4].all()
    for is_later in (False, True):
        assert not account.own_gradient_bytes(is_later)[:, 1:4].any()

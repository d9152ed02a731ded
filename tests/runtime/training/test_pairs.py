"""Any two methods of training, in one plan: the bits of the plain loop, or one message."""

from __future__ import annotations

import pytest
import torch

from protwin.shared.basics.errors import ProtwinError
from protwin.shared.schema.plan import Plan, TrainingMethod, why_not_bypass
from tests.proof_size import some_quick
from tests.runtime.pairs import METHODS, NOT_OF_BYPASS, PAIRS, Combined, refusal

QUICK = [("offloaded", "OSFT"), ("MLPs in tiles", "8-bit Adam")]
ALL = METHODS[:9]
COMBINED = [pair for pair in PAIRS if refusal(pair) is None]


@some_quick("one,other", COMBINED, quick=QUICK)
def test_two_methods_train_as_the_plain_loop(one: str, other: str) -> None:
    check(Combined((one, other)))


def test_all_methods_in_one_plan_train_as_the_plain_loop() -> None:
    check(Combined(ALL))


def check(combined: Combined) -> None:
    losses, weights, training = combined.by_plan()
    expected, after = combined.plainly()
    assert losses == expected
    assert [name for name, weight in weights.items() if not torch.equal(weight, after[name])] == []
    assert any(loss != losses[0] for loss in losses[1:])
    if "offloaded" in combined.methods:
        assert training.num_gathers > 0
        assert training.num_cpu_adam_steps > 0


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if refusal(pair) is not None], ids="-".join)
def test_what_cannot_be_combined_is_refused_by_name(pair: tuple[str, str]) -> None:
    found = refusal(pair)
    assert found is not None
    with pytest.raises(ProtwinError, match=found[0]):
        Combined(pair).by_plan()


@pytest.mark.parametrize("method", NOT_OF_BYPASS)
def test_what_a_distillation_cannot_have_is_refused_by_its_knob(method: str) -> None:
    knobs = NOT_OF_BYPASS[method]
    plan = Plan(workload_id="w", method=TrainingMethod.BYPASS, chunk_bytes=1, n_persist=0, n_buffer=1)
    why = why_not_bypass(plan.model_copy(update=knobs))
    assert why is not None
    assert any(knob in why for knob in knobs)
    assert "with method bypass" in why

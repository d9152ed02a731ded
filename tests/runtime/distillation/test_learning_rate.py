"""The learning rate of every step of a bypass training."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.runtime.distillation.learning_rate import CosineRate
from protwin.shared.basics.errors import PlanError


def test_the_rate_at_its_key_points() -> None:
    rates = CosineRate(peak=1e-3, warmup_steps=10, decay_steps=110, least_frac=0.1)
    expected = {1: 1e-4, 5: 5e-4, 10: 1e-3, 60: 5.5e-4, 110: 1e-4, 111: 1e-4, 10**6: 1e-4}
    for step, rate in expected.items():
        assert rates.at(step) == pytest.approx(rate, rel=1e-12)
    assert rates.at(35) == pytest.approx(1e-4 + 9e-4 * (1 + math.sqrt(0.5)) / 2, rel=1e-12)


def test_without_a_warm_up_the_first_step_has_nearly_the_peak_and_without_decay_all_have_it() -> None:
    assert CosineRate(peak=1e-3, warmup_steps=0, decay_steps=10).at(0) == 1e-3
    assert 0.97e-3 < CosineRate(peak=1e-3, warmup_steps=0, decay_steps=10).at(1) < 1e-3
    for steps in (3, 5):
        assert {CosineRate(peak=1e-3, warmup_steps=5, decay_steps=steps).at(step) for step in range(9)} == {1e-3}


@given(st.integers(0, 50), st.integers(1, 100), st.floats(0, 1))
def test_the_rate_rises_in_the_warm_up_and_falls_after_it(warmup: int, further: int, least_frac: float) -> None:
    rates = CosineRate(peak=2.0, warmup_steps=warmup, decay_steps=warmup + further, least_frac=least_frac)
    found = [rates.at(step) for step in range(1, warmup + further + 3)]
    assert found[:warmup] == sorted(found[:warmup])
    assert found[max(0, warmup - 1) :] == sorted(found[max(0, warmup - 1) :], reverse=True)
    assert found[-1] == 2.0 * least_frac
    assert max(found) <= 2.0


def test_impossible_figures_are_refused() -> None:
    for values, words in (
        ((0.0, 1, 2, 0.0), "learning rate of 0.0"),
        ((float("nan"), 1, 2, 0.0), "learning rate of nan"),
        ((1.0, 1, 2, 1.5), "least learning rate of 1.5"),
        ((1.0, -1, 2, 0.0), "-1 steps"),
    ):
        with pytest.raises(PlanError, match=words):
            CosineRate(*values)

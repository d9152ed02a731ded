"""Tokens to steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.runtime.runs.token_budget import TokenBudget
from protwin.shared.basics.errors import PlanError

from .settings import settings


@given(st.integers(1, 10**6), st.integers(1, 99), st.integers(1, 9), st.integers(1, 9), st.floats(0, 1))
def test_steps_are_the_fewest_whole_ones_that_go_through_all_tokens(
    num_tokens: int, length: int, samples: int, micro_batches: int, frac: float
) -> None:
    budget = TokenBudget(num_tokens, length, samples, micro_batches)
    a_step = length * samples * micro_batches
    assert (budget.num_steps - 1) * a_step < num_tokens <= budget.num_steps * a_step
    # Rounded up twice, first to batches and then to steps, is the same.
    assert budget.num_steps == math.ceil(math.ceil(num_tokens / (length * samples)) / micro_batches)
    assert budget.num_batches == budget.num_steps * micro_batches
    filled = ((num_tokens // length) // samples) // micro_batches
    assert budget.warmup_steps(frac) == max(1, round(frac * max(1, filled)))


def test_settings_have_their_budget() -> None:
    assert settings().budget == TokenBudget(480, 8, 2, 3)
    assert settings().budget.num_steps == 10


def test_impossible_figures_are_refused() -> None:
    for field, values in (("num_tokens", (0, 8, 1, 1)), ("micro_batches", (9, 8, 1, 0))):
        with pytest.raises(PlanError, match=f"{field} = 0"):
            TokenBudget(*values)
    with pytest.raises(PlanError, match="from 0 to 1"):
        TokenBudget(9, 1, 1).warmup_steps(1.5)

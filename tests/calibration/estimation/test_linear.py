"""Estimates of linear models: against the normal equations, and against what priors must do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.calibration.estimation.linear import Prior, estimate, expected

SEEDS = st.integers(0, 2**20)


@given(SEEDS)
def test_the_estimate_solves_the_normal_equations(seed: int) -> None:
    """With coefficients far above 0 nothing holds them: (X'X / e^2 + P) c = X'y / e^2 + P m, and its inverse is C."""
    draw = np.random.default_rng(seed)
    columns = {"seconds": draw.uniform(0.01, 1, 30), "bytes": draw.uniform(1e6, 1e8, 30), "one": np.ones(30)}
    truth, weights = np.array([2.0, 3e-8, 0.5]), draw.uniform(0.5, 2, 30)
    table = np.stack(list(columns.values()), axis=1)
    target = table @ truth + draw.normal(0, 0.01, 30) / weights
    priors = {"bytes": Prior(3e-8, 1e-8), "one": Prior(0.4, 0.1)}
    found = estimate(columns, target, weights, priors)
    precision = np.diag([0, 1e16, 100.0])
    # The error is what the estimate itself leaves, as it settles.
    left = (target - table @ found.values) * weights
    inverse = (table * weights[:, None] ** 2).T / np.mean(left**2)
    normal = inverse @ table + precision
    expected_values = np.linalg.solve(normal, inverse @ target + precision @ np.array([0, 3e-8, 0.4]))
    assert found.values == pytest.approx(expected_values, rel=1e-3)
    # Of its covariance: the rows that no coefficient took, and two beside them that are 5 % off.
    hat = table * weights[:, None] @ np.linalg.inv(normal) @ inverse / weights
    wanted = np.mean((target * weights) ** 2)
    variance = (np.sum(left**2) + 2 * 0.05**2 * wanted) / (30 - np.trace(hat) + 2)
    wider = (table * weights[:, None] ** 2).T @ table / variance + precision
    assert found.covariance == pytest.approx(np.linalg.inv(wider), rel=1e-2)
    assert found.values == pytest.approx(truth, rel=0.2)


def test_alike_rows_leave_a_coefficient_where_its_prior_is() -> None:
    """Rows that cannot tell two columns apart: the one of which nothing is known takes all beyond the other's prior."""
    columns = {"seconds": np.full(20, 0.1), "bytes": np.full(20, 1e6)}
    target = np.full(20, 0.13) + np.tile([1e-4, -1e-4], 10)
    found = estimate(columns, target, np.ones(20), {"bytes": Prior(1e-8, 1e-12)})
    assert found["bytes"] == pytest.approx(1e-8, rel=1e-3)
    assert found["seconds"] == pytest.approx(1.2, rel=1e-3)
    # The wrong variant: with a wide prior, nothing says which of both it is.
    free = estimate(columns, target, np.ones(20), {"bytes": Prior(0.0, 1e-7)})
    assert free.std("bytes") > 100 * found.std("bytes")


def test_no_coefficient_is_negative() -> None:
    """A column that would shorten tasks counts for nothing."""
    seconds = np.linspace(0.1, 1, 20)
    columns = {"seconds": seconds, "bytes": np.arange(20.0) % 3}
    found = estimate(columns, seconds - 0.01 * columns["bytes"], np.ones(20), {"bytes": Prior(0.0, 1.0)})
    assert found["bytes"] == 0.0
    assert found["seconds"] == pytest.approx(1, rel=0.05)
    assert found["tensors"] == found.std("tensors") == 0.0


def test_what_no_row_tells_is_what_was_known() -> None:
    """A column of zeros keeps its prior, and a kind without rows all of them."""
    priors = {"seconds": Prior(1.0, 0.5), "bytes": Prior(2.0, 0.25)}
    columns = {"seconds": np.linspace(1, 2, 10), "bytes": np.zeros(10)}
    found = estimate(columns, 3 * columns["seconds"], np.ones(10), priors)
    assert (found["bytes"], found.std("bytes")) == pytest.approx((2.0, 0.25))
    assert found["seconds"] == pytest.approx(3, rel=1e-3)
    unseen = expected(priors)
    assert (unseen["seconds"], unseen.std("seconds"), unseen.num_rows) == (1.0, 0.5, 0)


@given(SEEDS, st.integers(1, 4))
def test_two_rows_say_nothing_of_their_own_errors(seed: int, num_rows: int) -> None:
    """A line passes through two points whatever they are: the wrong variant took that for the truth."""
    draw = np.random.default_rng(seed)
    columns = {"seconds": draw.uniform(0.5, 1, num_rows), "one": np.ones(num_rows)}
    found = estimate(columns, columns["seconds"] * 2 + 0.1, np.ones(num_rows), {"one": Prior(0.0, 0.3)})
    assert found.std("seconds") > 0.02 * found["seconds"]


@pytest.mark.parametrize(("num_runs", "run_std"), [(1, 0.1), (4, 0.1), (9, 0.05)])
def test_rows_of_one_run_are_wrong_together(num_runs: int, run_std: float) -> None:
    """Of many rows of few runs, each slow or fast as a whole: the slope scatters as it is said to."""
    draw, found = np.random.default_rng(0), []
    runs = np.repeat(np.arange(num_runs), 40)
    seconds = draw.uniform(0.5, 1, len(runs))
    for _ in range(300):
        target = 2 * seconds * (1 + draw.normal(0, run_std, num_runs))[runs] * (1 + draw.normal(0, 0.02, len(runs)))
        found.append(estimate({"seconds": seconds}, target, np.ones(len(runs)), {}, runs, run_std))
    scattered = np.std([one["seconds"] for one in found])
    assert np.mean([one.std("seconds") for one in found]) == pytest.approx(scattered, rel=0.15)
    alone = [estimate({"seconds": seconds}, target, np.ones(len(runs)), {}).std("seconds")]
    assert alone[0] < 0.5 * scattered, "the wrong variant: rows that scatter by themselves"

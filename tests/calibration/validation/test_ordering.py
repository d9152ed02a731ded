"""Order beyond noise, and regret."""

from __future__ import annotations

import random
import statistics

import pytest

from protwin.calibration.validation.ordering import rank_correlation, rank_correlation_beyond_noise, regret_frac


def test_plans_that_cannot_be_told_apart_need_no_order() -> None:
    measured = [1.00, 1.01, 1.02, 2.00, 2.01, 4.0]
    predicted = [1.02, 1.01, 1.00, 2.01, 2.00, 4.0]
    noises = [0.02] * 6
    assert rank_correlation_beyond_noise(predicted, measured, noises) == pytest.approx(1)
    assert rank_correlation(predicted, measured) < 0.9, "the wrong variant"
    assert rank_correlation_beyond_noise(predicted, measured, [0.0] * 6) == pytest.approx(
        rank_correlation(predicted, measured)
    )


def test_plans_that_can_be_told_apart_do() -> None:
    measured, noises = [1.0, 1.01, 2.0, 4.0], [0.02] * 4
    assert rank_correlation_beyond_noise([4.0, 4.1, 2.0, 1.0], measured, noises) == pytest.approx(-1)


def test_where_all_are_alike_nothing_is_said() -> None:
    assert rank_correlation_beyond_noise([1.0, 2.0, 3.0], [1.0, 1.01, 1.02], [0.05] * 3) is None


def test_regret_is_not_the_luck_of_the_fastest() -> None:
    """Twenty plans that are equally fast: whichever was chosen, nothing is lost."""
    chance, names = random.Random(0), [str(number) for number in range(20)]

    def half() -> dict[str, float]:
        return {name: chance.gauss(1, 0.1) for name in names}

    trials = [(half(), half()) for _ in range(300)]
    assert statistics.fmean(regret_frac("3", names, halves) for halves in trials) == pytest.approx(0, abs=0.02)
    naive = [(a["3"] + b["3"]) / min(a[name] + b[name] for name in names) - 1 for a, b in trials]
    assert statistics.fmean(naive) > 0.1, "the wrong variant"

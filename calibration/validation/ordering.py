"""Whether predictions put plans in their true order, and what the search's pick costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from scipy.stats import rankdata, spearmanr


def rank_correlation(predicted_s: Sequence[float], measured_s: Sequence[float]) -> float:
    """Spearman's.  1 where all are alike in both, or there is one: nothing is in the wrong order."""
    if len(set(predicted_s)) < 2 or len(set(measured_s)) < 2:
        return 1.0
    return float(spearmanr(predicted_s, measured_s).statistic)


def rank_correlation_beyond_noise(
    predicted_s: Sequence[float], measured_s: Sequence[float], noises_frac: Sequence[float]
) -> float | None:
    """Spearman's correlation where plans that measurements cannot tell apart need no order.

    By measured time plans form groups: each has the plans that are within their own noise, and that of the group's
    fastest, of that fastest one.  Within a group measured ranks are tied, and so are predicted ones, at their mean.
    None if all plans are one group.
    """
    groups = _groups(measured_s, noises_frac)
    if len(groups) < 2:
        return None
    ranks = rankdata(predicted_s)
    measured, predicted = [0.0] * len(ranks), [0.0] * len(ranks)
    for place, group in enumerate(groups):
        for member in group:
            measured[member] = float(place)
            predicted[member] = statistics.fmean(float(ranks[one]) for one in group)
    return rank_correlation(predicted, measured)


def _groups(measured_s: Sequence[float], noises_frac: Sequence[float]) -> list[list[int]]:
    groups: list[list[int]] = []
    for place in sorted(range(len(measured_s)), key=measured_s.__getitem__):
        if groups:
            fastest = groups[-1][0]
            apart_s = measured_s[fastest] * (noises_frac[fastest] + noises_frac[place])
            if measured_s[place] - measured_s[fastest] <= apart_s:
                groups[-1].append(place)
                continue
        groups.append([place])
    return groups


def regret_frac(chosen: str, allowed: Sequence[str], halves: Sequence[Mapping[str, float]]) -> float:
    """Time of ``chosen`` over that of the best of ``allowed``, minus one.

    The best is found by one half of the measurements and timed by the other, both ways: the smallest of many noisy
    figures is smaller than any plan is fast.
    """
    return statistics.fmean(
        timed[chosen] / timed[min(allowed, key=choosing.__getitem__)] - 1 for choosing, timed in (halves, halves[::-1])
    )

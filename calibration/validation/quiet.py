"""The quiet share of noisy measurements, and how far they can be trusted.

Plans take turns, a burst of iterations each, round after round.  On a machine that others use too, some bursts are
slower than the plan is, and hardly any is faster.  So the fastest quarter of a plan's bursts stands for the plan, both
of those that a calibration is fitted to and of those that it is judged by: what others take then counts for neither.
How much others took is said beside it: how bursts of one plan scatter, and how the pace of the whole machine drifts
from one round to the next.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from ...shared.schema.record import LaneUse, RankRecord, RankWait, Record, TaskTiming

_SHARE: Final = 0.25
"""Of the bursts, at least two."""
_LEAST: Final = 2
_RESAMPLED: Final = 200

Measured = TypeVar("Measured", Record, RankRecord)


def seconds_of(burst: Record) -> float:
    """Seconds of an iteration of one burst, the mean over its ranks."""
    return statistics.fmean(rank.iteration_s for rank in burst.ranks) if burst.ranks else burst.iteration_s


def quiet_places(seconds: Sequence[float]) -> list[int]:
    """Places of the fastest quarter, in order; of two at least, if there are two."""
    fastest = sorted(range(len(seconds)), key=seconds.__getitem__)
    return sorted(fastest[: max(_LEAST, math.ceil(_SHARE * len(seconds)))])


def quiet_seconds(seconds: Sequence[float]) -> float:
    """Mean of the fastest quarter."""
    return statistics.fmean(seconds[place] for place in quiet_places(seconds))


def scatter_frac(seconds: Sequence[float]) -> float:
    """Median absolute deviation over the median; 0 of a single figure."""
    middle = statistics.median(seconds)
    return statistics.median(abs(one - middle) for one in seconds) / middle


def uncertainty_frac(seconds: Sequence[float]) -> float:
    """Standard deviation of ``quiet_seconds`` over itself, had the same bursts come as often by chance.

    Found by drawing them anew with replacement.  Infinite for fewer than three: nothing is known of them.
    """
    if len(seconds) < 3:
        return math.inf
    chance = random.Random(len(seconds))
    drawn = [quiet_seconds(chance.choices(seconds, k=len(seconds))) for _ in range(_RESAMPLED)]
    return statistics.pstdev(drawn) / quiet_seconds(seconds)


def drift_frac(rounds: Mapping[str, Sequence[float]]) -> float:
    """How far the machine's pace lies apart from one round to the next: median absolute deviation over the median.

    ``rounds``: seconds of an iteration of every plan, round by round.  The pace of a round is the median over plans of
    how much slower than its own median each was: what slows a single plan is its own noise.
    """
    paces = paces_of(rounds)
    if len(paces) < 2:
        return 0.0
    return scatter_frac(paces)


def paces_of(rounds: Mapping[str, Sequence[float]]) -> tuple[float, ...]:
    """How much slower than usual every round was; 1 is usual."""
    num_rounds = min(map(len, rounds.values()), default=0)
    usual_s = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    return tuple(
        statistics.median(seconds[turn] / usual_s[name] for name, seconds in rounds.items())
        for turn in range(num_rounds)
    )


def quiet_record(bursts: Sequence[Record]) -> Record:
    """One Record of the quiet ones among ``bursts`` of one plan, with the means of their times.

    Its noise is that of all bursts.  Its memory is that of the burst whose peak is the median of the quiet ones, so
    that peak and times are of the same iterations.
    """
    seconds = [seconds_of(burst) for burst in bursts]
    chosen = [bursts[place] for place in quiet_places(seconds)]
    within = statistics.median(burst.iteration_noise_frac for burst in bursts)
    update: dict[str, Any] = {
        "iteration_noise_frac": max(within, scatter_frac(seconds)),
        "num_iterations": sum(burst.num_iterations for burst in chosen),
        "waits": None,
    }
    if not chosen[0].ranks:
        return chosen[0].model_copy(update=_means(chosen) | update)
    ranks = tuple(_mean_rank([burst.ranks[place] for burst in chosen]) for place in range(len(chosen[0].ranks)))
    (slowest, _), *_ = Counter(burst.rank for burst in chosen).most_common()
    own = next(rank for rank in ranks if rank.rank == slowest)
    names = ("iteration_s", "forward_s", "backward_s", "optimizer_s", "tasks", "lanes", "memory")
    return chosen[0].model_copy(
        update={name: getattr(own, name) for name in names} | update | {"rank": slowest, "ranks": ranks}
    )


def _mean_rank(found: Sequence[RankRecord]) -> RankRecord:
    waits: dict[int, float] = {}
    for one in found:
        for wait in one.rank_waits:
            waits[wait.task] = waits.get(wait.task, 0.0) + wait.seconds / len(found)
    rank_waits = tuple(RankWait(task=task, seconds=seconds) for task, seconds in sorted(waits.items()))
    begins_s = statistics.fmean(one.begins_s for one in found)
    return found[0].model_copy(update=_means(found) | {"rank_waits": rank_waits, "begins_s": begins_s, "waits": None})


def _means(found: Sequence[Measured]) -> dict[str, Any]:
    """Fields of the records that are times, as means; and the memory of the one with the median peak."""
    by_peak = sorted(found, key=lambda one: max((curve.peak_bytes for curve in one.memory), default=0))
    return {
        **{
            name: statistics.fmean(getattr(one, name) for one in found)
            for name in ("iteration_s", "forward_s", "backward_s", "optimizer_s")
        },
        "tasks": tuple(_mean_task(same) for same in zip(*(one.tasks for one in found), strict=True)),
        "lanes": tuple(_mean_lane(same) for same in zip(*(one.lanes for one in found), strict=True)),
        "memory": by_peak[(len(by_peak) - 1) // 2].memory,
    }


def _mean_task(same: Iterable[TaskTiming]) -> TaskTiming:
    timings = tuple(same)
    start_s, duration_s = (
        statistics.fmean(getattr(one, name) for one in timings) for name in ("start_s", "duration_s")
    )
    return timings[0].model_copy(update={"start_s": start_s, "duration_s": duration_s, "end_s": start_s + duration_s})


def _mean_lane(same: Iterable[LaneUse]) -> LaneUse:
    uses = tuple(same)
    return uses[0].model_copy(update={"busy_s": statistics.fmean(use.busy_s for use in uses)})

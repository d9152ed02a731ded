"""Intervals of what several plans, or several kinds of ranks, take together.

[Note: The slowest of several]
What goes at the pace of its slowest part may be held up by another part than the one that is predicted to be slowest.
So the largest is taken draw by draw: parts on one machine meet the same factors, and each has a model's error of its
own.  With several parts that are about as slow, the interval lies above the prediction.

[Note: Ranks that wait for each other]
Unlike ranks meet in every collective, so they go at the pace of the slowest of them: a little slower where one kind is
late in forward and another one in backward.  What that little is in the prediction it is taken to be in every draw;
the slowest kind is found draw by draw.  They carry out one plan, so the model's error comes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...shared.basics.interval import Interval
from ...shared.schema.schedule import Schedule
from ..costs.contention import ContentionModel
from .drawn_timings import DrawnTimings
from .intervals import DrawnMachine, FloatArray, PlanDraws, around, central, interval_of, log_errors, time_logs
from .simulator import simulate_timing


def interval_of_slowest(parts: Sequence[PlanDraws]) -> Interval | None:
    """Where the time is expected that the slowest of ``parts`` is measured to take, by [Note: The slowest of several].

    They are plans on one machine, of one run.  None where most draws of some part have no period.
    """
    if len(parts) == 1:
        (only,) = parts
        return interval_of(only.iteration_s, only.logs, only.errors)
    predicted_s = max(part.iteration_s for part in parts)
    known = ~np.isnan(sum(part.logs for part in parts))
    if 2 * np.count_nonzero(known) <= known.size:
        return None
    random = np.random.default_rng(0)
    slowest = None
    for part in parts:
        # What belongs to the run, or to all plans for one workload, comes once for all.
        own = random.permutation(log_errors(replace(part.errors, run_std=0.0), is_shared=False))
        logs: FloatArray = np.add.outer(part.logs[known] + np.log(part.iteration_s / predicted_s), own)
        slowest = logs if slowest is None else np.maximum(slowest, logs)
    assert slowest is not None
    common = log_errors(replace(parts[0].errors, plan_std=0.0))
    return around(predicted_s, *central(slowest.ravel(), common))


def draws_of(
    schedule: Schedule, durations_s: Sequence[float], contention: ContentionModel, machine: DrawnMachine
) -> PlanDraws:
    """The time of ``schedule`` on one machine by itself, under every draw."""
    timing = simulate_timing(schedule, durations_s, contention, num_more_iterations=1)
    drawn = DrawnTimings(schedule, durations_s, contention, timing)
    return PlanDraws(timing.iteration_s, time_logs(drawn, machine), machine.errors)


def interval_of_groups(iteration_s: float, groups: Sequence[PlanDraws]) -> Interval | None:
    """Where the period of unlike ranks is expected, by [Note: Ranks that wait for each other].

    ``iteration_s``: as predicted for all of them together.  ``groups``: each kind of ranks by itself.  None where most
    draws of some group have no period.
    """
    slowest = max(groups, key=lambda group: group.iteration_s)
    logs: FloatArray = np.max([group.logs + np.log(group.iteration_s) for group in groups], axis=0)
    return interval_of(iteration_s, logs - np.log(slowest.iteration_s), slowest.errors)

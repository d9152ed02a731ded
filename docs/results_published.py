"""Lines of README about training runs that others published."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protwin.calibration.published.measured_runs import MEASURED_RUNS
from protwin.calibration.published.memory_margin import num_refused
from protwin.calibration.published.outcome import Outcome
from protwin.calibration.published.run_tables import WITHIN_FRAC
from protwin.sim.searching.confidence import DEFAULT_MARGIN_FRAC


def published_lines(content: Any) -> Iterator[tuple[str, str]]:
    """How many times are near, how many inside their intervals, and how many runs are said not to fit."""
    predicted = Outcome.model_validate(content).predicted
    timed = [(run.iteration_s, predicted[run.id]) for run in MEASURED_RUNS if run.iteration_s is not None]
    near = sum(abs(found.iteration_s / measured_s - 1) <= WITHIN_FRAC for measured_s, found in timed)
    inside = sum(
        found.iteration_interval_s is not None and found.iteration_interval_s.contains(measured_s)
        for measured_s, found in timed
    )
    yield (
        "times of training runs that others published, predicted from data sheets alone",
        f"{near} of {len(timed)} within {WITHIN_FRAC:.0%}, {inside} inside their 90 % interval",
    )
    by_prediction, by_search = (num_refused(MEASURED_RUNS, predicted, margin) for margin in (0.0, DEFAULT_MARGIN_FRAC))
    yield (
        "published runs that ran, but are said not to fit",
        f"{by_prediction} of {len(MEASURED_RUNS)} by the prediction; {by_search} with the {DEFAULT_MARGIN_FRAC:.0%} of "
        f"the device that searches leave free",
    )

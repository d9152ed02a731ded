"""Whether the machine changed while plans took turns on it: when, how long, and by how much on which lane.

A neighbour that takes a core, or a link that is throttled, slows some lanes of every plan from one round to the next.
Plans whose quiet bursts were before are then judged beside plans whose quiet bursts were after, and by a calibration of
either.  All plans have a turn in every round, so the machine's part can be told from a plan's own noise: it is what the
plans' lanes have in common.

[Note: States of a machine]
A change is a run of rounds within which lanes are slower, or faster, than in all others, by more than plans, and rounds
on either side, lie apart.  The machine was then in two states.  Nobody knows which of them the next run meets,
so intervals hold for both: half of the draws are of one state and half of the other, and 90 % of the measurements in
each lie within the central 90 % of both together (``sim/engine/intervals.py``).  A factor with a range as wide would
not do: who sits at the end of a range is outside every second time.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...shared.compile.compile import compile_schedule
from ...shared.schema.calibration import Calibration
from ...shared.schema.record import Record
from ...shared.schema.schedule import Lane
from ...shared.schema.workload import Workload
from ...shared.tables.labels import LANE_NAMES
from ...sim.engine.error_sources import transfer_of
from ..fitting.fit import pairs_of
from ..fitting.since_ready import seconds_since_ready
from .fidelity import MachineChange
from .quiet import paces_of, quiet_places, seconds_of

FloatArray = NDArray[np.float64]
LaneSeconds = Mapping[Lane, float]

LEAST_FRAC: Final = 0.05
"""A change by less is noise, whatever its statistics say."""
_LEAST_STDS: Final = 4.0
"""Standard deviations of a change: the largest of the 190 runs of 20 rounds is 3 by chance."""
_LEAST_SHARE: Final = 0.01
"""Of an iteration that a lane must be busy with in a plan: less says more about clocks."""
_LEAST_STD: Final = 0.01
"""Of a round's pace."""
_MAD: Final = 1.4826
"""Standard deviations in a median absolute deviation, of the normal distribution."""
_MEDIAN: Final = 1.2533
"""Standard errors of a median in that of a mean."""


class Rounds:
    """What the lanes of every plan took, round by round."""

    def __init__(self, workload: Workload, bursts: Mapping[str, Sequence[Record]], num_rounds: int) -> None:
        """``bursts``: of every plan one of each of the ``num_rounds`` rounds, the latest last.

        One before them is of round 0, and earlier ones do not count.
        """
        self.num_rounds = num_rounds + 1
        self._bursts = {name: list(found[-self.num_rounds :]) for name, found in bursts.items()}
        self._seconds = {name: list(_lane_seconds(workload, found)) for name, found in self._bursts.items()}

    def _logs(self, lane: Lane) -> FloatArray:
        """(P, R) logarithms of the lane's seconds in plans that have some; NaN where a plan had no turn."""
        rows = []
        for name, found in self._seconds.items():
            seconds = [one.get(lane, 0.0) for one in found]
            usual_s = statistics.median(map(seconds_of, self._bursts[name]))
            if min(seconds) > _LEAST_SHARE * usual_s:
                rows.append([math.nan] * (self.num_rounds - len(seconds)) + [math.log(one) for one in seconds])
        return np.array(rows).reshape(len(rows), self.num_rounds)

    @cached_property
    def _lanes(self) -> dict[Lane, FloatArray]:
        found = {lane: self._logs(lane) for lane in Lane}
        return {lane: logs for lane, logs in found.items() if len(logs)}

    @cached_property
    def change(self) -> MachineChange | None:
        """The rounds that differ most from the others; None if no lane differs by more than noise."""
        paces = {lane: _median(logs - _median(logs, axis=1)[:, None], axis=0) for lane, logs in self._lanes.items()}
        known = [number for number in range(self.num_rounds) if any(not math.isnan(p[number]) for p in paces.values())]
        runs = list(_runs(known))
        if not runs:
            return None
        first, until = max(runs, key=lambda run: sum(_explained(pace, *run) for pace in paces.values()))
        lanes = {lane: _change_of(logs, paces[lane], first, until) for lane, logs in self._lanes.items()}
        changed = {lane: math.exp(log) for lane, log in lanes.items() if log}
        return MachineChange(first_round=first, last_round=until - 1, lanes=changed) if changed else None

    def quiet_share(self, names: Iterable[str]) -> float:
        """Of the quiet bursts of these plans, the share within ``change``."""
        within = []
        for name in names:
            before = self.num_rounds - len(self._bursts[name])
            places = quiet_places([seconds_of(burst) for burst in self._bursts[name]])
            within += [self.change is not None and before + place in self.change for place in places]
        return statistics.fmean(within)

    @cached_property
    def drift_frac(self) -> float:
        """How far the pace of all plans together lies apart between rounds while the machine is in one state."""
        common = {name: [seconds_of(burst) for burst in found] for name, found in self._bursts.items()}
        num_common = min(map(len, common.values()))
        return self._scatter(paces_of({name: found[-num_common:] for name, found in common.items()}))

    def noise_frac(self, names: Collection[str]) -> float:
        """Noise of an iteration of a usual plan among ``names`` while the machine is in one state."""
        bursts = [found for name, found in self._bursts.items() if name in names]
        within = [statistics.median(burst.iteration_noise_frac for burst in found) for found in bursts]
        between = [self._scatter(map(seconds_of, found)) for found in bursts]
        return statistics.median(map(max, within, between))

    def steady_seconds(self, name: str) -> list[float]:
        """Seconds of an iteration of a plan, round by round, had the machine stayed as it was outside ``change``."""
        found = [seconds_of(burst) for burst in self._bursts[name]]
        before = self.num_rounds - len(found)
        own = [self.change is not None and before + place in self.change for place in range(len(found))]
        within, others = (
            [one for one, is_own in zip(found, own, strict=True) if is_own is part] for part in (True, False)
        )
        ratio = statistics.median(within) / statistics.median(others) if within and others else 1.0
        return [one / ratio if is_own else one for one, is_own in zip(found, own, strict=True)]

    def _scatter(self, values: Iterable[float]) -> float:
        """Median deviation from the median of the same state, over it; ``values``: of the latest rounds."""
        found = list(values)
        before = self.num_rounds - len(found)
        states: dict[bool, list[float]] = {}
        for place, value in enumerate(found):
            states.setdefault(self.change is not None and before + place in self.change, []).append(value)
        middles = {state: statistics.median(of_state) for state, of_state in states.items()}
        return statistics.median(
            abs(value / middles[state] - 1) for state, of_state in states.items() for value in of_state
        )


def as_it_changed(calibration: Calibration, rounds: Rounds, fitted: Collection[str] | None) -> Calibration:
    """``calibration`` of a machine that did what these rounds say, so that its intervals allow for it.

    ``fitted``: plans that it was fitted to; None: it is of another day, when the machine is taken to have been in the
    quieter state.
    """
    change = rounds.change
    # Of records that were taken in both states, the noise is that of the change.
    own_frac = calibration.iteration_noise_frac if fitted is None or change is None else rounds.noise_frac(fitted)
    noise_frac = max(rounds.drift_frac, own_frac)
    if change is None:
        return calibration.model_copy(update={"iteration_noise_frac": noise_frac})
    share = None if fitted is None else rounds.quiet_share(fitted)
    states: tuple[dict[Lane, float], dict[Lane, float]] = ({}, {})
    for lane, factor in change.lanes.items():
        known = min(1.0, factor) if share is None else 1 - share + share * factor
        states[0][lane], states[1][lane] = 1 / known, factor / known
    return calibration.model_copy(update={"states": states, "iteration_noise_frac": noise_frac})


def change_words(change: MachineChange, num_rounds: int) -> str:
    """For the report: when the machine changed, and by how much on which lane."""
    since = f"from round {change.first_round} on"
    if change.last_round < num_rounds:
        since = f"from round {change.first_round} to {change.last_round}"
    told = ", ".join(f"{LANE_NAMES[lane]} {factor:.2f}" for lane, factor in sorted(change.lanes.items()))
    return (
        f"The machine changed: {since} of {num_rounds}, tasks took so many times as long as in the other rounds: "
        f"{told}. Intervals hold for both."
    )


def transfer_notes(calibration: Calibration, model_name: str) -> list[str]:
    """What a report says where the judged calibration was fitted to other models alone."""
    if model_name in calibration.fitted_to:
        return []
    std, found_from = transfer_of(model_name, calibration)
    known = "taken for granted" if found_from is None else f"found from {found_from} models left out"
    others = ", ".join(calibration.fitted_to) or "none that it names"
    return [
        f"The calibration was fitted to other models: {others}. Intervals allow for an error of {std:.1%} that all "
        f"plans share ({known})."
    ]


def _lane_seconds(workload: Workload, bursts: Sequence[Record]) -> Iterator[LaneSeconds]:
    """Seconds of the tasks of every lane in each burst of a plan, the mean over ranks."""
    schedule = compile_schedule(bursts[0].plan, workload)
    for burst in bursts:
        pairs = pairs_of(workload, burst)
        found: dict[Lane, float] = {}
        for pair in pairs:
            for task, seconds in seconds_since_ready(pair.measured, schedule).items():
                lane = schedule.tasks[task].lane
                found[lane] = found.get(lane, 0.0) + seconds / len(pairs)
        yield found


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Every run of rounds that leaves some out, one of each two that are each other's rest."""
    ends = [*numbers, numbers[-1] + 1]
    for place, first in enumerate(ends[:-1]):
        for until in ends[place + 1 :]:
            if place:
                yield first, until


def _explained(pace: FloatArray, first: int, until: int) -> float:
    """How much of the scatter of the rounds goes away when these have a level of their own, in variances of noise."""
    own, rest = _parts(pace, first, until)
    if not len(own) or not len(rest):
        return 0.0
    change = float(np.mean(own) - np.mean(rest))
    return change**2 * len(own) * len(rest) / (len(own) + len(rest))


def _change_of(logs: FloatArray, pace: FloatArray, first: int, until: int) -> float:
    """Logarithm of what the rounds' tasks took over those of the rest; 0 if it is within noise."""
    own, rest = _parts(pace, first, until)
    if not len(own) or not len(rest):
        return 0.0
    within = _median(logs[:, first:until], axis=1)
    others = _median(np.delete(logs, np.s_[first:until], axis=1), axis=1)
    by_plan = (within - others)[~np.isnan(within - others)]
    if not len(by_plan):
        return 0.0
    change = float(np.median(by_plan))
    of_plans = _MEDIAN * _MAD * float(np.median(np.abs(by_plan - change))) / math.sqrt(len(by_plan))
    apart = np.concatenate([np.abs(part - np.median(part)) for part in (own, rest)])
    of_rounds = max(_LEAST_STD, _MAD * float(np.median(apart))) * math.sqrt(1 / len(own) + 1 / len(rest))
    least = max(math.log1p(LEAST_FRAC), _LEAST_STDS * math.hypot(of_plans, of_rounds))
    return change if abs(change) >= least else 0.0


def _parts(pace: FloatArray, first: int, until: int) -> tuple[FloatArray, FloatArray]:
    """The rounds from ``first`` to ``until``, and the others, as far as they are known."""
    own, rest = pace[first:until], np.concatenate([pace[:first], pace[until:]])
    return own[~np.isnan(own)], rest[~np.isnan(rest)]


def _median(values: FloatArray, *, axis: int) -> FloatArray:
    """Of what is known; NaN where nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found: FloatArray = np.nanmedian(values, axis=axis)
    return found

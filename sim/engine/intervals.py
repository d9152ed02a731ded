"""The interval of a predicted time, and of a predicted peak: what the sources of error make of them.

[Note: Drawn durations]
Every source of error ([Note: Sources of error] in ``sim/engine/error_sources.py``) is drawn ``NUM_DRAWS`` times, one
value from each of as many equally likely parts of its distribution (a Latin hypercube: McKay, Beckman, Conover,
doi 10.2307/1268522), and the schedule is replayed under each draw.  Values depend on the source's name alone: two plans
meet the same machines, draw by draw, so that what they share cancels in the ratio of their times.  The errors that
belong to no task multiply every draw by every value of their own distribution; the interval is from the 5 % to the 95 %
quantile of all products.  It contains the point prediction whatever the draws say: ranges that lie to one side of it
(data sheets are hardly ever outdone) would leave it out.

[Note: Peaks and timing]
What lies on the device at one moment depends on how far copies have come.  The same draws, with the time of every
single task scattered besides, are replayed with their memory.  No draw is above the guaranteed peak, which holds for
every timing.  Where no timing changes the peak, what remains are scalars of a training loop that no trace has.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...shared.basics.interval import Interval
from ...shared.schema.record import Record
from ...shared.schema.schedule import Lane, Memory, Schedule, TaskKind
from ..costs.contention import ContentionModel
from .device_memory import DeviceMemory
from .drawn_timings import DrawnTimings
from .error_sources import ErrorModel, Source
from .timing import Timing

FloatArray = NDArray[np.float64]

_Spread = tuple[float, int | None]
"""A standard deviation, and the number of errors that it was found from; None: it is taken for known."""
NUM_DRAWS: Final = 64
NUM_PEAKS: Final = 32
"""Draws that are replayed with their memory."""
LOWEST, HIGHEST = 0.05, 0.95
"""The ends of an interval, as quantiles."""
JITTER_STD: Final = 0.10
"""Of the logarithm of single tasks' times, at least: timed tasks of one kind and size scatter by a tenth on a quiet
machine, more on a shared one."""
SCALARS_FRAC: Final = 1e-4
"""Of a peak: so near are nine in ten of the peaks that the bench of fidelity has kept, of models that were traced where
they ran (losses, counts and step numbers of the training loop)."""
_NUM_ERRORS: Final = 199
"""Values that stand for the errors that belong to no task."""
_NUM_SAMPLES: Final = 4000
_CONTENTION: Final = Source.of_std("contention measured", 0.15)
_UNMEASURED_CONTENTION: Final = Source("contention unmeasured", 0.5, 2.0)
"""Of the excess over 1 of slowdowns: fair shares of what lanes draw on, against measured pairs of lanes."""


@dataclass(frozen=True, eq=False)
class PlanDraws:
    """One plan's time under every draw."""

    iteration_s: float
    """As predicted."""
    logs: FloatArray
    """``time_logs`` of it."""
    errors: ErrorModel


def drawn_record(
    record: Record,
    durations_s: Sequence[float],
    contention: ContentionModel,
    schedule: Schedule,
    timing: Timing,
    errors: ErrorModel,
    *,
    limit_bytes: int,
) -> tuple[Record, PlanDraws]:
    """``record`` with the intervals of its time and of its peak, and the chance that the peak is above a limit.

    ``durations_s``: of the tasks of ``schedule``, which ``timing`` is of.  ``limit_bytes``: of device memory.
    """
    drawn = DrawnTimings(schedule, durations_s, contention, timing)
    peaks = drawn_peaks(
        drawn,
        schedule if timing.fold is None else timing.fold.kept.with_all_left_over(),
        errors,
        peak_bytes=record.peak_device_bytes,
        guaranteed_bytes=record.guaranteed_peak_device_bytes,
    )
    draws = PlanDraws(record.iteration_s, time_logs(drawn, DrawnMachine(errors)), errors)
    known = {
        "iteration_interval_s": interval_of(record.iteration_s, draws.logs, errors),
        "peak_interval_bytes": peaks.interval,
        "chance_oom": peaks.chance_above(limit_bytes),
    }
    return record.model_copy(update=known), draws


@dataclass(frozen=True, eq=False)
class DrawnMachine:
    """The true machine over the predicted one, ``NUM_DRAWS`` times."""

    errors: ErrorModel
    owner: str = ""
    """Whose machine it is, where there are several: each has draws of its own."""

    def factors(self, kinds: Iterable[TaskKind]) -> dict[TaskKind, FloatArray]:
        """(NUM_DRAWS,) true over predicted seconds of each kind, but for the two that follow."""
        return {kind: self._of(kind, self.errors.sources_of(kind)) for kind in kinds}

    def overheads(self, kinds: Iterable[TaskKind]) -> dict[TaskKind, FloatArray]:
        """(NUM_DRAWS,) true over predicted seconds of what every task of each kind costs alike."""
        return {kind: self._of(kind, self.errors.overhead_sources_of(kind)) for kind in kinds}

    def _of(self, kind: TaskKind, sources: Iterable[Source]) -> FloatArray:
        found: FloatArray = self._state_of(kind.lane) * np.exp(sum(_log_draws(one, self.owner) for one in sources))
        return found

    def arrivals(self, kinds: Iterable[TaskKind]) -> dict[TaskKind, FloatArray]:
        """(NUM_DRAWS,) true over predicted seconds of what bytes that have just come cost tasks of each kind."""
        sources = {kind: self.errors.arrival_source_of(kind) for kind in kinds}
        return {
            kind: self._state_of(kind.lane) * (1.0 if one is None else np.exp(_log_draws(one, self.owner)))
            for kind, one in sources.items()
        }

    def _state_of(self, lane: Lane) -> FloatArray:
        """(NUM_DRAWS,) true over predicted seconds of the lane's tasks; every state has as many draws."""
        known = self.errors.calibration
        if known is None or not known.states:
            return np.ones(NUM_DRAWS)
        of_states = np.array([state.get(lane, 1.0) for state in known.states])
        found: FloatArray = of_states[_draw_order(f"{self.owner}state of the machine") * len(of_states) // NUM_DRAWS]
        return found

    @property
    def contention(self) -> FloatArray:
        """(NUM_DRAWS,) of the excess over 1 of every slowdown."""
        known = self.errors.calibration
        source = _CONTENTION if known is not None and known.contention else _UNMEASURED_CONTENTION
        return np.exp(_log_draws(source, self.owner))


@lru_cache(maxsize=256)
def _log_draws(source: Source, owner: str) -> FloatArray:
    """(NUM_DRAWS,) logarithms, one from every equally likely part; the order goes by the name."""
    normal = NormalDist()
    parts = np.array([normal.inv_cdf((number + 0.5) / NUM_DRAWS) for number in range(NUM_DRAWS)])
    # Middles of parts scatter a little less than the distribution.
    parts /= parts.std()
    found: FloatArray = source.log_mean + source.log_std * parts[_draw_order(owner + source.name)]
    return found


def _draw_order(name: str) -> NDArray[np.intp]:
    """(NUM_DRAWS,) which of the equally likely parts of the source of this name every draw has."""
    return np.random.default_rng(zlib.crc32(name.encode())).permutation(NUM_DRAWS)


def log_errors(errors: ErrorModel, *, num_plans: int = 1, is_shared: bool = True) -> FloatArray:
    """(_NUM_ERRORS,) equally likely values of what belongs to no task, as logarithms.

    ``num_plans``: errors of so many plans, each by itself, laid one over the other.  ``is_shared``: with what all plans
    for one workload have in common.
    """
    plan = errors.plan_std, errors.plan_freedom
    transfer = (errors.transfer_std, errors.transfer_freedom) if is_shared else (0.0, None)
    return _log_errors(plan, transfer, errors.run_std, num_plans)


@lru_cache(maxsize=64)
def _log_errors(plan: _Spread, transfer: _Spread, run_std: float, num_plans: int) -> FloatArray:
    random = np.random.default_rng(0)
    total = _drawn(transfer, random)
    for _ in range(num_plans):
        total += _drawn(plan, random) + run_std * random.standard_normal(_NUM_SAMPLES)
    found: FloatArray = _quantiles(total, (np.arange(_NUM_ERRORS) + 0.5) / _NUM_ERRORS)
    # What is left out of the mean by chance must not move the interval.
    return (found - found[::-1]) / 2


def _drawn(spread: _Spread, random: np.random.Generator) -> FloatArray:
    std, freedom = spread
    values = random.standard_normal(_NUM_SAMPLES) if freedom is None else random.standard_t(freedom, _NUM_SAMPLES)
    return std * values


def _quantiles(values: FloatArray, shares: FloatArray) -> FloatArray:
    """As numpy's quantiles, between which it interpolates; those import masked arrays, which take a while."""
    ordered = np.sort(values, axis=None)
    found: FloatArray = np.interp(shares * (ordered.size - 1), np.arange(ordered.size), ordered)
    return found


def central(logs: FloatArray, errors: FloatArray) -> tuple[float, float]:
    """The ends of the central 90 % of exp(draw + error), over all pairs."""
    low, high = _quantiles(np.add.outer(logs, errors), np.array([LOWEST, HIGHEST]))
    return float(np.exp(low)), float(np.exp(high))


def time_logs(drawn: DrawnTimings, machine: DrawnMachine) -> FloatArray:
    """(NUM_DRAWS,) logarithms of the iteration time over the predicted one."""
    return np.log([ratio for _, ratio in _replays(drawn, machine)])


def _replays(drawn: DrawnTimings, machine: DrawnMachine) -> Iterable[tuple[FloatArray, float]]:
    factors = _task_factors(drawn, machine)
    for of_tasks, excess in zip(factors, machine.contention.tolist(), strict=True):
        yield drawn.drawn(of_tasks, excess)


def _task_factors(drawn: DrawnTimings, machine: DrawnMachine) -> FloatArray:
    """(NUM_DRAWS, N) true over predicted seconds of every task."""
    tasks = drawn.schedule.tasks
    kinds = sorted({task.kind for task in tasks})
    place_of = {kind: place for place, kind in enumerate(kinds)}
    places = [place_of[task.kind] for task in tasks]
    work, overheads, arrivals = (
        np.stack([of[kind] for kind in kinds], axis=1)[:, places]
        for of in (machine.factors(kinds), machine.overheads(kinds), machine.arrivals(kinds))
    )
    known = machine.errors.calibration
    rates = np.array([0.0 if known is None else known.arrival(kind) for kind in kinds])[places]
    alike_s = np.array([0.0 if known is None else known.overhead(kind) for kind in kinds])[places]
    came_s = rates * np.array([task.arrived_bytes for task in tasks])
    of_arrivals, of_overhead = (
        np.divide(part_s, drawn.durations_s, out=np.zeros(len(tasks)), where=drawn.durations_s > 0)
        for part_s in (came_s, np.minimum(alike_s, drawn.durations_s - came_s))
    )
    found: FloatArray = work + of_arrivals * (arrivals - work) + of_overhead * (overheads - work)
    return found


def around(value: float, low: float, high: float) -> Interval:
    """From ``low`` to ``high`` times ``value``, with the value inside."""
    return Interval(low=value * min(low, 1.0), high=value * max(high, 1.0))


def interval_of(iteration_s: float, logs: FloatArray, errors: ErrorModel) -> Interval | None:
    """Where the iteration time is expected that a run of the plan will measure; ``iteration_s``: the prediction.

    ``logs``: ``time_logs``.  None where most draws have no period.
    """
    known = logs[~np.isnan(logs)]
    if 2 * len(known) <= len(logs):
        return None
    return around(iteration_s, *central(known, log_errors(errors)))


@dataclass(frozen=True, eq=False)
class DrawnPeaks:
    """The peak of device memory, draw by draw."""

    peak_bytes: int
    """As predicted."""
    drawn_bytes: tuple[int, ...]
    """Of every draw; the predicted one alone where no timing changes it."""
    model: tuple[float, float]
    """Measured over predicted, apart from timing: ``ErrorModel.memory``."""
    least_bytes: int
    """What is on the device for good."""
    guaranteed_bytes: int
    """Above it is no peak by timing."""

    @property
    def interval(self) -> Interval:
        """Where the measured peak is expected, in bytes."""
        ordered = sorted(self.drawn_bytes)
        below, above = (ordered[math.ceil(share * len(ordered)) - 1] for share in (LOWEST, HIGHEST))
        low = max(min(below, self.peak_bytes) * (1 - SCALARS_FRAC), min(self.least_bytes, self.peak_bytes))
        high = min(max(above, self.peak_bytes) * (1 + SCALARS_FRAC), max(self.guaranteed_bytes, self.peak_bytes))
        return Interval(low=low * self.model[0], high=high * self.model[1])

    def chance_above(self, limit_bytes: int) -> float:
        """The chance that the peak is above ``limit_bytes``, between 0 and 1."""
        source = Source("memory", *self.model)
        if source.log_std == 0:
            return sum(size > limit_bytes for size in self.drawn_bytes) / len(self.drawn_bytes)
        normal = NormalDist(source.log_mean, source.log_std)
        return sum(1 - normal.cdf(np.log(limit_bytes / size)) for size in self.drawn_bytes) / len(self.drawn_bytes)


def drawn_peaks(
    drawn: DrawnTimings,
    schedule: Schedule,
    errors: ErrorModel,
    *,
    peak_bytes: int,
    guaranteed_bytes: int,
) -> DrawnPeaks:
    """The peaks under drawn durations, by [Note: Peaks and timing].

    ``schedule``: whose buffers count, that of ``drawn`` with what left-out micro-batches leave over.
    """
    others = [lane for lane in schedule.lanes if lane is not Lane.COMPUTE and schedule.lanes[lane]]
    least_bytes = schedule.static_bytes(Memory.DEVICE)
    if not others or peak_bytes <= least_bytes:
        return DrawnPeaks(peak_bytes, (peak_bytes,), errors.memory, least_bytes, guaranteed_bytes)
    machine = DrawnMachine(errors)
    factors = _task_factors(drawn, machine)[: NUM_DRAWS : NUM_DRAWS // NUM_PEAKS]
    contention = machine.contention[: NUM_DRAWS : NUM_DRAWS // NUM_PEAKS]
    jitter = np.random.default_rng(0).standard_normal(factors.shape) * max(JITTER_STD, errors.run_std)
    memory = DeviceMemory(schedule, drawn.timing)
    found = []
    for of_tasks, excess in zip(factors * np.exp(jitter), contention.tolist(), strict=True):
        ends_s, _ = drawn.drawn(of_tasks, excess)
        found.append(memory.at(drawn.timing_of(ends_s)).peak_bytes)
    held = tuple(min(max(size, least_bytes), guaranteed_bytes) for size in found)
    return DrawnPeaks(peak_bytes, held, errors.memory, least_bytes, guaranteed_bytes)


def ratio_interval(one: FloatArray, other: FloatArray, errors: ErrorModel, *, ratio: float) -> Interval | None:
    """Where the measured ratio of two plans' times is expected; ``ratio``: the predicted one.

    ``one``, ``other``: ``time_logs`` of the two.  What both share cancels, draw by draw.  One point for one plan beside
    itself, and None where most draws have no period.
    """
    if np.array_equal(one, other) and ratio == 1:
        return Interval(low=1.0, high=1.0)
    logs = one - other
    known = logs[~np.isnan(logs)]
    if 2 * len(known) <= len(logs):
        return None
    return around(ratio, *central(known, log_errors(errors, num_plans=2, is_shared=False)))

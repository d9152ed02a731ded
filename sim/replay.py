"""The simulator's rules, carried out on many plans at once.

[Note: Replay]
A replay is no simulation to be believed but a bound to search with: it computes what ``simulate_timing`` would, for all
plans along one numpy axis, without building tasks.  Every lane of every plan runs its program in order; a step lets
each plan's time pass to its next end of a task, under the rates of the lanes that run.  Where the tasks have become
periodic after as many iterations as the simulator runs at least, the period is the simulator's up to rounding, and
``REPLAY_FRAC`` of it a lower bound.  Where they have not, there is no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..shared.schedule import Lane
from .compute_table import ComputeTable, FloatArray
from .contention import ContentionModel
from .lane_programs import CopyPrograms, LaneProgram, copy_programs
from .residency import Residency
from .simulator import MIN_ITERATIONS
from .space import BoolArray, IntArray

REPLAY_FRAC: Final = 1 - 1e-5
"""Covers the tolerance of "periodic" and the rounding of sums in another order."""

_STEADY_FRAC: Final = 1e-6
"""How far, as a share of the period, tasks may be from periodic; as in ``sim/timing.py``."""
_LANES: Final = tuple(Lane)
_COMPUTE, _H2D, _D2H, _CPU_OPTIM = (_LANES.index(lane) for lane in (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.CPU_OPTIM))
_WAITS_FOR: Final = np.array([[_H2D, _D2H], [_COMPUTE, _CPU_OPTIM], [_COMPUTE, _COMPUTE], [_D2H, _D2H]], dtype=np.int64)
"""The two lanes that tasks of each lane may wait for."""
_WAITS_FOR_A: Final = _WAITS_FOR[:, 0].copy()
_WAITS_FOR_B: Final = _WAITS_FOR[:, 1].copy()
_LANE_BITS: Final = (1 << np.arange(len(_LANES))).astype(np.uint8)
_UNROLLED: Final = MIN_ITERATIONS + 1
"""Iterations of every program: while the last lane completes the last of them, others have begun the next."""
_NEVER: Final = np.full((1, 2), 2**40)
"""A wait that is never over."""
_SIMULTANEOUS: Final = 1 + 1e-12
_FOREVER_S: Final = 1e300
_STEPS_BETWEEN_LOOKS: Final = 32
_WORTH_DROPPING: Final = 0.75
"""Plans that are done leave the arrays once fewer than this share is left."""


@dataclass(frozen=True)
class ReplayPlan:
    """One plan to replay."""

    residency: Residency
    depth: int
    """Index into the replayer's prefetch depths."""
    checkpoint: int
    """Row of the compute table."""


@dataclass(frozen=True)
class _Programs:
    """The lanes of J plans over several iterations, as stretches of two flat arrays that many lanes may share."""

    durations_s: FloatArray
    """(N,)"""
    waits: tuple[IntArray, IntArray]
    """(M,) each: how many tasks the lanes of ``_WAITS_FOR`` must have ended, since the beginning."""
    first_duration: IntArray
    """(J, 4) where each plan's lanes begin in ``durations_s``."""
    first_wait: IntArray
    """(J, 4) where they begin in ``waits``."""
    lengths: IntArray
    """(J, 4) tasks of one iteration."""


class Replayer:
    """Replays plans of one workload on one machine; what it has learnt of a residency it keeps."""

    def __init__(self, compute: ComputeTable, contention: ContentionModel, depths: IntArray) -> None:
        self._compute = compute
        self._depths = depths
        self._slowdowns = _slowdown_table(contention)
        self._known: dict[int, tuple[Residency, CopyPrograms]] = {}
        """By ``id``; the residency itself keeps its id from being reused."""

    def periods_s(self, plans: Sequence[ReplayPlan]) -> FloatArray:
        """(J,) the period of every plan, NaN where it is not periodic after ``MIN_ITERATIONS`` iterations."""
        if not plans:
            return np.zeros(0)
        builder = _Builder(self._compute)
        programs = builder.programs([builder.lanes(plan, self._copies(plan.residency)) for plan in plans])
        ends_s = _run(programs, self._slowdowns)
        lengths = programs.lengths
        begins = np.append(0, lengths.sum(axis=1).cumsum()[:-1])
        return _periods_s(ends_s, begins, begins + lengths[:, _COMPUTE] - 1)

    def _copies(self, residency: Residency) -> CopyPrograms:
        known = self._known.get(id(residency))
        if known is None:
            slowest_offload = float(self._slowdowns[:, _D2H].max())
            known = self._known[id(residency)] = (residency, copy_programs(residency, self._depths, slowest_offload))
        return known[1]


def _periods_s(ends_s: FloatArray, begins: IntArray, last: IntArray) -> FloatArray:
    """The rule of ``steady_period_s``: every task ends one and the same period after its counterpart.

    ``ends_s``: (iterations, tasks of all plans); ``begins`` and ``last``: (J,) where each plan's tasks begin, and its
    device Adam stands.
    """
    periods = np.full(len(begins), np.nan)
    lengths = np.diff(np.append(begins, ends_s.shape[1]))
    for cycle in range(MIN_ITERATIONS - 1, 0, -1):
        shift_s = ends_s[-1] - ends_s[-1 - cycle]
        reference_s = shift_s[last]
        deviation_s = np.maximum.reduceat(np.abs(shift_s - np.repeat(reference_s, lengths)), begins)
        period_s = reference_s / cycle
        periods = np.where(deviation_s <= _STEADY_FRAC * period_s, period_s, periods)
    return periods


# -- programs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lane:
    """Where a lane's program lies."""

    length: int
    first_duration: int
    first_wait: int


class _Builder:
    """Lays programs end to end; plans share the copies of a residency, and rows of the compute table."""

    def __init__(self, compute: ComputeTable) -> None:
        self._compute = compute
        self._durations: list[FloatArray] = []
        self._waits: list[IntArray] = []
        self._num_durations = self._num_waits = 0
        self._updates: dict[int, tuple[_Lane, _Lane]] = {}
        self._gathers: dict[tuple[int, int], tuple[int, _Lane]] = {}
        self._seconds: dict[tuple[int, float], int] = {}

    def lanes(self, plan: ReplayPlan, copies: CopyPrograms) -> tuple[_Lane, ...]:
        """The programs of a plan, in the order of ``Lane``."""
        key, length = id(plan.residency), copies.compute_waits.shape[1]
        if key not in self._updates:
            d2h_lane = self._lane(copies.d2h, (length, 0))
            self._updates[key] = d2h_lane, self._lane(copies.cpu_optim, (d2h_lane.length, 0))
        d2h_lane, cpu_lane = self._updates[key]
        if (key, plan.depth) not in self._gathers:
            h2d_lane = self._lane(copies.h2d[plan.depth], (length, cpu_lane.length))
            place = self._add_waits(copies.compute_waits[plan.depth], (h2d_lane.length, d2h_lane.length))
            self._gathers[key, plan.depth] = place, h2d_lane
        first_wait, h2d_lane = self._gathers[key, plan.depth]
        row = (plan.checkpoint, plan.residency.device_adam_s)
        if row not in self._seconds:
            self._seconds[row] = self._add_durations(np.append(self._compute.seconds[row[0], :-1], row[1]))
        return _Lane(length, self._seconds[row], first_wait), h2d_lane, d2h_lane, cpu_lane

    def programs(self, lanes: Sequence[tuple[_Lane, ...]]) -> _Programs:
        """The programs of the plans with these lanes."""
        waits = np.concatenate(self._waits)
        return _Programs(
            durations_s=np.concatenate([*self._durations, np.zeros(1)]),
            waits=(np.ascontiguousarray(waits[:, 0]), np.ascontiguousarray(waits[:, 1])),
            first_duration=np.array([[lane.first_duration for lane in of_plan] for of_plan in lanes]),
            first_wait=np.array([[lane.first_wait for lane in of_plan] for of_plan in lanes]),
            lengths=np.array([[lane.length for lane in of_plan] for of_plan in lanes]),
        )

    def _lane(self, program: LaneProgram, lengths: tuple[int, int]) -> _Lane:
        place = self._add_durations(program.durations_s)
        return _Lane(len(program.waits), place, self._add_waits(program.waits, lengths))

    def _add_durations(self, durations_s: FloatArray) -> int:
        place = self._num_durations
        self._durations += [durations_s] * _UNROLLED
        self._num_durations += len(durations_s) * _UNROLLED
        return place

    def _add_waits(self, waits: IntArray, lengths: tuple[int, int]) -> int:
        """Waits of every iteration, counted from the beginning; at the end one that is never over.

        ``lengths``: of the two lanes that are waited for.
        """
        place = self._num_waits
        per_iteration = np.array(lengths)
        for _ in range(_UNROLLED):
            self._waits.append(waits)
            waits = waits + per_iteration
        self._waits.append(_NEVER)
        self._num_waits += len(waits) * _UNROLLED + 1
        return place


# -- time ------------------------------------------------------------------------------------------------------------


class _Lanes:
    """All lanes of all plans, flat and lane by lane: entry ``l * J + j`` is lane l of plan j."""

    def __init__(self, programs: _Programs, first_end: IntArray) -> None:
        lengths = programs.lengths.T
        self.target = lengths.ravel() * MIN_ITERATIONS
        """Tasks to end."""
        self.first_wait = programs.first_wait.T.ravel()
        self.first_duration = programs.first_duration.T.ravel()
        self.first_end = first_end.T.ravel()
        """Where the lane's ends are noted."""
        self.ended = np.zeros_like(self.target)
        """Tasks that have ended since the beginning."""
        self.left_s = np.full(len(self.target), np.inf)
        """Progress that the lane's task still needs; infinite while the lane waits."""
        self.wait_a, self.wait_b = (column.take(self.first_wait) for column in programs.waits)
        """How many tasks the lanes of ``_WAITS_FOR`` must have ended before the lane's next one starts."""
        self.next_s = programs.durations_s.take(self.first_duration)
        """Seconds of the lane's next task."""
        self._number(lengths.shape[1])

    def _number(self, num_plans: int) -> None:
        self.plan = np.tile(np.arange(num_plans), len(_LANES))
        self.of_plan = (len(_LANES), num_plans)
        """The shape in which a column is a plan."""

    def keep(self, plans: BoolArray) -> None:
        """Drop the lanes of all other plans."""
        lanes = np.tile(plans, len(_LANES))
        for name in ("target", "first_wait", "first_duration", "first_end", "ended", "left_s"):
            setattr(self, name, getattr(self, name)[lanes])
        for name in ("wait_a", "wait_b", "next_s"):
            setattr(self, name, getattr(self, name)[lanes])
        self._number(int(np.count_nonzero(plans)))


def _run(programs: _Programs, slowdown_table: FloatArray) -> FloatArray:
    """Let every plan complete ``MIN_ITERATIONS`` iterations; the ends of all tasks, (iterations, tasks of all plans).

    A plan's tasks follow each other lane by lane.
    """
    # Idle lanes are what a step knows, so that the table is turned around.
    slowdowns = np.ascontiguousarray(slowdown_table[::-1].T)
    lengths = programs.lengths
    # Ends are noted lane by lane, all iterations of a lane in a row.
    places = lengths.ravel() * _UNROLLED
    first_end = (places.cumsum() - places).reshape(lengths.shape)
    ends_s = np.zeros(int(places.sum()))
    lanes = _Lanes(programs, first_end)
    now_s = np.zeros(len(lengths))
    while True:
        for _ in range(_STEPS_BETWEEN_LOOKS):
            _step(lanes, now_s, slowdowns, programs, ends_s)
        is_busy: BoolArray = np.asarray(np.any((lanes.ended < lanes.target).reshape(lanes.of_plan), axis=0))
        num_busy = np.count_nonzero(is_busy)
        if num_busy == 0:
            break
        if num_busy < _WORTH_DROPPING * len(is_busy):
            lanes.keep(is_busy)
            now_s = now_s[is_busy]
    # Sort the ends by iteration.
    counts = lengths.ravel()
    offsets = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
    at = np.repeat(first_end.ravel(), counts) + offsets
    return ends_s[at + np.repeat(counts, counts) * np.arange(MIN_ITERATIONS)[:, None]]


def _step(lanes: _Lanes, now_s: FloatArray, slowdowns: FloatArray, programs: _Programs, ends_s: FloatArray) -> None:
    """Start what may start, let each plan's time pass to its next end, and note the ends.

    Every index is within its array, so that ``take`` is told to clip, which spares it a check.
    """
    shape = lanes.of_plan
    is_idle = np.isinf(lanes.left_s).reshape(shape)
    ended = lanes.ended.reshape(shape)
    may = ended.take(_WAITS_FOR_A, axis=0, mode="clip") >= lanes.wait_a.reshape(shape)
    may &= ended.take(_WAITS_FOR_B, axis=0, mode="clip") >= lanes.wait_b.reshape(shape)
    may &= is_idle
    starting = may.ravel().nonzero()[0]
    lanes.left_s[starting] = lanes.next_s.take(starting, mode="clip")
    is_idle ^= may

    idle_lanes = (_LANE_BITS @ is_idle.view(np.uint8)).astype(np.intp)
    slowdown = slowdowns.take(idle_lanes, axis=1, mode="clip")
    remaining_s = lanes.left_s.reshape(shape) * slowdown
    # A plan that is through has nothing running; its clock means nothing any more.
    step_s = np.minimum.reduce(remaining_s, axis=0, initial=_FOREVER_S)
    now_s += step_s
    ending = (remaining_s <= step_s * _SIMULTANEOUS).ravel().nonzero()[0]
    remaining_s -= step_s
    remaining_s /= slowdown
    lanes.left_s = remaining_s.ravel()
    lanes.left_s[ending] = np.inf
    done = lanes.ended.take(ending, mode="clip")
    at = done + lanes.first_end.take(ending, mode="clip")
    ends_s[at] = now_s.take(lanes.plan.take(ending, mode="clip"), mode="clip")
    done += 1
    lanes.ended[ending] = done
    waits_a, waits_b = programs.waits
    wait = done + lanes.first_wait.take(ending, mode="clip")
    lanes.wait_a[ending] = waits_a.take(wait, mode="clip")
    lanes.wait_b[ending] = waits_b.take(wait, mode="clip")
    done += lanes.first_duration.take(ending, mode="clip")
    lanes.next_s[ending] = programs.durations_s.take(done, mode="clip")


def _slowdown_table(contention: ContentionModel) -> FloatArray:
    """(16, 4) the slowdown of every lane for every set of running lanes, as bits; 1 for lanes outside the set."""
    table = np.ones((1 << len(_LANES), len(_LANES)))
    for mask in range(len(table)):
        lanes = [lane for lane in range(len(_LANES)) if mask >> lane & 1]
        rates = contention.rates(frozenset(_LANES[lane] for lane in lanes))
        for lane in lanes:
            table[mask, lane] = 1 / rates[_LANES[lane]]
    return table

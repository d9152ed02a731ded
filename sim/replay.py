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
import numpy.typing as npt

from ..shared.schedule import Lane
from .compute_table import ComputeTable, FloatArray
from .contention import ContentionModel
from .lane_programs import UpdatePrograms, gather_programs, update_programs
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
_UNROLLED: Final = MIN_ITERATIONS + 1
"""Iterations of every program: while the last lane completes the last of them, others have begun the next."""
_NEVER: Final = 2**40
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
    prefetch_depth: int
    checkpoint: int
    """Row of the compute table."""


@dataclass(frozen=True)
class _Programs:
    """The lanes of J plans over several iterations, as stretches of two flat arrays that many lanes may share."""

    durations_s: FloatArray
    """(N,)"""
    waits: IntArray
    """(M, 2) how many tasks the lanes of ``_WAITS_FOR`` must have ended, since the beginning."""
    first_duration: IntArray
    """(J, 4) where each plan's lanes begin in ``durations_s``."""
    first_wait: IntArray
    """(J, 4) where they begin in ``waits``."""
    lengths: IntArray
    """(J, 4) tasks of one iteration."""


def replay_s(plans: Sequence[ReplayPlan], compute: ComputeTable, contention: ContentionModel) -> FloatArray:
    """(J,) the period of every plan, NaN where it is not periodic after ``MIN_ITERATIONS`` iterations."""
    if not plans:
        return np.zeros(0)
    slowdowns = _slowdown_table(contention)
    programs = _programs(plans, compute, slowest_offload=float(slowdowns[:, _D2H].max()))
    ends_s = _run(programs, slowdowns)
    lengths = programs.lengths
    begins = np.append(0, lengths.sum(axis=1).cumsum()[:-1])
    return _periods_s(ends_s, begins, begins + lengths[:, _COMPUTE] - 1)


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


class _Store:
    """Arrays laid end to end, each under a key and stored once."""

    def __init__(self) -> None:
        self.arrays: list[npt.NDArray[np.generic]] = []
        self.size = 0
        self._places: dict[object, int] = {}

    def add(self, values: npt.NDArray[np.generic]) -> int:
        """Where ``values`` begin, which are stored."""
        place = self.size
        self.arrays.append(values)
        self.size += len(values)
        return place

    def place(self, key: object, values: npt.NDArray[np.generic]) -> int:
        """Where the array of ``key`` begins; ``values`` are stored if it is new."""
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self.add(values)
        return place


def _programs(plans: Sequence[ReplayPlan], compute: ComputeTable, slowest_offload: float) -> _Programs:
    """The lanes' programs: many plans share the copies of a residency, or a row of the compute table."""
    durations, waits = _Store(), _Store()
    first_duration, first_wait, lengths = [], [], []
    updates: dict[int, UpdatePrograms] = {}
    lanes_of: dict[tuple[int, int], tuple[list[int], list[int], list[int]]] = {}
    for plan in plans:
        residency, depth = plan.residency, plan.prefetch_depth
        key = (id(residency), depth)
        if key not in lanes_of:
            update = updates.get(key[0])
            if update is None:
                update = updates[key[0]] = update_programs(residency, slowest_offload)
            compute_waits, gathers = gather_programs(residency, update, depth)
            copies = (gathers, update.d2h, update.cpu_optim)
            counts = [len(compute_waits), *(len(program.waits) for program in copies)]
            all_waits = (compute_waits, *(program.waits for program in copies))
            lanes_of[key] = (
                counts,
                [durations.add(np.tile(program.durations_s, _UNROLLED)) for program in copies],
                [waits.add(_unrolled(lane, counts, number)) for number, lane in enumerate(all_waits)],
            )
        counts, copy_durations, lane_waits = lanes_of[key]
        seconds_key = (plan.checkpoint, residency.device_adam_s)
        seconds = np.append(compute.seconds[plan.checkpoint, :-1], residency.device_adam_s)
        first_duration.append([durations.place(seconds_key, np.tile(seconds, _UNROLLED)), *copy_durations])
        first_wait.append(lane_waits)
        lengths.append(counts)
    return _Programs(
        durations_s=np.concatenate([*durations.arrays, np.zeros(1)], dtype=np.float64),
        waits=np.concatenate(waits.arrays, dtype=np.int64),
        first_duration=np.array(first_duration),
        first_wait=np.array(first_wait),
        lengths=np.array(lengths),
    )


def _unrolled(waits: IntArray, lengths: Sequence[int], lane: int) -> IntArray:
    """(iterations * T + 1, 2) the waits of a lane, counted from the beginning; at the end one that is never over."""
    per_iteration = np.array([lengths[source] for source in _WAITS_FOR[lane]])
    iterations = np.arange(_UNROLLED)[:, None, None]
    return np.concatenate([(waits + iterations * per_iteration).reshape(-1, 2), np.full((1, 2), _NEVER)])


# -- time ------------------------------------------------------------------------------------------------------------


class _Lanes:
    """All lanes of all plans, flat and lane by lane: entry ``l * J + j`` is lane l of plan j."""

    def __init__(self, programs: _Programs, first_end: IntArray) -> None:
        lengths = programs.lengths.T
        num_plans = lengths.shape[1]
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
        self._number(num_plans)

    def _number(self, num_plans: int) -> None:
        plans = np.arange(num_plans)
        self.plan = np.tile(plans, len(_LANES))
        self.source_a, self.source_b = ((_WAITS_FOR[:, [i]] * num_plans + plans).ravel() for i in (0, 1))
        """The two lanes that the lane's tasks wait for."""

    def keep(self, plans: BoolArray) -> None:
        """Drop the lanes of all other plans."""
        lanes = np.tile(plans, len(_LANES))
        for name in ("target", "first_wait", "first_duration", "first_end", "ended", "left_s"):
            setattr(self, name, getattr(self, name)[lanes])
        self._number(int(np.count_nonzero(plans)))


def _run(programs: _Programs, slowdown_table: FloatArray) -> FloatArray:
    """Let every plan complete ``MIN_ITERATIONS`` iterations; the ends of all tasks, (iterations, tasks of all plans).

    A plan's tasks follow each other lane by lane.
    """
    slowdowns = slowdown_table.T.copy()
    lengths = programs.lengths
    # Ends are noted lane by lane, all iterations of a lane in a row.
    places = lengths.ravel() * _UNROLLED
    first_end = (places.cumsum() - places).reshape(lengths.shape)
    ends_s = np.zeros(int(places.sum()))
    waits_a, waits_b = np.ascontiguousarray(programs.waits[:, 0]), np.ascontiguousarray(programs.waits[:, 1])
    lanes = _Lanes(programs, first_end)
    now_s = np.zeros(len(lengths))
    while True:
        for _ in range(_STEPS_BETWEEN_LOOKS):
            _step(lanes, now_s, slowdowns, waits_a, waits_b, programs.durations_s, ends_s)
        is_busy: BoolArray = np.asarray(np.any((lanes.ended < lanes.target).reshape(len(_LANES), -1), axis=0))
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


def _step(
    lanes: _Lanes,
    now_s: FloatArray,
    slowdowns: FloatArray,
    waits_a: IntArray,
    waits_b: IntArray,
    durations_s: FloatArray,
    ends_s: FloatArray,
) -> None:
    """Start what may start, let each plan's time pass to its next end, and note the ends."""
    idle = np.isinf(lanes.left_s).nonzero()[0]
    done = lanes.ended.take(idle)
    task = done + lanes.first_wait.take(idle)
    may = lanes.ended.take(lanes.source_a.take(idle)) >= waits_a.take(task)
    may &= lanes.ended.take(lanes.source_b.take(idle)) >= waits_b.take(task)
    starting = idle[may]
    lanes.left_s[starting] = durations_s.take(done[may] + lanes.first_duration.take(starting))

    left_s = lanes.left_s.reshape(len(_LANES), -1)
    slowdown = slowdowns.take(np.packbits(left_s < np.inf, axis=0, bitorder="little")[0], axis=1)
    remaining_s = left_s * slowdown
    # A plan that is through has nothing running; its clock means nothing any more.
    step_s = np.minimum(remaining_s.min(axis=0), _FOREVER_S)
    now_s += step_s
    ending = (remaining_s <= step_s * _SIMULTANEOUS).ravel().nonzero()[0]
    remaining_s -= step_s
    remaining_s /= slowdown
    lanes.left_s = remaining_s.ravel()
    lanes.left_s[ending] = np.inf
    ends_s[lanes.ended.take(ending) + lanes.first_end.take(ending)] = now_s.take(lanes.plan.take(ending))
    lanes.ended[ending] += 1


def _slowdown_table(contention: ContentionModel) -> FloatArray:
    """(16, 4) the slowdown of every lane for every set of running lanes, as bits; 1 for lanes outside the set."""
    table = np.ones((1 << len(_LANES), len(_LANES)))
    for mask in range(len(table)):
        lanes = [lane for lane in range(len(_LANES)) if mask >> lane & 1]
        rates = contention.rates(frozenset(_LANES[lane] for lane in lanes))
        for lane in lanes:
            table[mask, lane] = 1 / rates[_LANES[lane]]
    return table

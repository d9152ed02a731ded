"""The simulator's rules, carried out on many plans at once.

[Note: Replay]
A replay is no simulation to be believed but a bound to search with: it computes what ``simulate_timing`` would, for all
plans along one numpy axis, without building tasks.  Every lane of every plan runs its program in order; a step lets
each plan's time pass to its next end of a task, under the rates of the lanes that run.  Where the tasks have become
periodic after as many iterations as the simulator runs at least, the period is the simulator's up to rounding, and
``REPLAY_FRAC`` of it a lower bound.  Where they have not, there is no answer.

Of many micro-batches few are replayed ([Note: Folded iterations] in ``sim/engine/folding.py``); where the micro-batches
themselves are not periodic then, there is no answer either.

Where the compiled replay is there, it runs the plans one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from ..costs.contention import ContentionModel
from ..engine.folding import Repeating, find_folds, settled_period_s
from ..engine.intervals import NUM_DRAWS, DrawnMachine
from ..engine.simulator import MIN_ITERATIONS
from ..kernels import lanes as kernels
from ..space.plan_family import COMPUTE, PlanFamily
from ..space.prices import FloatArray
from ..space.space import BoolArray, IntArray
from .lane_programs import WAITS_FOR, LaneProgram, copy_programs, repeating_programs
from .rounding import rounded_s

REPLAY_FRAC: Final = 1 - 1e-5
"""Covers the tolerance of "periodic" and the rounding of sums in another order."""

_STEADY_FRAC: Final = 1e-6
"""How far, as a share of the period, tasks may be from periodic; as in ``sim/engine/timing.py``."""
_UNROLLED: Final = MIN_ITERATIONS + 1
"""Iterations of every program: while the last lane completes the last of them, others have begun the next."""
_NEVER: Final = 2**40
"""A wait that is never over."""
_SIMULTANEOUS: Final = 1 + 1e-12
_FOREVER_S: Final = 1e300
_STEPS_BETWEEN_LOOKS: Final = 32
_MOST_KNOWN: Final = 1024
"""Copies of one micro-batch that are kept from one batch of plans to the next; of several, as many fewer."""
_WORTH_DROPPING: Final = 0.75
"""Plans that are done leave the arrays once fewer than this share is left."""


@dataclass(frozen=True)
class ReplayPlan:
    """One plan to replay."""

    family: PlanFamily
    depth: int
    """The number of the prefetch depth."""
    mode: int
    """Row of the compute table."""
    num_left_out: int = 0
    """Micro-batches that the plan has beyond those of its lanes."""

    @property
    def in_mode(self) -> ReplayPlan:
        """The plan of a family whose lanes beside compute take what they take in its mode."""
        family = self.family.in_mode(self.mode)
        return self if family is self.family else replace(self, family=family)


@dataclass(frozen=True, eq=False)
class _Copies:
    """What is kept of the lanes of many plans."""

    family: PlanFamily
    """Keeps its ``id`` from being reused."""
    programs: tuple[LaneProgram, ...]
    repeating: Repeating | None
    """None where no micro-batch repeats the one before."""


@dataclass(frozen=True)
class _Programs:
    """The lanes of J plans over several iterations, as stretches of two flat arrays that many lanes may share."""

    durations_s: FloatArray
    """(N,) seconds of tasks alone on their lanes."""
    waits: tuple[IntArray, ...]
    """(M,) each: how many tasks the lanes of ``WAITS_FOR`` must have ended, since the beginning."""
    first_duration: IntArray
    """(J, L) where each plan's lanes begin in ``durations_s``; L lanes."""
    first_wait: IntArray
    """(J, L) where they begin in ``waits``."""
    lengths: IntArray
    """(J, L) tasks of one iteration."""


class Replayer:
    """Replays plans of one workload on one machine; what it has learnt of their copies it keeps."""

    def __init__(self, contention: ContentionModel) -> None:
        self._slowdowns = contention.table()
        self._known: dict[tuple[int, int], _Copies] = {}
        """By ``id`` and depth."""
        self._replayable: dict[tuple[int, int], tuple[PlanFamily, kernels.Replayable]] = {}
        """By the same; the families keep their ``id`` from being reused."""
        self._repeating: dict[int, Repeating | None] = {}
        """By ``id`` of these families, if micro-batches of them are left out."""

    def periods_s(self, plans: Sequence[ReplayPlan]) -> FloatArray:
        """(J,) the period of every plan, NaN where it is not periodic after ``MIN_ITERATIONS`` iterations."""
        plans = [plan.in_mode for plan in plans]
        if not kernels.is_available():
            return rounded_s(self._numpy_s(plans) if plans else np.zeros(0))
        periods_s = np.full(len(plans), np.nan)
        of_family: dict[int, list[int]] = {}
        for number, plan in enumerate(plans):
            of_family.setdefault(id(plan.family), []).append(number)
        if plans and len(self._replayable) * max(plan.family.positions.micro_batches for plan in plans) > _MOST_KNOWN:
            self._replayable.clear()
            self._repeating.clear()
        for numbers in of_family.values():
            periods_s[numbers] = self._compiled_s([plans[number] for number in numbers])
        return rounded_s(periods_s)

    def time_logs(self, plan: ReplayPlan, machine: DrawnMachine) -> FloatArray:
        """(draws,) logarithms of the period over that of the expected seconds, under every draw of the machine.

        All NaN without the compiled replay; see [Note: Drawn durations] in ``sim/engine/intervals.py``.
        """
        if not kernels.is_available():
            return np.full(NUM_DRAWS, np.nan)
        plan = plan.in_mode
        lanes, compute_s = self._lanes_of(plan), plan.family.compute_s(np.array([plan.mode]))[0]
        found_s = [self._period_s(plan, lanes, compute_s, self._slowdowns)]
        drawn_s = plan.family.drawn_s(plan.mode, plan.depth, machine.factors, machine.overheads, machine.arrivals)
        for (own_s, *beside_s), excess in zip(drawn_s, machine.contention.tolist(), strict=True):
            slowdowns = 1 + excess * (self._slowdowns - 1)
            found_s.append(self._period_s(plan, replace(lanes, seconds=tuple(beside_s)), own_s, slowdowns))
        return np.log(np.array(found_s[1:]) / found_s[0])

    def _compiled_s(self, plans: Sequence[ReplayPlan]) -> list[float]:
        """The periods of plans of one family, their tasks not fused: that takes longer than it saves."""
        compute_s = plans[0].family.compute_s(np.array([plan.mode for plan in plans]))
        return [self._compiled_one_s(plan, of_plan_s) for plan, of_plan_s in zip(plans, compute_s, strict=True)]

    def _compiled_one_s(self, plan: ReplayPlan, compute_s: FloatArray) -> float:
        return self._period_s(plan, self._lanes_of(plan), compute_s, self._slowdowns)

    def _period_s(
        self, plan: ReplayPlan, lanes: kernels.Replayable, compute_s: FloatArray, slowdowns: FloatArray
    ) -> float:
        if not plan.num_left_out:
            return lanes.period_s(compute_s, slowdowns, num_iterations=MIN_ITERATIONS, steady_frac=_STEADY_FRAC)
        repeating = self._repeating_of(plan.family)
        if repeating is None:
            return np.nan
        lengths = np.array(lanes.lengths)
        targets = [_first_target(lanes.lengths[COMPUTE], repeating), *[0] * (len(lengths) - 1)]
        ends_s = lanes.ends_s(compute_s, slowdowns, targets, num_iterations=MIN_ITERATIONS)
        stops = lengths.cumsum()[:-1]
        settled_s = settled_period_s([np.split(row, stops) for row in ends_s[:2]], repeating, plan.num_left_out)
        if settled_s is not None:
            return settled_s
        targets = (lengths * MIN_ITERATIONS).tolist()
        ends_s = lanes.ends_s(compute_s, slowdowns, targets, num_iterations=MIN_ITERATIONS)
        if not _unfold(ends_s, lengths, repeating, plan.num_left_out):
            return np.nan
        return float(_periods_s(ends_s, np.zeros(1, dtype=np.int64), lengths[:1] - 1)[0])

    def _lanes_of(self, plan: ReplayPlan) -> kernels.Replayable:
        """The lanes of a plan as the compiled replay reads them."""
        family, depth = plan.family, plan.depth
        key = id(family), depth
        if key not in self._replayable:
            lanes = family.lanes
            waits = {pair: found[depth] for pair, found in lanes.waits.items()}
            seconds = tuple(family.seconds(lane, depth) for lane in range(COMPUTE + 1, family.num_lanes))
            self._replayable[key] = family, kernels.Replayable(lanes.lengths, waits, seconds)
        return self._replayable[key][1]

    def _repeating_of(self, family: PlanFamily) -> Repeating | None:
        """Where the lanes of the compiled replay repeat; None if they do not."""
        if id(family) not in self._repeating:
            begins = [np.arange(length) for length in family.lanes.lengths]
            self._repeating[id(family)] = repeating_programs(family, begins)
        return self._repeating[id(family)]

    def _numpy_s(self, plans: Sequence[ReplayPlan]) -> FloatArray:
        """(J,) the periods of one plan or more."""
        # Copies of earlier plans rarely come again, and take much room together: more with every micro-batch.
        if len(self._known) * max(plan.family.positions.micro_batches for plan in plans) > _MOST_KNOWN:
            self._known.clear()
        known = [self._copies(plan) for plan in plans]
        periods_s = np.full(len(plans), np.nan)
        folded = [number for number, plan in enumerate(plans) if plan.num_left_out and known[number].repeating]
        if folded:
            periods_s[folded] = self._settled_s([plans[number] for number in folded])
        left = np.flatnonzero(np.isnan(periods_s)).tolist()
        if left:
            periods_s[left] = self._steady_s([plans[number] for number in left])
        return periods_s

    def _programs(self, plans: Sequence[ReplayPlan]) -> _Programs:
        builder = _Builder()
        return builder.programs([builder.lanes(plan, self._copies(plan).programs) for plan in plans])

    def _settled_s(self, plans: Sequence[ReplayPlan]) -> FloatArray:
        """(J,) the periods of plans of which micro-batches are left out, where two iterations tell them; else NaN."""
        repeating = [self._copies(plan).repeating for plan in plans]
        programs = self._programs(plans)
        targets = np.zeros_like(programs.lengths)
        lengths = programs.lengths[:, COMPUTE].tolist()
        targets[:, COMPUTE] = [_first_target(of, one) for of, one in zip(lengths, repeating, strict=True) if one]
        ends_s = _run(programs, self._slowdowns, targets)[:2]
        stops = programs.lengths.cumsum().tolist()
        lanes = [[row[begin:stop] for row in ends_s] for begin, stop in pairwise([0, *stops])]
        num_lanes = programs.lengths.shape[1]
        periods_s = np.full(len(plans), np.nan)
        for number, (plan, one) in enumerate(zip(plans, repeating, strict=True)):
            assert one is not None, "only plans that repeat are settled"
            of_plan = lanes[number * num_lanes : (number + 1) * num_lanes]
            period_s = settled_period_s(list(zip(*of_plan, strict=True)), one, plan.num_left_out)
            if period_s is not None:
                periods_s[number] = period_s
        return periods_s

    def _steady_s(self, plans: Sequence[ReplayPlan]) -> FloatArray:
        """(J,) the periods by the simulator's rule."""
        known = [self._copies(plan) for plan in plans]
        programs = self._programs(plans)
        ends_s = _run(programs, self._slowdowns, programs.lengths * MIN_ITERATIONS)
        lengths = programs.lengths
        begins = np.append(0, lengths.sum(axis=1).cumsum()[:-1])
        is_known = np.ones(len(plans), dtype=np.bool_)
        for number, (plan, copies) in enumerate(zip(plans, known, strict=True)):
            if plan.num_left_out:
                stop = begins[number] + lengths[number].sum()
                is_known[number] = _unfold(
                    ends_s[:, begins[number] : stop], lengths[number], copies.repeating, plan.num_left_out
                )
        return np.where(is_known, _periods_s(ends_s, begins, begins + lengths[:, COMPUTE] - 1), np.nan)

    def _copies(self, plan: ReplayPlan) -> _Copies:
        key = id(plan.family), plan.depth
        known = self._known.get(key)
        if known is None:
            family = plan.family
            programs = copy_programs(family, plan.depth, self._slowdowns.max(axis=0))
            begins = [program.begins for program in programs]
            repeating = repeating_programs(family, begins) if plan.num_left_out else None
            known = self._known[key] = _Copies(family, programs, repeating)
        return known


def _first_target(length: int, repeating: Repeating) -> int:
    """Tasks of compute, ``length`` in an iteration, whose ends tell whether two iterations have settled."""
    return length + repeating.mark + repeating.num_tasks[COMPUTE] + 2


def _unfold(ends_s: FloatArray, lengths: IntArray, repeating: Repeating | None, num_left_out: int) -> bool:
    """Make the ends of one plan's tasks, (iterations, tasks), those with all micro-batches; whether they are known."""
    if repeating is None:
        return False
    parts = np.append(0, lengths.cumsum()).tolist()
    folds = find_folds([[row[begin:stop] for begin, stop in pairwise(parts)] for row in ends_s], repeating)
    if folds is None:
        return False
    for iteration, row in enumerate(ends_s):
        row += folds.shifts_s(num_left_out, iteration, lengths.tolist())
    return True


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
    """Lays programs end to end; plans share what travels."""

    def __init__(self) -> None:
        self._durations: list[FloatArray] = []
        self._waits: list[IntArray] = []
        self._num_durations = self._num_waits = 0
        self._copies: dict[tuple[int, int], tuple[int, tuple[_Lane, ...]]] = {}

    def lanes(self, plan: ReplayPlan, copies: tuple[LaneProgram, ...]) -> tuple[_Lane, ...]:
        """The programs of a plan, in the order of ``Lane``; ``copies``: ``copy_programs``."""
        key = id(plan.family), plan.depth
        lengths = np.array([len(program.waits) for program in copies])
        waits_for = WAITS_FOR[len(copies)]
        if key not in self._copies:
            compute, *others = copies
            lanes = tuple(
                _Lane(
                    len(program.waits),
                    self._add_durations(program.durations_s),
                    self._add_waits(program.waits, lengths[waits_for[1 + place]]),
                )
                for place, program in enumerate(others)
            )
            self._copies[key] = self._add_waits(compute.waits, lengths[waits_for[COMPUTE]]), lanes
        first_wait, lanes = self._copies[key]
        durations_s = np.add.reduceat(plan.family.compute_s(np.array([plan.mode]))[0], copies[COMPUTE].begins)
        return (_Lane(int(lengths[COMPUTE]), self._add_durations(durations_s), first_wait), *lanes)

    def programs(self, lanes: Sequence[tuple[_Lane, ...]]) -> _Programs:
        """The programs of the plans with these lanes, as many of each."""
        waits = np.concatenate(self._waits)
        columns = [np.ascontiguousarray(waits[:, column]) for column in range(waits.shape[1])]
        # Few plans wait for more than two lanes: for others two columns say it all.
        while len(columns) > 2 and not np.any((columns[-1] > 0) & (columns[-1] < _NEVER)):
            columns.pop()
        return _Programs(
            durations_s=np.concatenate([*self._durations, np.zeros(1)]),
            waits=tuple(columns),
            first_duration=np.array([[lane.first_duration for lane in of_plan] for of_plan in lanes]),
            first_wait=np.array([[lane.first_wait for lane in of_plan] for of_plan in lanes]),
            lengths=np.array([[lane.length for lane in of_plan] for of_plan in lanes]),
        )

    def _add_durations(self, durations_s: FloatArray) -> int:
        place = self._num_durations
        self._durations += [durations_s] * _UNROLLED
        self._num_durations += len(durations_s) * _UNROLLED
        return place

    def _add_waits(self, waits: IntArray, lengths: IntArray) -> int:
        """Waits of every iteration, counted from the beginning; at the end one that is never over.

        ``lengths``: of the lanes that are waited for.
        """
        place = self._num_waits
        for iteration in range(_UNROLLED):
            self._waits.append(waits + iteration * lengths)
        self._waits.append(np.full((1, waits.shape[1]), _NEVER))
        self._num_waits += len(waits) * _UNROLLED + 1
        return place


# -- time ------------------------------------------------------------------------------------------------------------


class _Lanes:
    """All lanes of all plans, flat and lane by lane: entry ``l * J + j`` is lane l of plan j."""

    def __init__(self, programs: _Programs, first_end: IntArray, targets: IntArray) -> None:
        lengths = programs.lengths.T
        self.num_lanes = len(lengths)
        self.others = np.ascontiguousarray(WAITS_FOR[self.num_lanes].T)[: len(programs.waits)]
        """The lanes that each waits for, by column of its waits."""
        self.lane_bits = (1 << np.arange(self.num_lanes)).astype(np.uint8)
        self.target = targets.T.ravel()
        """Tasks to end."""
        self.first_wait = programs.first_wait.T.ravel()
        self.first_duration = programs.first_duration.T.ravel()
        self.first_end = first_end.T.ravel()
        """Where the lane's ends are noted."""
        self.ended = np.zeros_like(self.target)
        """Tasks that have ended since the beginning."""
        self.left_s = np.full(len(self.target), np.inf)
        """Progress that the lane's task still needs; infinite while the lane waits."""
        self.waits = np.stack([column.take(self.first_wait) for column in programs.waits])
        """How many tasks the lanes of ``WAITS_FOR`` must have ended before the lane's next one starts."""
        self.next_s = programs.durations_s.take(self.first_duration)
        """Seconds of the lane's next task."""
        self._number(lengths.shape[1])

    def _number(self, num_plans: int) -> None:
        self.plan = np.tile(np.arange(num_plans), self.num_lanes)
        self.of_plan = (self.num_lanes, num_plans)
        """The shape in which a column is a plan."""

    def keep(self, plans: BoolArray) -> None:
        """Drop the lanes of all other plans."""
        lanes = np.tile(plans, self.num_lanes)
        for name in ("target", "first_wait", "first_duration", "first_end", "ended", "left_s", "next_s"):
            setattr(self, name, getattr(self, name)[lanes])
        self.waits = self.waits[:, lanes]
        self._number(int(np.count_nonzero(plans)))


def _run(programs: _Programs, slowdown_table: FloatArray, targets: IntArray) -> FloatArray:
    """Let every lane end so many tasks, (J, L); the ends of all tasks, (iterations, tasks of all plans).

    A plan's tasks follow each other lane by lane; those that have not ended are infinite.
    """
    # Idle lanes are what a step knows, so that the table is turned around.
    slowdowns = np.ascontiguousarray(slowdown_table[::-1].T)
    lengths = programs.lengths
    # Ends are noted lane by lane, all iterations of a lane in a row.
    places = lengths.ravel() * _UNROLLED
    first_end = (places.cumsum() - places).reshape(lengths.shape)
    ends_s = np.full(int(places.sum()), np.inf)
    lanes = _Lanes(programs, first_end, targets)
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
    is_over = ended.take(lanes.others, axis=0, mode="clip") >= lanes.waits.reshape(-1, *shape)
    may = is_idle & is_over[0]
    for over in is_over[1:]:
        may &= over
    starting = may.ravel().nonzero()[0]
    lanes.left_s[starting] = lanes.next_s.take(starting, mode="clip")
    is_idle ^= may

    idle_lanes = (lanes.lane_bits @ is_idle.view(np.uint8)).astype(np.intp)
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
    place = done + lanes.first_wait.take(ending, mode="clip")
    for waits, column in zip(lanes.waits, programs.waits, strict=True):
        waits[ending] = column.take(place, mode="clip")
    done += lanes.first_duration.take(ending, mode="clip")
    lanes.next_s[ending] = programs.durations_s.take(done, mode="clip")

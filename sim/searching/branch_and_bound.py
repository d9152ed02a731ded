"""Branch and bound over the space of one search; see [Note: Branch and bound] in ``sim/searching/search.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...shared.answers.plan_kind import PlanKind
from ...shared.schema.plan import Plan
from ...shared.schema.schedule import Schedule
from ..bounds.replay import REPLAY_FRAC, ReplayPlan
from ..engine.simulator import simulate_plan
from ..engine.timing import Timing
from ..space.plan_family import PlanFamily
from ..space.prices import FloatArray
from ..space.space import Trips
from .candidates import Candidates
from .levels import Beside, Candidate
from .problem import FamilyKey, SearchProblem
from .spent_effort import SpentEffort

_BATCH: Final = 512
"""Plans replayed at once."""
_IN_PART: Final = 2048
"""Micro-batches of as many plans are replayed side by side."""
_FIRST_BATCH: Final = 32
"""Until a good plan is known: with one, few others need to be looked at."""
_SIMPLEST: Final = 64
"""Plans that the first batch takes besides, for they may be as good and are simpler."""
_NEAR_TOLERANCES: Final = 5
"""Bounds up to so many tolerances above the least are taken for near: times lie above their bounds."""

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Simulated:
    """A plan that was compiled and simulated."""

    candidate: Candidate
    plan: Plan
    schedule: Schedule
    timing: Timing

    @property
    def time_s(self) -> float:
        """Of an iteration."""
        return self.timing.iteration_s

    @property
    def order(self) -> tuple[float, tuple[int, ...]]:
        """Fastest first, of equally fast ones the simplest."""
        return self.timing.iteration_s, self.candidate.simplicity


@dataclass(frozen=True, eq=False)
class Replayed:
    """A plan that was replayed and not simulated."""

    candidate: Candidate
    period_s: float
    """NaN if the replay did not become periodic."""
    bound_s: float
    """No simulation takes less."""

    @property
    def time_s(self) -> float:
        """Of an iteration; NaN if it is not known."""
        return self.period_s

    @property
    def order(self) -> tuple[float, tuple[int, ...]]:
        """Best bound first, of equal ones the simplest."""
        return self.bound_s, self.candidate.simplicity


class BranchAndBound:
    """One search under way, over the plans of one kind.

    ``incumbent_s``: the best time known from elsewhere; plans that cannot beat it are not looked at.
    """

    def __init__(
        self,
        problem: SearchProblem,
        kind: PlanKind | None = None,
        *,
        tolerance_frac: float,
        spent: SpentEffort | None = None,
    ) -> None:
        self.problem = problem
        self.kind = kind
        self.tolerance_frac = tolerance_frac
        self._spent = SpentEffort(widens=problem.step.micro_batches > 1) if spent is None else spent
        self._next_batch = _FIRST_BATCH
        self._settles = True
        """Whether the micro-batches that are kept tell of all, for most plans."""
        self.max_replays: int | None = None
        """Ends the search after this many plans were replayed, once one fits."""
        self.candidates = Candidates(problem, kind)
        self.replayed: list[Replayed] = []
        """In their order, of plans within the limits of memory."""
        self._beyond: list[Replayed] = []
        """Of the others."""
        self.num_replays = 0
        self.simulated: list[Simulated] = []
        self.dropped: list[Simulated] = []
        """Those of which it is known that they do not survive."""
        self.incumbent_s = np.inf
        self.best: Simulated | None = None
        """The fastest simulated plan within the limits of memory."""

    @property
    def num_candidates(self) -> int:
        """Distinct plans."""
        return self.candidates.num_candidates

    @property
    def own_best_s(self) -> float:
        """The time of ``best``; infinite if there is none."""
        return np.inf if self.best is None else self.best.timing.iteration_s

    @property
    def promised_s(self) -> float:
        """The best time of ``best`` and of what was replayed, for the simulator says the same; infinite if none."""
        # Bounds of what was replayed are its periods, less rounding: the first one is the least.
        replayed_s = next((found.period_s for found in self.replayed if not math.isnan(found.period_s)), np.inf)
        return min(self.own_best_s, replayed_s)

    @property
    def best_s(self) -> float:
        """The best time known, from here or from elsewhere."""
        return min(self.incumbent_s, self.promised_s)

    @property
    def limit_s(self) -> float:
        """Bounds from here on cannot win by more than plans that are left out may."""
        return self.best_s * (1 - self.left_out_frac)

    @property
    def left_out_frac(self) -> float:
        """By which share plans that are left out may be faster; see [Note: Widening]."""
        return self._spent.left_out_frac(self.tolerance_frac)

    @property
    def near_s(self) -> float:
        """Times up to here are within the tolerance of the best."""
        return self.best_s * (1 + self.tolerance_frac)

    @property
    def open_bound_s(self) -> float:
        """No plan that was not simulated takes less; infinite where all were, or do not fit."""
        return min([self.candidates.next_bound_s, *(found.bound_s for found in self.replayed[:1])])

    @property
    def fitting(self) -> list[Simulated]:
        """The simulated plans within the limits of memory of their layouts, without those that were dropped."""
        return [found for found in self.simulated if self._holds(found) and found not in self.dropped]

    def _holds(self, found: Simulated | Replayed) -> bool:
        return self.candidates.holds(found.candidate)

    def sort_out(self) -> None:
        """Have plans wait that are beyond the limits of memory, and bring back those within, since limits changed."""
        gone = [found for found in self.replayed if not self._holds(found)]
        back = [found for found in self._beyond if self._holds(found)]
        if gone:
            self.replayed = [found for found in self.replayed if self._holds(found)]
        if back:
            self._next_batch = _FIRST_BATCH
            self._beyond = [found for found in self._beyond if not self._holds(found)]
            self.replayed = sorted([*self.replayed, *back], key=lambda found: found.order)
        self._beyond += gone
        self._settle_best()

    def drop(self, found: Simulated) -> None:
        """Leave out a plan that was simulated, whatever the limits."""
        self.dropped.append(found)
        self._settle_best()

    def _settle_best(self) -> None:
        self.best = min(self.fitting, key=lambda found: found.order, default=None)

    def waits(self, layout: int) -> bool:
        """Whether plans of a layout wait beyond its limit."""
        return self.candidates.waits(layout) or any(found.candidate.layout == layout for found in self._beyond)

    @property
    def num_beyond(self) -> int:
        """Plans that wait beyond the limits of memory."""
        return self.candidates.num_beyond + len(self._beyond)

    def beyond(self, limit_s: float) -> Beside:
        """The same beside a limit of time."""
        others_s = [found.bound_s for found in self._beyond if found.bound_s >= limit_s]
        replayed = Beside(len(self._beyond) - len(others_s), len(others_s), min(others_s, default=np.inf))
        return Beside.of([replayed, self.candidates.beyond(limit_s)])

    def step(self) -> bool:
        """Replay one more batch of plans; false if none is left that may win."""
        if batch := self._batch(self.num_replays):
            self._replay(batch)
            self.num_replays += len(batch)
        while self.replayed and np.isinf(self.best_s):
            # Nothing of the batch became periodic.
            self.simulate(self.replayed.pop(0).candidate)
        return bool(batch)

    def confirm(self, best_s: float) -> bool:
        """Simulate the best plan that was replayed if it may win over ``best_s``, simulated; whether it may.

        One whose period is known is left out only within the tolerance, however much others may win by.
        """
        limit_s, promised_s = best_s * (1 - self.left_out_frac), best_s * (1 - self.tolerance_frac)
        for place, found in enumerate(self.replayed):
            if found.bound_s < (limit_s if math.isnan(found.period_s) else promised_s):
                self.simulate(self.replayed.pop(place).candidate)
                return True
        return False

    def break_ties(self) -> None:
        """Simulate the simplest of the replayed plans that seem to be within the tolerance of the best."""
        if self.tolerance_frac == 0:
            return
        self._replay_fewer_buffers()
        near = [found for found in self.replayed if found.period_s <= self.near_s]
        for found in sorted(near, key=lambda found: found.candidate.simplicity):
            chosen = self.simplest_near()
            if chosen is not None and found.candidate.simplicity >= chosen.candidate.simplicity:
                return
            self.replayed.remove(found)
            self.simulate(found.candidate)

    def _replay_fewer_buffers(self) -> None:
        """Replay plans like the simplest that is near the best, with as few buffers as leave it near."""
        near = [one for one in self.known if one.time_s <= self.near_s]
        if not near:
            return
        like = min(near, key=lambda one: one.candidate.simplicity).candidate
        grid, row = self.problem.layouts[like.layout].grid, like.index[0]
        rows = np.flatnonzero((grid.prefix == grid.prefix[row]) & (grid.n_buffer < grid.n_buffer[row]))
        rows = rows[np.argsort(grid.n_buffer[rows])]
        low, high = 0, len(rows)
        while low < high:
            middle = (low + high) // 2
            is_near = self._time_with(like, int(rows[middle])) <= self.near_s
            low, high = (low, middle) if is_near else (middle + 1, high)

    def _time_with(self, like: Candidate, row: int) -> float:
        """Of the plan like another one in another residency; infinite if it does not fit."""
        candidate = self.candidates.with_buffers(like, row)
        if candidate is not None:
            self._replay([candidate])
            self.num_replays += 1
        found = (like.layout, (row, *like.index[1:]))
        times_s = (one.time_s for one in self.known if (one.candidate.layout, one.candidate.index) == found)
        return next(times_s, np.inf)

    @property
    def known(self) -> list[Simulated | Replayed]:
        """The plans within the limits of memory that were simulated or replayed."""
        return [*self.fitting, *self.replayed]

    def simplest_near(self) -> Simulated | None:
        """The simplest of the simulated plans within the tolerance of the best, if there is any."""
        near = [found for found in self.fitting if found.timing.iteration_s <= self.near_s]
        return min(near, key=lambda found: found.candidate.simplicity, default=None)

    @property
    def num_decided(self) -> int:
        """Plans of which it is known what becomes of them."""
        num_looked_at = len(self.simulated) + len(self.replayed)
        return self.candidates.num_bounded_by_memory + num_looked_at + self.num_beyond

    def _batch(self, num_replays: int) -> list[Candidate]:
        """The plans to replay next; a cap ends the search only once something was found that fits."""
        is_first = np.isinf(self.best_s)
        size = _FIRST_BATCH if is_first else self._next_batch
        self._next_batch = _FIRST_BATCH if is_first else min(2 * size, _BATCH)
        if self.max_replays is not None and (not is_first or num_replays < self.max_replays):
            size = max(0, min(size, self.max_replays - num_replays))
        if not is_first or not size:
            return self.candidates.below(self.limit_s, size)
        batch = self.candidates.promising(size)
        if batch and size == _FIRST_BATCH:
            near_s = min(self.limit_s, batch[0].bound_s * (1 + _NEAR_TOLERANCES * self.tolerance_frac))
            batch += self.candidates.simplest_known(near_s, _SIMPLEST)
        return batch

    def _periods_s(self, batch: list[Candidate]) -> FloatArray:
        """(J,) as of ``Replayer``: with as many micro-batches as the simulator needs too."""
        problem = self.problem
        periods_s = np.full(len(batch), np.nan)
        if self._settles:
            periods_s = self._replayed_s(batch, problem.family)
        left = np.flatnonzero(np.isnan(periods_s)).tolist()
        if problem.num_left_out and left:
            self._settles = 2 * len(left) <= len(batch)
            periods_s[left] = self._replayed_s([batch[number] for number in left], problem.longer_family)
        return periods_s

    def _replayed_s(self, batch: list[Candidate], family_of: Callable[[int, int, Trips], PlanFamily]) -> FloatArray:
        known: dict[FamilyKey, PlanFamily] = {}
        plans = []
        for candidate in batch:
            key = candidate.family
            family = known[key] if key in known else known.setdefault(key, family_of(*key))
            plans.append(ReplayPlan(family, *candidate.index[1:], self.problem.num_left_out_of(family)))
        num_micro_batches = [plan.family.positions.micro_batches for plan in plans]
        self._spent.add_replayed(sum(num_micro_batches), settles=self._settles)
        # In parts, for the programs of many micro-batches take much room.
        size = max(_FIRST_BATCH, _IN_PART // max(num_micro_batches))
        parts = [plans[place : place + size] for place in range(0, len(plans), size)]
        return np.concatenate([self.problem.replayer.periods_s(part) for part in parts])

    def _replay(self, batch: list[Candidate]) -> None:
        periods_s = self._periods_s(batch)
        found = []
        for candidate, period_s in zip(batch, periods_s.tolist(), strict=True):
            bound_s = candidate.bound_s if np.isnan(period_s) else max(candidate.bound_s, period_s * REPLAY_FRAC)
            found.append(Replayed(candidate, period_s, bound_s))
        self.replayed = sorted([*self.replayed, *found], key=lambda one: one.order)

    def simulate(self, candidate: Candidate) -> Simulated:
        """Compile and simulate a plan that was replayed."""
        problem = self.problem
        plan = problem.plan(candidate.layout, *candidate.index)
        layout = problem.layouts[candidate.layout].grid.layout
        schedule, timing = simulate_plan(
            plan, problem.workload, problem.costs, problem.contention, layout=layout, method=problem.method
        )
        found = Simulated(candidate, plan, schedule, timing)
        self.simulated.append(found)
        self._spent.add_simulated(schedule.micro_batches)
        if self.best is None or found.order < self.best.order:
            self.best = found
        return found


def was_interrupted(branches: Collection[BranchAndBound], work: Callable[[], None], *, keep: bool) -> bool:
    """Do ``work`` on the branches; whether Ctrl-C ended it, which is raised unless ``keep`` and a plan was found."""
    try:
        work()
    except KeyboardInterrupt:
        waiting = [branch for branch in branches if branch.replayed]
        if keep and waiting:
            # The best of what was replayed is not lost.
            min(waiting, key=lambda branch: branch.replayed[0].order).confirm(np.inf)
        if not keep or all(branch.best is None for branch in branches):
            raise
        return True
    return False


def run_in_turns(
    branches: Sequence[BranchAndBound],
    on_step: Callable[[], None],
    *,
    incumbent_s: float = np.inf,
    max_replays: int | None = None,
) -> None:
    """Search several spaces that share the best time: each step is taken where the lowest bound is.

    A space is left out as a whole as soon as none of its plans can win.  Of equal bounds the first space counts.

    Args:
        branches: The spaces.
        on_step: Called after every step.
        incumbent_s: A time from elsewhere that plans must beat.
        max_replays: Ends the search after this many plans of all spaces together, once one fits.
    """
    spent: set[int] = set()
    while True:
        best_s = min(incumbent_s, *(branch.promised_s for branch in branches))
        num_replays = sum(branch.num_replays for branch in branches)
        for branch in branches:
            branch.incumbent_s = best_s
            if max_replays is not None:
                branch.max_replays = branch.num_replays + max(0, max_replays - num_replays)
        left = [
            place
            for place, branch in enumerate(branches)
            if place not in spent and branch.candidates.next_bound_s < branch.limit_s
        ]
        if left:
            place = min(left, key=lambda place: branches[place].candidates.next_bound_s)
            if not branches[place].step():
                spent.add(place)
        else:
            simulated_s = min(incumbent_s, *(branch.own_best_s for branch in branches))
            # Of equal bounds, the simplest plan.
            waiting = sorted((branch for branch in branches if branch.replayed), key=lambda one: one.replayed[0].order)
            if not any(branch.confirm(simulated_s) for branch in waiting):
                break
            spent.clear()
        on_step()

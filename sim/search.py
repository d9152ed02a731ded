"""The search: the fastest plan that fits, with a proof that none of its space is faster by more than a tolerance.

[Note: Branch and bound]
Plans come from a queue in the order of a lower bound of their time (``sim/candidates.py``).  A batch of them is
replayed at once (``sim/replay.py``), which sharpens their bounds to what the simulator would say; then the best are
compiled, their guaranteed peak is checked, and they are simulated, until no bound is left below the best simulated time
less the tolerance.  Every plan that was not simulated then either fails a memory bound or has a time bound above that.

Bounds sort, and never decide: the plan that is returned was compiled, checked and simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from ..shared.calibration import Calibration
from ..shared.compile import compile_schedule
from ..shared.errors import PlanError
from ..shared.hardware import Hardware
from ..shared.memory_bound import guaranteed_device_peak
from ..shared.plan import Plan
from ..shared.schedule import Schedule
from ..shared.search_result import Certificate, PlanOutcome
from ..shared.search_result import SearchResult as SearchResult
from ..shared.workload import Workload
from .candidates import Candidate, Candidates
from .infeasible import explain_infeasible
from .prediction import predicted_record
from .replay import REPLAY_FRAC, Replayer, ReplayPlan
from .search_problem import SearchProblem, search_problem
from .simulator import simulate_timing
from .space import SearchSpace
from .step_rule import StepRule
from .timing import Timing

_BATCH: Final = 512
"""Plans replayed at once."""
_FIRST_RESIDENCIES: Final = 64
"""The first batch is there to find a good plan early, and ends with the plans of so many residencies: each residency
costs more than many of its plans."""
_NUM_ALTERNATIVES: Final = 4
_PARETO_SAVING_FRAC: Final = 0.01

OnProgress = Callable[[int, int], None]


def search(
    workload: Workload,
    hardware: Hardware,
    calibration: Calibration | None = None,
    *,
    device_budget_bytes: int | None = None,
    host_budget_bytes: int | None = None,
    space: SearchSpace | None = None,
    micro_batches: int = 1,
    max_gradient_norm: float | None = None,
    tolerance_frac: float = 0.005,
    max_replays: int | None = None,
    on_progress: OnProgress | None = None,
) -> SearchResult:
    """The fastest plan of ``space`` whose memory fits for every timing.

    A plan fits if its guaranteed device peak is within ``device_budget_bytes`` (the device's usable bytes) and its
    pinned and other host memory within ``host_budget_bytes`` (``default_host_budget_bytes``).  No plan of the space
    is faster than the fastest one found by more than ``tolerance_frac``; with 0 the result is that of simulating every
    plan.  Of plans within the tolerance of the fastest, the simplest counts (``LayoutGrid.simplicity``).
    ``micro_batches`` and ``max_gradient_norm`` say what a step is, and every plan has them.
    ``max_replays`` ends the search after that many plans were looked at closely; then the certificate says so.
    ``on_progress`` is told, now and then, how many plans of how many are decided.

    Raises InfeasibleError if no plan fits, PlanError if the space holds no plan, and what ``simulate`` raises.
    """
    if not 0 <= tolerance_frac < 1:
        raise PlanError(f"tolerance_frac is {tolerance_frac}; it must be at least 0 and below 1.")
    problem = search_problem(
        workload,
        hardware,
        calibration,
        device_budget_bytes=device_budget_bytes,
        host_budget_bytes=host_budget_bytes,
        space=space,
        rule=StepRule(micro_batches, max_gradient_norm),
    )
    if max_replays is not None and max_replays < 1:
        raise PlanError(f"max_replays is {max_replays}; it must be at least 1.")
    hunt = _Hunt(problem, tolerance_frac, max_replays, on_progress or (lambda done, total: None))
    hunt.run()
    if hunt.best is None:
        raise explain_infeasible(problem)
    return hunt.result()


@dataclass(frozen=True)
class _Simulated:
    """A plan that was compiled, checked and simulated."""

    candidate: Candidate
    plan: Plan
    schedule: Schedule
    timing: Timing
    peak_bytes: int

    @property
    def order(self) -> tuple[float, tuple[int, ...]]:
        """Fastest first, of equally fast ones the simplest."""
        return self.timing.iteration_s, self.candidate.simplicity


@dataclass(frozen=True)
class _Replayed:
    """A plan that was replayed and not simulated."""

    candidate: Candidate
    period_s: float
    """NaN if the replay did not become periodic."""
    bound_s: float
    """No simulation takes less."""

    @property
    def order(self) -> tuple[float, tuple[int, ...]]:
        """Best bound first, of equal ones the simplest."""
        return self.bound_s, self.candidate.simplicity


class _Hunt:
    """One search under way."""

    def __init__(
        self, problem: SearchProblem, tolerance_frac: float, max_replays: int | None, on_progress: OnProgress
    ) -> None:
        self.problem = problem
        self.tolerance_frac = tolerance_frac
        self.max_replays = max_replays
        self.on_progress = on_progress
        self.candidates = Candidates(problem)
        self.replayer = Replayer(problem.compute, problem.contention)
        self.replayed: list[_Replayed] = []
        """In their order."""
        self.simulated: list[_Simulated] = []
        self.num_infeasible = 0
        self.best: _Simulated | None = None

    @property
    def limit_s(self) -> float:
        """Bounds from here on cannot win by more than the tolerance."""
        return np.inf if self.best is None else self.best.timing.iteration_s * (1 - self.tolerance_frac)

    def run(self) -> None:
        """Simulate until no bound is left below the limit, then settle near-ties."""
        num_replays = 0
        while batch := self._batch(num_replays):
            self._replay(batch)
            num_replays += len(batch)
            while self.replayed and self.replayed[0].bound_s < self.limit_s:
                self._simulate(self.replayed.pop(0).candidate)
            self._report()
        self._settle_near_ties()

    def _batch(self, num_replays: int) -> list[Candidate]:
        """The plans to replay next; a cap ends the search only once something was found that fits."""
        size = _BATCH
        if self.max_replays is not None and (self.best is not None or num_replays < self.max_replays):
            size = max(0, min(size, self.max_replays - num_replays))
        batch: list[Candidate] = []
        residencies: set[int] = set()
        for candidate in islice(self.candidates.below(self.limit_s), size):
            batch.append(candidate)
            residencies.add(id(candidate.traffic))
            if self.best is None and len(residencies) == _FIRST_RESIDENCIES:
                break
        return batch

    def _replay(self, batch: list[Candidate]) -> None:
        depths = self.problem.layouts[0].grid.prefetch_depth.tolist()
        plans = [
            ReplayPlan(candidate.traffic, depths[depth], mode)
            for candidate in batch
            for _, depth, mode in (candidate.index,)
        ]
        periods_s = self.replayer.periods_s(plans)
        for candidate, period_s in zip(batch, periods_s.tolist(), strict=True):
            bound_s = candidate.bound_s if np.isnan(period_s) else max(candidate.bound_s, period_s * REPLAY_FRAC)
            self.replayed.append(_Replayed(candidate, period_s, bound_s))
        self.replayed.sort(key=lambda found: found.order)

    def _simulate(self, candidate: Candidate) -> None:
        problem = self.problem
        plan = problem.plan(candidate.layout, *candidate.index)
        schedule = compile_schedule(plan, problem.workload, problem.layouts[candidate.layout].grid.layout)
        peak_bytes = guaranteed_device_peak(schedule).size_bytes
        if peak_bytes > problem.device_budget_bytes:
            self.num_infeasible += 1
            return
        durations_s = problem.costs.durations_s(schedule)
        timing = simulate_timing(schedule, durations_s, problem.contention, num_more_iterations=1)
        found = _Simulated(candidate, plan, schedule, timing, peak_bytes)
        self.simulated.append(found)
        if self.best is None or found.order < self.best.order:
            self.best = found

    def _settle_near_ties(self) -> None:
        """Simulate the simplest of the replayed plans that seem to be within the tolerance of the fastest."""
        if self.best is None or self.tolerance_frac == 0:
            return
        near = [found for found in self.replayed if found.period_s <= self._near_s]
        for found in sorted(near, key=lambda found: found.candidate.simplicity):
            if found.candidate.simplicity >= self._chosen().candidate.simplicity:
                return
            self.replayed.remove(found)
            self._simulate(found.candidate)

    @property
    def _near_s(self) -> float:
        assert self.best is not None
        return self.best.timing.iteration_s * (1 + self.tolerance_frac)

    def _chosen(self) -> _Simulated:
        near = [found for found in self.simulated if found.timing.iteration_s <= self._near_s]
        return min(near, key=lambda found: found.candidate.simplicity)

    def _report(self) -> None:
        num_decided = self.candidates.num_bounded_by_memory + self.num_infeasible
        num_decided += len(self.simulated) + len(self.replayed)
        self.on_progress(num_decided, self.problem.num_candidates)

    # -- the result --------------------------------------------------------------------------------------------------

    def result(self) -> SearchResult:
        """The document that says what was found."""
        problem, chosen = self.problem, self._chosen()
        prediction = predicted_record(
            chosen.plan, problem.workload, problem.hardware, problem.calibration, chosen.schedule, chosen.timing
        )
        known = [_Known(s.candidate, s.timing.iteration_s, s.peak_bytes, is_simulated=True) for s in self.simulated]
        known += [
            _Known(r.candidate, r.period_s, r.candidate.peak_bytes, is_simulated=False)
            for r in self.replayed
            if not np.isnan(r.period_s)
        ]
        known.sort(key=lambda one: (one.iteration_s, one.peak_bytes, one.candidate.simplicity))
        self.on_progress(problem.num_candidates, problem.num_candidates)
        return SearchResult(
            model_name=problem.workload.model_name,
            hardware_name=problem.hardware.name,
            device_budget_bytes=problem.device_budget_bytes,
            host_budget_bytes=problem.host_budget_bytes,
            plan=chosen.plan,
            prediction=prediction,
            certificate=self._certificate(),
            alternatives=tuple(self._outcome(one) for one in _alternatives(chosen.candidate, known)),
            pareto=tuple(self._outcome(one) for one in _pareto_front(known)),
        )

    def _certificate(self) -> Certificate:
        assert self.best is not None
        num_candidates = self.problem.num_candidates
        by_memory = self.candidates.num_bounded_by_memory
        num_left = num_candidates - by_memory - len(self.simulated) - self.num_infeasible
        is_complete = self.candidates.next_bound_s >= self.limit_s
        bounds_s = [found.bound_s for found in self.replayed]
        if is_complete and np.isfinite(self.candidates.next_bound_s):
            bounds_s.append(self.candidates.next_bound_s)
        return Certificate(
            num_candidates=num_candidates,
            num_bounded_by_memory=by_memory,
            num_bounded_by_time=num_left if is_complete else len(self.replayed),
            num_simulated=len(self.simulated),
            num_infeasible_simulated=self.num_infeasible,
            num_undecided=0 if is_complete else num_left - len(self.replayed),
            best_iteration_s=self.best.timing.iteration_s,
            best_unsimulated_bound_s=min(bounds_s, default=None),
            tolerance_frac=self.tolerance_frac,
        )

    def _outcome(self, known: _Known) -> PlanOutcome:
        problem, candidate = self.problem, known.candidate
        plan = problem.plan(candidate.layout, *candidate.index)
        n_persist = np.array([plan.n_persist])
        pinned_bytes = int(problem.pinned_host_bytes(candidate.layout, n_persist, plan.n_swap)[0])
        return PlanOutcome(
            plan=plan,
            iteration_s=known.iteration_s,
            is_simulated=known.is_simulated,
            guaranteed_peak_device_bytes=known.peak_bytes,
            pinned_host_bytes=pinned_bytes,
            host_bytes=int(problem.host_bytes(candidate.layout, n_persist, plan.n_swap)[0]) - pinned_bytes,
        )


@dataclass(frozen=True)
class _Known:
    """A plan whose time and peak are known."""

    candidate: Candidate
    iteration_s: float
    peak_bytes: int
    is_simulated: bool

    @property
    def character(self) -> tuple[int, ...]:
        """What makes plans more than variants of one another: layout, offloaded chunks, modes."""
        n_swap, n_checkpoint, _, num_offloaded, *_ = self.candidate.simplicity
        return self.candidate.layout, num_offloaded, n_checkpoint, n_swap


def _alternatives(chosen: Candidate, known: list[_Known]) -> list[_Known]:
    """The next best of another character than ``chosen`` and each other; ``known`` fastest first."""
    found: dict[tuple[int, ...], _Known] = {}
    for one in known:
        found.setdefault(one.character, one)
    found.pop(next(one.character for one in known if one.candidate is chosen))
    return list(found.values())[:_NUM_ALTERNATIVES]


def _pareto_front(known: Iterable[_Known]) -> list[_Known]:
    """The front of ``known``, which comes fastest first: each of its plans saves a share of the peak before it."""
    front: list[_Known] = []
    for one in known:
        if not front or one.peak_bytes <= front[-1].peak_bytes * (1 - _PARETO_SAVING_FRAC):
            front.append(one)
    return front

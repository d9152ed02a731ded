"""Which of the plans that fit is recommended: the simplest that is worth it, that survives, and that none outdoes.

[Note: The recommended plan]
The fastest plan is found first, of all kinds.  Then the kinds are asked in the order of their simplicity
(``PlanKind``): the first is chosen whose best plan no less simple kind beats by more than the uncertainty of the
comparison ([Note: Uncertainty of a comparison] in ``sim/searching/confidence.py``).  Of its plans within the tolerance
of its best, the simplest mode counts, then the largest shard groups, then the fewest micro-batches, then the simplest
plan; if a known plan of the same kind is as fast and needs less memory, that one takes its place.  A plan that does not
survive ([Note: Plans that survive] in ``sim/searching/survival.py``) makes room for the next.

[Note: Plans by their upper ends]
Who asks for the least upper end (``Risk.HIGH``) has a plan whose time is less uncertain, for a longer predicted time.
An upper end is no less than the predicted time, so that no plan slower than the best upper end can win.  Of the plans
that the search has looked at closely, of all kinds, the fastest are weighed in that order, up to ``_MOST_WEIGHED`` of
them.  The certificate is one of predicted times, and says nothing of upper ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ...shared.answers.plan_kind import PlanKind
from ...shared.schema.plan import ParallelMode, ProjectionPlace
from ..engine.intervals import interval_of
from ..space.step_spec import SEVERAL
from .branch_and_bound import BranchAndBound, OnProgress, Replayed, Simulated, run_in_turns
from .request import SearchRequest
from .survival import LayoutLimit, SegmentRoom

_MOST_WEIGHED: Final = 200

Grouping = tuple[ParallelMode, int | None]
"""What ranks do together: the mode, and the ranks of a shard group, None for all."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Which space."""

    size: int
    """Samples of a micro-batch."""
    mode: ParallelMode
    shard_ranks: int | None
    """Ranks of a shard group; None for all."""
    kind: PlanKind
    place: ProjectionPlace = ProjectionPlace.HOST
    """Where gradients that leave are projected."""
    sequence_ranks: int = 1
    """Ranks that share each sequence."""

    @property
    def grouping(self) -> Grouping:
        """What ranks do together."""
        return self.mode, self.shard_ranks


@dataclass(frozen=True, eq=False)
class Chosen:
    """A plan with the space that it comes from."""

    where: Where
    branch: BranchAndBound
    plan: Simulated

    @property
    def iteration_s(self) -> float:
        """Simulated."""
        return self.plan.timing.iteration_s


@dataclass(frozen=True, eq=False)
class Choice:
    """The recommendation, and what was passed over for it."""

    chosen: Chosen
    survives: bool
    """Whether its segments are expected to fit with the allocator's default settings."""
    expandable: Chosen | None = None
    """A faster plan whose segments are expected to fit with expandable segments alone."""
    passed_over: Chosen | None = None
    """A faster plan of a less simple kind, the gain of which is within the uncertainty."""
    passed_over_for_risk: Chosen | None = None
    """The plan that would be chosen by the predicted time, where another one has the lower upper end."""
    num_weighed: int = 0
    """Plans whose upper ends were compared."""


class Chooser:
    """Searches all spaces and settles on one plan; see [Note: The recommended plan]."""

    def __init__(
        self, request: SearchRequest, branches: Mapping[Where, BranchAndBound], on_progress: OnProgress
    ) -> None:
        self._request = request
        self._branches = {where: branches[where] for where in sorted(branches, key=_simplest)}
        self._on_progress = on_progress
        self._room = SegmentRoom.of(request)
        self._fragile: list[Chosen] = []
        """Plans that do not survive."""
        self._wanted_bytes: dict[Simulated, int] = {}
        """Segments that plans are expected to hold."""
        self._limits = {
            where: [LayoutLimit(branch, layout) for layout in range(len(branch.problem.layouts))]
            for where, branch in self._branches.items()
        }

    def search(self) -> None:
        """Search until the recommendation is known; an interruption leaves what was found so far."""
        while True:
            self._run(self._branches.values())
            kind = self._kind_worth_it()
            if kind is not None and self._has_stepped_back(kind):
                continue
            if kind is None:
                break
            fastest = self._fastest(kind)
            if fastest is not None and self._keeps(fastest):
                found = self._settled(kind)
                if found.plan is fastest.plan or self._keeps(found):
                    break
        self._on_progress(self._num_candidates, self._num_candidates)

    @property
    def _num_candidates(self) -> int:
        return sum(branch.num_candidates for branch in self._branches.values())

    def _tell(self) -> None:
        self._on_progress(sum(branch.num_decided for branch in self._branches.values()), self._num_candidates)

    def choice(self) -> Choice | None:
        """The recommendation as things stand; None if nothing fits.  No search goes on for it."""
        found: Chosen | None = None
        while found is None:
            kind = self._kind_worth_it(explores=False)
            if kind is None:
                closest = min(self._fragile, key=lambda one: self._wanted_bytes[one.plan], default=None)
                fallback = self._expandable(np.inf) or closest
                return None if fallback is None else Choice(fallback, survives=False)
            found = self._settled(kind, explores=False)
            if not self._keeps(found):
                found = None
        fastest = self._fastest() or found
        tolerance_frac = self._request.effort.tolerance_frac
        limit_s = found.iteration_s * (1 - tolerance_frac)
        return Choice(
            found,
            survives=True,
            expandable=self._expandable(limit_s),
            passed_over=fastest
            if fastest.where.kind is not found.where.kind and fastest.iteration_s < limit_s
            else None,
        )

    def least_high_end(self, choice: Choice) -> Choice:
        """``choice`` by the upper end of the interval; see [Note: Plans by their upper ends]."""
        by_mean = choice.chosen
        own_s = _high_end_s(by_mean.branch, by_mean.plan)
        best, best_s = by_mean, own_s * (1 - self._request.effort.tolerance_frac)
        known = [
            (where, branch, one)
            for where, branch in self._branches.items()
            for one in branch.known
            if not np.isnan(one.time_s)
        ]
        known.sort(key=lambda one: one[2].time_s)
        num_weighed = 1
        for where, branch, one in known[:_MOST_WEIGHED]:
            # An upper end lies above the predicted time.
            if one.time_s >= best_s:
                break
            num_weighed += 1
            if one is by_mean.plan or _high_end_s(branch, one) >= best_s:
                continue
            simulated = one if isinstance(one, Simulated) else branch.simulate(one.candidate)
            if isinstance(one, Replayed):
                branch.replayed.remove(one)
            found = Chosen(where, branch, simulated)
            high_s = _high_end_s(branch, simulated)
            if high_s < best_s and self._survives(found) and simulated in branch.fitting:
                best, best_s = found, high_s
        if best is by_mean:
            return replace(choice, num_weighed=num_weighed)
        return replace(choice, chosen=best, passed_over_for_risk=by_mean, passed_over=None, num_weighed=num_weighed)

    # -- kinds -------------------------------------------------------------------------------------------------------

    def _of(self, kind: PlanKind | None) -> dict[Where, BranchAndBound]:
        """The spaces of one kind, or all."""
        return {where: branch for where, branch in self._branches.items() if kind is None or where.kind is kind}

    def _fastest(self, kind: PlanKind | None = None) -> Chosen | None:
        found = [
            Chosen(where, branch, branch.best) for where, branch in self._of(kind).items() if branch.best is not None
        ]
        return min(found, key=lambda one: one.iteration_s, default=None)

    def _kind_worth_it(self, *, explores: bool = True) -> PlanKind | None:
        """The simplest kind whose best plan no less simple kind beats by more than the uncertainty.

        Where it ``explores``, also a simpler kind that was left out too far.  None if nothing fits.
        """
        fastest = self._fastest()
        for kind in PlanKind:
            if not self._of(kind):
                continue
            limit_s = np.inf
            if fastest is not None:
                limit_s = fastest.iteration_s
                if kind is not fastest.where.kind:
                    limit_s /= 1 - self._request.uncertainty.between(kind, fastest.where.kind)
            if explores:
                # What ties with the limit is worth it.
                self._run(self._of(kind).values(), np.nextafter(limit_s, np.inf) / (1 - self._left_out_frac))
                if self._left_out_too_far(kind):
                    return kind
            own = self._fastest(kind)
            is_near = own is not None and own.iteration_s <= limit_s
            if own is not None and is_near and not self._is_beaten(own, explores=explores):
                return kind
        return None

    def _is_beaten(self, own: Chosen, *, explores: bool) -> bool:
        """Whether a plan of a less simple kind than the one of ``own`` is faster by more than the uncertainty."""
        kind = own.where.kind
        for other in tuple(PlanKind)[kind.complexity + 1 :]:
            limit_s = own.iteration_s * (1 - self._request.uncertainty.between(kind, other))
            if explores and self._of(other):
                self._run(self._of(other).values(), limit_s)
            best = self._fastest(other)
            if best is not None and best.iteration_s < limit_s:
                return True
        return False

    def _settled(self, kind: PlanKind, *, explores: bool = True) -> Chosen:
        """Of the plans of one kind, the simplest within the tolerance that none outdoes.

        If that one does not survive, the fastest within the tolerance of which it is known that it does.
        """
        fastest = self._fastest(kind)
        assert fastest is not None, "a kind that is worth it has a plan"
        near = self._simplest_near(self._of(kind), fastest.iteration_s, explores=explores)
        # Where the search ended early, plans that were replayed and not simulated may be far better than the fastest.
        simplest = self._undominated(near or fastest)
        if self._survives(simplest):
            return simplest
        near_s = fastest.iteration_s * (1 + self._request.effort.tolerance_frac)
        surviving = [
            Chosen(where, branch, one)
            for where, branch in self._of(kind).items()
            for one in branch.fitting
            if one.time_s <= near_s and one in self._wanted_bytes and self._survives(Chosen(where, branch, one))
        ]
        return min(surviving, key=lambda one: one.plan.order, default=simplest)

    @property
    def _left_out_frac(self) -> float:
        return max(branch.left_out_frac for branch in self._branches.values())

    def _run(self, branches: Iterable[BranchAndBound], incumbent_s: float = np.inf) -> None:
        run_in_turns(
            list(branches),
            self._tell,
            incumbent_s=incumbent_s,
            max_replays=self._request.effort.max_replays,
        )

    def _simplest_near(
        self, branches: Mapping[Where, BranchAndBound], best_s: float, *, explores: bool
    ) -> Chosen | None:
        """Of the plans of one kind within the tolerance of the best one, the simplest; None if none was simulated."""
        near: dict[Where, Simulated] = {}
        for where, branch in branches.items():
            branch.incumbent_s = best_s
            if explores:
                branch.break_ties()
            plan = branch.simplest_near()
            if plan is not None:
                near[where] = plan
        if not near:
            return None
        where = min(near, key=_simplest)
        return Chosen(where, branches[where], near[where])

    def _undominated(self, chosen: Chosen) -> Chosen:
        """A plan of the same space that is no slower, needs less memory and stays undominated, if one is known."""
        branch, plan = chosen.branch, chosen.plan
        while True:
            better: list[Simulated | Replayed] = [one for one in branch.fitting if _dominates(one, plan)]
            better += [one for one in branch.replayed if _dominates(one, plan)]
            if not better:
                return Chosen(chosen.where, branch, plan)
            best = min(better, key=lambda one: (one.time_s, one.candidate.peak_bytes, one.candidate.simplicity))
            if isinstance(best, Replayed):
                branch.replayed.remove(best)
                best = branch.simulate(best.candidate)
                if not _dominates(best, plan):
                    continue
            plan = best

    # -- survival ----------------------------------------------------------------------------------------------------

    def _keeps(self, found: Chosen) -> bool:
        """Whether ``found`` survives.  Otherwise its like are left out, and it may be named as a faster alternative."""
        room = self._room
        if room is None or self._survives(found):
            return True
        self._fragile.append(found)
        found.branch.drop(found.plan)
        candidate = found.plan.candidate
        limit_bytes = room.lowered_peak_bytes(found.plan, self._wanted_bytes[found.plan])
        self._limits[found.where][candidate.layout].lower(candidate.peak_bytes, limit_bytes)
        found.branch.sort_out()
        return False

    def _survives(self, found: Chosen) -> bool:
        """Whether its segments are expected to leave the margin free."""
        if self._room is None:
            return True
        if found.plan not in self._wanted_bytes:
            self._wanted_bytes[found.plan] = self._room.wanted_bytes(found.plan, found.branch.problem)
        return self._wanted_bytes[found.plan] <= self._room.limit_bytes

    def _expandable(self, limit_s: float) -> Chosen | None:
        """The fastest plan below ``limit_s`` that needs expandable segments, if there is one."""
        room = self._room
        for found in sorted(self._fragile, key=lambda one: one.iteration_s):
            if room is None or found.iteration_s >= limit_s:
                break
            problem = found.branch.problem
            if room.holds_expandable(found.plan, problem):
                return found
        return None

    def _left_out_too_far(self, kind: PlanKind) -> bool:
        """Whether nothing is left of a kind, though limits of layouts are far below peaks that do not survive."""
        is_empty = all(branch.best is None and np.isinf(branch.open_bound_s) for branch in self._of(kind).values())
        return is_empty and any(limit.may_rise for where in self._of(kind) for limit in self._limits[where])

    def _has_stepped_back(self, kind: PlanKind) -> bool:
        """Search a kind with limits half way back, if it was left out too far."""
        if not self._left_out_too_far(kind):
            return False
        for where, branch in self._of(kind).items():
            for limit in self._limits[where]:
                if limit.may_rise:
                    limit.rise_half_way()
            branch.sort_out()
        return True


def _high_end_s(branch: BranchAndBound, plan: Simulated | Replayed) -> float:
    """The upper end of a plan's interval; infinite where nothing tells."""
    problem, candidate = branch.problem, plan.candidate
    logs = problem.time_logs(candidate.family, candidate.index)
    interval = interval_of(plan.time_s, logs, problem.errors)
    return np.inf if interval is None else interval.high


def _simplest(where: Where) -> tuple[float, ...]:
    """Orders by kind, mode, larger shard groups, fewer micro-batches, projections on the host.

    Then by fewer ranks that share a sequence.
    """
    mode, group = where.mode, np.inf if where.shard_ranks is None else where.shard_ranks
    is_on_device = where.place is ProjectionPlace.DEVICE
    of_mode = SEVERAL.index(mode) if mode in SEVERAL else 0
    return where.kind.complexity, of_mode, -group, -where.size, is_on_device, where.sequence_ranks


def _dominates(one: Simulated | Replayed, other: Simulated) -> bool:
    """Whether ``one`` is no slower and needs no more device memory, and is better in one of the two."""
    pairs = (
        (one.time_s, other.timing.iteration_s),
        (one.candidate.peak_bytes, other.candidate.peak_bytes),
    )
    return all(mine <= its for mine, its in pairs) and any(mine < its for mine, its in pairs)

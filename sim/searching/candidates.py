"""The plans that may still win, best bound first, looked at no closer than needed.

[Note: Levels of a bound]
A *group* is all plans of a layout with the same number of swapped blocks, a *family* those of a group with the same
persistent chunks.  A plan's bound is sharpened in levels, each dearer than the one before: the bound of its group, by
the work of a whole period; that of its family; its own ([Note: Time bounds] in ``sim/bounds/time_bounds.py``); whether
it fits, by a lower bound of its peak; and whether it fits exactly, for which slots must be assigned to its residency.
One heap holds groups, families, residencies and plans by what is known of them, so that whatever comes out of it as a
plan fits, and no plan that is still inside has a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

import numpy as np

from ...shared.schema.plan_kind import PlanKind
from ..bounds.exact_peaks import guaranteed_peaks
from ..space.compute_table import FloatArray
from ..space.side_lanes import SideLanes
from ..space.space import BoolArray, IntArray
from .problem import SearchProblem

_GROUP: Final = 0
_FAMILY: Final = 1
_RESIDENCY: Final = 2
_PLAN: Final = 3


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that fits by all that is known before it is compiled."""

    layout: int
    index: tuple[int, int, int]
    """GatherPlan, prefetch depth and modes, as indices into the layout's grid."""
    simplicity: tuple[int, ...]
    side_lanes: SideLanes
    bound_s: float
    """No simulation of it takes less."""
    peak_bytes: int
    """Guaranteed device peak."""


@dataclass(frozen=True, eq=False)
class _Group:
    """The plans of a layout with the same number of swapped blocks."""

    layout: int
    number: int
    """Among the groups of ``ModeRows``."""
    may_fit: BoolArray
    """(F, K) what a quick bound of memory leaves of every family; K choices of modes of the group."""


@dataclass(frozen=True, eq=False)
class _Family:
    layout: int
    group: int
    prefix: int
    modes: IntArray
    """(K,) the choices of modes that the group's quick bound of memory leaves."""


@dataclass(frozen=True, eq=False)
class _Residency:
    """The plans of one family and residency that a bound of their peak leaves."""

    layout: int
    group: int
    row: int
    modes: IntArray
    """(K,) choices of modes that a bound of the peak leaves, as rows of ``ModeRows``."""
    bound_s: FloatArray
    """(D, K), infinite for plans that do not fit or are not distinct."""
    least_peaks: IntArray
    """(D, K) bounds of the peaks."""


class _Plans:
    """The plans of one residency that fit, best bound first, then simplest."""

    def __init__(
        self, found: _Residency, bounds_s: FloatArray, side_lanes: SideLanes, fits: BoolArray, peaks: IntArray
    ) -> None:
        self.layout = found.layout
        self.row = found.row
        self.side_lanes = side_lanes
        depth, place = fits.nonzero()
        bound_s = bounds_s[depth, place]
        order = np.lexsort((depth, place, bound_s))
        depth, place = depth[order], place[order]
        columns = bound_s[order], depth, found.modes[place], peaks[depth, place]
        self.left = list(zip(*(column.tolist() for column in columns), strict=True))
        """(bound, depth, modes, peak), the next plan last."""
        self.left.reverse()


_Entry = _Group | _Family | _Residency | _Plans


class Candidates:
    """The plans of one kind as a queue; see [Note: Levels of a bound].  Ties come out in the order of simplicity.

    ``kind``: None for the plans of all kinds.
    """

    def __init__(self, problem: SearchProblem, kind: PlanKind | None = None) -> None:
        self._problem = problem
        self._kind = kind
        self.num_candidates = 0
        """Distinct plans of the kind."""
        self.num_bounded_by_memory = 0
        self.device_limit_bytes = problem.device_budget_bytes
        """Guaranteed peaks above it do not fit; may be lowered at any time."""
        self._ticket = count()
        self._heap: list[tuple[float, int, tuple[int, ...], int, _Entry]] = []
        for layout in range(len(problem.layouts)):
            self._add_groups(layout)
        heapify(self._heap)

    @property
    def next_bound_s(self) -> float:
        """No plan that has not come out takes less; infinite when the queue is empty."""
        return self._heap[0][0] if self._heap else np.inf

    def below(self, limit_s: float) -> Iterator[Candidate]:
        """The plans with lower bounds below ``limit_s``, best first; they leave the queue."""
        while self._heap and self._heap[0][0] < limit_s:
            entry = heappop(self._heap)[-1]
            if isinstance(entry, _Plans):
                candidate = self._take(entry)
                if candidate.peak_bytes <= self.device_limit_bytes:
                    yield candidate
                else:
                    self.num_bounded_by_memory += 1
            elif isinstance(entry, _Residency):
                self._add_plans(entry)
            elif isinstance(entry, _Family):
                self._add_residencies(entry)
            else:
                self._add_families(entry)

    def simplest_known(self, limit_s: float, most: int) -> list[Candidate]:
        """The simplest plans with lower bounds below ``limit_s`` of the residencies that have been looked at.

        At most so many; they leave the queue.
        """
        opened = [entry for *_, entry in self._heap if isinstance(entry, _Plans)]
        near = [
            (self._problem.layouts[plans.layout].grid.simplicity(plans.row, plan[1], plan[2]), number, plan)
            for number, plans in enumerate(opened)
            for plan in plans.left
            if plan[0] < limit_s and plan[3] <= self.device_limit_bytes
        ]
        chosen = sorted(near)[:most]
        if chosen:
            for number in {number for _, number, _ in chosen}:
                taken = {plan for _, other, plan in chosen if other == number}
                opened[number].left = [plan for plan in opened[number].left if plan not in taken]
            self._heap = [entry for entry in self._heap if not isinstance(entry[-1], _Plans)]
            heapify(self._heap)
            for plans in opened:
                self._queue(plans)
        return [self._candidate(opened[number], plan) for _, number, plan in chosen]

    def _push(self, bound_s: float, level: int, key: tuple[int, ...], entry: _Entry) -> None:
        heappush(self._heap, (bound_s, level, key, next(self._ticket), entry))

    def _add_groups(self, index: int) -> None:
        """Bound every group by its most generous plan, and leave out families that no budget holds."""
        problem, layout = self._problem, self._problem.layouts[index]
        for number, (n_swap, modes) in enumerate(layout.grid.modes.groups):
            is_open = np.ones((len(layout.prefixes), len(modes)), dtype=np.bool_)
            if self._kind is not None:
                is_open = layout.grid.is_of_kind(self._kind, layout.prefixes, modes)
            rows = np.flatnonzero(is_open.any(axis=1))
            if not len(rows):
                continue
            prefixes = layout.prefixes[rows]
            static_bytes = layout.table.static_device_bytes(prefixes, problem.workload.resident_bytes)
            levels = layout.memory.activation_bytes[modes]
            may_fit = np.zeros_like(is_open)
            may_fit[rows] = is_open[rows] & (static_bytes[:, None] + levels <= problem.device_budget_bytes)
            may_fit[rows] &= (problem.host_bytes(index, prefixes, n_swap) <= problem.host_budget_bytes)[:, None]
            num_residencies = layout.num_residencies(n_swap)[:, None]
            self.num_candidates += int((num_residencies * is_open).sum())
            self.num_bounded_by_memory += int((num_residencies * (is_open & ~may_fit)).sum())
            if may_fit.any():
                most_buffers = np.full(len(prefixes), len(layout.table.size_bytes))
                deepest = np.full(len(prefixes), layout.grid.prefetch_depth[-1])
                bounds_s = layout.time.whole_s(prefixes, most_buffers, deepest, modes)
                bound_s = float(np.where(may_fit[rows], bounds_s, np.inf).min())
                self._push(bound_s, _GROUP, (n_swap, index), _Group(index, number, may_fit))

    def _add_families(self, group: _Group) -> None:
        layout = self._problem.layouts[group.layout]
        n_swap, modes = layout.grid.modes.groups[group.number]
        fits = group.may_fit.any(axis=1)
        prefixes, may_fit = layout.prefixes[fits], group.may_fit[fits]
        most_buffers = np.full(len(prefixes), len(layout.table.size_bytes))
        deepest = np.full(len(prefixes), layout.grid.prefetch_depth[-1])
        bounds_s = np.where(may_fit, layout.time.iteration_s(prefixes, most_buffers, deepest, modes), np.inf)
        for prefix, bound_s, mask in zip(prefixes.tolist(), bounds_s.min(axis=1).tolist(), may_fit, strict=True):
            family = _Family(group.layout, group.number, prefix, modes[mask])
            self._push(bound_s, _FAMILY, (n_swap, group.layout, prefix), family)

    def _add_residencies(self, family: _Family) -> None:
        layout = self._problem.layouts[family.layout]
        grid, modes = layout.grid, family.modes
        n_swap = int(grid.modes.n_swap[modes[0]])
        rows = np.flatnonzero(grid.prefix == family.prefix)
        peaks = layout.memory.peak_bytes(family.prefix, grid.n_buffer[rows], grid.prefetch_depth, modes)
        is_open = grid.is_distinct(n_swap)[rows][:, :, None]
        fits = is_open & (peaks <= self.device_limit_bytes)
        self.num_bounded_by_memory += int(np.count_nonzero(is_open & ~fits))
        may_fit = fits.any(axis=(0, 1))
        modes, fits, peaks = modes[may_fit], fits[:, :, may_fit], peaks[:, :, may_fit]
        row, depth = np.nonzero(fits.any(axis=2))
        if not len(row):
            return
        bounds_s = np.full(fits.shape, np.inf)
        found_s = layout.time.iteration_s(
            grid.prefix[rows[row]], grid.n_buffer[rows[row]], grid.prefetch_depth[depth], modes
        )
        bounds_s[row, depth] = np.where(fits[row, depth], found_s, np.inf)
        for number in np.flatnonzero(np.bincount(row)).tolist():
            index, bound_s = int(rows[number]), bounds_s[number]
            found = _Residency(family.layout, family.group, index, modes, bound_s, peaks[number])
            self._push(float(bound_s.min()), _RESIDENCY, (n_swap, family.layout, index), found)

    def _add_plans(self, found: _Residency) -> None:
        problem, layout = self._problem, self._problem.layouts[found.layout]
        is_open = np.isfinite(found.bound_s)
        if not (is_open & (found.least_peaks <= self.device_limit_bytes)).any():
            self.num_bounded_by_memory += int(np.count_nonzero(is_open))  # the limit was lowered meanwhile
            return
        n_swap = int(layout.grid.modes.n_swap[found.modes[0]])
        side_lanes = problem.side_lanes(problem.gather_plan(found.layout, found.row), n_swap)
        peaks = guaranteed_peaks(side_lanes, layout.grid.prefetch_depth, found.modes, problem.workload.resident_bytes)
        fits = is_open & (peaks <= self.device_limit_bytes)
        self.num_bounded_by_memory += int(np.count_nonzero(is_open & ~fits))
        sharper_s = layout.time.side_lanes_s(side_lanes, layout.grid.prefetch_depth, found.modes)
        self._queue(_Plans(found, np.maximum(found.bound_s, sharper_s), side_lanes, fits, peaks))

    def _queue(self, plans: _Plans) -> None:
        if plans.left:
            bound_s, depth, mode, _ = plans.left[-1]
            simplicity = self._problem.layouts[plans.layout].grid.simplicity(plans.row, depth, mode)
            self._push(bound_s, _PLAN, simplicity, plans)

    def _take(self, plans: _Plans) -> Candidate:
        """The next plan of a residency; the others go back into the queue."""
        plan = plans.left.pop()
        self._queue(plans)
        return self._candidate(plans, plan)

    def _candidate(self, plans: _Plans, plan: tuple[float, int, int, int]) -> Candidate:
        bound_s, depth, mode, peak_bytes = plan
        simplicity = self._problem.layouts[plans.layout].grid.simplicity(plans.row, depth, mode)
        index = (plans.row, depth, mode)
        return Candidate(plans.layout, index, simplicity, plans.side_lanes, bound_s, peak_bytes)

"""What the queue of plans holds, and how an entry is replaced by sharper ones.

[Note: Levels of a bound]
A *group* is all plans of a layout whose blocks send the same to the host, a *family* those of a group whose
chunks have the same residencies.  A plan's bound is sharpened in levels, each dearer than the one before: the bound of
its group, by the work of a whole period; that of its family; its own ([Note: Stretches] in
``sim/bounds/stretches.py``); whether it fits, by a lower bound of its peak; and whether it fits exactly, for which
slots must be assigned to its residency.
One heap holds groups, families, residencies and plans by what is known of them, so that whatever comes out of it as a
plan fits, and no plan that is still inside has a lower bound.

[Note: Looks]
A *look* compiles one residency and bounds its plans.  Where fewer buffers and less look-ahead only add tasks and waits
(``Residency.fewer_buffers_add``), what is found holds for all residencies of the family with fewer buffers.  So the
first look at a family is at the most buffers that may fit: if these cannot win, none of the family can.  Further looks
halve what is left.  As long as no plan is known, a few families are opened alone, for a good plan spares most looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np

from ...shared.answers.plan_kind import PlanKind
from ..bounds.exact_peaks import family_peaks
from ..space.plan_family import PlanFamily
from ..space.prices import FloatArray
from ..space.space import BoolArray, IntArray, LayoutGrid, Trips
from .problem import FamilyKey, SearchProblem

PLAN: Final = 0
RESIDENCY: Final = 1
FAMILY: Final = 2
GROUP: Final = 3

Place = tuple[float, int, tuple[Any, ...]]
"""Of an entry in the heap: its bound, level and simplicity."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that fits by all that is known before it is compiled."""

    layout: int
    index: tuple[int, int, int]
    """Residency, prefetch depth and modes, as indices into the layout's grid."""
    trips: Trips
    simplicity: tuple[int, ...]
    bound_s: float
    """No simulation of it takes less."""
    peak_bytes: int
    """Guaranteed device peak."""

    @property
    def family(self) -> FamilyKey:
        """The family of ``SearchProblem.family``."""
        return self.layout, self.index[0], self.trips


@dataclass(frozen=True)
class Beside:
    """How plans lie beside a limit of time."""

    num_below: int
    """Those with bounds below it."""
    num_others: int
    others_s: float
    """None of the others takes less; infinite without any."""

    @classmethod
    def of(cls, parts: Iterable[Beside]) -> Self:
        """Of all together."""
        found = list(parts)
        num_below, num_others = (sum(getattr(one, name) for one in found) for name in ("num_below", "num_others"))
        return cls(num_below, num_others, min((one.others_s for one in found), default=np.inf))


@dataclass(frozen=True, eq=False)
class Group:
    """The plans of a layout whose blocks send the same to the host."""

    layout: int
    number: int
    """Among the groups of ``ModeRows``."""
    bounds_s: FloatArray
    """(F, K) of every family by the work of lanes, infinite where a quick bound of memory leaves no plan; K choices of
    modes of the group."""

    def place(self, grid: LayoutGrid) -> Place:
        """By its most generous plan."""
        trips, _ = grid.modes.groups[self.number]
        return float(self.bounds_s.min()), GROUP, (*trips, -grid.layout.chunk_bytes)

    def families(self, problem: SearchProblem) -> Iterator[Family]:
        """Those that a quick bound of memory leaves."""
        layout = problem.layouts[self.layout]
        _, modes = layout.grid.modes.groups[self.number]
        for prefix, bounds_s in zip(layout.prefixes.tolist(), self.bounds_s, strict=True):
            may_fit = np.isfinite(bounds_s)
            if may_fit.any():
                yield Family(self.layout, self.number, prefix, modes[may_fit], bounds_s[may_fit])


@dataclass(frozen=True, eq=False)
class Family:
    """The plans of a group whose chunks have the same residencies."""

    layout: int
    group: int
    prefix: int
    modes: IntArray
    """(K,) the choices of modes that the group's quick bound of memory leaves."""
    bounds_s: FloatArray
    """(K,) by the work of lanes."""

    def place(self, grid: LayoutGrid) -> Place:
        """By its most generous plan."""
        trips = grid.modes.trips[self.modes[0]]
        return float(self.bounds_s.min()), FAMILY, (*trips, -grid.layout.chunk_bytes, self.prefix)

    def rows(self, problem: SearchProblem) -> tuple[Rows, int]:
        """Its residencies, most buffers first, and the number of plans that a bound of their peak excludes."""
        layout = problem.layouts[self.layout]
        grid = layout.grid
        rows = np.flatnonzero(grid.prefix == self.prefix)
        rows = rows[np.argsort(-grid.n_buffer[rows])]
        peaks = layout.memory.peak_bytes(self.prefix, grid.n_buffer[rows], grid.prefetch_depth, self.modes)
        is_distinct = grid.is_distinct(grid.modes.trips[self.modes[0]])[rows]
        is_open = np.broadcast_to(is_distinct[:, :, None], peaks.shape)
        fits = is_open & (peaks <= problem.device_budget_bytes)
        bounds_s = np.broadcast_to(self.bounds_s, peaks.shape[1:])
        found = Rows(self.layout, self.group, rows, self.modes, bounds_s, fits, peaks, is_whole=True)
        return found, int(np.count_nonzero(is_open & ~fits))


@dataclass(frozen=True, eq=False)
class Rows:
    """Plans of one family that a bound of their peak leaves: R residencies, D depths, K choices of modes."""

    layout: int
    group: int
    rows: IntArray
    """(R,) residencies, most buffers first."""
    modes: IntArray
    """(K,) as rows of ``ModeRows``."""
    bounds_s: FloatArray
    """(D, K) for each of the residencies."""
    fits: BoolArray
    """(R, D, K)"""
    least_peaks: IntArray
    """(R, D, K) bounds of the peaks."""
    is_whole: bool = False
    """Whether this is all of the family: nothing of it was looked at."""

    def of(self, rows: IntArray, columns: IntArray) -> Rows:
        """The plans with these residencies and choices of modes."""
        return replace(
            self,
            rows=self.rows[rows],
            modes=self.modes[columns],
            bounds_s=self.bounds_s[:, columns],
            fits=self.fits[rows][:, :, columns],
            least_peaks=self.least_peaks[rows][:, :, columns],
            is_whole=False,
        )

    def trimmed(self) -> Rows:
        """Without residencies and modes of which no plan fits."""
        rows, columns = (np.flatnonzero(self.fits.any(axis=axes)) for axes in ((1, 2), (0, 1)))
        return replace(self.of(rows, columns), is_whole=self.is_whole)

    def split(self, limit_bytes: int) -> tuple[Rows, Rows]:
        """The plans whose peaks may be within a limit, and those whose bounds exceed it."""
        is_beyond = self.least_peaks > limit_bytes
        within, beyond = (replace(self, fits=self.fits & side) for side in (~is_beyond, is_beyond))
        return within.trimmed(), beyond.trimmed()

    @property
    def num_plans(self) -> int:
        """Plans that may fit."""
        return int(np.count_nonzero(self.fits))

    def beside(self, limit_s: float) -> Beside:
        """Its plans beside a limit of time."""
        is_below = self.bounds_s < limit_s
        num_below = int(np.count_nonzero(self.fits & is_below))
        others_s = np.where(self.fits.any(axis=0) & ~is_below, self.bounds_s, np.inf)
        return Beside(num_below, self.num_plans - num_below, float(others_s.min()))

    @property
    def bound_s(self) -> float:
        """No plan takes less."""
        return float(np.where(self.fits.any(axis=0), self.bounds_s, np.inf).min())

    def place(self, grid: LayoutGrid) -> Place:
        """By the best of its plans."""
        row = self.rows[0]
        place = (-grid.layout.chunk_bytes, int(grid.prefix[row]), int(grid.n_buffer[row]))
        return self.bound_s, RESIDENCY, (*grid.modes.trips[self.modes[0]], *place, *self.modes.tolist())

    def look(self, problem: SearchProblem, limit_s: float) -> Look:
        """A residency, as far as its plans may win: see [Note: Looks]."""
        is_open = self.fits & (self.bounds_s < limit_s)
        open_rows = np.flatnonzero(is_open.any(axis=(1, 2)))
        if np.isinf(limit_s):
            # No plan is known: the one with the best bound, and as many buffers as fit with it.
            best = np.where(self.fits.any(axis=0), self.bounds_s, np.inf).argmin()
            open_rows = np.flatnonzero(self.fits.reshape(len(self.rows), -1)[:, best])
        number = int(open_rows[0 if self.is_whole or np.isinf(limit_s) else (len(open_rows) - 1) // 2])
        # Also of plans that do not fit: what is found of them holds for those with fewer buffers.
        adds = problem.fewer_buffers_add(self.layout, int(self.rows[number]))
        counting = is_open[number:] if adds else is_open[number : number + 1]
        columns = np.flatnonzero(counting.any(axis=(0, 1)))
        trips = problem.layouts[self.layout].grid.modes.trips[self.modes[0]]
        return Look(self, number, columns, problem.family(self.layout, int(self.rows[number]), trips))


@dataclass(frozen=True, eq=False)
class Look:
    """What is looked at closer: D depths and K choices of modes."""

    entry: Rows
    number: int
    """Of the residency among those of the entry."""
    columns: IntArray
    """(K,) of the entry's modes."""
    family: PlanFamily

    @property
    def row(self) -> int:
        """The residency."""
        return int(self.entry.rows[self.number])

    @property
    def modes(self) -> IntArray:
        """(K,) as rows of ``ModeRows``."""
        return self.entry.modes[self.columns]

    def taken_apart(
        self, problem: SearchProblem, found_s: FloatArray, limit_s: float
    ) -> tuple[Plans | None, list[Rows], int]:
        """The plans that may win and fit, all others, and the number of those that turn out not to fit.

        ``found_s``: (D, K) bounds of what was looked at.
        """
        rows, number = self.entry, self.number
        bounds_s = rows.bounds_s.copy()
        bounds_s[:, self.columns] = np.maximum(bounds_s[:, self.columns], found_s)
        may_win = (rows.fits[number] & (bounds_s < limit_s)).any(axis=0)
        columns, others = np.flatnonzero(may_win), np.flatnonzero(~may_win)
        plans, num_lost = None, 0
        if len(columns):
            modes = rows.modes[columns]
            is_open = rows.fits[number][:, columns]
            peaks = family_peaks(self.family, modes)
            fits = is_open & (peaks <= problem.device_budget_bytes)
            num_lost = int(np.count_nonzero(is_open & ~fits))
            plans = Plans(rows.layout, self.row, modes, bounds_s[:, columns], fits, peaks)
        self.family.let_go()
        every = np.arange(len(rows.modes))
        left = [
            replace(rows.of(np.array([number]), others), bounds_s=bounds_s[:, others]),
            rows.of(np.arange(number), every),
        ]
        if problem.fewer_buffers_add(rows.layout, self.row):
            rows = replace(rows, bounds_s=np.maximum.accumulate(bounds_s[::-1], axis=0)[::-1])
        left.append(rows.of(np.arange(number + 1, len(rows.rows)), every))
        return plans, left, num_lost


OpenedPlan = tuple[float, int, int, int]
"""Bound, depth, modes, peak."""


class Plans:
    """The plans of one residency that fit, best bound first, then simplest."""

    def __init__(
        self,
        layout: int,
        row: int,
        modes: IntArray,
        bounds_s: FloatArray,
        fits: BoolArray,
        peaks: IntArray,
    ) -> None:
        self.layout = layout
        self.row = row
        depth, place = fits.nonzero()
        bound_s = bounds_s[depth, place]
        order = np.lexsort((depth, place, bound_s))
        depth, place = depth[order], place[order]
        columns = bound_s[order], depth, modes[place], peaks[depth, place]
        self.left: list[OpenedPlan] = list(zip(*(column.tolist() for column in columns), strict=True))
        """The next plan last."""
        self.left.reverse()

    def with_left(self, left: list[OpenedPlan]) -> Plans:
        """The same residency with these of its plans."""
        other = Plans.__new__(Plans)
        other.layout, other.row, other.left = self.layout, self.row, left
        return other

    def split(self, limit_bytes: int) -> tuple[Plans, Plans]:
        """The plans with peaks within a limit, and the others."""
        within = [plan for plan in self.left if plan[3] <= limit_bytes]
        beyond = [plan for plan in self.left if plan[3] > limit_bytes] if len(within) < len(self.left) else []
        return self.with_left(within), self.with_left(beyond)

    @property
    def num_plans(self) -> int:
        """Plans that are left."""
        return len(self.left)

    def beside(self, limit_s: float) -> Beside:
        """Its plans beside a limit of time."""
        others_s = [plan[0] for plan in self.left if plan[0] >= limit_s]
        return Beside(len(self.left) - len(others_s), len(others_s), min(others_s, default=np.inf))

    @property
    def bound_s(self) -> float:
        """No plan takes less."""
        return self.left[-1][0]

    def simplicity(self, grid: LayoutGrid, plan: OpenedPlan) -> tuple[int, ...]:
        """Of one of the plans."""
        return grid.simplicity(self.row, plan[1], plan[2])

    def place(self, grid: LayoutGrid) -> Place:
        """By the next plan."""
        return self.bound_s, PLAN, self.simplicity(grid, self.left[-1])

    def candidate(self, grid: LayoutGrid, plan: OpenedPlan) -> Candidate:
        """One of the plans."""
        bound_s, depth, mode, peak_bytes = plan
        index, trips = (self.row, depth, mode), grid.modes.trips[mode]
        return Candidate(self.layout, index, trips, self.simplicity(grid, plan), bound_s, peak_bytes)


Sharp = Rows | Plans
"""Entries of which a limit of the peak leaves a part."""
Entry = Group | Family | Sharp


@dataclass(frozen=True)
class Groups:
    """The groups of one layout that budgets leave, and what became of all of its plans."""

    left: list[Group]
    num_plans: int
    num_bounded_by_memory: int


def groups_of(problem: SearchProblem, index: int, kind: PlanKind | None) -> Groups:
    """Bound every group of a layout, and leave out families that no budget holds; ``kind``: None for all kinds."""
    layout = problem.layouts[index]
    left: list[Group] = []
    num_plans = num_bounded_by_memory = 0
    for number, (trips, modes) in enumerate(layout.grid.modes.groups):
        is_open = np.ones((len(layout.prefixes), len(modes)), dtype=np.bool_)
        if kind is not None:
            is_open = layout.grid.is_of_kind(kind, layout.prefixes, modes)
        rows = np.flatnonzero(is_open.any(axis=1))
        if not len(rows):
            continue
        prefixes = layout.prefixes[rows]
        static_bytes = layout.table.static_device_bytes(prefixes, problem.workload.resident_bytes)
        levels = layout.memory.activation_bytes[modes]
        may_fit = np.zeros_like(is_open)
        may_fit[rows] = is_open[rows] & (static_bytes[:, None] + levels <= problem.device_budget_bytes)
        host_bytes = problem.host_bytes(index, prefixes, trips)
        is_within = (host_bytes <= problem.host_budget_bytes) & (host_bytes > problem.beyond_host_bytes)
        may_fit[rows] &= is_within[:, None]
        num_residencies = layout.num_residencies(trips)[:, None]
        num_plans += int((num_residencies * is_open).sum())
        num_bounded_by_memory += int((num_residencies * (is_open & ~may_fit)).sum())
        if may_fit.any():
            bounds_s = np.full(is_open.shape, np.inf)
            bounds_s[rows] = np.where(may_fit[rows], layout.work.period_s(prefixes, modes), np.inf)
            left.append(Group(index, number, bounds_s))
    return Groups(left, num_plans, num_bounded_by_memory)

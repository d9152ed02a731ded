"""The plans that may still win, best bound first, looked at no closer than needed.

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

from bisect import bisect_right
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Final

import numpy as np

from ...shared.answers.plan_kind import PlanKind
from ..bounds.exact_peaks import family_peaks
from ..space.plan_family import PlanFamily
from ..space.prices import FloatArray
from ..space.space import BoolArray, IntArray, LayoutGrid, Trips
from .problem import FamilyKey, SearchProblem

_PLAN: Final = 0
_RESIDENCY: Final = 1
_FAMILY: Final = 2
_GROUP: Final = 3
_AT_FIRST: Final = 8
"""Families that are opened before a plan is known."""
_AT_ONCE: Final = 16
"""Residencies that are looked at together: numpy's time goes by calls."""


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


@dataclass(frozen=True, eq=False)
class _Group:
    """The plans of a layout whose blocks send the same to the host."""

    layout: int
    number: int
    """Among the groups of ``ModeRows``."""
    bounds_s: FloatArray
    """(F, K) of every family by the work of lanes, infinite where a quick bound of memory leaves no plan; K choices of
    modes of the group."""


@dataclass(frozen=True, eq=False)
class _Family:
    layout: int
    group: int
    prefix: int
    modes: IntArray
    """(K,) the choices of modes that the group's quick bound of memory leaves."""
    bounds_s: FloatArray
    """(K,) by the work of lanes."""


@dataclass(frozen=True, eq=False)
class _Rows:
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

    def of(self, rows: IntArray, columns: IntArray) -> _Rows:
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


@dataclass(frozen=True, eq=False)
class _Look:
    """What is looked at closer: D depths and K choices of modes."""

    entry: _Rows
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


class _Plans:
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
        self.left = list(zip(*(column.tolist() for column in columns), strict=True))
        """(bound, depth, modes, peak), the next plan last."""
        self.left.reverse()


_Entry = _Group | _Family | _Rows | _Plans
_Opened = tuple[_Plans, tuple[float, int, int, int]]
"""A plan that was looked at, with those of its residency."""
_Item = tuple[float, int, tuple[Any, ...], int, _Entry]
"""Its bound, level and simplicity, and a ticket."""


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
        self._heap: list[_Item] = []
        for layout in range(len(problem.layouts)):
            self._add_groups(layout)
        heapify(self._heap)

    @property
    def next_bound_s(self) -> float:
        """No plan that has not come out takes less; infinite when the queue is empty."""
        return self._heap[0][0] if self._heap else np.inf

    def below(self, limit_s: float, most: int) -> list[Candidate]:
        """Plans that fit with bounds below ``limit_s``, at most so many, and none if none is left.

        The best of those that are known after a few looks: others may have lower bounds.  They leave the queue.
        """
        while self._heap and self._heap[0][0] < limit_s:
            if not isinstance(self._heap[0][-1], _Plans):
                self._look_closer(limit_s)
            known = self._opened(limit_s)
            if known:
                return self._taken(self._best(known, most))
            self._drop_lost()
        return []

    def open_families(self, limit_s: float, most: int) -> None:
        """Open the families with the lowest bounds as far as their memory: it sharpens ``next_bound_s``.

        At most so many, with bounds below ``limit_s``.
        """
        while most and self._heap and self._heap[0][0] < limit_s:
            entry = self._heap[0][-1]
            if not isinstance(entry, (_Group, _Family)):
                return
            heappop(self._heap)
            self._looked_at(entry, limit_s)
            most -= isinstance(entry, _Family)

    def _drop_lost(self) -> None:
        """Count and leave plans that fit no longer, for the limit was lowered."""
        opened = [item[-1] for item in self._heap if isinstance(item[-1], _Plans)]
        self._heap = [item for item in self._heap if not isinstance(item[-1], _Plans)]
        heapify(self._heap)
        for plans in opened:
            left = [plan for plan in plans.left if plan[3] <= self.device_limit_bytes]
            self.num_bounded_by_memory += len(plans.left) - len(left)
            plans.left = left
            self._queue(plans)

    def promising(self, most: int) -> list[Candidate]:
        """Plans that fit, of the families with the best bounds; at most so many, and none if no plan fits.

        Others may have lower bounds.  They leave the queue.
        """
        while not self._opened(np.inf) and self._open_families():
            pass
        return self._taken(self._best(self._opened(np.inf), most))

    def with_buffers(self, like: Candidate, row: int) -> Candidate | None:
        """The plan like another one in another residency; None if it does not fit or has left the queue."""
        _, depth, mode = like.index
        for item in self._heap:
            rows = item[-1]
            if isinstance(rows, _Rows) and rows.layout == like.layout and row in rows.rows and mode in rows.modes:
                self._heap.remove(item)
                heapify(self._heap)
                number, columns = int(np.flatnonzero(rows.rows == row)[0]), np.flatnonzero(rows.modes == mode)
                family = self._problem.family(like.layout, row, like.trips)
                self._sharpen([_Look(rows, number, columns, family)], np.inf)
                break
        for plans, plan in self._opened(np.inf):
            if (plans.layout, plans.row, *plan[1:3]) == (like.layout, row, depth, mode):
                return self._taken([(plans, plan)])[0]
        return None

    def _open_families(self) -> bool:
        """Look at a residency of each of the best families; false if nothing is left.

        Families that were looked at come first: of others, only the work of lanes is known.
        """
        if not any(isinstance(item[-1], _Rows) and not item[-1].is_whole for item in self._heap):
            return self._open_new_families()
        best: dict[tuple[int, int, int], _Item] = {}
        for item in self._heap:
            rows = item[-1]
            if isinstance(rows, _Rows) and not rows.is_whole:
                family = rows.layout, rows.group, int(self._grid(rows.layout).prefix[rows.rows[0]])
                best[family] = min(item, best.get(family, item))
        chosen = sorted(best.values())[:_AT_FIRST]
        tickets = {item[3] for item in chosen}
        self._heap = [item for item in self._heap if item[3] not in tickets]
        heapify(self._heap)
        entries = [item[-1] for item in chosen]
        looks = [self._look_at_rows(rows, np.inf) for rows in entries if isinstance(rows, _Rows)]
        self._sharpen([look for look in looks if look is not None], np.inf)
        return True

    def _open_new_families(self) -> bool:
        plans: list[_Item] = []
        looks: list[_Look] = []
        while self._heap and len(looks) < _AT_FIRST:
            item = heappop(self._heap)
            if isinstance(item[-1], _Plans):
                plans.append(item)
            else:
                looks += self._looked_at(item[-1], np.inf)
        for item in plans:
            heappush(self._heap, item)
        self._sharpen(looks, np.inf)
        return bool(looks)

    def _look_closer(self, limit_s: float) -> None:
        """Sharpen the bounds of whatever has the lowest."""
        looks: list[_Look] = []
        plans = []
        while self._heap and self._heap[0][0] < limit_s and len(looks) < _AT_ONCE:
            item = heappop(self._heap)
            if isinstance(item[-1], _Plans):
                plans.append(item)
            else:
                looks += self._looked_at(item[-1], limit_s)
        for item in plans:
            heappush(self._heap, item)
        self._sharpen(looks, limit_s)

    def _looked_at(self, entry: _Group | _Family | _Rows, limit_s: float) -> list[_Look]:
        """Replace an entry by what it consists of, or say what to look at."""
        if isinstance(entry, _Group):
            self._add_families(entry)
        elif isinstance(entry, _Family):
            self._add_rows(entry)
        else:
            look = self._look_at_rows(entry, limit_s)
            return [] if look is None else [look]
        return []

    def _sharpen(self, looks: list[_Look], limit_s: float) -> None:
        """Bound what is looked at, and queue it again."""
        found_s = self._problem.least_periods_s([(look.family, look.modes) for look in looks])
        for look, of_look_s in zip(looks, found_s, strict=True):
            self._add_plans(look, of_look_s, limit_s)

    def simplest_known(self, limit_s: float, most: int) -> list[Candidate]:
        """The simplest plans with lower bounds below ``limit_s`` of the residencies that have been looked at.

        At most so many; they leave the queue.
        """
        near = [
            (self._simplicity(plans, plan), number, (plans, plan))
            for number, (plans, plan) in enumerate(self._opened(limit_s))
        ]
        return self._taken([one for *_, one in sorted(near)[:most]])

    def _opened(self, limit_s: float) -> list[_Opened]:
        """The plans that fit and were looked at."""
        return [
            (entry, plan)
            for *_, entry in self._heap
            if isinstance(entry, _Plans)
            for plan in entry.left
            if plan[0] < limit_s and plan[3] <= self.device_limit_bytes
        ]

    def _best(self, known: list[_Opened], most: int) -> list[_Opened]:
        """At most so many with the best bounds; of equal ones the simplest."""
        known = sorted(known, key=lambda one: one[1][0])
        if len(known) > most:
            known = known[: bisect_right(known, known[most - 1][1][0], key=lambda one: one[1][0])]
        keyed = [(plan[0], self._simplicity(plans, plan), number) for number, (plans, plan) in enumerate(known)]
        return [known[number] for *_, number in sorted(keyed)[:most]]

    def _simplicity(self, plans: _Plans, plan: tuple[float, int, int, int]) -> tuple[int, ...]:
        return self._grid(plans.layout).simplicity(plans.row, plan[1], plan[2])

    def _taken(self, chosen: list[_Opened]) -> list[Candidate]:
        """Take these plans out of the queue."""
        taken: dict[int, set[tuple[float, int, int, int]]] = {}
        for plans, plan in chosen:
            taken.setdefault(id(plans), set()).add(plan)
        if taken:
            opened = {id(entry): entry for *_, entry in self._heap if isinstance(entry, _Plans)}
            self._heap = [item for item in self._heap if id(item[-1]) not in taken]
            heapify(self._heap)
            for number, gone in taken.items():
                opened[number].left = [plan for plan in opened[number].left if plan not in gone]
                self._queue(opened[number])
        return [self._candidate(plans, plan) for plans, plan in chosen]

    def _grid(self, layout: int) -> LayoutGrid:
        return self._problem.layouts[layout].grid

    def _push(self, bound_s: float, level: int, key: tuple[Any, ...], entry: _Entry) -> None:
        heappush(self._heap, (bound_s, level, key, next(self._ticket), entry))

    def _add_groups(self, index: int) -> None:
        """Bound every group by its most generous plan, and leave out families that no budget holds."""
        problem, layout = self._problem, self._problem.layouts[index]
        for number, (trips, modes) in enumerate(layout.grid.modes.groups):
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
            host_bytes = problem.host_bytes(index, prefixes, trips)
            is_within = (host_bytes <= problem.host_budget_bytes) & (host_bytes > problem.beyond_host_bytes)
            may_fit[rows] &= is_within[:, None]
            num_residencies = layout.num_residencies(trips)[:, None]
            self.num_candidates += int((num_residencies * is_open).sum())
            self.num_bounded_by_memory += int((num_residencies * (is_open & ~may_fit)).sum())
            if may_fit.any():
                bounds_s = np.full(is_open.shape, np.inf)
                bounds_s[rows] = np.where(may_fit[rows], layout.work.period_s(prefixes, modes), np.inf)
                self._push(
                    float(bounds_s.min()),
                    _GROUP,
                    (*trips, -layout.grid.layout.chunk_bytes),
                    _Group(index, number, bounds_s),
                )

    def _add_families(self, group: _Group) -> None:
        layout = self._problem.layouts[group.layout]
        trips, modes = layout.grid.modes.groups[group.number]
        for prefix, bounds_s in zip(layout.prefixes.tolist(), group.bounds_s, strict=True):
            may_fit = np.isfinite(bounds_s)
            if may_fit.any():
                family = _Family(group.layout, group.number, prefix, modes[may_fit], bounds_s[may_fit])
                key = (*trips, -layout.grid.layout.chunk_bytes, prefix)
                self._push(float(bounds_s.min()), _FAMILY, key, family)

    def _add_rows(self, family: _Family) -> None:
        """Leave out what a bound of the peak excludes, and queue the family's residencies, most buffers first."""
        layout = self._problem.layouts[family.layout]
        grid, modes = layout.grid, family.modes
        trips = grid.modes.trips[modes[0]]
        rows = np.flatnonzero(grid.prefix == family.prefix)
        rows = rows[np.argsort(-grid.n_buffer[rows])]
        peaks = layout.memory.peak_bytes(family.prefix, grid.n_buffer[rows], grid.prefetch_depth, modes)
        is_open = np.broadcast_to(grid.is_distinct(trips)[rows][:, :, None], peaks.shape)
        fits = is_open & (peaks <= self.device_limit_bytes)
        self.num_bounded_by_memory += int(np.count_nonzero(is_open & ~fits))
        bounds_s = np.broadcast_to(family.bounds_s, peaks.shape[1:])
        self._push_rows(_Rows(family.layout, family.group, rows, modes, bounds_s, fits, peaks, is_whole=True))

    def _push_rows(self, found: _Rows) -> None:
        rows = np.flatnonzero(found.fits.any(axis=(1, 2)))
        columns = np.flatnonzero(found.fits.any(axis=(0, 1)))
        if len(rows):
            left = replace(found.of(rows, columns), is_whole=found.is_whole)
            bound_s = float(np.where(left.fits.any(axis=0), left.bounds_s, np.inf).min())
            grid, row = self._grid(found.layout), left.rows[0]
            place = (-grid.layout.chunk_bytes, int(grid.prefix[row]), int(grid.n_buffer[row]))
            key = (*grid.modes.trips[left.modes[0]], *place, *left.modes.tolist())
            self._push(bound_s, _RESIDENCY, key, left)

    def _look_at_rows(self, found: _Rows, limit_s: float) -> _Look | None:
        """A residency, as far as its plans may win: see [Note: Looks]."""
        lost = found.fits & (found.least_peaks > self.device_limit_bytes)
        if lost.any():
            # The limit was lowered meanwhile.
            self.num_bounded_by_memory += int(np.count_nonzero(lost))
            self._push_rows(replace(found, fits=found.fits & ~lost))
            return None
        is_open = found.fits & (found.bounds_s < limit_s)
        open_rows = np.flatnonzero(is_open.any(axis=(1, 2)))
        if np.isinf(limit_s):
            # No plan is known: the one with the best bound, and as many buffers as fit with it.
            best = np.where(found.fits.any(axis=0), found.bounds_s, np.inf).argmin()
            open_rows = np.flatnonzero(found.fits.reshape(len(found.rows), -1)[:, best])
        number = int(open_rows[0 if found.is_whole or np.isinf(limit_s) else (len(open_rows) - 1) // 2])
        # Also of plans that do not fit: what is found of them holds for those with fewer buffers.
        adds = self._problem.fewer_buffers_add(found.layout, int(found.rows[number]))
        counting = is_open[number:] if adds else is_open[number : number + 1]
        columns = np.flatnonzero(counting.any(axis=(0, 1)))
        trips = self._grid(found.layout).modes.trips[found.modes[0]]
        return _Look(found, number, columns, self._problem.family(found.layout, int(found.rows[number]), trips))

    def _add_plans(self, look: _Look, found_s: FloatArray, limit_s: float) -> None:
        """Queue the plans that were looked at and fit, and all others; ``found_s``: (D, K)."""
        rows, number = look.entry, look.number
        bounds_s = rows.bounds_s.copy()
        bounds_s[:, look.columns] = np.maximum(bounds_s[:, look.columns], found_s)
        may_win = (rows.fits[number] & (bounds_s < limit_s)).any(axis=0)
        columns, others = np.flatnonzero(may_win), np.flatnonzero(~may_win)
        if len(columns):
            modes = rows.modes[columns]
            is_open = rows.fits[number][:, columns]
            peaks = family_peaks(look.family, modes)
            fits = is_open & (peaks <= self.device_limit_bytes)
            self.num_bounded_by_memory += int(np.count_nonzero(is_open & ~fits))
            self._queue(_Plans(rows.layout, look.row, modes, bounds_s[:, columns], fits, peaks))
        look.family.let_go()
        every = np.arange(len(rows.modes))
        self._push_rows(replace(rows.of(np.array([number]), others), bounds_s=bounds_s[:, others]))
        self._push_rows(rows.of(np.arange(number), every))
        if self._problem.fewer_buffers_add(rows.layout, look.row):
            rows = replace(rows, bounds_s=np.maximum.accumulate(bounds_s[::-1], axis=0)[::-1])
        self._push_rows(rows.of(np.arange(number + 1, len(rows.rows)), every))

    def _queue(self, plans: _Plans) -> None:
        if plans.left:
            self._push(plans.left[-1][0], _PLAN, self._simplicity(plans, plans.left[-1]), plans)

    def _candidate(self, plans: _Plans, plan: tuple[float, int, int, int]) -> Candidate:
        bound_s, depth, mode, peak_bytes = plan
        grid = self._grid(plans.layout)
        simplicity, trips = self._simplicity(plans, plan), grid.modes.trips[mode]
        return Candidate(plans.layout, (plans.row, depth, mode), trips, simplicity, bound_s, peak_bytes)

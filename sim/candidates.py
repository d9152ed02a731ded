"""The plans that may still win, best bound first, looked at no closer than needed.

[Note: Levels of a bound]
A *family* is all plans of a layout with the same persistent chunks.  A plan's bound is sharpened in levels, each dearer
than the one before: the bound of its family; its own ([Note: Time bounds] in ``sim/time_bounds.py``); whether it fits,
by a lower bound of its peak; and whether it fits exactly, for which slots must be assigned to its residency.  One heap
holds families, residencies and plans by what is known of them, so that whatever comes out of it as a plan fits, and no
plan that is still inside has a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

import numpy as np

from .compute_table import FloatArray
from .residency import Residency, residency
from .search_problem import SearchProblem
from .space import BoolArray, IntArray

_FAMILY: Final = 0
_RESIDENCY: Final = 1
_PLAN: Final = 2


@dataclass(frozen=True)
class Candidate:
    """A plan that fits by all that is known before it is compiled."""

    layout: int
    index: tuple[int, int, int]
    """Residency, prefetch depth and number of checkpointed blocks, as indices into the layout's grid."""
    simplicity: tuple[int, ...]
    residency: Residency
    bound_s: float
    """No simulation of it takes less."""
    peak_bytes: int
    """Guaranteed device peak."""


@dataclass(frozen=True)
class _Family:
    layout: int
    n_persist: int
    may_fit: BoolArray
    """(K,) what the family's quick bound of memory leaves."""


@dataclass(frozen=True)
class _Residency:
    """The plans of one residency that a bound of their peak leaves."""

    layout: int
    row: int
    bound_s: FloatArray
    """(D, K), infinite for plans that do not fit or are not distinct."""


class _Plans:
    """The plans of one residency that fit, best bound first, then simplest."""

    def __init__(self, layout: int, row: int, resident: Residency, bound_s: FloatArray, peaks: IntArray) -> None:
        self.layout = layout
        self.row = row
        self.residency = resident
        depth, checkpoint = np.isfinite(bound_s).nonzero()
        order = np.lexsort((depth, checkpoint, bound_s[depth, checkpoint]))
        depth, checkpoint = depth[order], checkpoint[order]
        self.left = list(
            zip(
                bound_s[depth, checkpoint].tolist(),
                depth.tolist(),
                checkpoint.tolist(),
                peaks[depth, checkpoint].tolist(),
                strict=True,
            )
        )
        """(bound, depth, checkpoint, peak), the next plan last."""
        self.left.reverse()


class Candidates:
    """The space as a queue; see [Note: Levels of a bound].  Deterministic: ties come out in the order of simplicity."""

    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem
        self.num_bounded_by_memory = 0
        self._ticket = count()
        self._heap: list[tuple[float, int, tuple[int, ...], int, _Family | _Residency | _Plans]] = []
        for layout in range(len(problem.layouts)):
            self._add_families(layout)
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
                yield self._take(entry)
            elif isinstance(entry, _Residency):
                self._add_plans(entry)
            else:
                self._add_residencies(entry)

    def _push(self, bound_s: float, level: int, key: tuple[int, ...], entry: _Family | _Residency | _Plans) -> None:
        heappush(self._heap, (bound_s, level, key, next(self._ticket), entry))

    def _add_families(self, index: int) -> None:
        """Bound every family by its most generous plan, and leave out those that no budget holds."""
        problem, layout = self._problem, self._problem.layouts[index]
        grid, table, prefixes = layout.grid, layout.table, layout.prefixes
        most_buffers = np.full(len(prefixes), len(layout.table.size_bytes))
        deepest = np.full(len(prefixes), grid.prefetch_depth[-1])
        bounds_s = layout.time.iteration_s(prefixes, most_buffers, deepest)
        levels = (problem.compute.alive_bytes + problem.compute.peak_bytes).max(axis=1)
        static_bytes = table.static_device_bytes(prefixes, problem.workload.resident_bytes)
        may_fit = static_bytes[:, None] + levels <= problem.device_budget_bytes
        host_bytes = table.pinned_host_bytes(prefixes) + table.host_bytes(prefixes)
        may_fit &= (host_bytes <= problem.host_budget_bytes)[:, None]
        sizes = [np.count_nonzero(grid.is_distinct[grid.n_persist == prefix]) for prefix in prefixes]
        self.num_bounded_by_memory += int((np.array(sizes)[:, None] * ~may_fit).sum())
        for prefix, bound_s, fits in zip(
            prefixes, np.where(may_fit, bounds_s, np.inf).min(axis=1), may_fit, strict=True
        ):
            if fits.any():
                self._push(float(bound_s), _FAMILY, (index, int(prefix)), _Family(index, int(prefix), fits))

    def _add_residencies(self, family: _Family) -> None:
        problem, layout = self._problem, self._problem.layouts[family.layout]
        grid = layout.grid
        rows = np.flatnonzero(grid.n_persist == family.n_persist)
        columns = np.flatnonzero(family.may_fit)
        peaks = layout.memory.peak_bytes(family.n_persist, grid.n_buffer[rows], grid.prefetch_depth, columns)
        is_open = grid.is_distinct[rows][:, :, None]
        fits = is_open & (peaks <= problem.device_budget_bytes)
        self.num_bounded_by_memory += int(np.count_nonzero(is_open & ~fits))
        row, depth = np.nonzero(fits.any(axis=2))
        bounds_s = np.full((*fits.shape[:2], len(family.may_fit)), np.inf)
        found_s = layout.time.iteration_s(
            grid.n_persist[rows[row]], grid.n_buffer[rows[row]], grid.prefetch_depth[depth], columns
        )
        bounds_s[row[:, None], depth[:, None], columns] = np.where(fits[row, depth], found_s, np.inf)
        for number in np.flatnonzero(np.bincount(row)).tolist():
            index, bound_s = int(rows[number]), bounds_s[number]
            found = _Residency(family.layout, index, bound_s)
            self._push(float(bound_s.min()), _RESIDENCY, (family.layout, index), found)

    def _add_plans(self, found: _Residency) -> None:
        problem, layout = self._problem, self._problem.layouts[found.layout]
        grid, row = layout.grid, found.row
        resident = residency(layout.table, int(grid.n_persist[row]), int(grid.n_buffer[row]))
        peaks = resident.peak_bytes(problem.compute, grid.prefetch_depth, problem.workload.resident_bytes)
        fits = peaks <= problem.device_budget_bytes
        self.num_bounded_by_memory += int(np.count_nonzero(np.isfinite(found.bound_s) & ~fits))
        self._queue(_Plans(found.layout, row, resident, np.where(fits, found.bound_s, np.inf), peaks))

    def _queue(self, plans: _Plans) -> None:
        if plans.left:
            bound_s, depth, checkpoint, _ = plans.left[-1]
            simplicity = self._problem.layouts[plans.layout].grid.simplicity(plans.row, depth, checkpoint)
            self._push(bound_s, _PLAN, simplicity, plans)

    def _take(self, plans: _Plans) -> Candidate:
        """The next plan of a residency; the others go back into the queue."""
        bound_s, depth, checkpoint, peak_bytes = plans.left.pop()
        self._queue(plans)
        simplicity = self._problem.layouts[plans.layout].grid.simplicity(plans.row, depth, checkpoint)
        index = (plans.row, depth, checkpoint)
        return Candidate(plans.layout, index, simplicity, plans.residency, bound_s, peak_bytes)

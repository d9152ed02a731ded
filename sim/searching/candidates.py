"""The plans that may still win, best bound first, looked at no closer than needed.

What the queue holds, and how bounds are sharpened, says [Note: Levels of a bound] in ``sim/searching/levels.py``.

[Note: Limits of layouts]
Every layout has a limit of its guaranteed peaks, within the device's budget, that may be lowered and raised.  Plans
beyond it wait aside, each with its bound, and come back when the limit is raised.  So nothing is looked at twice, and
the certificate can say how many of the plans that wait might be faster.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

import numpy as np

from ...shared.answers.plan_kind import PlanKind
from ..space.prices import FloatArray
from ..space.space import LayoutGrid
from .levels import Beside, Candidate, Entry, Family, Group, Look, OpenedPlan, Place, Plans, Rows, Sharp, groups_of
from .problem import SearchProblem

_AT_FIRST: Final = 8
"""Families that are opened before a plan is known."""
_AT_ONCE: Final = 16
"""Residencies that are looked at together: numpy's time goes by calls."""

_Opened = tuple[Plans, OpenedPlan]
"""A plan that was looked at, with those of its residency."""
_Item = tuple[*Place, int, Entry]
"""Its bound, level and simplicity, and a ticket."""


class Candidates:
    """The plans of one kind as a queue.  Ties come out in the order of simplicity.

    ``kind``: None for the plans of all kinds.
    """

    def __init__(self, problem: SearchProblem, kind: PlanKind | None = None) -> None:
        self._problem = problem
        self.num_candidates = 0
        """Distinct plans of the kind."""
        self.num_bounded_by_memory = 0
        self._limits_bytes = [problem.device_budget_bytes] * len(problem.layouts)
        self._beyond: list[list[Sharp]] = [[] for _ in problem.layouts]
        """By layout, what waits beyond its limit."""
        self._ticket = count()
        self._heap: list[_Item] = []
        for layout in range(len(problem.layouts)):
            groups = groups_of(problem, layout, kind)
            self.num_candidates += groups.num_plans
            self.num_bounded_by_memory += groups.num_bounded_by_memory
            for group in groups.left:
                self._queue(group)

    # -- limits ------------------------------------------------------------------------------------------------------

    def limit_bytes(self, layout: int) -> int:
        """Plans of the layout with higher guaranteed peaks wait."""
        return self._limits_bytes[layout]

    def set_limit(self, layout: int, limit_bytes: int) -> None:
        """Lower the limit of a layout, or raise it, which brings back plans within it.  No higher than the budget."""
        is_raised = limit_bytes > self._limits_bytes[layout]
        self._limits_bytes[layout] = limit_bytes
        if is_raised:
            waiting, self._beyond[layout] = self._beyond[layout], []
            for entry in waiting:
                self._queue_within(entry)

    def holds(self, candidate: Candidate) -> bool:
        """Whether a plan is within the limit of its layout."""
        return candidate.peak_bytes <= self._limits_bytes[candidate.layout]

    @property
    def num_beyond(self) -> int:
        """Plans that wait beyond the limits of their layouts."""
        return sum(entry.num_plans for waiting in self._beyond for entry in waiting)

    def beyond(self, limit_s: float) -> Beside:
        """The same beside a limit of time."""
        return Beside.of(entry.beside(limit_s) for waiting in self._beyond for entry in waiting)

    def waits(self, layout: int) -> bool:
        """Whether plans of a layout wait."""
        return bool(self._beyond[layout])

    # -- the queue ---------------------------------------------------------------------------------------------------

    @property
    def next_bound_s(self) -> float:
        """No plan that has not come out takes less; infinite when the queue is empty."""
        return self._heap[0][0] if self._heap else np.inf

    def below(self, limit_s: float, most: int) -> list[Candidate]:
        """Plans that fit with bounds below ``limit_s``, at most so many, and none if none is left.

        The best of those that are known after a few looks: others may have lower bounds.  They leave the queue.
        """
        while self._heap and self._heap[0][0] < limit_s:
            if not isinstance(self._heap[0][-1], Plans):
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
            if not isinstance(entry, (Group, Family)):
                return
            heappop(self._heap)
            self._looked_at(entry, limit_s)
            most -= isinstance(entry, Family)

    def _drop_lost(self) -> None:
        """Have opened plans wait that are no longer within the limit of their layout."""
        opened = [item[-1] for item in self._heap if isinstance(item[-1], Plans)]
        self._heap = [item for item in self._heap if not isinstance(item[-1], Plans)]
        heapify(self._heap)
        for plans in opened:
            self._queue_within(plans)

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
            if isinstance(rows, Rows) and rows.layout == like.layout and row in rows.rows and mode in rows.modes:
                self._heap.remove(item)
                heapify(self._heap)
                number, columns = int(np.flatnonzero(rows.rows == row)[0]), np.flatnonzero(rows.modes == mode)
                family = self._problem.family(like.layout, row, like.trips)
                self._sharpen([Look(rows, number, columns, family)], np.inf)
                break
        for plans, plan in self._opened(np.inf):
            if (plans.layout, plans.row, *plan[1:3]) == (like.layout, row, depth, mode):
                return self._taken([(plans, plan)])[0]
        return None

    def _open_families(self) -> bool:
        """Look at a residency of each of the best families; false if nothing is left.

        Families that were looked at come first: of others, only the work of lanes is known.
        """
        if not any(isinstance(item[-1], Rows) and not item[-1].is_whole for item in self._heap):
            return self._open_new_families()
        best: dict[tuple[int, int, int], _Item] = {}
        for item in self._heap:
            rows = item[-1]
            if isinstance(rows, Rows) and not rows.is_whole:
                family = rows.layout, rows.group, int(self._grid(rows.layout).prefix[rows.rows[0]])
                best[family] = min(item, best.get(family, item))
        chosen = sorted(best.values())[:_AT_FIRST]
        tickets = {item[3] for item in chosen}
        self._heap = [item for item in self._heap if item[3] not in tickets]
        heapify(self._heap)
        entries = [item[-1] for item in chosen]
        looks = [self._look_at_rows(rows, np.inf) for rows in entries if isinstance(rows, Rows)]
        self._sharpen([look for look in looks if look is not None], np.inf)
        return True

    def _open_new_families(self) -> bool:
        plans: list[_Item] = []
        looks: list[Look] = []
        while self._heap and len(looks) < _AT_FIRST:
            item = heappop(self._heap)
            if isinstance(item[-1], Plans):
                plans.append(item)
            else:
                looks += self._looked_at(item[-1], np.inf)
        for item in plans:
            heappush(self._heap, item)
        self._sharpen(looks, np.inf)
        return bool(looks)

    def _look_closer(self, limit_s: float) -> None:
        """Sharpen the bounds of whatever has the lowest."""
        looks: list[Look] = []
        plans = []
        while self._heap and self._heap[0][0] < limit_s and len(looks) < _AT_ONCE:
            item = heappop(self._heap)
            if isinstance(item[-1], Plans):
                plans.append(item)
            else:
                looks += self._looked_at(item[-1], limit_s)
        for item in plans:
            heappush(self._heap, item)
        self._sharpen(looks, limit_s)

    def _looked_at(self, entry: Group | Family | Rows, limit_s: float) -> list[Look]:
        """Replace an entry by what it consists of, or say what to look at."""
        if isinstance(entry, Group):
            for family in entry.families(self._problem):
                self._queue(family)
        elif isinstance(entry, Family):
            rows, num_lost = entry.rows(self._problem)
            self.num_bounded_by_memory += num_lost
            self._queue_within(rows)
        else:
            look = self._look_at_rows(entry, limit_s)
            return [] if look is None else [look]
        return []

    def _sharpen(self, looks: list[Look], limit_s: float) -> None:
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
            if isinstance(entry, Plans)
            for plan in entry.left
            if plan[0] < limit_s and plan[3] <= self._limits_bytes[entry.layout]
        ]

    def _best(self, known: list[_Opened], most: int) -> list[_Opened]:
        """At most so many with the best bounds; of equal ones the simplest."""
        known = sorted(known, key=lambda one: one[1][0])
        if len(known) > most:
            known = known[: bisect_right(known, known[most - 1][1][0], key=lambda one: one[1][0])]
        keyed = [(plan[0], self._simplicity(plans, plan), number) for number, (plans, plan) in enumerate(known)]
        return [known[number] for *_, number in sorted(keyed)[:most]]

    def _simplicity(self, plans: Plans, plan: OpenedPlan) -> tuple[int, ...]:
        return plans.simplicity(self._grid(plans.layout), plan)

    def _taken(self, chosen: list[_Opened]) -> list[Candidate]:
        """Take these plans out of the queue."""
        taken: dict[int, set[OpenedPlan]] = {}
        for plans, plan in chosen:
            taken.setdefault(id(plans), set()).add(plan)
        if taken:
            opened = {id(entry): entry for *_, entry in self._heap if isinstance(entry, Plans)}
            self._heap = [item for item in self._heap if id(item[-1]) not in taken]
            heapify(self._heap)
            for number, gone in taken.items():
                opened[number].left = [plan for plan in opened[number].left if plan not in gone]
                self._queue(opened[number])
        return [plans.candidate(self._grid(plans.layout), plan) for plans, plan in chosen]

    def _grid(self, layout: int) -> LayoutGrid:
        return self._problem.layouts[layout].grid

    def _queue(self, entry: Entry) -> None:
        """Put an entry where its bound belongs; one without a plan is dropped."""
        if isinstance(entry, Rows):
            entry = entry.trimmed()
        if isinstance(entry, (Group, Family)) or entry.num_plans:
            heappush(self._heap, (*entry.place(self._grid(entry.layout)), next(self._ticket), entry))

    def _queue_within(self, entry: Sharp) -> None:
        """Queue the plans within the limit of their layout; the others wait."""
        within, beyond = entry.split(self._limits_bytes[entry.layout])
        if beyond.num_plans:
            self._beyond[entry.layout].append(beyond)
        self._queue(within)

    def _look_at_rows(self, found: Rows, limit_s: float) -> Look | None:
        """What to look at; None if the limit was lowered meanwhile, and what it leaves of the entry is queued again."""
        if (found.fits & (found.least_peaks > self._limits_bytes[found.layout])).any():
            self._queue_within(found)
            return None
        return found.look(self._problem, limit_s)

    def _add_plans(self, look: Look, found_s: FloatArray, limit_s: float) -> None:
        """Queue the plans that were looked at and fit, and all others; ``found_s``: (D, K)."""
        plans, others, num_lost = look.taken_apart(self._problem, found_s, limit_s)
        self.num_bounded_by_memory += num_lost
        if plans is not None:
            self._queue_within(plans)
        for rows in others:
            self._queue(rows)

"""What plans that a search leaves out by default might bring at most, by bounds of the larger space.

[Note: Plans that are left out]
By default no plan swaps activations, steps chunks on the host that the device keeps, or looks rows up: a search with
them takes a few times as long.  What they might bring is told by the bounds that a search begins with: the quick bound
of the time ([Note: Round trips] in ``sim/bounds/round_trips.py``) of all plans that a quick bound of memory leaves.  No
plan is looked at.

*Swaps.*  Every residency of the search, with the numbers of swapped blocks that a search with swaps would try.  The
families with the lowest bounds are opened as far as their memory.  Plans that swap and have the host step what the
device keeps are of the next sort.

*Chunks that the host steps.*  Take one offloaded chunk to the device, to be stepped on the host.  Its gradients leave,
CPU Adam steps it and its parameters come once per step as before; it has no more host memory and needs more of the
device, for good.  So the quick bounds of the plans that offload it, which count no buffers, hold for those that keep
it, if every chunk is trained: no table of theirs is needed.

*Rows.*  Nothing is known of them that would be cheap.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from ...shared.answers.plan_kind import PlanKind
from ...shared.answers.search_result import LeftOut, LeftOutSort
from ...shared.layout.looked_up import why_not_looked_up
from ...shared.layout.residencies import ChunkResidency
from ...shared.schema.plan import ParallelMode
from ..bounds.least_work import LeastWork
from .candidates import Candidates
from .problem import SearchProblem
from .request import SearchRequest

_KNOBS: Final = {LeftOutSort.SWAPS: "n_swap", LeftOutSort.HOST_STEPPED: "n_host_stepped"}
_MOST_FAMILIES: Final = 4
"""Opened in each space: bounds get sharper by a percent or two, in a percent of a search's seconds."""


def left_out(request: SearchRequest, problems: Iterable[SearchProblem], limit_s: float) -> tuple[LeftOut, ...]:
    """What the spaces of ``request`` leave out by default and may fit, each with a bound of its time.

    ``limit_s``: the time of the plan that was found; bounds above it are not sharpened.
    """
    problems = list(problems)
    sorts = [sort for sort in _KNOBS if all(_is_left_out(request, problem, sort) for problem in problems)]
    bounds_s = [_bounds_s(request, problem, limit_s) for problem in problems] if sorts else []
    found = []
    for sort in sorts:
        known_s = [of_space[sort] for of_space in bounds_s if of_space is not None and sort in of_space]
        if len(known_s) < len(bounds_s):
            found.append(LeftOut(sort=sort, shortest_possible_s=None))
        elif np.isfinite(least_s := min(known_s, default=np.inf)) and least_s > 0:
            found.append(LeftOut(sort=sort, shortest_possible_s=least_s))
    if not request.space.looks_up_rows and any(_may_look_up(problem) for problem in problems):
        found.append(LeftOut(sort=LeftOutSort.ROW_LOOKUPS, shortest_possible_s=None))
    return tuple(found)


def _bounds_s(request: SearchRequest, problem: SearchProblem, limit_s: float) -> dict[LeftOutSort, float] | None:
    """No plan of each sort takes less; infinite if none fits.  A sort of which nothing is known is not there."""
    if problem.is_shared or not all(isinstance(layout.work, LeastWork) for layout in problem.layouts):
        # Of other methods no work is known without a look, and a larger space would share one memory otherwise.
        return None
    is_swapping = _is_left_out(request, problem, LeftOutSort.SWAPS)
    space = request.space.model_copy(update={"n_swap": None}) if is_swapping else None
    larger, found = problem.with_modes(space), {}
    if is_swapping:
        swapping = Candidates(larger, PlanKind.SWAPPED)
        swapping.open_families(limit_s, _MOST_FAMILIES)
        found[LeftOutSort.SWAPS] = swapping.next_bound_s
    if not ChunkResidency.HOST_STEPPED.is_known_to(problem.step.parallel):
        found[LeftOutSort.HOST_STEPPED] = np.inf
    elif request.space.n_buffer is None and not problem.has_disk and _steps_all(problem):
        # A plan that keeps chunks may do with fewer buffers than are allowed; what lies on a disk depends on the rest.
        # Those that swap too are counted here: families that were opened are bounded by what their offloaded chunks do.
        kinds = (PlanKind.OFFLOADED, PlanKind.SWAPPED)
        found[LeftOutSort.HOST_STEPPED] = min(Candidates(larger, kind).next_bound_s for kind in kinds)
    return found


def _steps_all(problem: SearchProblem) -> bool:
    """Whether every chunk is trained: frozen ones among those that the host steps are not gathered at all."""
    return all(bool(layout.table.facts.is_trainable.all()) for layout in problem.layouts)


def _is_left_out(request: SearchRequest, problem: SearchProblem, sort: LeftOutSort) -> bool:
    if sort is LeftOutSort.SWAPS and not problem.method.policies.sections.has_modes:
        return False
    knob = _KNOBS[sort]
    return knob not in request.space.model_fields_set and getattr(request.space, knob) == (0,)


def _may_look_up(problem: SearchProblem) -> bool:
    """Whether plans of ``problem`` may look rows up."""
    is_alone = problem.step.parallel is ParallelMode.SINGLE and not problem.step.knobs.widens
    return is_alone and any(why_not_looked_up(problem.workload, one.grid.layout) is None for one in problem.layouts)

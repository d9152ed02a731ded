"""The least memory that plans of a space need: of the device, of the host, of one within a limit of the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...shared.schema.plan import Plan
from ..bounds.exact_peaks import family_peaks
from .problem import SearchProblem


@dataclass(frozen=True)
class Need:
    """What one plan needs."""

    plan: Plan
    device_bytes: int
    """Its guaranteed peak."""
    host_bytes: int
    disk_bytes: int = 0


def least_device(problem: SearchProblem, host_limit_bytes: int | None = None) -> Need | None:
    """The plan with the smallest guaranteed device peak, of those within the host's limit; None if there is none."""
    within = [place for place in _places(problem) if host_limit_bytes is None or place.host_bytes <= host_limit_bytes]
    best: Need | None = None
    for bound_bytes, _, index, number, prefix in sorted(within, key=lambda place: (place.bound_bytes, place[2:])):
        if best is not None and bound_bytes >= best.device_bytes:
            break
        layout = problem.layouts[index]
        grid, modes = layout.grid, layout.grid.modes.groups[number][1]
        peaks = layout.memory.peak_bytes(prefix, grid.n_buffer[grid.prefix == prefix], grid.prefetch_depth, modes)
        if best is not None and peaks.min() >= best.device_bytes:
            continue
        found = _cheapest_of_prefix(problem, index, number, prefix)
        if best is None or found.device_bytes < best.device_bytes:
            best = found
    return best


def some_plan_fits(problem: SearchProblem) -> bool:
    """Whether a plan is within both budgets, for every timing."""
    device_bytes, host_bytes = problem.device_budget_bytes, problem.host_budget_bytes
    within = [one for one in _places(problem) if one.host_bytes <= host_bytes and one.bound_bytes <= device_bytes]
    for _, _, index, number, prefix in sorted(within, key=lambda place: (place.bound_bytes, place[2:])):
        layout = problem.layouts[index]
        grid, modes = layout.grid, layout.grid.modes.groups[number][1]
        n_buffer = grid.n_buffer[grid.prefix == prefix]
        if layout.memory.peak_bytes(prefix, n_buffer, grid.prefetch_depth, modes).min() > device_bytes:
            continue
        if _cheapest_of_prefix(problem, index, number, prefix).device_bytes <= device_bytes:
            return True
    return False


def least_host(problem: SearchProblem, device_limit_bytes: int | None = None) -> Need | None:
    """The plan that needs the least host memory, of those within the device's limit; None if there is none.

    Of several, the one with the smallest guaranteed device peak.
    """
    within = [
        place for place in _places(problem) if device_limit_bytes is None or place.bound_bytes <= device_limit_bytes
    ]
    best: Need | None = None
    for _, host_bytes, index, number, prefix in sorted(within, key=lambda place: place[1:]):
        if best is not None and host_bytes > best.host_bytes:
            break
        if device_limit_bytes is not None:
            layout = problem.layouts[index]
            grid, modes = layout.grid, layout.grid.modes.groups[number][1]
            n_buffer = grid.n_buffer[grid.prefix == prefix]
            if layout.memory.peak_bytes(prefix, n_buffer, grid.prefetch_depth, modes).min() > device_limit_bytes:
                continue
        found = _cheapest_of_prefix(problem, index, number, prefix)
        if device_limit_bytes is not None and found.device_bytes > device_limit_bytes:
            continue
        if best is None or found.device_bytes < best.device_bytes:
            best = found
    return best


def least_disk(problem: SearchProblem) -> Need | None:
    """The plan that has the least on a disk, of those within both budgets; None if there is none."""
    within = [
        (_disk_bytes(problem, place), place)
        for place in _places(problem)
        if place.host_bytes <= problem.host_budget_bytes and place.bound_bytes <= problem.device_budget_bytes
    ]
    for _, (_, _, index, number, prefix) in sorted(within):
        layout = problem.layouts[index]
        grid, modes = layout.grid, layout.grid.modes.groups[number][1]
        n_buffer = grid.n_buffer[grid.prefix == prefix]
        peaks = layout.memory.peak_bytes(prefix, n_buffer, grid.prefetch_depth, modes)
        if peaks.min() > problem.device_budget_bytes:
            continue
        found = _cheapest_of_prefix(problem, index, number, prefix)
        if found.device_bytes <= problem.device_budget_bytes:
            return found
    return None


def _disk_bytes(problem: SearchProblem, place: _Place) -> int:
    table = problem.layouts[place.layout].table
    return int(table.staged_bytes.on_disk(table.places.on_disk[place.prefix]))


class _Place(NamedTuple):
    """The plans of one layout that swap the same blocks and have the same chunks in the same places."""

    bound_bytes: int
    """Device memory that none of them stays below."""
    host_bytes: int
    layout: int
    """By its number."""
    modes: int
    """The number of the group of modes."""
    prefix: int
    """The residencies of chunks ([Note: Prefixes] in ``sim/space/placements.py``)."""


def _places(problem: SearchProblem) -> Iterator[_Place]:
    for index, layout in enumerate(problem.layouts):
        static_bytes = layout.table.static_device_bytes(layout.prefixes, problem.workload.resident_bytes)
        for number, (trips, modes) in enumerate(layout.grid.modes.groups):
            bounds = (static_bytes + int(layout.memory.activation_bytes[modes].min())).tolist()
            host_bytes = problem.host_bytes(index, layout.prefixes, trips).tolist()
            for bound, host, prefix in zip(bounds, host_bytes, layout.prefixes.tolist(), strict=True):
                yield _Place(bound, host, index, number, prefix)


def _cheapest_of_prefix(problem: SearchProblem, index: int, group: int, prefix: int) -> Need:
    """The plan with this prefix and these swapped blocks that has the smallest guaranteed device peak."""
    key = (index, group, prefix)
    if key not in problem.cheapest:
        problem.cheapest[key] = _found_cheapest(problem, index, group, prefix)
    peak_bytes, found = problem.cheapest[key]
    layout = problem.layouts[index]
    trips, _ = layout.grid.modes.groups[group]
    host_bytes = int(problem.host_bytes(index, np.array([prefix]), trips)[0])
    disk_bytes = int(layout.table.staged_bytes.on_disk(layout.table.places.on_disk[prefix]))
    return Need(problem.plan(index, *found), peak_bytes, host_bytes, disk_bytes)


def _found_cheapest(problem: SearchProblem, index: int, group: int, prefix: int) -> tuple[int, tuple[int, int, int]]:
    layout = problem.layouts[index]
    grid = layout.grid
    trips, modes = grid.modes.groups[group]
    rows = np.flatnonzero(grid.prefix == prefix)
    bounds = layout.memory.peak_bytes(prefix, grid.n_buffer[rows], grid.prefetch_depth, modes).min(axis=(1, 2))
    best: tuple[int, tuple[int, ...], tuple[int, int, int]] | None = None
    for bound_bytes, row in sorted(zip(bounds.tolist(), rows.tolist(), strict=True)):
        if best is not None and bound_bytes > best[0]:
            break
        peaks = family_peaks(problem.family(index, row, trips), modes)
        for depth, place in np.argwhere(peaks == peaks.min()).tolist():
            mode = int(modes[place])
            key = (int(peaks.min()), grid.simplicity(row, depth, mode), (row, depth, mode))
            best = key if best is None else min(best, key)
    assert best is not None
    return best[0], best[2]

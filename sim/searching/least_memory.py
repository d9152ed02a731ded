"""The least memory that plans of a space need: of the device, of the host, of one within a limit of the other.

[Note: Fewer buffers hold no more]
Plans that differ in ``n_buffer`` alone have the same buffers, but for stays that fewer places cut in two, and fewer
places add tasks and waits (``Residency.fewer_buffers_add``).  So nothing is guaranteed to come earlier or to go later
with fewer, and the fewest have the least guaranteed peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...shared.schema.plan import Plan
from ..bounds.exact_peaks import family_peaks
from ..space.space import IntArray
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
    best: tuple[int, _Place] | None = None
    for place in sorted(within, key=lambda place: (place.bound_bytes, place[2:])):
        if best is not None and place.bound_bytes >= best[0]:
            break
        if best is not None and _bound_bytes(problem, place) >= best[0]:
            continue
        peak_bytes = _least_peak_bytes(problem, place)
        if best is None or peak_bytes < best[0]:
            best = peak_bytes, place
    return None if best is None else _cheapest(problem, best[1])


def some_plan_fits(problem: SearchProblem) -> bool:
    """Whether a plan is within both budgets, for every timing."""
    device_bytes, host_bytes = problem.device_budget_bytes, problem.host_budget_bytes
    within = [one for one in _places(problem) if one.host_bytes <= host_bytes and one.bound_bytes <= device_bytes]
    return any(
        _bound_bytes(problem, place) <= device_bytes and _least_peak_bytes(problem, place) <= device_bytes
        for place in sorted(within, key=lambda place: (place.bound_bytes, place[2:]))
    )


def least_host(problem: SearchProblem, device_limit_bytes: int | None = None) -> Need | None:
    """The plan that needs the least host memory, of those within the device's limit; None if there is none.

    Of several, the one with the smallest guaranteed device peak.
    """
    within = [
        place for place in _places(problem) if device_limit_bytes is None or place.bound_bytes <= device_limit_bytes
    ]
    best: tuple[int, int, _Place] | None = None
    for place in sorted(within, key=lambda place: place[1:]):
        if best is not None and place.host_bytes > best[0]:
            break
        if device_limit_bytes is not None and _bound_bytes(problem, place) > device_limit_bytes:
            continue
        peak_bytes = _least_peak_bytes(problem, place)
        if device_limit_bytes is not None and peak_bytes > device_limit_bytes:
            continue
        if best is None or peak_bytes < best[1]:
            best = place.host_bytes, peak_bytes, place
    return None if best is None else _cheapest(problem, best[2])


def least_disk(problem: SearchProblem) -> Need | None:
    """The plan that has the least on a disk, of those within both budgets; None if there is none."""
    within = [
        (_disk_bytes(problem, place), place)
        for place in _places(problem)
        if place.host_bytes <= problem.host_budget_bytes and place.bound_bytes <= problem.device_budget_bytes
    ]
    limit_bytes = problem.device_budget_bytes
    for _, place in sorted(within):
        if _bound_bytes(problem, place) <= limit_bytes and _least_peak_bytes(problem, place) <= limit_bytes:
            return _cheapest(problem, place)
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


def _bound_bytes(problem: SearchProblem, place: _Place) -> int:
    """Device memory that no plan there stays below, by a closer look than the place's own bound."""
    layout = problem.layouts[place.layout]
    grid, modes = layout.grid, layout.grid.modes.groups[place.modes][1]
    n_buffer = grid.n_buffer[grid.prefix == place.prefix]
    return int(layout.memory.peak_bytes(place.prefix, n_buffer, grid.prefetch_depth, modes).min())


def _least_peak_bytes(problem: SearchProblem, place: _Place) -> int:
    """The smallest guaranteed device peak there."""
    rows = _rows(problem, place)
    if not problem.fewer_buffers_add(place.layout, rows[0]):
        return _found(problem, place)[0]
    key = place[2:]
    if key not in problem.least_peaks:
        problem.least_peaks[key] = int(_peaks(problem, place, rows[0]).min())
    return problem.least_peaks[key]


def _cheapest(problem: SearchProblem, place: _Place) -> Need:
    """The plan there that has the smallest guaranteed device peak."""
    peak_bytes, found = _found(problem, place)
    on_disk = _disk_bytes(problem, place)
    return Need(problem.plan(place.layout, *found), peak_bytes, place.host_bytes, on_disk)


def _found(problem: SearchProblem, place: _Place) -> tuple[int, tuple[int, int, int]]:
    key = place[2:]
    if key not in problem.cheapest:
        problem.cheapest[key] = _found_cheapest(problem, place)
    return problem.cheapest[key]


def _rows(problem: SearchProblem, place: _Place) -> list[int]:
    """The residencies there, fewest buffers first."""
    grid = problem.layouts[place.layout].grid
    rows = np.flatnonzero(grid.prefix == place.prefix)
    ordered: list[int] = rows[np.argsort(grid.n_buffer[rows], kind="stable")].tolist()
    return ordered


def _peaks(problem: SearchProblem, place: _Place, row: int) -> IntArray:
    """(D, K) of the plans of one residency there."""
    trips, modes = problem.layouts[place.layout].grid.modes.groups[place.modes]
    return family_peaks(problem.family(place.layout, row, trips), modes)


def _found_cheapest(problem: SearchProblem, place: _Place) -> tuple[int, tuple[int, int, int]]:
    """The smallest guaranteed peak there, and row, depth and mode of its simplest plan."""
    layout = problem.layouts[place.layout]
    grid = layout.grid
    modes = grid.modes.groups[place.modes][1]
    rows = _rows(problem, place)
    bounds = layout.memory.peak_bytes(place.prefix, grid.n_buffer[rows], grid.prefetch_depth, modes).min(axis=(1, 2))
    ascends = problem.fewer_buffers_add(place.layout, rows[0])
    # See [Note: Fewer buffers hold no more].
    ordered = rows if ascends else [row for _, row in sorted(zip(bounds.tolist(), rows, strict=True))]
    least_bytes = dict(zip(rows, bounds.tolist(), strict=True))
    best: tuple[int, tuple[int, ...], tuple[int, int, int]] | None = None
    for row in ordered:
        if best is not None and least_bytes[row] > best[0]:
            break
        peaks = _peaks(problem, place, row)
        if ascends and best is not None and peaks.min() > best[0]:
            break
        for depth, number in np.argwhere(peaks == peaks.min()).tolist():
            mode = int(modes[number])
            key = (int(peaks.min()), grid.simplicity(row, depth, mode), (row, depth, mode))
            best = key if best is None else min(best, key)
    assert best is not None
    return best[0], best[2]

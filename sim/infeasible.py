"""Why no plan fits: which limit binds, by how much, and which plan comes closest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..shared.errors import InfeasibleError
from ..shared.plan import Plan
from ..shared.units import format_bytes
from .held_memory import guaranteed_peaks
from .residency import residency
from .search_problem import SearchProblem
from .traffic import Traffic


@dataclass(frozen=True)
class _Need:
    """What one plan needs."""

    plan: Plan
    device_bytes: int
    host_bytes: int


def explain_infeasible(problem: SearchProblem) -> InfeasibleError:
    """The error that says why no plan of the space fits.

    Where the host's memory rules out every plan, or every plan that the device could hold, it binds; otherwise the
    device does.  The closest plan is the one that exceeds the binding limit by the least.
    """
    least_host = _least_host(problem)
    if least_host.host_bytes > problem.host_budget_bytes:
        return InfeasibleError(_host_message(problem, least_host))
    closest = _least_device(problem, problem.host_budget_bytes)
    smallest = _least_device(problem, None)
    if smallest.device_bytes <= problem.device_budget_bytes:
        return InfeasibleError(_both_message(problem, closest, smallest))
    return InfeasibleError(_device_message(problem, closest))


def _least_host(problem: SearchProblem) -> _Need:
    """The plan that needs the least host memory."""
    needs = []
    for index, layout in enumerate(problem.layouts):
        for number, (n_swap, _) in enumerate(layout.grid.modes.groups):
            host_bytes = problem.host_bytes(index, layout.prefixes, n_swap).tolist()
            needs += [
                (need, index, number, prefix) for need, prefix in zip(host_bytes, layout.prefixes.tolist(), strict=True)
            ]
    least = min(needs)[0]
    plans = [_cheapest_of_prefix(problem, *where) for need, *where in needs if need == least]
    return min(plans, key=lambda need: need.device_bytes)


def _least_device(problem: SearchProblem, host_limit_bytes: int | None) -> _Need:
    """The plan with the smallest guaranteed device peak, of those within the host's limit."""
    quick: list[tuple[int, int, int, int]] = []
    for index, layout in enumerate(problem.layouts):
        static_bytes = layout.table.static_device_bytes(layout.prefixes, problem.workload.resident_bytes)
        for number, (n_swap, modes) in enumerate(layout.grid.modes.groups):
            bounds = (static_bytes + int(layout.memory.activation_bytes[modes].min())).tolist()
            host_bytes = problem.host_bytes(index, layout.prefixes, n_swap).tolist()
            quick += [
                (bound_bytes, index, number, prefix)
                for bound_bytes, host, prefix in zip(bounds, host_bytes, layout.prefixes.tolist(), strict=True)
                if host_limit_bytes is None or host <= host_limit_bytes
            ]
    best: _Need | None = None
    for bound_bytes, index, number, prefix in sorted(quick):
        if best is not None and bound_bytes >= best.device_bytes:
            break
        layout = problem.layouts[index]
        grid, modes = layout.grid, layout.grid.modes.groups[number][1]
        peaks = layout.memory.peak_bytes(prefix, grid.n_buffer[grid.n_persist == prefix], grid.prefetch_depth, modes)
        if best is not None and peaks.min() >= best.device_bytes:
            continue
        found = _cheapest_of_prefix(problem, index, number, prefix)
        if best is None or found.device_bytes < best.device_bytes:
            best = found
    assert best is not None, "some plan is within the host's limit"
    return best


def least_host_bytes(problem: SearchProblem) -> int | None:
    """The least host memory of all plans that the device's budget holds; None if it holds none."""
    wheres = []
    for index, layout in enumerate(problem.layouts):
        for number, (n_swap, modes) in enumerate(layout.grid.modes.groups):
            host_bytes = problem.host_bytes(index, layout.prefixes, n_swap).tolist()
            static_bytes = layout.table.static_device_bytes(layout.prefixes, problem.workload.resident_bytes)
            may_fit = static_bytes + int(layout.memory.activation_bytes[modes].min()) <= problem.device_budget_bytes
            wheres += [
                (need, index, number, prefix)
                for need, prefix, may in zip(host_bytes, layout.prefixes.tolist(), may_fit.tolist(), strict=True)
                if may
            ]
    for need, index, number, prefix in sorted(wheres):
        layout = problem.layouts[index]
        grid, modes = layout.grid, layout.grid.modes.groups[number][1]
        peaks = layout.memory.peak_bytes(prefix, grid.n_buffer[grid.n_persist == prefix], grid.prefetch_depth, modes)
        if peaks.min() > problem.device_budget_bytes:
            continue
        if _cheapest_of_prefix(problem, index, number, prefix).device_bytes <= problem.device_budget_bytes:
            return int(need)
    return None


def least_device_bytes(problem: SearchProblem) -> int | None:
    """The smallest guaranteed device peak of all plans within the host's budget; None if no plan is."""
    if _least_host(problem).host_bytes > problem.host_budget_bytes:
        return None
    return _least_device(problem, problem.host_budget_bytes).device_bytes


def _cheapest_of_prefix(problem: SearchProblem, index: int, group: int, n_persist: int) -> _Need:
    """The plan with these persistent chunks and swapped blocks that has the smallest guaranteed device peak."""
    layout = problem.layouts[index]
    grid = layout.grid
    n_swap, modes = grid.modes.groups[group]
    rows = np.flatnonzero(grid.n_persist == n_persist)
    bounds = layout.memory.peak_bytes(n_persist, grid.n_buffer[rows], grid.prefetch_depth, modes).min(axis=(1, 2))
    best: tuple[int, tuple[int, ...], tuple[int, int, int]] | None = None
    for bound_bytes, row in sorted(zip(bounds.tolist(), rows.tolist(), strict=True)):
        if best is not None and bound_bytes > best[0]:
            break
        traffic = Traffic(residency(layout.table, n_persist, int(grid.n_buffer[row])), problem.compute, n_swap)
        peaks = guaranteed_peaks(traffic, grid.prefetch_depth, modes, problem.workload.resident_bytes)
        for depth, place in np.argwhere(peaks == peaks.min()).tolist():
            mode = int(modes[place])
            key = (int(peaks.min()), grid.simplicity(row, depth, mode), (row, depth, mode))
            best = key if best is None else min(best, key)
    assert best is not None
    host_bytes = int(problem.host_bytes(index, np.array([n_persist]), n_swap)[0])
    return _Need(problem.plan(index, *best[2]), best[0], host_bytes)


# -- messages --------------------------------------------------------------------------------------------------------


def _knobs(plan: Plan) -> str:
    return (
        f"chunk_bytes = {plan.chunk_bytes}, n_persist = {plan.n_persist}, n_buffer = {plan.n_buffer}, "
        f"prefetch_depth = {plan.prefetch_depth}, n_checkpoint = {plan.n_checkpoint}"
        f"{f', n_swap = {plan.n_swap}' if plan.n_swap else ''}"
    )


def _widen(problem: SearchProblem) -> str:
    return ", or allow more of the space than was given" if problem.is_restricted else ""


def _device_message(problem: SearchProblem, closest: _Need) -> str:
    budget, need = problem.device_budget_bytes, closest.device_bytes
    return (
        f"no plan fits {problem.hardware.device.name}: the closest needs {format_bytes(need)} of device memory but the "
        f"budget is {format_bytes(budget)}, {format_bytes(need - budget)} too little ({_knobs(closest.plan)}). "
        f"Raise the device budget to {need} bytes, or train with a smaller batch or a shorter sequence"
        f"{_widen(problem)}."
    )


def _host_message(problem: SearchProblem, closest: _Need) -> str:
    budget, need = problem.host_budget_bytes, closest.host_bytes
    return (
        f"no plan fits host {problem.hardware.host.name}: the closest needs {format_bytes(need)} of host memory for "
        f"offloaded parameters, gradients and optimizer state but the budget is {format_bytes(budget)}, "
        f"{format_bytes(need - budget)} too little ({_knobs(closest.plan)}). Raise the host budget to {need} bytes"
        f"{_widen(problem)}."
    )


def _both_message(problem: SearchProblem, closest: _Need, smallest: _Need) -> str:
    device, host = problem.device_budget_bytes, problem.host_budget_bytes
    enough_host_bytes = least_host_bytes(problem)
    assert enough_host_bytes is not None, "the smallest plan is within the device's budget"
    return (
        f"no plan fits {problem.hardware.device.name} and host {problem.hardware.host.name} together: within the host "
        f"budget of {format_bytes(host)} the closest needs {format_bytes(closest.device_bytes)} of device memory, "
        f"{format_bytes(closest.device_bytes - device)} more than the budget of {format_bytes(device)} "
        f"({_knobs(closest.plan)}); the plan that needs the least device memory, "
        f"{format_bytes(smallest.device_bytes)}, needs {format_bytes(smallest.host_bytes)} of host memory, "
        f"{format_bytes(smallest.host_bytes - host)} too much ({_knobs(smallest.plan)}). "
        f"Raise the host budget to {enough_host_bytes} bytes, or the device budget to "
        f"{closest.device_bytes}{_widen(problem)}."
    )

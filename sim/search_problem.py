"""Everything that a search looks up: the space, what its plans cost and hold, and what they may hold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from ..shared.calibration import Calibration
from ..shared.errors import PlanError
from ..shared.hardware import DeviceKind, Hardware
from ..shared.plan import Plan
from ..shared.workload import Workload
from .chunk_table import ChunkTable, chunk_table
from .compute_table import ComputeTable, compute_table
from .contention import ContentionModel
from .costs import CostModel
from .memory_bounds import MemoryBounds
from .space import IntArray, LayoutGrid, SearchSpace, enumerate_space
from .throughput import throughput_weights
from .time_bounds import TimeBounds
from .workload_check import check_magnitude

_HOST_RESERVE_FRAC: Final = 0.1
_HOST_RESERVE_BYTES: Final = 4 * 2**30
"""Host memory that plans leave alone, for the system, Python and the data loader: a tenth, at most so much."""


@dataclass(frozen=True)
class LayoutProblem:
    """One layout of the space, with its tables and bounds."""

    grid: LayoutGrid
    table: ChunkTable
    time: TimeBounds
    memory: MemoryBounds

    @cached_property
    def prefixes(self) -> IntArray:
        """(F,) distinct ``n_persist``, ascending."""
        n_persist = np.sort(self.grid.n_persist)
        distinct: IntArray = n_persist[np.append(True, n_persist[1:] != n_persist[:-1])]
        return distinct


@dataclass(frozen=True)
class SearchProblem:
    """A workload, a machine, budgets, and a space of plans."""

    workload: Workload
    hardware: Hardware
    calibration: Calibration | None
    device_budget_bytes: int
    host_budget_bytes: int
    is_restricted: bool
    """Whether the user has narrowed the space."""
    costs: CostModel
    contention: ContentionModel
    compute: ComputeTable
    layouts: tuple[LayoutProblem, ...]

    @property
    def num_candidates(self) -> int:
        """Distinct plans."""
        return sum(layout.grid.num_candidates for layout in self.layouts)

    def plan(self, layout: int, residency: int, depth: int, checkpoint: int) -> Plan:
        """The plan at these indices."""
        return self.layouts[layout].grid.plan(self.workload, residency, depth, checkpoint)


def search_problem(
    workload: Workload,
    hardware: Hardware,
    calibration: Calibration | None = None,
    *,
    device_budget_bytes: int | None = None,
    host_budget_bytes: int | None = None,
    space: SearchSpace | None = None,
) -> SearchProblem:
    """Lay out the space and tabulate its costs.  Arguments and errors as of ``search``."""
    check_magnitude(workload)
    if device_budget_bytes is None:
        device_budget_bytes = hardware.device.usable_bytes
    if host_budget_bytes is None:
        host_budget_bytes = default_host_budget_bytes(hardware, device_budget_bytes)
    for name, budget, least in (("device", device_budget_bytes, 1), ("host", host_budget_bytes, 0)):
        if budget < least:
            raise PlanError(f"{name}_budget_bytes is {budget}; it must be at least {least}. Give the bytes to fill.")
    costs = CostModel(hardware, calibration, use_measured=workload.measured_on == hardware.name)
    contention = ContentionModel.of(hardware, calibration)
    grids = enumerate_space(workload, space)
    compute = compute_table(workload, grids[0].n_checkpoint, costs)
    weights = throughput_weights(contention)
    tables = [chunk_table(workload, grid.layout, costs) for grid in grids]
    return SearchProblem(
        workload=workload,
        hardware=hardware,
        calibration=calibration,
        device_budget_bytes=device_budget_bytes,
        host_budget_bytes=host_budget_bytes,
        is_restricted=space is not None and space != SearchSpace(),
        costs=costs,
        contention=contention,
        compute=compute,
        layouts=tuple(
            LayoutProblem(
                grid, table, TimeBounds(table, compute, weights), MemoryBounds(table, compute, workload.resident_bytes)
            )
            for grid, table in zip(grids, tables, strict=True)
        ),
    )


def default_host_budget_bytes(hardware: Hardware, device_budget_bytes: int) -> int:
    """Host memory that plans may fill: all of it, less a reserve of a tenth or 4 GiB, whichever is less.

    Where the CPU is the device, the device's budget is a part of the same memory.
    """
    memory_bytes = hardware.host.memory_bytes
    left_bytes = memory_bytes - min(int(memory_bytes * _HOST_RESERVE_FRAC), _HOST_RESERVE_BYTES)
    if hardware.device.kind is DeviceKind.CPU:
        left_bytes -= device_budget_bytes
    return max(0, left_bytes)

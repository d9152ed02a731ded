"""Everything that a search looks up: the space, what its plans cost and hold, and what they may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from ...shared.basics.errors import PlanError
from ...shared.catalogue.rank_share import machine_of_rank
from ...shared.compile.compile import Policies
from ...shared.layout.looked_up import looking_up
from ...shared.methods.full_training import FULL_TRAINING
from ...shared.methods.method import Method
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import DeviceKind, Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..bounds.least_work import LeastWork, NoLeastWork
from ..bounds.peak_bounds import MemoryBounds, NoMemoryBounds
from ..bounds.replay import Replayer, ReplayPlan
from ..bounds.round_trips import RoundTrips
from ..bounds.stretches import least_periods_s
from ..bounds.throughput import Throughput
from ..costs.contention import ContentionModel
from ..costs.task_costs import CostModel
from ..engine.error_sources import ErrorModel
from ..engine.folding import MORE_KEPT, kept_micro_batches
from ..engine.intervals import DrawnMachine
from ..memory.host import default_host_budget_bytes, shares_of_one_memory
from ..space.chunk_table import ChunkTable, chunk_table
from ..space.compute_table import ComputeTable, compute_table_in_tiles
from ..space.disk_choices import OnDisk
from ..space.enumerate import enumerate_space, keeping_all
from ..space.lane_programs import LanePrograms
from ..space.least_on_disk import HostAndDisk, least_on_disk, within_disk
from ..space.plan_family import PlanFamily
from ..space.prices import FloatArray
from ..space.space import IntArray, LayoutGrid, SearchSpace, Trips
from ..space.step_spec import StepSpec
from ..space.tilings import Tiles, mode_rows_in_tiles, run_in, tile_counts
from .request import SearchRequest, check_possible

_MOST_FAMILIES: Final = 64
"""Families of one micro-batch that are kept; of several, as many fewer."""


FamilyKey = tuple[int, int, Trips]
"""Of a family of plans: layout, residency, and what blocks send to the host."""


@dataclass(frozen=True)
class LayoutProblem:
    """One layout of the space, with its tables and bounds."""

    grid: LayoutGrid
    table: ChunkTable
    work: LeastWork | NoLeastWork
    memory: MemoryBounds | NoMemoryBounds
    kept_table: ChunkTable
    """The same of the micro-batches that are replayed and simulated."""

    @cached_property
    def prefixes(self) -> IntArray:
        """(F,) distinct prefixes, ascending."""
        prefix = np.sort(self.grid.prefix)
        distinct: IntArray = prefix[np.append(True, prefix[1:] != prefix[:-1])]
        return distinct

    def num_residencies(self, trips: Trips) -> IntArray:
        """(F,) distinct residencies and prefetch depths of every prefix, for the plans with these trips."""
        place = np.searchsorted(self.prefixes, self.grid.prefix)
        found = np.bincount(place, self.grid.is_distinct(trips).sum(axis=1), minlength=len(self.prefixes))
        num_residencies: IntArray = found.astype(np.int64)
        return num_residencies


@dataclass(frozen=True)
class SearchProblem:
    """A workload, a machine, budgets, and a space of plans."""

    workload: Workload
    hardware: Hardware
    """Of one rank."""
    together: Hardware
    """Of all ranks."""
    calibration: Calibration | None
    device_budget_bytes: int
    host_budget_bytes: int
    is_host_budget_given: bool
    """Whether it was asked for, and is not what the machine has."""
    is_restricted: bool
    """Whether the user has narrowed the space."""
    costs: CostModel
    contention: ContentionModel
    throughput: Throughput
    compute: ComputeTable
    kept_compute: ComputeTable
    """The same of the micro-batches that are replayed and simulated."""
    step: StepSpec
    layouts: tuple[LayoutProblem, ...]
    is_shared: bool = False
    """Whether both budgets are shares of one memory, which nobody asked for."""
    beyond_host_bytes: int = -1
    """Plans are looked at that need more of the host than this alone; -1: all."""
    method: Method = FULL_TRAINING
    _families: dict[FamilyKey, PlanFamily] = field(default_factory=dict, repr=False, compare=False)
    """The latest, by their keys."""
    cheapest: dict[tuple[int, int, int], tuple[int, tuple[int, int, int]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Of a layout, group of modes and prefix, once it was asked for: the smallest guaranteed device peak, and the row,
    depth and mode of its plan (``least_memory.py``)."""
    least_peaks: dict[tuple[int, int, int], int] = field(default_factory=dict, repr=False, compare=False)
    """The same peaks where they are known without that plan."""

    @property
    def has_disk(self) -> bool:
        """Whether some plans have chunks on a disk."""
        return any(layout.table.has_disk for layout in self.layouts)

    @property
    def world_ranks(self) -> int:
        """Ranks on the machine, of all stages where the workload is one of a pipeline's."""
        return self.step.num_ranks * self.workload.num_stages

    @property
    def num_candidates(self) -> int:
        """Distinct plans."""
        return sum(layout.grid.num_candidates for layout in self.layouts)

    @cached_property
    def least_activation_bytes(self) -> int:
        """Device memory that activations take in every plan, by a quick bound."""
        return min(int(layout.memory.activation_bytes.min()) for layout in self.layouts)

    @cached_property
    def errors(self) -> ErrorModel:
        """What predicted times and peaks may be off by."""
        return ErrorModel.of(self.workload, self.together, self.calibration)

    @cached_property
    def replayer(self) -> Replayer:
        """Replays plans of all kinds: they share what is known of their copies."""
        return Replayer(self.contention)

    def time_logs(self, family: FamilyKey, index: tuple[int, int, int]) -> FloatArray:
        """(draws,) logarithms of one plan's time over the predicted one: ``time_logs`` in ``sim/engine/intervals.py``.

        NaN where the replay does not become periodic.  ``family``, ``index``: of its candidate.
        """
        found = self.family(*family)
        plan = ReplayPlan(found, *index[1:], self.num_left_out_of(found))
        return self.replayer.time_logs(plan, DrawnMachine(self.errors))

    def least_periods_s(self, plans: Sequence[tuple[PlanFamily, IntArray]]) -> list[FloatArray]:
        """(D, K) for each of the families with these rows of modes (K,): no plan takes less."""
        programs = [family.programs(modes, num_left_out=self.num_left_out_of(family)) for family, modes in plans]
        found: list[FloatArray] = [np.zeros((0, 0))] * len(plans)
        for lane_of in {one.lane_of for one in programs}:
            alike = [number for number, one in enumerate(programs) if one.lane_of == lane_of]
            found_s = least_periods_s(LanePrograms.stacked([programs[number] for number in alike]), self.throughput)
            begin = 0
            for number in alike:
                end = begin + len(programs[number].lengths)
                found[number] = found_s[begin:end, : len(plans[number][1])]
                begin = end
        return found

    def fewer_buffers_add(self, layout: int, row: int) -> bool:
        """Whether plans with fewer buffers and less look-ahead have all tasks and waits of others, and more.

        Of plans with parameters on a disk these have more reads, which take their turns at other places.
        """
        grid = self.layouts[layout].grid
        return (
            self.method.policies.residency.fewer_buffers_add
            and grid.places.choice_of_disk(int(grid.prefix[row])).n_disk == 0
        )

    def plan(self, layout: int, residency: int, depth: int, mode: int) -> Plan:
        """The plan at these indices."""
        return self.layouts[layout].grid.plan(self.workload, residency, depth, mode)

    @property
    def num_left_out(self) -> int:
        """Micro-batches that are neither replayed nor simulated; see [Note: Folded iterations]."""
        return self.step.micro_batches - self.kept_compute.positions.micro_batches

    def num_left_out_of(self, family: PlanFamily) -> int:
        """Micro-batches that the family has no tasks of."""
        return self.step.micro_batches - family.positions.micro_batches

    def family(self, layout: int, row: int, trips: Trips) -> PlanFamily:
        """The plans of one residency of a layout with the same trips, at all prefetch depths.

        Of the micro-batches that are kept, or of all where buffers are not used alike in each.
        """
        key = (layout, row, trips)
        known = self._families.pop(key, None)
        if known is None:
            table = self.layouts[layout].kept_table
            known = self._family(table, self.kept_compute, key)
            if self.num_left_out and not known.draft.repeats:
                known = self._family(self.layouts[layout].table, self._whole_compute, key)
            while len(self._families) * known.positions.micro_batches > _MOST_FAMILIES:
                del self._families[next(iter(self._families))]
        self._families[key] = known
        return known

    def longer_family(self, layout: int, row: int, trips: Trips) -> PlanFamily:
        """The same plans of more micro-batches than are kept, as many as the simulator takes where these do not settle.

        The family itself if it has as many.
        """
        family = self.family(layout, row, trips)
        num_kept = self.kept_compute.positions.micro_batches
        num_longer = min(MORE_KEPT * num_kept, self.step.micro_batches)
        if family.positions.micro_batches >= num_longer:
            return family
        table = replace(self.layouts[layout].table, step=replace(self.step, micro_batches=num_longer))
        positions = self.method.policies.sections.positions_of(self.workload, num_longer)
        compute = replace(self.kept_compute, positions=positions)
        longer = self._family(table, compute, (layout, row, trips))
        return longer if longer.draft.repeats or num_longer == self.step.micro_batches else family

    def _family(self, table: ChunkTable, compute: ComputeTable, key: FamilyKey) -> PlanFamily:
        layout, row, trips = key
        grid = self.layouts[layout].grid
        return PlanFamily.of(
            table,
            compute,
            prefix=int(grid.prefix[row]),
            n_buffer=int(grid.n_buffer[row]),
            trips=trips,
            depths=grid.prefetch_depth,
            policies=self.method.policies,
        )

    @cached_property
    def _whole_compute(self) -> ComputeTable:
        """The compute lane with the levels of every micro-batch."""
        workloads, policies = self.compute.workloads, self.method.policies
        return compute_table_in_tiles(workloads, self.compute.modes, self.costs, self.step, policies)

    def within(self, request: SearchRequest) -> SearchProblem:
        """The same space within the budgets of a request that differs in nothing else.  Raises PlanError."""
        device_budget_bytes, host_budget_bytes = _checked(request.budgets_bytes(self.step.shard_ranks))
        return replace(
            self,
            device_budget_bytes=device_budget_bytes,
            host_budget_bytes=host_budget_bytes,
            is_host_budget_given=request.host_budget_bytes is not None,
        )

    def with_modes(self, space: SearchSpace | None) -> SearchProblem:
        """The same residencies with all modes that ``space`` allows, for bounds of plans that are not looked at.

        None: with its own.  Of a space whose least work is known.
        """
        modes = self.compute.modes if space is None else mode_rows_in_tiles(self._tilings, space)
        grid = replace(self.layouts[0].grid, modes=modes)
        policies = self.method.policies
        compute, kept = _compute_tables(self.compute.workloads, grid, self.costs, self.step, policies)
        deepest = int(grid.prefetch_depth[-1])
        return replace(
            self,
            compute=compute,
            kept_compute=kept,
            layouts=tuple(
                replace(
                    layout,
                    grid=replace(layout.grid, modes=modes),
                    work=self._sharpest_work(layout.table, compute, deepest),
                    memory=MemoryBounds(layout.table, compute, layout.table.workload.resident_bytes),
                )
                for layout in self.layouts
            ),
            _families={},
            cheapest={},
            least_peaks={},
        )

    @property
    def tiles(self) -> tuple[Tiles, ...]:
        """The numbers of tiles that plans may have, of MLPs and of the loss."""
        return self.compute.modes.tiles

    @property
    def _tilings(self) -> dict[Tiles, Workload]:
        return dict(zip(self.tiles, self.compute.workloads, strict=True))

    def in_tiles(self, request: SearchRequest, tiles: Sequence[Tiles]) -> SearchProblem:
        """The space whose plans run their MLPs and loss in these numbers of tiles, and are the same else.

        It has the same chunks, and shares what is known of them.  Raises PlanError as ``run_in``.
        """
        if tuple(tiles) == self.tiles:
            return self
        first, policies = self.layouts[0].grid, self.method.policies
        planned = {one: _planned(run_in(self.workload, one), first) for one in tiles}
        modes = mode_rows_in_tiles(planned, _space_of(request, self.method))
        workloads = [planned[one] for one in modes.tiles]
        compute, kept = _compute_tables(workloads, replace(first, modes=modes), self.costs, self.step, policies)
        layouts = []
        for layout in self.layouts:
            work, memory = _quick_bounds(request, layout.table, compute, self.throughput)
            layouts.append(replace(layout, grid=replace(layout.grid, modes=modes), work=work, memory=memory))
        found = replace(self, compute=compute, kept_compute=kept, layouts=tuple(layouts), is_shared=False)
        found = replace(found, _families={}, cheapest={}, least_peaks={})
        return _with_shares(found) if self.is_shared else found

    def _sharpest_work(self, table: ChunkTable, compute: ComputeTable, deepest: int) -> LeastWork:
        """What is known of full training alone, and else of every method; ``deepest``: the most look-ahead."""
        if self.method.policies == FULL_TRAINING.policies:
            return RoundTrips(table, compute, self.throughput, deepest)
        return LeastWork(table, compute, self.throughput)

    def pinned_host_bytes(self, layout: int, prefix: IntArray, trips: Trips) -> IntArray:
        """(R,) pinned host memory: of offloaded chunks, and of what blocks send there."""
        pinned: IntArray = self.layouts[layout].table.pinned_host_bytes(prefix) + self.compute.trip_bytes(trips)
        return pinned

    def host_bytes(self, layout: int, prefix: IntArray, trips: Trips) -> IntArray:
        """(R,) all host memory, with what steps make on the way."""
        table = self.layouts[layout].table
        return self.pinned_host_bytes(layout, prefix, trips) + table.host_bytes(prefix) + table.step_bytes(prefix)


def search_problem(
    request: SearchRequest,
    workload: Workload | None = None,
    step: StepSpec | None = None,
    *,
    is_offloading: bool | None = None,
    tiles: Sequence[Tiles] | None = None,
) -> SearchProblem:
    """Lay out one space of ``request`` and tabulate its costs.  Errors as of ``search``.

    ``workload`` and ``step``: of this space; those of the request's smallest micro-batch in its last mode if None.
    ``is_offloading``: as of ``enumerate_space``.  ``tiles``: those that plans may have; None: ``tile_counts``.
    """
    workload = request.smallest_workload() if workload is None else workload
    step = request.step.spec(request.step.allowed_modes[-1]) if step is None else step
    check_possible(request, workload, step)
    together, calibration, num_stages = request.hardware, request.calibration, workload.num_stages
    num_ranks = step.num_ranks * num_stages
    hardware = machine_of_rank(together, num_ranks) if num_ranks > 1 else together
    device_budget_bytes, host_budget_bytes = _checked(request.budgets_bytes(step.shard_ranks))
    is_measured = workload.measured_on == hardware.name
    costs = CostModel(
        hardware,
        calibration,
        use_measured=is_measured,
        together=together,
        optimizer=step.optimizer,
        num_ranks=step.num_ranks,
        shard_ranks=step.shard_ranks,
        num_stages=num_stages,
    )
    method = request.method_of(workload)
    grids = _grids(request, workload, step, costs, is_offloading=is_offloading)
    tilings = {one: _planned(run_in(workload, one), grids[0]) for one in tiles or tile_counts(request.space, workload)}
    modes = mode_rows_in_tiles(tilings, _space_of(request, method))
    grids = tuple(replace(grid, modes=modes) for grid in grids)
    planned = [tilings[one] for one in modes.tiles]
    has_disk = any(grid.places.uses_disk for grid in grids)
    contention = ContentionModel.of(
        together, calibration, num_ranks=num_ranks, optimizer=step.optimizer, has_disk=has_disk
    )
    compute, kept_compute = _compute_tables(planned, grids[0], costs, step, method.policies)
    kept_step = replace(step, micro_batches=kept_compute.positions.micro_batches)
    throughput = Throughput.of(contention)
    tables = [chunk_table(planned[0], grid.layout, costs, step, grid.places, has_disk=has_disk) for grid in grids]
    kept_tables = tables if kept_compute is compute else [replace(table, step=kept_step) for table in tables]
    problem = SearchProblem(
        workload=workload,
        hardware=hardware,
        together=together,
        calibration=calibration,
        device_budget_bytes=device_budget_bytes,
        host_budget_bytes=host_budget_bytes,
        is_host_budget_given=request.host_budget_bytes is not None,
        is_restricted=any(
            getattr(request.space, knob) not in (None, field.default)
            for knob, field in SearchSpace.model_fields.items()
        ),
        costs=costs,
        contention=contention,
        throughput=throughput,
        compute=compute,
        kept_compute=kept_compute,
        step=step,
        method=method,
        layouts=tuple(
            LayoutProblem(grid, table, work, memory, kept_table)
            for grid, table, kept_table in zip(grids, tables, kept_tables, strict=True)
            for work, memory in [_quick_bounds(request, table, compute, throughput)]
        ),
    )
    is_budget_given = request.device_budget_bytes is not None or request.host_budget_bytes is not None
    return problem if is_budget_given or hardware.device.kind is not DeviceKind.CPU else _with_shares(problem)


def _on_disk(request: SearchRequest, workload: Workload, step: StepSpec, costs: CostModel) -> OnDisk | None:
    """The choices by the host's budget, on a machine of one rank that has a disk and a host beside its device."""
    hardware = request.hardware
    is_one_memory = hardware.device.kind is DeviceKind.CPU and request.host_budget_bytes is None
    if hardware.disk is None or step.num_ranks * workload.num_stages > 1 or is_one_memory:
        return None
    room = HostAndDisk(request.budgets_bytes()[1], hardware.disk.capacity_bytes)
    return least_on_disk(workload, costs, step, room, request.space.n_staging)


def _grids(
    request: SearchRequest, workload: Workload, step: StepSpec, costs: CostModel, *, is_offloading: bool | None
) -> tuple[LayoutGrid, ...]:
    """The space, without what the disk has no room for."""
    space = _space_of(request, request.method_of(workload))
    on_disk = None if space.names_disk else _on_disk(request, workload, step, costs)
    grids = enumerate_space(workload, space, step, is_offloading=is_offloading, on_disk=on_disk)
    if any(grid.places.uses_disk for grid in grids):
        grids = within_disk(_planned(workload, grids[0]), grids, costs, step)
    return tuple(grids)


def _space_of(request: SearchRequest, method: Method) -> SearchSpace:
    """The space of a method, which may have no modes."""
    return request.space if method.policies.sections.has_modes else keeping_all(request.space)


def _checked(budgets_bytes: tuple[int, int]) -> tuple[int, int]:
    """The budgets of the device and the host.  Raises PlanError if one leaves nothing to fill."""
    for name, budget, least in zip(("device", "host"), budgets_bytes, (1, 0), strict=True):
        if budget < least:
            raise PlanError(f"{name}_budget_bytes is {budget}; it must be at least {least}. Give the bytes to fill.")
    return budgets_bytes


def _planned(workload: Workload, grid: LayoutGrid) -> Workload:
    """What the plans of ``grid`` do: ``workload``, with rows looked up if they look any up."""
    looks_up_rows = any(chunk.rows is not None for chunk in grid.layout.chunks)
    return looking_up(workload, grid.layout)[0] if looks_up_rows else workload


def _quick_bounds(
    request: SearchRequest, table: ChunkTable, compute: ComputeTable, throughput: Throughput
) -> tuple[LeastWork, MemoryBounds] | tuple[NoLeastWork, NoMemoryBounds]:
    """Bounds for all plans of a layout, which spare looks; of other ways to move chunks they know nothing.

    Of rows that are looked up neither.
    """
    if not request.method_of(table.workload).policies.move_plainly or request.space.looks_up_rows:
        return NoLeastWork(), NoMemoryBounds(len(compute.modes.n_swap))
    return LeastWork(table, compute, throughput), MemoryBounds(table, compute, table.workload.resident_bytes)


def _compute_tables(
    workloads: Sequence[Workload], grid: LayoutGrid, costs: CostModel, step: StepSpec, policies: Policies
) -> tuple[ComputeTable, ComputeTable]:
    """The compute lane of all micro-batches, and of those that are kept; ``workloads``: by tiling."""
    deepest = int(grid.prefetch_depth[-1])
    positions = policies.sections.positions_of(workloads[0], step.micro_batches)
    num_kept = kept_micro_batches(step.micro_batches, positions.micro_steps, deepest)
    if num_kept < step.micro_batches:
        kept_step = replace(step, micro_batches=num_kept)
        kept = compute_table_in_tiles(workloads, grid.modes, costs, kept_step, policies)
        levels = kept.levels.folded(step.micro_batches - num_kept)
        if levels is not None:
            kept = replace(kept, levels=levels)
            return replace(kept, positions=positions), kept
    compute = compute_table_in_tiles(workloads, grid.modes, costs, step, policies)
    return compute, compute


def _with_shares(problem: SearchProblem) -> SearchProblem:
    """The problem with budgets that share the one memory of a host whose CPU is the device."""
    memory_bytes = min(default_host_budget_bytes(problem.hardware, 0), problem.hardware.device.usable_bytes)
    most_device: list[int] = []
    host_needs: list[int] = []
    for index, layout in enumerate(problem.layouts):
        table = layout.table
        static_bytes = table.static_device_bytes(layout.prefixes, problem.workload.resident_bytes).max()
        chunks_bytes = table.facts.size_bytes.sum() + table.facts.gradients[2].sum()
        most_device.append(int(static_bytes + chunks_bytes + layout.memory.activation_bytes.max()))
        for trips, _ in layout.grid.modes.groups:
            host_needs += problem.host_bytes(index, layout.prefixes, trips).tolist()
    device_bytes, host_bytes = shares_of_one_memory(
        memory_bytes, most_device_bytes=max(most_device), host_needs_bytes=host_needs
    )
    return replace(problem, device_budget_bytes=device_bytes, host_budget_bytes=host_bytes, is_shared=True)

"""The least that has to lie on a disk for the host's memory to hold the rest; see [Note: Chunks on the disk]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...shared.basics.errors import HardwareError
from ...shared.basics.units import format_bytes
from ...shared.layout.layout import Layout
from ...shared.schema.workload import Workload
from ..costs.task_costs import CostModel, disk_of
from .chunk_table import ChunkTable, chunk_table
from .disk_choices import ON_HOST, DiskChoice, OnDisk
from .placements import Placements
from .space import LayoutGrid
from .step_spec import StepSpec


class HostAndDisk(NamedTuple):
    """The memories that chunks may lie in beside the device's.  Bytes."""

    host_budget_bytes: int
    """Without what blocks swap."""
    disk_bytes: int


def least_on_disk(
    workload: Workload, costs: CostModel, step: StepSpec, room: HostAndDisk, n_staging: Sequence[int]
) -> OnDisk:
    """The choices of every placement by the host's budget and the disk's room.

    ``n_staging``: numbers of places to try.
    """

    def of(layout: Layout, counted: Sequence[tuple[int, ...]]) -> list[list[DiskChoice]]:
        table = chunk_table(workload, layout, costs, step, Placements.of(layout, counted))
        prefixes = table.places.all
        host_bytes = table.pinned_host_bytes(prefixes) + table.host_bytes(prefixes) + table.step_bytes(prefixes)
        return [
            [
                choice
                for choice in _of_placement(
                    table, len(layout.chunks) - sum(counts), need - room.host_budget_bytes, sorted(set(n_staging))
                )
                if table.staged_bytes.on_disk(np.array(choice)) <= room.disk_bytes
            ]
            or [ON_HOST]
            for counts, need in zip(counted, host_bytes.tolist(), strict=True)
        ]

    return of


def _of_placement(
    table: ChunkTable, num_offloaded: int, short_bytes: int, n_staging: Sequence[int]
) -> list[DiskChoice]:
    """The choices of a placement whose host lacks ``short_bytes``, not above 0 if it holds everything."""
    if short_bytes <= 0 or num_offloaded == 0:
        return [ON_HOST]
    found = list(dict.fromkeys(_enough(table, num_offloaded, short_bytes, n_staging)))
    if found:
        return found
    every = _choices(num_offloaded, num_offloaded, n_staging[0])
    more_bytes = table.staged_bytes.more_host(every)
    return [DiskChoice(*every[more_bytes.argmin()].tolist()), ON_HOST] if more_bytes.min() < 0 else [ON_HOST]


def _enough(table: ChunkTable, num_offloaded: int, short_bytes: int, n_staging: Sequence[int]) -> Iterator[DiskChoice]:
    """The fewest chunks that spare ``short_bytes``, of every number of places, in each of three ways."""
    chunks = np.arange(1, num_offloaded + 1)
    for places in n_staging:
        state_alone = _choices(chunks, 0, places)
        both_alike = _choices(chunks, chunks, places)
        all_state = _choices(num_offloaded, chunks, places)
        ways = [state_alone, both_alike]
        if not (is_enough := _is_enough(table, state_alone, short_bytes)).any():
            ways = [both_alike, all_state]
        for way in ways:
            is_enough = _is_enough(table, way, short_bytes)
            if is_enough.any():
                yield DiskChoice(*way[is_enough.argmax()].tolist())


def _is_enough(table: ChunkTable, choices: np.ndarray, short_bytes: int) -> np.ndarray:
    is_enough: np.ndarray = table.staged_bytes.more_host(choices) <= -short_bytes
    return is_enough


def _choices(of_state: int | np.ndarray, of_parameters: int | np.ndarray, places: int) -> np.ndarray:
    """(n, 3) as ``DiskChoice``."""
    return np.stack(np.broadcast_arrays(np.atleast_1d(of_state), of_parameters, places), axis=-1)


def within_disk(
    workload: Workload, grids: Sequence[LayoutGrid], costs: CostModel, step: StepSpec
) -> tuple[LayoutGrid, ...]:
    """The plans that the disk has room for.  Raises HardwareError if there is no disk, or room for none of them."""
    disk = disk_of(costs.hardware)
    found, least_bytes = [], []
    for grid in grids:
        table = chunk_table(workload, grid.layout, costs, step, grid.places)
        disk_bytes = table.staged_bytes.on_disk(grid.places.on_disk)[grid.prefix]
        has_room = disk_bytes <= disk.capacity_bytes
        least_bytes.append(int(disk_bytes.min()))
        if has_room.any():
            found.append(replace(grid, prefix=grid.prefix[has_room], n_buffer=grid.n_buffer[has_room]))
    if not found:
        raise HardwareError(
            f"chunks take at least {format_bytes(min(least_bytes))} of the disk {disk.name}, which has "
            f"{format_bytes(disk.capacity_bytes)} for files (disk.capacity_bytes). Allow a smaller n_disk_state, or "
            f"use a larger disk."
        )
    return tuple(found)

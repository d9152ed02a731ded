"""Measuring a machine as several ranks reach it: all at once where they share its CPU, and what they do together.

See [Note: A CPU of several ranks] in ``shared/catalogue/rank_share.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from ...shared.basics.errors import RanksError
from ...shared.schema.hardware import (
    Collective,
    Device,
    Hardware,
    Host,
    Link,
    LinkPoint,
    MeasuredCollective,
    Node,
    Topology,
)
from ..devices.cpu_device import CpuDevice
from ..devices.device import TrainingDevice
from ..devices.machine import host_memory_bytes, name_of_ranks
from ..devices.probe import probe_hardware
from ..devices.process_settings import leave_a_core_for_lanes
from ..model.snapshot import random_states_kept
from .agreement import agreed
from .collective_probe import measure_collectives
from .own_device import check_own_device, device_of_rank
from .world import World, exchanged, join_world

_TIMEOUT_S: Final = 600.0


@random_states_kept()
def probe_ranks(
    num_ranks: int,
    *,
    seconds: float = 12.0,
    device: TrainingDevice | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    leaves_a_core: bool = False,
    disk_folder: str | Path | None = None,
    rank_timeout_s: float = _TIMEOUT_S,
) -> Hardware:
    """Measure this machine for about ``seconds`` as ``num_ranks`` processes reach it, of which this is one.

    To be called on all of them, which torchrun has started or which have torch.distributed's default group; gives the
    same on all, and leaves random states as they were.  Half of the time every rank measures its part of a CPU while
    the others do the same; of devices beside a host one is measured, and the host.  Then all ranks measure their
    collectives.  Arguments are those of ``probe_hardware``; ``leaves_a_core`` leaves each rank a core of its part for
    its lanes.  Raises, on all alike, RanksError if ranks do not find each other, are on several hosts or have no device
    of their own, and FileError if ``disk_folder`` cannot be written.
    """
    if num_ranks < 2:
        raise RanksError(f"{num_ranks} ranks do nothing together. Call probe_hardware, or name 2 ranks or more.")
    world = join_world(num_ranks, timeout_s=rank_timeout_s)
    assert world is not None, "two ranks or more have a world"
    try:
        return _probed(world, device, seconds, on_progress, leaves_a_core=leaves_a_core, disk_folder=disk_folder)
    finally:
        world.leave()


def _probed(
    world: World,
    device: TrainingDevice | None,
    seconds: float,
    on_progress: Callable[[int, int], None] | None,
    *,
    leaves_a_core: bool,
    disk_folder: str | Path | None,
) -> Hardware:
    chosen = agreed(world, lambda: _device(world, device))
    check_own_device(world, chosen)
    world.open_lane(chosen.torch_device)
    is_cpu = isinstance(chosen, CpuDevice)
    if leaves_a_core and is_cpu:
        leave_a_core_for_lanes(world.num_ranks)

    def report(done: int, total: int, *, is_second: bool) -> None:
        if on_progress is not None:
            on_progress(50 * is_second + 50 * done // total, 100)

    def in_step(done: int, total: int) -> None:
        if any(exchanged(world, None)):
            raise RanksError("another rank has failed. Its own message says why.")
        report(done, total, is_second=False)

    # A disk is one for all.
    folder = disk_folder if world.rank == 0 else None

    def measured_alone() -> Hardware | None:
        if not (is_cpu or world.rank == 0):
            return None  # Devices are equal, and the host is measured once.
        return probe_hardware(
            seconds=seconds / 2, device=chosen, on_progress=in_step if is_cpu else None, disk_folder=folder
        )

    of_ranks = exchanged(world, agreed(world, measured_alone))
    measured = measure_collectives(
        world, chosen, seconds=seconds / 2, on_progress=lambda done, total: report(done, total, is_second=True)
    )
    return hardware_of_ranks(of_ranks, measured) if is_cpu else hardware_of_devices(of_ranks[0], measured)


def _device(world: World, device: TrainingDevice | None) -> TrainingDevice:
    """What this rank measures.  Raises RanksError if there is none for it, or ranks are on several hosts."""
    if len(set(world.hosts)) > 1:
        raise RanksError(
            f"ranks are on {len(set(world.hosts))} hosts, but a probe measures one node. Probe each node by itself and "
            f"describe their network in the machine's file."
        )
    return device or device_of_rank("cuda" if torch.cuda.is_available() else "cpu", world.local_rank)


def hardware_of_devices(found: Hardware, measured: Sequence[MeasuredCollective]) -> Hardware:
    """The machine that one rank has measured, with the collectives of all.

    Where the driver tells no node, the devices reach each other as their all-gathers imply.
    """
    node = found.node or _node(f"{measured[0].num_ranks} devices", measured)
    return Hardware.model_validate(found.model_dump() | {"node": node, "collectives": tuple(measured)})


def hardware_of_ranks(of_ranks: Sequence[Hardware], measured: Sequence[MeasuredCollective]) -> Hardware:
    """A node of as many devices as there are ranks, from what each measured of the CPU that they share.

    ``of_ranks`` were measured at the same time.  The slowest rank sets the pace; the host has what all ranks reach
    together.
    """
    num_ranks, first = len(of_ranks), of_ranks[0]
    shared = f"by each of {num_ranks} processes while all of them measure"
    host = _host([one.host for one in of_ranks], shared)
    return Hardware(
        name=name_of_ranks(num_ranks),
        device=_slowest_device([one.device for one in of_ranks], shared),
        host=host,
        host_to_device=_slowest_link([one.host_to_device for one in of_ranks]),
        device_to_host=_slowest_link([one.device_to_host for one in of_ranks]),
        disk=first.disk,
        node=_node(f"{num_ranks} processes of one CPU", measured),
        collectives=tuple(measured),
    )


def _node(name: str, measured: Sequence[MeasuredCollective]) -> Node:
    """As many devices at one socket as there are ranks, which reach each other as fast as their all-gathers say."""
    gathers = next(one for one in measured if one.collective is Collective.ALL_GATHER)
    return Node(
        name=name,
        num_devices=gathers.num_ranks,
        sockets=(gathers.num_ranks,),
        pcie_roots=(gathers.num_ranks,),
        topology=Topology.HOST,
        host_path=_path(gathers),
        source="as many as there were ranks",
    )


def _slowest_device(devices: Sequence[Device], shared: str) -> Device:
    """What the slowest rank has; memory is an equal part of the machine's, or the budget that it was given."""
    first = devices[0]
    peaks = {dtype: min(one.peak_flop_per_s[dtype] for one in devices) for dtype in first.peak_flop_per_s}
    return first.model_copy(
        update={
            "memory_bytes": min(first.memory_bytes, host_memory_bytes() // len(devices)),
            "memory_bandwidth_bytes_per_s": min(one.memory_bandwidth_bytes_per_s for one in devices),
            "peak_flop_per_s": peaks,
            "vector_flop_per_s": min(one.vector_flop_per_s for one in devices),
            "launch_overhead_s": max(one.launch_overhead_s for one in devices),
            "source": f"{first.source} {shared}",
        }
    )


def _host(hosts: Sequence[Host], shared: str) -> Host:
    """The whole host: cores and memory are all of them, rates as many times the slowest rank's as there are ranks."""
    first, num_ranks = hosts[0], len(hosts)
    adam = [one.adam_bytes_per_s for one in hosts if one.adam_bytes_per_s is not None]
    products = [one.matrix_flop_per_s for one in hosts if one.matrix_flop_per_s is not None]
    return first.model_copy(
        update={
            "memory_bandwidth_bytes_per_s": num_ranks * min(one.memory_bandwidth_bytes_per_s for one in hosts),
            "adam_bytes_per_s": num_ranks * min(adam) if adam else None,
            "matrix_flop_per_s": num_ranks * min(products) if products else None,
            "source": f"{first.source} {shared}, times {num_ranks}",
        }
    )


def _slowest_link(links: Sequence[Link]) -> Link:
    first = links[0]
    table = tuple(
        LinkPoint(size_bytes=points[0].size_bytes, seconds=max(point.seconds for point in points))
        for points in zip(*(link.table for link in links), strict=True)
    )
    return first.model_copy(
        update={
            "latency_s": max(link.latency_s for link in links),
            "bandwidth_bytes_per_s": min(link.bandwidth_bytes_per_s for link in links),
            "table": table,
        }
    )


def _path(gathers: MeasuredCollective) -> Link:
    """The way from one process to another with which the model gives the smallest and the largest all-gather."""
    first, last, ranks = gathers.table[0], gathers.table[-1], gathers.num_ranks
    moved_bytes = (ranks - 1) * last.size_bytes / ranks
    return Link(
        name="from process to process",
        latency_s=first.seconds,
        bandwidth_bytes_per_s=moved_bytes / ((last.seconds - first.seconds) or last.seconds),
        source="from the smallest and the largest all-gather",
    )

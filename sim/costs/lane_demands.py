"""What the lanes of a machine draw on while each runs alone, from the machine's figures.

[Note: Shares of a resource]
Demands are shares of a resource's capacity, so that every capacity is 1.  A lane's demand is what it draws at the rate
that the cost model gives it: a copy at the link's bandwidth, CPU Adam at its rate.  An optimizer whose arithmetic takes
longer than its memory draws that much less of the memory, and keeps all cores of its operations busy.  Compute draws on
several resources at rates that change from operation to operation; it gets the mean over a transformer's training.

[Note: Compute beside collectives]
A collective runs as one block of threads for each of its channels.  Blocks wait for their neighbours on other devices,
so each keeps its multiprocessor until the collective has ended, and compute has the others.  What the collective moves
in the device's memory, h of what that moves in all, holds compute up besides, though together they would fit: kernels
of compute load in bursts.  So compute takes (1 + h) / (1 - held) times as long, and the collective no longer.

That is 1.73 times on an A100 and 1.63 times on an H100.  Measured beside all-gathers: on an A100 in GPT training,
products 1.76, attention 1.83 times (github.com/NVIDIA/nccl issue 1428); on an H100 a product 1.7 times (80 to 47 % of
the peak, NVIDIA's developer forum, thread 337991), products 1.3 to 1.4 times (github.com/pytorch/pytorch pull request
179937).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from ...shared.catalogue.rank_share import machine_of_rank
from ...shared.optimizers.work import host_kernels
from ...shared.schema.hardware import DeviceKind, Hardware, Topology
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.schedule import Lane
from ..operations.efficiency import CORE_BYTES_PER_S
from .fabrics import fabric_levels, flat_fabric
from .task_costs import disk_of, host_adam_bytes_per_s, step_cores


class Resource(StrEnum):
    """What lanes share."""

    HOST_MEMORY = "host memory"
    LINK = "link"
    """Both directions of a link that is not full duplex."""
    TO_DEVICE = "link to the device"
    FROM_DEVICE = "link from the device"
    CORES = "cores"
    DEVICE_MEMORY = "device memory"
    PROCESSORS = "processors"
    """Those of the device.  What collectives hold of them, compute does not have."""


_CPU_COMPUTE_FRAC: Final = 0.23
"""Share of the host's memory bandwidth that compute draws when the CPU is the device.

Its products work from the cache.  Measured on a two-core machine: compute slows 1.13 times beside a copy or beside CPU
Adam, which slow each other 1.8 times; if they draw 0.9 each, compute draws 1.13 - 0.9.  All three together then slow
2.03 times, where 1.6 to 2.5 was measured.
"""
_DEVICE_COMPUTE_FRAC: Final = 0.42
"""Share of the device's memory bandwidth that compute draws.

Training a transformer spends 39 % of its time outside products (Ivanov et al., arXiv 2007.00072, table 1), where it
streams at 0.85 of the bandwidth (``sim/operations/efficiency.py``); a product of 2 048 by 4 096 by 4 096 in 16 bit
moves 67 MB in 0.22 ms on an A100, 0.15 of it.
"""
_COLLECTIVE_PASSES: Final = 3
"""A ring's step reads what it sends, reads what it adds to, and writes the sum."""
_DISK_PASSES: Final = 3
"""Between the disk and the page cache once; a copy between that and a place of the host reads and writes."""
_SWITCH_CHANNELS: Final = 24
"""Of a collective in one node with a switch, a block of threads each: 24 on eight A100 (github.com/NVIDIA/nccl-tests
issue 100), 24 on eight H100 (NCCL's log of an AWS p5.48xlarge, with 16 for NVLink SHARP)."""
_ADAPTER_CHANNELS: Final = 2
"""For every adapter, where nodes meet: 16 of a DGX A100's eight (github.com/NVIDIA/nccl issue 320)."""
_PEER_CHANNELS: Final = 4
"""Over PCIe or a bridge, between devices that write into each other: 4 on eight RTX 5090
(github.com/tinygrad/open-gpu-kernel-modules issue 29)."""
_HOST_CHANNELS: Final = 2
"""Through the host's memory: 2 on eight RTX 4090 (github.com/NVIDIA/nccl-tests issue 307)."""
_MOST_HELD_FRAC: Final = 0.5
"""By definition: of devices with few processors, libraries leave half to compute, as users can make them do."""
_COLLECTIVE_PROCESSORS_FRAC: Final = 20 / 132
"""Processors that collectives hold where nobody tells their channels (devices whose multiprocessors are not stated,
meshes and rings): 20 of an H800's 132 (DeepSeek-V3, arXiv 2412.19437, section 3.5.1)."""


def lane_demands(
    hardware: Hardware, num_ranks: int = 1, optimizer: Optimizer = Optimizer.ADAMW, *, has_disk: bool = False
) -> dict[Lane, dict[Resource, float]]:
    """The share of every resource that each lane of one rank draws while it runs alone; none above 1.

    Where the CPU is the device, its memory is the host's, and its cores compute.  Several ranks have a lane of
    collectives too, and each draws on its own part of the machine (``shared/catalogue/rank_share.py``).  ``has_disk``:
    with that of the disk.  Raises HardwareError if the machine does not have the ranks, or the disk.
    """
    own = hardware if num_ranks == 1 else machine_of_rank(hardware, num_ranks)
    demands = (_on_cpu if own.device.kind is DeviceKind.CPU else _beside_a_device)(own, optimizer)
    if not own.full_duplex:
        demands[Lane.H2D][Resource.LINK] = demands[Lane.D2H][Resource.LINK] = 1.0
    if num_ranks > 1:
        demands[Lane.COLLECTIVE] = _collective(hardware, own, num_ranks)
        demands[Lane.H2D][Resource.TO_DEVICE] = demands[Lane.D2H][Resource.FROM_DEVICE] = 1.0
    if has_disk:
        demands[Lane.DISK] = _disk(own)
    return {lane: {resource: min(1.0, share) for resource, share in demand.items()} for lane, demand in demands.items()}


def _optimizer_rate(hardware: Hardware, optimizer: Optimizer) -> float:
    """Bytes of memory per second that a step on the host moves."""
    rate, kernels = host_adam_bytes_per_s(hardware.host), host_kernels(optimizer)
    arithmetic_s = kernels.core_s_per_scalar / step_cores(hardware)
    return min(rate, kernels.bytes_per_scalar / arithmetic_s) if arithmetic_s else rate


def _on_cpu(hardware: Hardware, optimizer: Optimizer) -> dict[Lane, dict[Resource, float]]:
    """A copy reads the host's memory and writes it; what streams keeps as many cores busy as its rate takes."""
    host = hardware.host
    rates = {
        Lane.H2D: 2 * hardware.host_to_device.bandwidth_bytes_per_s,
        Lane.D2H: 2 * hardware.device_to_host.bandwidth_bytes_per_s,
        Lane.CPU_OPTIM: _optimizer_rate(hardware, optimizer),
    }
    demands: dict[Lane, dict[Resource, float]] = {
        lane: {
            Resource.HOST_MEMORY: rate / host.memory_bandwidth_bytes_per_s,
            Resource.CORES: rate / CORE_BYTES_PER_S / host.num_cores,
        }
        for lane, rate in rates.items()
    }
    if rates[Lane.CPU_OPTIM] < host_adam_bytes_per_s(host):
        demands[Lane.CPU_OPTIM][Resource.CORES] = step_cores(hardware) / host.num_cores
    # Compute leaves a core to the other lanes, where there are two ([Note: A core for the lanes]).
    cores_frac = step_cores(hardware) / host.num_cores
    demands[Lane.COMPUTE] = {Resource.HOST_MEMORY: _CPU_COMPUTE_FRAC, Resource.CORES: cores_frac}
    return demands


def _beside_a_device(hardware: Hardware, optimizer: Optimizer) -> dict[Lane, dict[Resource, float]]:
    """A copy passes the host's memory once; CPU Adam has the cores to itself.

    The device's memory is no matter for copies: of every machine's that is known, both directions together take less
    than compute leaves of it (at most 17 %, a GH200's).
    """
    host = hardware.host
    copies = {
        Lane.H2D: hardware.host_to_device.bandwidth_bytes_per_s,
        Lane.D2H: hardware.device_to_host.bandwidth_bytes_per_s,
    }
    demands: dict[Lane, dict[Resource, float]] = {
        lane: {Resource.HOST_MEMORY: rate / host.memory_bandwidth_bytes_per_s} for lane, rate in copies.items()
    }
    rate = _optimizer_rate(hardware, optimizer)
    demands[Lane.CPU_OPTIM] = {Resource.HOST_MEMORY: rate / host.memory_bandwidth_bytes_per_s}
    demands[Lane.COMPUTE] = {Resource.DEVICE_MEMORY: _DEVICE_COMPUTE_FRAC, Resource.PROCESSORS: 1.0}
    return demands


def _disk(hardware: Hardware) -> dict[Resource, float]:
    """What is read or written lies in the page cache on its way: the disk's copy of it, and the system's, in and out.

    The system's copy keeps as many cores busy as its rate takes.  Of reads and writes the faster counts for both.
    """
    disk, host = disk_of(hardware), hardware.host
    rate = max(disk.read_bytes_per_s, disk.write_bytes_per_s)
    demand = {Resource.HOST_MEMORY: _DISK_PASSES * rate / host.memory_bandwidth_bytes_per_s}
    if hardware.device.kind is DeviceKind.CPU:
        demand[Resource.CORES] = 2 * rate / CORE_BYTES_PER_S / host.num_cores
    return demand


def _collective(hardware: Hardware, own: Hardware, num_ranks: int) -> dict[Resource, float]:
    """Collectives at the rate of rings over the devices' own links; if there are none, over the host's, as copies.

    ``own``: the part of ``hardware`` that one rank has.
    """
    node = hardware.node
    levels = fabric_levels(hardware, num_ranks)
    has_own_links = node is not None and node.device_link is not None and min(num_ranks, node.num_devices) > 1
    if has_own_links and node is not None and node.topology is Topology.PAIRS and min(num_ranks, node.num_devices) > 2:
        # Pair by pair through the host: that is what takes the time.
        has_own_links = False
        rate = levels[-1 if len(levels) == 1 else 1].ring_bytes_per_s
    elif has_own_links:
        # Rings through nodes go no faster than the adapters, within nodes either.
        rate = min(levels[0].ring_bytes_per_s, flat_fabric(hardware, num_ranks).ring_bytes_per_s)
    else:
        rate = levels[0].ring_bytes_per_s
    passes = _COLLECTIVE_PASSES * rate
    if own.device.kind is DeviceKind.CPU:
        return {
            Resource.HOST_MEMORY: passes / own.host.memory_bandwidth_bytes_per_s,
            Resource.CORES: passes / CORE_BYTES_PER_S / own.host.num_cores,
        }
    demand = {
        Resource.DEVICE_MEMORY: passes / own.device.memory_bandwidth_bytes_per_s,
        Resource.PROCESSORS: _held_frac(hardware, num_ranks, has_own_links=has_own_links),
    }
    if has_own_links:
        return demand
    demand[Resource.TO_DEVICE] = rate / own.host_to_device.bandwidth_bytes_per_s
    demand[Resource.FROM_DEVICE] = rate / own.device_to_host.bandwidth_bytes_per_s
    if not own.full_duplex:
        demand[Resource.LINK] = demand[Resource.TO_DEVICE] + demand[Resource.FROM_DEVICE]
    if node is not None and node.through_host_memory:
        # What a device sends is written there, what it receives is read from there.
        demand[Resource.HOST_MEMORY] = 2 * rate / own.host.memory_bandwidth_bytes_per_s
    return demand


def _held_frac(hardware: Hardware, num_ranks: int, *, has_own_links: bool) -> float:
    """Share of a device's processors that a collective holds; see [Note: Compute beside collectives]."""
    node, network = hardware.node, hardware.network
    num_processors = hardware.device.num_multiprocessors
    per_node = 1 if node is None else node.num_devices
    if num_processors is None:
        return _COLLECTIVE_PROCESSORS_FRAC
    if num_ranks > per_node and network is not None:
        most = _SWITCH_CHANNELS if has_own_links else _PEER_CHANNELS
        channels = min(most, _ADAPTER_CHANNELS * network.adapters_per_node)
    elif not has_own_links or node is None:
        channels = _HOST_CHANNELS if node is not None and node.through_host_memory else _PEER_CHANNELS
    elif node.topology is Topology.PAIRS:
        channels = _PEER_CHANNELS
    elif node.topology is Topology.SWITCH:
        channels = _SWITCH_CHANNELS
    else:
        return _COLLECTIVE_PROCESSORS_FRAC
    return min(channels / num_processors, _MOST_HELD_FRAC)

"""The links between a machine's devices as fabrics for collectives, and collectives on a machine.

[Note: The host's path]
Where devices have no links of their own, every message crosses the sender's link to the host and the receiver's from
it, the roots above them, and, where devices may not write into each other, the memory of the sender's socket twice.
When all ranks send at once these are shared fairly (``sim/costs/fair_share.py``), and the slowest rank sets the pace.

Adding takes no time of its own: NCCL adds one part while it receives the next, and the bandwidths of links between
devices are those of whole collectives.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import Final

from ...shared.basics.errors import HardwareError
from ...shared.schema.hardware import Hardware, Link, Node, Topology
from .collectives import Algorithm, Collective, CollectiveTime, Fabric, Shape, collective_time, hierarchical_s
from .fair_share import fair_shares

CALL_OVERHEAD_S: Final = 8.4e-6
"""Seconds of a collective that moves nothing: NCCL's base latency of its protocol for large messages (baseLatencies in
src/graph/tuning.cc of github.com/NVIDIA/nccl, version 2.28)."""


def machine_collective(
    collective: Collective,
    size_bytes: int,
    hardware: Hardware,
    num_ranks: int,
    algorithm: Algorithm | None = None,
) -> CollectiveTime:
    """A collective over ``num_ranks`` devices of an otherwise idle machine; by ``algorithm``, or by the fastest.

    Ranks take the devices in order and fill a node before the next.  Over several nodes, or pairs, HIERARCHICAL is one
    more way beside the flat ones, whose every message may have to take the slowest link.
    Raises HardwareError if the machine does not have the ranks, PlanError if the algorithm cannot do it there.
    """
    if num_ranks == 1:
        return CollectiveTime(0.0, algorithm or Algorithm.RING)
    levels = fabric_levels(hardware, num_ranks)
    ways = []
    if len(levels) > 1 and algorithm in (None, Algorithm.HIERARCHICAL):
        ways.append(CollectiveTime(hierarchical_s(collective, size_bytes, levels), Algorithm.HIERARCHICAL))
    if algorithm is not Algorithm.HIERARCHICAL:
        named = Algorithm if algorithm is None else (algorithm,)
        ways.append(collective_time(collective, size_bytes, flat_fabric(hardware, num_ranks), named))
    elif not ways:
        raise HardwareError(
            f"{hardware.name} has no groups of devices among {num_ranks} ranks for {algorithm}. Name another algorithm."
        )
    best = min(ways, key=lambda way: way.seconds)
    return CollectiveTime(best.seconds + CALL_OVERHEAD_S, best.algorithm)


def fabric_levels(hardware: Hardware, num_ranks: int) -> tuple[Fabric, ...]:
    """What joins the ranks, innermost first: pairs, devices of a node, nodes.  Levels of one rank are left out.

    Raises HardwareError if the machine does not have the ranks, or if they fill some node only in part.
    """
    per_node = _ranks_per_node(hardware, num_ranks)
    levels = [] if per_node == 1 else list(_node_levels(hardware, per_node))
    num_nodes = num_ranks // per_node
    if num_nodes > 1:
        levels.append(_network_fabric(hardware, num_nodes, sharing=per_node))
    return tuple(levels)


def flat_fabric(hardware: Hardware, num_ranks: int) -> Fabric:
    """All ranks side by side, every message at the pace of the slowest link between two of them.

    Rings pass each adapter of a node with an equal part, so that a node's adapters work together.
    Raises HardwareError as ``fabric_levels`` does.
    """
    levels = fabric_levels(hardware, num_ranks)
    if len(levels) < 2:
        return levels[0] if levels else Fabric(1, 0.0, inf)
    per_node = _ranks_per_node(hardware, num_ranks)
    bandwidths = [level.ring_bytes_per_s for level in levels]
    if num_ranks > per_node:
        bandwidths[-1] = _network_fabric(hardware, num_ranks // per_node, sharing=1).bandwidth_bytes_per_s
    latency_s = max(level.latency_s for level in levels)
    return Fabric(num_ranks, latency_s, min(bandwidths), Shape.RING)


def _ranks_per_node(hardware: Hardware, num_ranks: int) -> int:
    per_node = hardware.devices_per_node
    if num_ranks > hardware.num_devices:
        raise HardwareError(
            f"{num_ranks} ranks need as many devices but {hardware.name} has {hardware.num_devices} "
            f"({per_node} in each of {hardware.num_nodes} nodes). Choose a larger node, or set network.num_nodes."
        )
    if num_ranks > per_node and num_ranks % per_node:
        raise HardwareError(
            f"{num_ranks} ranks do not fill nodes of {per_node} devices on {hardware.name}. "
            f"Use {num_ranks // per_node * per_node} or {-(-num_ranks // per_node) * per_node} ranks."
        )
    return min(num_ranks, per_node)


def _network_fabric(hardware: Hardware, num_nodes: int, *, sharing: int) -> Fabric:
    """One rank of every node, where ``sharing`` ranks of a node share its adapters."""
    network = hardware.network
    assert network is not None  # a machine without one has one node
    together = network.adapters_per_node * network.link.bandwidth_bytes_per_s
    # Ranks that outnumber the adapters share them; an adapter that no rank has to itself serves the others.
    bandwidth = together / sharing
    return Fabric(num_nodes, network.link.latency_s, bandwidth, Shape.NETWORK)


def _node_levels(hardware: Hardware, num_ranks: int) -> tuple[Fabric, ...]:
    """The fabrics of the first ``num_ranks`` devices of a node, at least two."""
    node = hardware.node
    assert node is not None  # a machine without one has one device
    if node.device_link is None:
        return (_host_fabric(hardware, node, range(num_ranks)),)
    link = node.device_link
    shapes = {Topology.RING: Shape.RING, Topology.MESH: Shape.MESH, Topology.SWITCH: Shape.SWITCH}
    if node.topology is not Topology.PAIRS:
        shape = shapes[node.topology]
        return (Fabric(num_ranks, link.latency_s, link.bandwidth_bytes_per_s, shape, node.reduces_in_switch),)
    pair = Fabric(2, link.latency_s, link.bandwidth_bytes_per_s)
    if num_ranks == 2:
        return (pair,)
    if num_ranks % 2:
        return (_host_fabric(hardware, node, range(num_ranks)),)
    # Both members of every pair talk to their counterparts at once.
    paths = _host_fabric(hardware, node, range(num_ranks), stride=2)
    return pair, Fabric(num_ranks // 2, paths.latency_s, paths.bandwidth_bytes_per_s)


def _host_fabric(hardware: Hardware, node: Node, ranks: range, *, stride: int = 1) -> Fabric:
    """Ranks that reach each other through the host; see [Note: The host's path].

    ``stride``: each rank sends to the one so many places on, around.
    """
    path = _host_path(hardware, node)
    socket_of, root_of = _groups(node.sockets), _groups(node.pcie_roots)
    demands: list[dict[Hashable, float]] = []
    capacities: dict[Hashable, float] = {}
    rate = path.bandwidth_bytes_per_s
    for rank in ranks:
        target = (rank + stride) % len(ranks)
        demand: dict[Hashable, float] = {}
        if node.root_bandwidth_bytes_per_s is not None and (
            node.through_host_memory or root_of[rank] != root_of[target]
        ):
            for crossed in (("up", root_of[rank]), ("down", root_of[target])):
                demand[crossed] = rate
                capacities[crossed] = node.root_bandwidth_bytes_per_s
        if node.through_host_memory:
            memory = ("memory", socket_of[rank])
            demand[memory] = 2 * rate
            capacities[memory] = hardware.host.memory_bandwidth_bytes_per_s
        demands.append(demand)
    slowest = min(fair_shares(demands, capacities))
    return Fabric(len(ranks), path.latency_s, slowest * rate)


def _host_path(hardware: Hardware, node: Node) -> Link:
    """What one device sends to another through an idle host: no more than two copies that overlap, nor than stated."""
    up, down = hardware.device_to_host, hardware.host_to_device
    rate = min(up.bandwidth_bytes_per_s, down.bandwidth_bytes_per_s)
    if not hardware.full_duplex:
        rate /= 2  # every device sends and receives at once
    if node.host_path is not None:
        stated = node.host_path.bandwidth_bytes_per_s
        return node.host_path.model_copy(update={"bandwidth_bytes_per_s": min(stated, rate)})
    return Link(name="through the host", latency_s=up.latency_s + down.latency_s, bandwidth_bytes_per_s=rate)


def _groups(sizes: tuple[int, ...]) -> list[int]:
    """The group of every device."""
    return [group for group, size in enumerate(sizes) for _ in range(size)]

"""The links between a machine's devices as fabrics for collectives, and collectives on a machine.

[Note: The host's path]
Where devices have no links of their own, every message crosses the sender's link to the host and the receiver's from
it, the roots above them, and, where devices may not write into each other, the memory of the sender's socket twice.
When all ranks of the node send at once, those of other shard groups too, these are shared fairly
(``sim/costs/fair_share.py``), and the slowest rank sets the pace.

Adding takes no time of its own: NCCL adds one part while it receives the next, and the bandwidths of links between
devices are those of whole collectives.

Processes that share a CPU as their devices send through its memory, which is no link of any of them: their path is the
node's ``host_path`` where it is stated.

[Note: Measured collectives]
A machine may have measured seconds of its collectives (``Hardware.collectives``).  Over the number of ranks that was
measured they are the seconds themselves, between two sizes and beyond the last as a link's table is read
(``sim/costs/copies.py``); below the first size they are the first one's, which is latency.  Over another number of
ranks every measured size takes the measured seconds of the nearest number, times what the model gives for these ranks
over what it gives for those; the ranks of a shard group, and replicas, are other ranks.  Who names an algorithm asks
for the model.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import accumulate
from math import inf, log
from statistics import fmean, median
from typing import Final

from ...shared.basics.errors import HardwareError
from ...shared.schema.hardware import DeviceKind, Hardware, Link, LinkPoint, MeasuredCollective, Node, Topology
from ...shared.schema.schedule import Lane
from .collectives import Algorithm, Collective, CollectiveTime, Fabric, Shape, collective_time, hierarchical_s
from .copies import copy_time_s
from .fair_share import fair_shares
from .rank_lines import RankLine

_LARGE_BYTES: Final = 2**18
"""From which a measured collective is bound by its links rather than by its latency."""
CALL_OVERHEAD_S: Final = 8.4e-6
"""Seconds of a collective that moves nothing: NCCL's base latency of its protocol for large messages (baseLatencies in
src/graph/tuning.cc of github.com/NVIDIA/nccl, version 2.28)."""


def machine_collective(
    collective: Collective,
    size_bytes: int,
    hardware: Hardware,
    ranks: int | RankLine,
    algorithm: Algorithm | None = None,
) -> CollectiveTime:
    """A collective over ``ranks``, a number or a line, of an otherwise idle machine; by ``algorithm``, or the fastest.

    As it was measured there, else as the links imply; see [Note: Measured collectives].  Never less for more bytes.
    Raises HardwareError if the machine does not have the ranks, PlanError if the algorithm cannot do it there.
    """
    line = _line(ranks)
    measured = None if algorithm is not None else _nearest(hardware, collective, line.num_ranks)
    if measured is None or line.num_ranks == 1:
        return modelled_collective(collective, size_bytes, hardware, line, algorithm)
    return CollectiveTime(copy_time_s(size_bytes, _as_link(measured, hardware, line)), None)


def _nearest(hardware: Hardware, collective: Collective, num_ranks: int) -> MeasuredCollective | None:
    """What was measured over this number of ranks, or over the nearest one by its logarithm, the smaller of two."""
    measured = [one for one in hardware.collectives if one.collective is collective]
    return min(measured, key=lambda one: (abs(log(one.num_ranks / num_ranks)), one.num_ranks), default=None)


def _as_link(measured: MeasuredCollective, hardware: Hardware, line: RankLine) -> Link:
    """Its table over the ranks of ``line``, as a link that copies whole buffers."""
    points, alone = measured.table, RankLine(measured.num_ranks)
    if line != alone:
        points = _scaled(measured, points, (hardware, alone), (hardware, line))
    last = points[-1]
    return Link(
        name=measured.collective,
        latency_s=points[0].seconds,
        bandwidth_bytes_per_s=last.size_bytes / last.seconds,
        table=points,
    )


def _scaled(
    measured: MeasuredCollective,
    points: tuple[LinkPoint, ...],
    before: tuple[Hardware, RankLine],
    after: tuple[Hardware, RankLine],
) -> tuple[LinkPoint, ...]:
    """Points times what the model gives for one machine and ranks over what it gives for others."""

    def modelled_s(size_bytes: int, hardware: Hardware, line: RankLine) -> float:
        return modelled_collective(measured.collective, size_bytes, hardware, line).seconds

    ratios = [modelled_s(point.size_bytes, *after) / modelled_s(point.size_bytes, *before) for point in points]
    seconds = accumulate((point.seconds * ratio for point, ratio in zip(points, ratios, strict=True)), max)
    return tuple(
        LinkPoint(size_bytes=point.size_bytes, seconds=scaled_s)
        for point, scaled_s in zip(points, seconds, strict=True)
    )


def with_collectives_scaled(before: Hardware, after: Hardware) -> Hardware:
    """``after``, which is ``before`` with faster or slower links, with measured collectives that follow its links."""
    scaled = []
    for one in before.collectives:
        machines = (before, RankLine(one.num_ranks)), (after, RankLine(one.num_ranks))
        tables = {name: _scaled(one, getattr(one, name), *machines) for name in ("table", "beside_compute")}
        scaled.append(one.model_copy(update=tables))
    return after.model_copy(update={"collectives": tuple(scaled)})


def collectives_beside_compute(hardware: Hardware, num_ranks: int) -> dict[Lane, float] | None:
    """How much slower collectives and compute run side by side than alone; None where that was not measured.

    Of each collective what was measured over the nearest number of ranks counts: the median over sizes of the seconds
    beside compute over those alone.  Sizes that are latency count only where no larger one was measured.
    """
    found = []
    for collective in Collective:
        measured = _nearest(hardware, collective, num_ranks)
        if num_ranks > 1 and measured is not None and measured.beside_compute:
            pairs = list(zip(measured.table, measured.beside_compute, strict=True))
            large = [(alone, beside) for alone, beside in pairs if alone.size_bytes >= _LARGE_BYTES] or pairs
            ratio = median(beside.seconds / alone.seconds for alone, beside in large)
            found.append((max(1.0, ratio), measured.compute_slowdown))
    if not found:
        return None
    return {Lane.COLLECTIVE: fmean(own for own, _ in found), Lane.COMPUTE: fmean(other for _, other in found)}


def modelled_collective(
    collective: Collective,
    size_bytes: int,
    hardware: Hardware,
    ranks: int | RankLine,
    algorithm: Algorithm | None = None,
) -> CollectiveTime:
    """As ``machine_collective``, by the links alone, whatever was measured.

    Ranks take the devices in order and fill a node before the next; all lines of a world meet at once.  Over several
    nodes, or pairs, HIERARCHICAL is one more way beside the flat ones, whose every message may have to take the slowest
    link.
    Raises HardwareError if the machine does not have the ranks, PlanError if the algorithm cannot do it there.
    """
    line = _line(ranks)
    if line.num_ranks == 1:
        return CollectiveTime(0.0, algorithm or Algorithm.RING)
    levels = fabric_levels(hardware, line)
    ways = []
    if len(levels) > 1 and algorithm in (None, Algorithm.HIERARCHICAL):
        ways.append(CollectiveTime(hierarchical_s(collective, size_bytes, levels), Algorithm.HIERARCHICAL))
    if algorithm is not Algorithm.HIERARCHICAL:
        named = Algorithm if algorithm is None else (algorithm,)
        ways.append(collective_time(collective, size_bytes, flat_fabric(hardware, line), named))
    elif not ways:
        raise HardwareError(
            f"{hardware.name} has no groups of devices among {line.num_ranks} ranks for {algorithm}. Name another "
            f"algorithm."
        )
    best = min(ways, key=lambda way: way.seconds)
    return CollectiveTime(best.seconds + CALL_OVERHEAD_S, best.algorithm)


def passing_s(size_bytes: int, hardware: Hardware, num_ranks: int) -> float:
    """Seconds in which every one of ``num_ranks`` sends so many bytes to its next one and receives as many.

    A message over the slowest link between two neighbours: latency_s + size_bytes / bandwidth, and the overhead of a
    call.  Raises HardwareError as ``fabric_levels`` does.
    """
    fabric = flat_fabric(hardware, num_ranks)
    return CALL_OVERHEAD_S + fabric.latency_s + size_bytes / fabric.bandwidth_bytes_per_s


def _line(ranks: int | RankLine) -> RankLine:
    return RankLine(ranks) if isinstance(ranks, int) else ranks


def fabric_levels(hardware: Hardware, ranks: int | RankLine) -> tuple[Fabric, ...]:
    """What joins the ranks, innermost first: pairs, devices of a node, nodes.  Levels of one rank are left out.

    Raises HardwareError if the machine does not have the ranks, or if they fill some node only in part.
    """
    line = _line(ranks)
    per_node, on_node = line.on_node(hardware)
    levels = [] if on_node == 1 else list(_node_levels(hardware, line, per_node, on_node))
    num_nodes = line.num_ranks // on_node
    if num_nodes > 1:
        levels.append(_network_fabric(hardware, num_nodes, sharing=per_node))
    return tuple(levels)


def flat_fabric(hardware: Hardware, ranks: int | RankLine) -> Fabric:
    """All ranks side by side, every message at the pace of the slowest link between two of them.

    Rings pass each adapter of a node with an equal part, so that a node's adapters work together.
    Raises HardwareError as ``fabric_levels`` does.
    """
    line = _line(ranks)
    levels = fabric_levels(hardware, line)
    if len(levels) < 2:
        return levels[0] if levels else Fabric(1, 0.0, inf)
    per_node, on_node = line.on_node(hardware)
    bandwidths = [level.ring_bytes_per_s for level in levels]
    if line.num_ranks > on_node:
        # The rings of all lines that pass a node share its adapters.
        network = _network_fabric(hardware, line.num_ranks // on_node, sharing=per_node // on_node)
        bandwidths[-1] = network.bandwidth_bytes_per_s
    latency_s = max(level.latency_s for level in levels)
    return Fabric(line.num_ranks, latency_s, min(bandwidths), Shape.RING)


def _network_fabric(hardware: Hardware, num_nodes: int, *, sharing: int) -> Fabric:
    """One rank of every node, where ``sharing`` ranks of a node share its adapters."""
    network = hardware.network
    assert network is not None  # a machine without one has one node
    together = network.adapters_per_node * network.link.bandwidth_bytes_per_s
    # Ranks that outnumber the adapters share them; an adapter that no rank has to itself serves the others.
    bandwidth = together / sharing
    return Fabric(num_nodes, network.link.latency_s, bandwidth, Shape.NETWORK)


def _node_levels(hardware: Hardware, line: RankLine, per_node: int, on_node: int) -> tuple[Fabric, ...]:
    """The fabrics of a line's ``on_node`` devices of a node, at least two, among ``per_node`` that are used."""
    node = hardware.node
    assert node is not None  # a machine without one has one device
    through_host = _HostPaths(hardware, node, line, per_node, on_node)
    if node.device_link is None:
        return (through_host.fabric(),)
    link = node.device_link
    shapes = {Topology.RING: Shape.RING, Topology.MESH: Shape.MESH, Topology.SWITCH: Shape.SWITCH}
    if node.topology is not Topology.PAIRS:
        # On a ring of devices every message passes the links to the devices between, as those of other lines do.
        passed = line.stride if node.topology is Topology.RING else 1
        latency_s, bandwidth = passed * link.latency_s, link.bandwidth_bytes_per_s / passed
        return (Fabric(on_node, latency_s, bandwidth, shapes[node.topology], node.reduces_in_switch),)
    pair = Fabric(2, link.latency_s, link.bandwidth_bytes_per_s)
    if on_node == 2 and line.stride == 1:
        return (pair,)
    if on_node % 2 or line.stride > 1:
        return (through_host.fabric(),)
    # Both members of every pair talk to their counterparts at once.
    paths = through_host.fabric(hop=2)
    return pair, Fabric(on_node // 2, paths.latency_s, paths.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class _HostPaths:
    """Ranks that reach each other through the host; see [Note: The host's path]."""

    hardware: Hardware
    node: Node
    line: RankLine
    per_node: int
    """Ranks on the node, all of which send at once."""
    on_node: int
    """Those of one line."""

    def fabric(self, *, hop: int = 1) -> Fabric:
        """One line's ranks; each sends to the one ``hop`` places on along the line, around."""
        node = self.node
        path = _host_path(self.hardware, node)
        socket_of, root_of = _groups(node.sockets), _groups(node.pcie_roots)
        demands: list[dict[Hashable, float]] = []
        capacities: dict[Hashable, float] = {}
        rate = path.bandwidth_bytes_per_s
        for rank in range(self.per_node):
            target = self.line.next_of(rank, self.on_node, hop)
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
                capacities[memory] = self.hardware.host.memory_bandwidth_bytes_per_s
            demands.append(demand)
        slowest = min(fair_shares(demands, capacities))
        return Fabric(self.on_node, path.latency_s, slowest * rate)


def _host_path(hardware: Hardware, node: Node) -> Link:
    """What one device sends to another through an idle host: no more than two copies that overlap, nor than stated."""
    if hardware.device.kind is DeviceKind.CPU and node.host_path is not None:
        return node.host_path
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

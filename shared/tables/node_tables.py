"""Nodes, networks and the parts of machines as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..basics.units import format_rate, format_seconds
from ..catalogue.machines import cluster_names, machine
from ..catalogue.parts import (
    host_names,
    host_part,
    link_names,
    link_part,
    network_names,
    network_part,
    node_names,
    node_part,
)
from ..schema.hardware import Network, Node
from .labels import NO_VALUE
from .style import add_row, plain_table, spaced, titled


def node_rows(node: Node) -> dict[str, str]:
    """Labels and values of a node's figures, but for its links."""
    root = node.root_bandwidth_bytes_per_s
    return {
        "devices": str(node.num_devices),
        "at each socket": _counts(node.sockets),
        "below each PCIe root": _counts(node.pcie_roots),
        "a root carries": "what its devices ask for" if root is None else f"{format_rate(root)} each way",
        "topology": node.topology,
        "between devices": "through host memory" if node.through_host_memory else "written into each other",
        "sums in the switch": "yes" if node.reduces_in_switch else "no",
    }


def network_rows(network: Network) -> dict[str, str]:
    """Labels and values of a network's figures, but for its link."""
    return {"nodes": str(network.num_nodes), "adapters of a node": str(network.adapters_per_node)}


def cluster_table(names: Iterable[str] | None = None) -> RenderableType:
    """One row for each machine of the catalogue with several devices, or of ``names``.  Raises CatalogueError."""
    table = plain_table("name", ">devices", ">sockets", "topology", ">link\nGB/s", "network")
    for name in cluster_names() if names is None else names:
        hardware = machine(name)
        node, network = hardware.node, hardware.network
        if node is None:
            continue
        link = NO_VALUE if node.device_link is None else _giga(node.device_link.bandwidth_bytes_per_s)
        joined = NO_VALUE if network is None else f"{network.adapters_per_node} x {network.name}"
        add_row(table, name, str(node.num_devices), str(len(node.sockets)), node.topology, link, joined)
    words = "link: between devices, one direction, as collectives use it; – through the host."
    return Group(titled("Machines with several devices", table), Text(words, style="dim"))


def part_tables() -> RenderableType:
    """Every host, link, node and network of the catalogue, by the names that ``--set`` takes."""
    return spaced(
        (
            titled("Hosts: --set host=NAME", _host_table()),
            titled("Links between host and device: --set link=NAME", _link_table()),
            titled("Nodes: --set node=NAME", _node_table()),
            titled("Networks: --set network=NAME", _network_table()),
        )
    )


def _host_table() -> Table:
    table = plain_table("name", ">cores", ">GiB", ">channels", ">GB/s")
    for name in host_names():
        host = host_part(name)
        size = f"{host.memory_bytes / 2**30:.4g}"
        channels = NO_VALUE if host.num_memory_channels is None else str(host.num_memory_channels)
        add_row(table, name, str(host.num_cores), size, channels, _giga(host.memory_bandwidth_bytes_per_s))
    return table


def _link_table() -> Table:
    table = plain_table("name", ">to device\nGB/s", ">to host\nGB/s", "both at once", ">latency")
    for name in link_names():
        pair = link_part(name)
        rates = [_giga(link.bandwidth_bytes_per_s) for link in (pair.host_to_device, pair.device_to_host)]
        latency = format_seconds(pair.host_to_device.latency_s)
        add_row(table, name, *rates, "yes" if pair.full_duplex else "no", latency)
    return table


def _node_table() -> Table:
    table = plain_table("name", ">devices", ">sockets", ">roots", "topology", "link between devices", ">GB/s")
    for name in node_names():
        node = node_part(name)
        link = node.device_link or node.host_path
        between = (NO_VALUE, NO_VALUE) if link is None else (link.name, _giga(link.bandwidth_bytes_per_s))
        counts = (str(node.num_devices), str(len(node.sockets)), str(len(node.pcie_roots)))
        add_row(table, name, *counts, node.topology, *between)
    return table


def _network_table() -> Table:
    table = plain_table("name", ">GB/s", ">latency")
    for name in network_names():
        link = network_part(name).link
        add_row(table, name, _giga(link.bandwidth_bytes_per_s), format_seconds(link.latency_s))
    return table


def _giga(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.4g}"


def _counts(groups: Sequence[int]) -> str:
    """``"4, 4"``, or ``"2 (36 times)"``."""
    if len(groups) > 1 and len(set(groups)) == 1:
        return f"{groups[0]} ({len(groups)} times)"
    return ", ".join(map(str, groups))

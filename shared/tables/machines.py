"""Machines, nodes, networks and the parts of machines as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from ..basics.units import format_bytes, format_flop_per_s, format_rate, format_seconds
from ..catalogue.machines import cluster_names, machine, machine_names
from ..catalogue.parts import (
    disk_names,
    disk_part,
    host_names,
    host_part,
    link_names,
    link_part,
    network_names,
    network_part,
    node_names,
    node_part,
)
from ..schema.hardware import Device, Disk, Hardware, Host, Link, MeasuredCollective, Network, Node
from ..schema.workload import DType
from .labels import NO_VALUE
from .table import Heading, Parts, Row, Table

_COLUMNS: Final = (
    ">memory\nGiB",
    ">memory\nGB/s",
    ">16-bit\nTFLOPS",
    ">32-bit\nTFLOPS",
    ">host\ncores",
    ">host\nGiB",
    ">host\nGB/s",
    ">link\nGB/s",
)


# -- the catalogue ---------------------------------------------------------------------------------------------------


def hardware_table(names: Iterable[str] | None = None) -> Parts:
    """One row for each machine of the catalogue, or of ``names``.  Raises CatalogueError if one is unknown."""
    words = "16-bit: bfloat16, or float16 where there is no bfloat16; 32-bit: float32. link: to the device."
    rows = [_machine_cells(machine(name), name) for name in (machine_names() if names is None else names)]
    return (Table(title="Machines", columns=("\nname", *_COLUMNS), rows=rows, notes=(words,)),)


def _machine_cells(hardware: Hardware, name: str) -> Row:
    device, host = hardware.device, hardware.host
    return (
        name,
        f"{device.memory_bytes / 2**30:.4g}",
        _giga(device.memory_bandwidth_bytes_per_s),
        _tera(device, DType.BFLOAT16 if DType.BFLOAT16 in device.peak_flop_per_s else DType.FLOAT16),
        _tera(device, DType.FLOAT32),
        str(host.num_cores),
        f"{host.memory_bytes / 2**30:.4g}",
        _giga(host.memory_bandwidth_bytes_per_s),
        _giga(hardware.host_to_device.bandwidth_bytes_per_s),
    )


def cluster_table(names: Iterable[str] | None = None) -> Parts:
    """One row for each machine of the catalogue with several devices, or of ``names``.  Raises CatalogueError."""
    rows = []
    for name in cluster_names() if names is None else names:
        hardware = machine(name)
        node, network = hardware.node, hardware.network
        if node is None:
            continue
        link = NO_VALUE if node.device_link is None else _giga(node.device_link.bandwidth_bytes_per_s)
        joined = NO_VALUE if network is None else f"{network.adapters_per_node} x {network.name}"
        rows.append((name, str(node.num_devices), str(len(node.sockets)), str(node.topology), link, joined))
    columns = ("name", ">devices", ">sockets", "topology", ">link\nGB/s", "network")
    words = "link: between devices, one direction, as collectives use it; – through the host."
    return (Table(title="Machines with several devices", columns=columns, rows=rows, notes=(words,)),)


def part_tables() -> Parts:
    """Every host, link, disk, node and network of the catalogue, by the names that ``--set`` takes."""
    return (
        Table(
            title="Hosts: --set host=NAME",
            columns=("name", ">cores", ">GiB", ">channels", ">GB/s"),
            rows=[_host_cells(name) for name in host_names()],
        ),
        Table(
            title="Links between host and device: --set link=NAME",
            columns=("name", ">to device\nGB/s", ">to host\nGB/s", "both at once", ">latency"),
            rows=[_link_cells(name) for name in link_names()],
        ),
        Table(
            title="Disks: --set disk=NAME",
            columns=("name", ">GB", ">read\nGB/s", ">write\nGB/s"),
            rows=[_disk_cells(name) for name in disk_names()],
        ),
        Table(
            title="Nodes: --set node=NAME",
            columns=("name", ">devices", ">sockets", ">roots", "topology", "link between devices", ">GB/s"),
            rows=[_node_cells(name) for name in node_names()],
        ),
        Table(
            title="Networks: --set network=NAME",
            columns=("name", ">GB/s", ">latency"),
            rows=[_network_cells(name) for name in network_names()],
        ),
    )


def _host_cells(name: str) -> Row:
    host = host_part(name)
    channels = NO_VALUE if host.num_memory_channels is None else str(host.num_memory_channels)
    size = f"{host.memory_bytes / 2**30:.4g}"
    return name, str(host.num_cores), size, channels, _giga(host.memory_bandwidth_bytes_per_s)


def _link_cells(name: str) -> Row:
    pair = link_part(name)
    to_device, to_host = (_giga(link.bandwidth_bytes_per_s) for link in (pair.host_to_device, pair.device_to_host))
    latency = format_seconds(pair.host_to_device.latency_s)
    return name, to_device, to_host, "yes" if pair.full_duplex else "no", latency


def _disk_cells(name: str) -> Row:
    disk = disk_part(name)
    return name, _giga(disk.capacity_bytes), _giga(disk.read_bytes_per_s), _giga(disk.write_bytes_per_s)


def _node_cells(name: str) -> Row:
    node = node_part(name)
    link = node.device_link or node.host_path
    between = (NO_VALUE, NO_VALUE) if link is None else (link.name, _giga(link.bandwidth_bytes_per_s))
    counts = (str(node.num_devices), str(len(node.sockets)), str(len(node.pcie_roots)))
    return name, *counts, str(node.topology), *between


def _network_cells(name: str) -> Row:
    link = network_part(name).link
    return name, _giga(link.bandwidth_bytes_per_s), format_seconds(link.latency_s)


# -- one machine -----------------------------------------------------------------------------------------------------


def hardware_details(hardware: Hardware) -> Parts:
    """Every figure of a machine, part by part, each part with the source of its figures."""
    duplex = "side by side at full speed" if hardware.full_duplex else "one at a time, or each at half speed"
    device, host, disk = hardware.device, hardware.host, hardware.disk
    to_device, to_host = hardware.host_to_device, hardware.device_to_host
    return (
        Heading(f"Machine: {hardware.name}"),
        _part("Device", device.name, _device_rows(device), device.source),
        _part("Host", host.name, _host_rows(host), host.source),
        _part("Host to device", to_device.name, _link_rows(to_device), to_device.source),
        _part("Device to host", to_host.name, _link_rows(to_host), to_host.source),
        f"Both directions run {duplex}.",
        *([] if disk is None else [_part("Disk", disk.name, _disk_rows(disk), disk.source)]),
        *_cluster(hardware),
    )


def _cluster(hardware: Hardware) -> Iterator[Table | str]:
    """What a machine has beyond one device: the node, the network, the rent."""
    if (node := hardware.node) is not None:
        yield _part("Node", node.name, _node_rows(node), node.source)
        for title, link in (("Device link", node.device_link), ("Host path", node.host_path)):
            if link is not None:
                yield _part(title, link.name, _link_rows(link), link.source)
    if (network := hardware.network) is not None:
        yield _part("Network", network.name, _network_rows(network) | _link_rows(network.link), network.link.source)
    if hardware.collectives:
        yield _collectives_table(hardware.collectives)
    if hardware.price_usd_per_hour is not None:
        yield f"One machine costs {hardware.price_usd_per_hour:.4g} USD an hour."


def _collectives_table(measured: Sequence[MeasuredCollective]) -> Table:
    """Every measured collective, size by size, and what each does to compute beside it."""
    rows = []
    for one in measured:
        beside = one.beside_compute or (None,) * len(one.table)
        for place, (alone, other) in enumerate(zip(one.table, beside, strict=True)):
            beside_s = NO_VALUE if other is None else format_seconds(other.seconds)
            slowdown = f"{one.compute_slowdown:.2f}" if other is not None and place == 0 else ""
            label = (str(one.collective), str(one.num_ranks)) if place == 0 else ("", "")
            rows.append((*label, format_bytes(alone.size_bytes), format_seconds(alone.seconds), beside_s, slowdown))
    columns = ("collective", "ranks", "buffer", "alone", "beside compute", "compute takes, times")
    return Table(title="Collectives, measured", columns=columns, rows=rows)


def _part(title: str, name: str, rows: Mapping[str, str], source: str) -> Table:
    told = ("source", source.replace("; ", "\n") or "not stated")
    return Table(title=f"{title}: {name}", columns=("", ""), rows=[*rows.items(), told], styles={len(rows): "dim"})


def _device_rows(device: Device) -> dict[str, str]:
    peaks = {f"peak {dtype}": format_flop_per_s(rate) for dtype, rate in device.peak_flop_per_s.items()}
    efficiency = {f"efficiency {kind}": f"{share:.0%}" for kind, share in device.efficiency.items()}
    return {
        "kind": device.kind,
        "memory": format_bytes(device.memory_bytes),
        "of it reserved": format_bytes(device.reserved_bytes),
        "for training": format_bytes(device.usable_bytes),
        "memory bandwidth": format_rate(device.memory_bandwidth_bytes_per_s),
        **peaks,
        "outside matrix units": format_flop_per_s(device.vector_flop_per_s),
        **({} if device.num_multiprocessors is None else {"multiprocessors": str(device.num_multiprocessors)}),
        **({} if device.drawn_w is None else {"power at most": f"{device.drawn_w:g} W"}),
        "launch overhead": format_seconds(device.launch_overhead_s),
        **efficiency,
    }


def _host_rows(host: Host) -> dict[str, str]:
    adam, products = host.adam_bytes_per_s, host.matrix_flop_per_s
    return {
        "cores": str(host.num_cores),
        "memory": format_bytes(host.memory_bytes),
        "memory channels": "not stated" if host.num_memory_channels is None else str(host.num_memory_channels),
        "memory bandwidth": format_rate(host.memory_bandwidth_bytes_per_s),
        "CPU Adam": "follows from the memory bandwidth" if adam is None else f"{format_rate(adam)}, measured",
        **({} if products is None else {"float32 products": f"{format_flop_per_s(products)}, measured"}),
    }


def _link_rows(link: Link) -> dict[str, str]:
    measured = {
        f"copy of {format_bytes(point.size_bytes)}": f"{format_seconds(point.seconds)}, measured"
        for point in link.table
    }
    return {
        "bandwidth": format_rate(link.bandwidth_bytes_per_s),
        "latency": format_seconds(link.latency_s),
        **measured,
    }


def _disk_rows(disk: Disk) -> dict[str, str]:
    return {
        "for files": format_bytes(disk.capacity_bytes),
        "reads": format_rate(disk.read_bytes_per_s),
        "writes": format_rate(disk.write_bytes_per_s),
        "latency": format_seconds(disk.latency_s),
    }


def _node_rows(node: Node) -> dict[str, str]:
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


def _network_rows(network: Network) -> dict[str, str]:
    """Labels and values of a network's figures, but for its link."""
    return {"nodes": str(network.num_nodes), "adapters of a node": str(network.adapters_per_node)}


def _tera(device: Device, dtype: DType) -> str:
    rate = device.peak_flop_per_s.get(dtype)
    return NO_VALUE if rate is None else f"{rate / 1e12:.4g}"


def _giga(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.4g}"


def _counts(groups: Sequence[int]) -> str:
    """``"4, 4"``, or ``"2 (36 times)"``."""
    if len(groups) > 1 and len(set(groups)) == 1:
        return f"{groups[0]} ({len(groups)} times)"
    return ", ".join(map(str, groups))

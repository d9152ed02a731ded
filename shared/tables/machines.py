"""Machines as tables for the terminal.

Every cell is plain ``Text``: names and sources from files are never read as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from ..basics.units import format_bytes, format_rate, format_seconds
from ..catalogue.machines import machine, machine_names
from ..schema.hardware import Device, Hardware, Host, Link
from ..schema.workload import DType
from .labels import NO_VALUE
from .node_tables import network_rows, node_rows
from .style import add_row, plain_table, titled

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


def hardware_table(names: Iterable[str] | None = None) -> RenderableType:
    """One row for each machine of the catalogue, or of ``names``.  Raises CatalogueError if one is unknown."""
    table = plain_table("\nname", *_COLUMNS)
    for name in machine_names() if names is None else names:
        hardware = machine(name)
        device, host = hardware.device, hardware.host
        add_row(
            table,
            name,
            f"{device.memory_bytes / 2**30:.4g}",
            f"{device.memory_bandwidth_bytes_per_s / 1e9:.4g}",
            _tera(device, DType.BFLOAT16 if DType.BFLOAT16 in device.peak_flop_per_s else DType.FLOAT16),
            _tera(device, DType.FLOAT32),
            str(host.num_cores),
            f"{host.memory_bytes / 2**30:.4g}",
            f"{host.memory_bandwidth_bytes_per_s / 1e9:.4g}",
            f"{hardware.host_to_device.bandwidth_bytes_per_s / 1e9:.4g}",
        )
    words = "16-bit: bfloat16, or float16 where there is no bfloat16; 32-bit: float32. link: to the device."
    return Group(titled("Machines", table), Text(words, style="dim"))


def hardware_details(hardware: Hardware) -> RenderableType:
    """Every figure of a machine, part by part, each part with the source of its figures."""
    duplex = "side by side at full speed" if hardware.full_duplex else "one at a time, or each at half speed"
    device, host = hardware.device, hardware.host
    to_device, to_host = hardware.host_to_device, hardware.device_to_host
    return Group(
        Text(f"Machine: {hardware.name}", style="bold"),
        Text(""),
        _part("Device", device.name, _device_rows(device), device.source),
        Text(""),
        _part("Host", host.name, _host_rows(host), host.source),
        Text(""),
        _part("Host to device", to_device.name, _link_rows(to_device), to_device.source),
        Text(""),
        _part("Device to host", to_host.name, _link_rows(to_host), to_host.source),
        Text(""),
        Text(f"Both directions run {duplex}."),
        *_cluster(hardware),
    )


def _cluster(hardware: Hardware) -> Iterator[RenderableType]:
    """What a machine has beyond one device: the node, the network, the rent."""
    if hardware.node is not None:
        yield Text("")
        yield _part("Node", hardware.node.name, node_rows(hardware.node), hardware.node.source)
        for title, link in (("Device link", hardware.node.device_link), ("Host path", hardware.node.host_path)):
            if link is not None:
                yield Text("")
                yield _part(title, link.name, _link_rows(link), link.source)
    if hardware.network is not None:
        network = hardware.network
        yield Text("")
        yield _part("Network", network.name, network_rows(network) | _link_rows(network.link), network.link.source)
    if hardware.price_usd_per_hour is not None:
        yield Text("")
        yield Text(f"One machine costs {hardware.price_usd_per_hour:.4g} USD an hour.")


def format_flop_per_s(flop_per_s: float) -> str:
    """``"71 TFLOP/s"``; the decimal unit that leaves a number of at least one."""
    for unit, scale in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if flop_per_s >= scale:
            return f"{flop_per_s / scale:.4g} {unit}"
    return f"{flop_per_s:.4g} FLOP/s"


def _part(title: str, name: str, rows: Mapping[str, str], source: str) -> RenderableType:
    table = plain_table("", "")
    table.show_header = False
    table.columns[0].no_wrap = True
    for label, value in rows.items():
        add_row(table, label, value)
    add_row(table, "source", source.replace("; ", "\n") or "not stated", style="dim")
    return titled(f"{title}: {name}", table)


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
        "launch overhead": format_seconds(device.launch_overhead_s),
        **efficiency,
    }


def _host_rows(host: Host) -> dict[str, str]:
    adam = host.adam_bytes_per_s
    return {
        "cores": str(host.num_cores),
        "memory": format_bytes(host.memory_bytes),
        "memory channels": "not stated" if host.num_memory_channels is None else str(host.num_memory_channels),
        "memory bandwidth": format_rate(host.memory_bandwidth_bytes_per_s),
        "CPU Adam": "follows from the memory bandwidth" if adam is None else f"{format_rate(adam)}, measured",
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


def _tera(device: Device, dtype: DType) -> str:
    rate = device.peak_flop_per_s.get(dtype)
    return NO_VALUE if rate is None else f"{rate / 1e12:.4g}"

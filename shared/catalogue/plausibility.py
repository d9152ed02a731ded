"""Figures that no machine has: most often a quantity whose unit was forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ..basics.errors import HardwareError
from ..schema.hardware import Hardware, Link


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float
    unit: str
    example: str


_MEMORY: Final = _Range(2**18, 2**50, " B", "24GiB; a bare number is bytes")
_BANDWIDTH: Final = _Range(1e5, 1e15, " B/s", "25GB/s; a bare number is bytes per second")
_RATE: Final = _Range(1e6, 1e19, " FLOP/s", "71e12 for 71 TFLOP/s")
_SECONDS: Final = _Range(0, 1, " s", "5e-6 for 5 µs")
_CORES: Final = _Range(1, 2**16, "", "64")
_DEVICES: Final = _Range(1, 2**12, "", "8")
_NODES: Final = _Range(1, 2**20, "", "4")
_PRICE: Final = _Range(1e-4, 1e7, " USD/h", "2.5 for 2.50 US dollars an hour")


def check_plausible(hardware: Hardware, *, origin: str) -> None:
    """Raise HardwareError if a figure is beyond any machine; the message names the field, its value and its range.

    Sizes lie from 256 KiB to 1 PiB, bandwidths from 0.1 MB/s to 1 PB/s, rates from 1 MFLOP/s to 10 EFLOP/s, latencies
    up to 1 s.  ``origin`` names the description in messages.
    """
    for field, value, bounds in _figures(hardware):
        if not bounds.low <= value <= bounds.high:
            raise HardwareError(
                f"{origin}: {field} is {value:.6g}{bounds.unit}, outside {bounds.low:g} to {bounds.high:g}{bounds.unit}"
                f". Write it as {bounds.example}."
            )


def _figures(hardware: Hardware) -> Iterator[tuple[str, float, _Range]]:
    device, host = hardware.device, hardware.host
    yield "device.memory_bytes", device.memory_bytes, _MEMORY
    yield "device.memory_bandwidth_bytes_per_s", device.memory_bandwidth_bytes_per_s, _BANDWIDTH
    for dtype, rate in device.peak_flop_per_s.items():
        yield f"device.peak_flop_per_s.{dtype}", rate, _RATE
    yield "device.vector_flop_per_s", device.vector_flop_per_s, _RATE
    yield "device.launch_overhead_s", device.launch_overhead_s, _SECONDS
    yield "host.num_cores", host.num_cores, _CORES
    if host.num_memory_channels is not None:
        yield "host.num_memory_channels", host.num_memory_channels, _DEVICES
    yield "host.memory_bytes", host.memory_bytes, _MEMORY
    yield "host.memory_bandwidth_bytes_per_s", host.memory_bandwidth_bytes_per_s, _BANDWIDTH
    if host.adam_bytes_per_s is not None:
        yield "host.adam_bytes_per_s", host.adam_bytes_per_s, _BANDWIDTH
    yield from _link_figures("host_to_device", hardware.host_to_device)
    yield from _link_figures("device_to_host", hardware.device_to_host)
    if hardware.price_usd_per_hour is not None:
        yield "price_usd_per_hour", hardware.price_usd_per_hour, _PRICE
    yield from _cluster_figures(hardware)


def _cluster_figures(hardware: Hardware) -> Iterator[tuple[str, float, _Range]]:
    node, network = hardware.node, hardware.network
    if node is not None:
        yield "node.num_devices", node.num_devices, _DEVICES
        if node.root_bandwidth_bytes_per_s is not None:
            yield "node.root_bandwidth_bytes_per_s", node.root_bandwidth_bytes_per_s, _BANDWIDTH
        for field, link in (("device_link", node.device_link), ("host_path", node.host_path)):
            if link is not None:
                yield from _link_figures(f"node.{field}", link)
    if network is not None:
        yield "network.num_nodes", network.num_nodes, _NODES
        yield "network.adapters_per_node", network.adapters_per_node, _DEVICES
        yield from _link_figures("network.link", network.link)


def _link_figures(direction: str, link: Link) -> Iterator[tuple[str, float, _Range]]:
    yield f"{direction}.latency_s", link.latency_s, _SECONDS
    yield f"{direction}.bandwidth_bytes_per_s", link.bandwidth_bytes_per_s, _BANDWIDTH

"""The catalogue of machines: figures against the silicon that they come from."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from protwin.shared.catalogue.machines import (
    cluster_names,
    load_hardware,
    machine,
    machine_names,
    override_hardware,
)
from protwin.shared.catalogue.parts import (
    device_link_names,
    device_link_part,
    device_part,
    host_names,
    host_part,
    link_names,
    link_part,
    network_names,
    network_part,
    node_names,
)
from protwin.shared.schema.hardware import Device
from protwin.shared.schema.workload import DType
from tests.shared.full_machine import whole_file

GIB = 2**30
REQUIRED = ("rtx-3090", "rtx-4090", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb")
NO_BFLOAT16 = ("t4", "v100-16gb", "v100-32gb")


@dataclass(frozen=True)
class Silicon:
    """What a device's peaks follow from; clocks are boost clocks."""

    num_processors: int
    matrix_flop_per_clock: int
    """Of one processor in 16 bit: dense, accumulating in float32."""
    matrix_clock_hz: float
    num_lanes: int
    """Of one processor in float32; each does a multiply-add per clock."""
    clock_hz: float
    bus_bits: int
    pin_bits_per_s: float
    memory_gib: int
    matrix_float32: int = 1
    """How many times faster float32 is in matrix units than outside."""


SILICON = {
    "rtx-3090": Silicon(82, 512, 1.695e9, 128, 1.695e9, 384, 19.5e9, 24),
    "rtx-3090-ti": Silicon(84, 512, 1.86e9, 128, 1.86e9, 384, 21e9, 24),
    "rtx-4090": Silicon(128, 512, 2.52e9, 128, 2.52e9, 384, 21e9, 24),
    "rtx-5090": Silicon(170, 512, 2.407e9, 128, 2.407e9, 512, 28e9, 32),
    "rtx-a6000": Silicon(84, 1024, 1.8e9, 128, 1.8e9, 384, 16e9, 48),
    "rtx-6000-ada": Silicon(142, 1024, 2.505e9, 128, 2.505e9, 384, 20e9, 48),
    "rtx-pro-6000": Silicon(188, 1024, 2.617e9, 128, 2.617e9, 512, 28e9, 96),
    "t4": Silicon(40, 1024, 1.59e9, 64, 1.59e9, 256, 10e9, 16),
    "a10": Silicon(72, 1024, 1.695e9, 128, 1.695e9, 384, 12.5e9, 24),
    "a40": Silicon(84, 1024, 1.74e9, 128, 1.74e9, 384, 14.5e9, 48),
    "l4": Silicon(58, 1024, 2.04e9, 128, 2.04e9, 192, 12.5e9, 24),
    "v100-16gb": Silicon(80, 1024, 1.53e9, 64, 1.53e9, 4096, 1.754e9, 16),
    "a100-40gb-pcie": Silicon(108, 2048, 1.41e9, 64, 1.41e9, 5120, 2.43e9, 40),
    "a100-80gb-pcie": Silicon(108, 2048, 1.41e9, 64, 1.41e9, 5120, 3.024e9, 80),
    "h100-80gb-pcie": Silicon(114, 4096, 1.62e9, 128, 1.755e9, 5120, 3.125e9, 80),
    "h100-94gb-nvl": Silicon(132, 4096, 1.545e9, 128, 1.785e9, 6016, 5.23e9, 94),
    "mi210-64gb": Silicon(104, 1024, 1.7e9, 64, 1.7e9, 4096, 3.2e9, 64, matrix_float32=2),
    "mi250x-64gb": Silicon(110, 1024, 1.7e9, 64, 1.7e9, 4096, 3.2e9, 64, matrix_float32=2),
    "mi325x-256gb": Silicon(304, 2048, 2.1e9, 128, 2.1e9, 8192, 5.86e9, 256),
    "l40s": Silicon(142, 1024, 2.49e9, 128, 2.52e9, 384, 18e9, 48),
    "v100-32gb": Silicon(80, 1024, 1.53e9, 64, 1.53e9, 4096, 1.754e9, 32),
    "a100-40gb": Silicon(108, 2048, 1.41e9, 64, 1.41e9, 5120, 2.43e9, 40),
    "a100-80gb": Silicon(108, 2048, 1.41e9, 64, 1.41e9, 5120, 3.186e9, 80),
    "h100-80gb": Silicon(132, 4096, 1.83e9, 128, 1.98e9, 5120, 5.23e9, 80),
    "h200-141gb": Silicon(132, 4096, 1.83e9, 128, 1.98e9, 6144, 6.25e9, 141),
    "gh200-96gb": Silicon(132, 4096, 1.83e9, 128, 1.98e9, 6144, 5.23e9, 96),
    "mi300x-192gb": Silicon(304, 2048, 2.1e9, 128, 2.1e9, 8192, 5.2e9, 192),
}
"""Processors, clocks and memory buses as published; the Blackwell data sheets name none for the B200 and the GB200."""
TOLERANCE = 0.012
"""Data sheets round to two or three digits."""

CHANNELS = {
    # Memory channels of 8 bytes and transfers per second.
    "desktop-16": (2, 3200e6),
    "desktop-16-ddr5": (2, 5200e6),
    "workstation-32": (8, 3200e6),
    "workstation-96": (8, 5200e6),
    "xeon-20": (4, 2400e6),
    "epyc-64": (8, 3200e6),
    "epyc-96": (12, 4800e6),
    "xeon-56": (8, 4800e6),
    "xeon-56-ddr5-5600": (8, 5600e6),
    "grace-72": (32, 2e9),  # 512 GB/s
}


def peaks_agree(device: Device, silicon: Silicon) -> bool:
    """Whether a device's peaks are those of its silicon."""
    matrix = silicon.num_processors * silicon.matrix_flop_per_clock * silicon.matrix_clock_hz
    vector = silicon.num_processors * silicon.num_lanes * 2 * silicon.clock_hz
    pairs = [
        (device.peak_flop_per_s[DType.FLOAT16], matrix),
        (device.peak_flop_per_s.get(DType.BFLOAT16, matrix), matrix),
        (device.peak_flop_per_s[DType.FLOAT32], vector * silicon.matrix_float32),
        (device.vector_flop_per_s, vector),
        (device.memory_bandwidth_bytes_per_s, silicon.bus_bits / 8 * silicon.pin_bits_per_s),
        (device.memory_bytes, silicon.memory_gib * GIB),
    ]
    return all(math.isclose(stated, derived, rel_tol=TOLERANCE) for stated, derived in pairs)


# -- figures ---------------------------------------------------------------------------------------------------------


def test_the_machines_that_people_ask_for_are_there() -> None:
    assert set(REQUIRED) <= set(machine_names())


@pytest.mark.parametrize("name", SILICON)
def test_peaks_follow_from_the_silicon(name: str) -> None:
    device = device_part(name)
    assert peaks_agree(device, SILICON[name])
    assert device.num_multiprocessors == SILICON[name].num_processors
    sparse = {dtype: 2 * peak for dtype, peak in device.peak_flop_per_s.items()}
    with_tf32 = device.peak_flop_per_s | {DType.FLOAT32: device.peak_flop_per_s[DType.FLOAT16] / 2}
    decimal = round(device.memory_bytes / GIB * 1e9)
    assert not peaks_agree(device.model_copy(update={"peak_flop_per_s": sparse}), SILICON[name])
    assert not peaks_agree(device.model_copy(update={"memory_bytes": decimal}), SILICON[name])
    if "rtx-3090" not in name and "4090" not in name and "5090" not in name:  # their TF32 is no faster than float32
        assert not peaks_agree(device.model_copy(update={"peak_flop_per_s": with_tf32}), SILICON[name])


@pytest.mark.parametrize("name", machine_names())
def test_figures_of_a_machine_agree_with_each_other(name: str) -> None:
    hardware = machine(name)
    device, peaks = hardware.device, hardware.device.peak_flop_per_s
    assert hardware.name == device.name == name
    assert (DType.BFLOAT16 in peaks) == (name not in NO_BFLOAT16)
    assert peaks.get(DType.BFLOAT16, peaks[DType.FLOAT16]) == peaks[DType.FLOAT16]
    matrix_float32 = 2 if name.startswith("mi2") else 1
    assert math.isclose(peaks[DType.FLOAT32], matrix_float32 * device.vector_flop_per_s, rel_tol=0.003)
    for eight_bit in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2):
        assert math.isclose(peaks.get(eight_bit, 2 * peaks[DType.FLOAT16]), 2 * peaks[DType.FLOAT16], rel_tol=0.02)
    assert 0.75 * GIB <= device.reserved_bytes <= 0.14 * device.memory_bytes
    stated_gib = re.search(r"(\d+)gb(-|$)", name)
    assert stated_gib is None or device.memory_bytes == int(stated_gib[1]) * GIB


@pytest.mark.parametrize("name", machine_names())
def test_every_figure_names_its_source(name: str) -> None:
    device = device_part(name)
    for word in ("reserved_bytes", "launch_overhead_s", "peaks", "bandwidth"):
        assert word in device.source
    stated, reported = re.search(r"([\d.]+) GiB less the ([\d.]+) GiB", device.source).groups()  # type: ignore[union-attr]
    assert float(stated) * GIB == device.memory_bytes
    assert math.isclose(device.reserved_bytes, (float(stated) - float(reported) + 0.75) * GIB, abs_tol=1000)


@pytest.mark.parametrize("name", host_names())
def test_host_memory_reaches_what_its_channels_allow(name: str) -> None:
    host = host_part(name)
    num_channels, transfers_per_s = CHANNELS[name]
    assert host.num_memory_channels == (None if name == "grace-72" else num_channels)  # LPDDR5X has no such channels
    assert 0.7 <= host.memory_bandwidth_bytes_per_s / (num_channels * 8 * transfers_per_s) <= 0.96
    assert host.num_cores == int(re.findall(r"-(\d+)", name)[0])
    assert "memory_bandwidth" in host.source


@pytest.mark.parametrize("name", link_names())
def test_links_reach_what_their_lanes_allow(name: str) -> None:
    pair = link_part(name)
    generation = re.match(r"pcie(\d)-x(\d+)", name)
    if generation is None:
        signalling_bytes_per_s = {"nvlink-c2c": 450e9, "infinity-fabric": 36e9}[name]  # per direction
    else:
        transfers_per_s = {"3": 8e9, "4": 16e9, "5": 32e9, "6": 64e9}[generation[1]]
        carried_frac = 236 / 256 if generation[1] == "6" else 128 / 130
        signalling_bytes_per_s = int(generation[2]) * transfers_per_s * carried_frac / 8
    for link in (pair.host_to_device, pair.device_to_host):
        assert 0.65 <= link.bandwidth_bytes_per_s / signalling_bytes_per_s <= 0.92
        assert 1e-6 <= link.latency_s <= 2e-5
        assert "latency_s" in link.source
        assert "full_duplex" in link.source


@pytest.mark.parametrize("gib_s", [("pcie3", 8), ("pcie4", 8), ("pcie5", 8)])
def test_half_of_the_lanes_carry_half(gib_s: tuple[str, int]) -> None:
    generation, lanes = gib_s
    whole, half = link_part(f"{generation}-x16"), link_part(f"{generation}-x{lanes}")
    for direction in ("host_to_device", "device_to_host"):
        rates = [getattr(pair, direction).bandwidth_bytes_per_s for pair in (whole, half)]
        assert rates[0] == pytest.approx(2 * rates[1])


def test_every_machine_is_made_of_known_parts() -> None:
    machines = whole_file("machines")
    for part, known in (("device", machine_names()), ("host", host_names())):
        assert {parts[part] for parts in machines.values()} == set(known)
    assert {parts["link"] for parts in machines.values()} <= set(link_names())
    assert {parts["node"] for parts in machines.values() if "node" in parts} <= set(node_names())
    assert {parts["network"] for parts in machines.values() if "network" in parts} <= set(network_names())


# -- nodes and networks ----------------------------------------------------------------------------------------------

DEVICE_LINKS = {
    # Links of a device and what one signals in one direction, as data sheets state them.
    "nvlink2-v100": (6, 25e9),
    "nvlink3-ga102": (4, 14.0625e9),
    "nvlink3-a100": (12, 25e9),
    "nvlink3-a100-bridge": (12, 25e9),
    "nvlink4-h100": (18, 25e9),
    "nvlink4-h100-bridge": (12, 25e9),
    "nvlink5-b200": (18, 50e9),
    "infinity-fabric-mi300x": (1, 64e9),
    "pcie3-peer": (16, 8e9 * (128 / 130) / 8),
    "pcie4-peer": (16, 16e9 * (128 / 130) / 8),
    "pcie5-peer": (16, 32e9 * (128 / 130) / 8),
}
NETWORK_BITS_PER_S = {"edr": 100e9, "hdr": 200e9, "ndr": 400e9}


@pytest.mark.parametrize("name", device_link_names())
def test_links_between_devices_reach_what_their_lanes_allow(name: str) -> None:
    link = device_link_part(name)
    num_links, signalling_bytes_per_s = DEVICE_LINKS[name]
    assert 0.5 <= link.bandwidth_bytes_per_s / (num_links * signalling_bytes_per_s) <= 0.86
    assert link.latency_s == (3.4e-6 if name.startswith(("nvlink", "infinity")) else 5.7e-6)
    assert "bandwidth:" in link.source
    assert "latency_s:" in link.source


@pytest.mark.parametrize("name", network_names())
def test_networks_reach_what_their_line_allows(name: str) -> None:
    link = network_part(name).link
    rate = re.search(r"-(\d+)g$", name)
    bits_per_s = int(rate[1]) * 1e9 if rate else NETWORK_BITS_PER_S[name.rpartition("-")[2]]
    assert 0.7 <= 8 * link.bandwidth_bytes_per_s / bits_per_s <= 0.97
    assert "bandwidth:" in link.source


@pytest.mark.parametrize("name", cluster_names())
def test_a_cluster_is_its_machine_several_times(name: str) -> None:
    hardware = machine(name)
    device, _, count = name.partition("-x")
    assert hardware.node is not None
    assert hardware.device == device_part(device)
    assert hardware.num_devices == hardware.devices_per_node == int(count.partition("-")[0])
    assert hardware.node.source
    assert len(hardware.node.sockets) <= hardware.devices_per_node
    if hardware.node.root_bandwidth_bytes_per_s is not None:
        assert max(hardware.node.pcie_roots) > 1
        assert hardware.node.root_bandwidth_bytes_per_s == hardware.host_to_device.bandwidth_bytes_per_s
    four = override_hardware(hardware, {"network": "infiniband-ndr", "network.num_nodes": "4"})
    assert (four.num_nodes, four.num_devices) == (4, 4 * hardware.devices_per_node)


def test_a_machine_with_one_device_reads_as_before_it_could_have_several(tmp_path: Path) -> None:
    known = machine("rtx-3090")
    content = known.model_dump(mode="json")
    for field in ("node", "network", "price_usd_per_hour"):
        assert content.pop(field) is None
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"kind": "hardware", "schema_version": 1} | content), encoding="utf-8")
    assert load_hardware(path) == known
    assert (known.num_devices, known.devices_per_node, known.num_nodes) == (1, 1, 1)

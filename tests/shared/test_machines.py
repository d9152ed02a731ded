"""The catalogue of machines: figures against the silicon that they come from, and machines from files."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import tomli_w
from hypothesis import given
from pydantic import BaseModel

import protwin.shared.hardware
from protwin.shared.catalogue_files import machine_sections, read_machine_table
from protwin.shared.errors import CatalogueError, FileError, HardwareError
from protwin.shared.hardware import Device, DeviceKind, Hardware, Host, Link, LinkPoint, Network, Node, Topology
from protwin.shared.hardware_tables import hardware_details, hardware_table
from protwin.shared.machine_parts import (
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
from protwin.shared.machines import (
    cluster_names,
    hardware_to_toml,
    load_hardware,
    machine,
    machine_names,
    override_hardware,
)
from protwin.shared.node_tables import cluster_table, part_tables
from protwin.shared.tables import as_text
from protwin.shared.workload import DType, OperationClass
from tests.strategies import hardware as random_hardware
from tests.strategies import links

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


def whole_file(name: str) -> dict[str, Any]:
    """A file in the folder of machines, parsed in one go."""
    folder = Path(protwin.shared.hardware.__file__).parent / "catalogue" / "machines"
    return tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))


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


# -- names and files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "meant"), [("3090", "rtx-3090"), ("RTX 4090", "rtx-4090"), ("a100", "a100-40gb"), ("h-100", "h100-80gb")]
)
def test_an_unknown_machine_is_answered_with_the_nearest(asked: str, meant: str) -> None:
    with pytest.raises(CatalogueError, match=f"Did you mean .*{meant}") as caught:
        load_hardware(asked)
    assert ".toml" in str(caught.value)


def full_hardware() -> Hardware:
    """A machine that leaves no field at its default."""
    table = (LinkPoint(size_bytes=1024, seconds=1e-5), LinkPoint(size_bytes=2**20, seconds=1e-4))
    return Hardware(
        name='my "machine" \\ µ\n[device]',
        device=Device(
            name="d",
            kind=DeviceKind.CPU,
            memory_bytes=2**61 + 1,
            reserved_bytes=12345,
            memory_bandwidth_bytes_per_s=0.1 + 0.2,
            peak_flop_per_s={DType.FLOAT32: 1e12, DType.FLOAT8_E5M2: 1 / 3},
            vector_flop_per_s=1e300,
            launch_overhead_s=5e-324,
            num_multiprocessors=7,
            efficiency={OperationClass.MATMUL: 0.7, OperationClass.EMBEDDING: 1.0},
            source="a = 1 # no comment",
        ),
        host=Host(
            name="h",
            num_cores=3,
            num_memory_channels=5,
            memory_bytes=2**40,
            memory_bandwidth_bytes_per_s=2.0,
            adam_bytes_per_s=7e9,
            source="'''\"\"\"",
        ),
        host_to_device=Link(name="x", latency_s=1e-6, bandwidth_bytes_per_s=1e9, table=table, source="s"),
        device_to_host=Link(name="y", latency_s=2e-6, bandwidth_bytes_per_s=2e9, table=table[:1], source="t"),
        full_duplex=False,
        node=Node(
            name="n",
            num_devices=4,
            sockets=(3, 1),
            pcie_roots=(1, 2, 1),
            root_bandwidth_bytes_per_s=1e9,
            topology=Topology.SWITCH,
            device_link=Link(name="z", latency_s=3e-6, bandwidth_bytes_per_s=3e9, table=table, source="u"),
            host_path=Link(name="p", latency_s=4e-6, bandwidth_bytes_per_s=4e9, table=table, source="v"),
            through_host_memory=True,
            reduces_in_switch=True,
            source="w",
        ),
        network=Network(
            name="net",
            num_nodes=3,
            adapters_per_node=2,
            link=Link(name="a", latency_s=5e-6, bandwidth_bytes_per_s=5e9, table=table, source="x"),
            source="y",
        ),
        price_usd_per_hour=1 / 3,
    )


def field_paths(model: BaseModel, path: str = "") -> Iterator[str]:
    """The dotted name of every field, and of the fields within it."""
    for field in type(model).model_fields:
        yield f"{path}{field}"
        value = getattr(model, field)
        if isinstance(value, BaseModel):
            yield from field_paths(value, f"{path}{field}.")


FIELDS = tuple(field_paths(full_hardware()))


def read_back(text: str, folder: Path) -> Hardware:
    path = folder / "machine.toml"
    path.write_text(text, encoding="utf-8")
    return Hardware.load(path)


def test_toml_reads_back_equal_in_every_field(tmp_path: Path) -> None:
    hardware = full_hardware()
    assert read_back(hardware_to_toml(hardware), tmp_path) == hardware
    head = {"kind": "hardware", "schema_version": 1}
    for path in FIELDS:
        content = hardware.model_dump(mode="json")
        *within, field = path.split(".")
        holder = content
        for part in within:
            holder = holder[part]
        del holder[field]  # a writer that forgets one field
        try:
            assert read_back(tomli_w.dumps(head | content), tmp_path) != hardware
        except FileError:
            continue


@st.composite
def random_clusters(draw: st.DrawFn) -> Hardware:
    """A small machine; some with several devices, a network, a price."""
    sockets = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    topology = draw(st.sampled_from([Topology.HOST, Topology.RING, Topology.MESH, Topology.SWITCH]))
    node = Node(
        name=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
        num_devices=sum(sockets),
        sockets=sockets,
        pcie_roots=sockets,
        root_bandwidth_bytes_per_s=draw(st.none() | st.floats(1, 1e12)),
        topology=topology,
        device_link=None if topology is Topology.HOST else draw(links()),
        host_path=draw(st.none() | links()),
        through_host_memory=draw(st.booleans()),
        reduces_in_switch=topology is Topology.SWITCH and draw(st.booleans()),
    )
    network = Network(
        name="n", num_nodes=draw(st.integers(1, 99)), adapters_per_node=draw(st.integers(1, 9)), link=draw(links())
    )
    more = {
        "node": draw(st.none() | st.just(node)),
        "network": draw(st.none() | st.just(network)),
        "price_usd_per_hour": draw(st.none() | st.floats(1e-3, 1e6)),
    }
    return draw(random_hardware()).model_copy(update=more)


@given(hardware=random_clusters(), text=st.text(st.characters(exclude_categories=["Cs"])))
def test_random_machines_read_back_equal_from_toml(hardware: Hardware, text: str) -> None:
    named = hardware.model_copy(update={"name": text, "host": hardware.host.model_copy(update={"source": text})})
    content = hardware_to_toml(named)
    assert Hardware.from_mapping(tomllib.loads(content), origin="text") == named


@pytest.mark.parametrize("name", machine_names() + cluster_names())
def test_the_catalogue_reads_back_from_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(hardware_to_toml(machine(name)), encoding="utf-8")
    assert load_hardware(path) == load_hardware(name) == machine(name)
    machine(name).save(tmp_path / "machine.json")
    assert load_hardware(str(tmp_path / "machine.json")) == machine(name)


def test_people_write_units(tmp_path: Path) -> None:
    text = hardware_to_toml(machine("rtx-3090"))
    text = re.sub(r"(?m)^memory_bytes = \d+$", 'memory_bytes = "24GiB"', text)
    text = text.replace("bandwidth_bytes_per_s = 936000000000.0", 'bandwidth_bytes_per_s = "936 GB/s"')
    hardware = read_back(text, tmp_path)
    assert hardware.device == machine("rtx-3090").device
    assert hardware.host.memory_bytes == 24 * GIB


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("memory_bandwidth_bytes_per_s = 936e9", "memory_bandwidth_bytes_per_s = nan", FileError, "device.memory_band"),
        ("memory_bandwidth_bytes_per_s = 936e9", "memory_bandwidth_bytes_per_s = 0", FileError, "device.memory_band"),
        ("memory_bandwidth_bytes_per_s = 936e9", "memory_bandwidth_bytes_per_s = -1", FileError, "device.memory_band"),
        ("memory_bandwidth_bytes_per_s = 936e9", "memory_bandwidth_bytes_per_s = inf", FileError, "device.memory_band"),
        ("memory_bandwidth_bytes_per_s = 936e9", "memory_bandwidth_bytes_per_s = 936", HardwareError, "936 B/s"),
        ("memory_bandwidth_bytes_per_s = 936e9", 'memory_bandwidth_bytes_per_s = "9XB"', FileError, "unknown unit"),
        ("memory_bandwidth_bytes_per_s = 936e9", "memory_bandwith = 936e9", FileError, "device.memory_bandwith"),
        ("num_cores = 16", "num_cores = 0", FileError, "host.num_cores"),
        ("num_cores = 16", "num_cores = 1000000", HardwareError, "host.num_cores is 1e\\+06"),
        ('kind = "hardware"', 'kind = "plan"', FileError, "is a plan file"),
        ("schema_version = 1", "schema_version = 2", FileError, "schema_version 2"),
        ("[device]", "[device", FileError, "damaged"),
        ("latency_s = 6e-06", "latency_s = 6.0", HardwareError, "host_to_device.latency_s is 6 s"),
        ("bandwidth_bytes_per_s = 25600000000.0", "bandwidth_bytes_per_s = 0.0", FileError, "host_to_device.bandwidth"),
        ("[device]", "price_usd_per_hour = -1.0\n[device]", FileError, "price_usd_per_hour"),
        ("[device]", "price_eur_per_hour = 1.0\n[device]", FileError, "price_eur_per_hour"),
    ],
)
def test_an_impossible_file_is_refused(
    old: str, new: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    text = hardware_to_toml(machine("rtx-3090")).replace("936000000000.0", "936e9")
    assert old in text
    path = tmp_path / "machine.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(error, match=message) as caught:
        load_hardware(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"node": {"num_devices": 0}}, FileError, "node.num_devices"),
        ({"node": {"sockets": [4, 3]}}, FileError, "sockets 4,3 hold 7 devices, but num_devices is 8"),
        ({"node": {"pcie_roots": [3, 3, 2]}}, FileError, "a root belongs to one socket"),
        ({"node": {"sockets": [8, 0]}}, FileError, "node.sockets.1"),
        ({"node": {"topology": "star"}}, FileError, "node.topology"),
        ({"node": {"device_link": None}}, FileError, "topology switch needs a device_link"),
        ({"node": {"topology": "host", "reduces_in_switch": False}}, FileError, "topology host has no device_link"),
        ({"node": {"topology": "ring"}}, FileError, "topology ring has no switch"),
        ({"node": {"device_link": {"bandwidth_bytes_per_s": 0}}}, FileError, "node.device_link.bandwidth_bytes_per_s"),
        ({"node": {"device_link": {"bandwidth_bytes_per_s": 370}}}, HardwareError, "node.device_link.bandwidth_bytes"),
        ({"node": {"num_device": 8}}, FileError, "node.num_device"),
        ({"network": {"num_nodes": 0}}, FileError, "network.num_nodes"),
        ({"network": {"adapters_per_node": 2**13}}, HardwareError, "network.adapters_per_node is 8192"),
        ({"network": {"link": {"latency_s": -1}}}, FileError, "network.link.latency_s"),
        ({"price_usd_per_hour": 1e9}, HardwareError, "price_usd_per_hour is 1e\\+09"),
    ],
)
def test_an_impossible_cluster_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    content = {"kind": "hardware", "schema_version": 1} | machine("h100-80gb-x8").model_dump(mode="json")
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(merged(content, changes)), encoding="utf-8")
    with pytest.raises(error, match=message) as caught:
        load_hardware(path)
    assert str(path) in str(caught.value)


def merged(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``content`` with some of it changed, however deep."""
    return content | {
        key: merged(content[key], value) if isinstance(value, dict) else value for key, value in changes.items()
    }


def test_pairs_need_a_partner(tmp_path: Path) -> None:
    content = machine("a100-80gb-pcie-x8").model_dump(mode="json")
    content["node"] |= {"num_devices": 7, "sockets": [4, 3], "pcie_roots": [1] * 7}
    with pytest.raises(FileError, match="7 devices cannot be joined in pairs"):
        Hardware.from_mapping({"kind": "hardware", "schema_version": 1} | content, origin="text")


def test_what_is_no_machine_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        load_hardware(tmp_path / "nothing.toml")
    (tmp_path / "machine.txt").write_text("text")
    with pytest.raises(FileError, match=r"must end in \.toml or \.json"):
        load_hardware(tmp_path / "machine.txt")
    with pytest.raises(CatalogueError, match="no machine"):
        load_hardware(tmp_path)


# -- tables ----------------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_every_machine_and_fits_a_terminal() -> None:
    lines = as_text(hardware_table(), width=80).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.split() and line.split()[0] in machine_names()}
    assert tuple(rows) == machine_names()
    assert rows["a100-80gb"] == ["a100-80gb", "80", "2039", "312", "19.5", "64", "512", "171.5", "25.6"]
    assert "…" not in "\n".join(lines)
    with pytest.raises(CatalogueError, match="rtx-3090"):
        hardware_table(["rtx3090"])


def test_the_table_of_clusters_has_a_row_for_each_and_fits_a_terminal() -> None:
    lines = as_text(cluster_table(), width=80).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.split() and line.split()[0] in cluster_names()}
    assert tuple(rows) == cluster_names()
    assert rows["h100-80gb-x8"] == ["h100-80gb-x8", "8", "2", "switch", "370", "8", "x", "infiniband-ndr"]
    assert rows["rtx-4090-x8"] == ["rtx-4090-x8", "8", "2", "host", "–", "–"]


def test_every_part_that_can_be_chosen_is_listed() -> None:
    shown = as_text(part_tables(), width=100).splitlines()
    listed = {line.split()[0] for line in shown if line.strip()}
    assert listed >= {*host_names(), *link_names(), *node_names(), *network_names()}


@pytest.mark.parametrize("name", machine_names() + cluster_names())
def test_details_show_every_figure_and_every_source(name: str) -> None:
    hardware = machine(name)
    shown = " ".join(as_text(hardware_details(hardware), width=100).split())
    node, network = hardware.node, hardware.network
    more = [] if node is None else [part for part in (node, node.device_link, node.host_path) if part is not None]
    more += [] if network is None else [network.link]
    for part in (hardware.device, hardware.host, hardware.host_to_device, hardware.device_to_host, *more):
        assert part.name in shown
        for sentence in part.source.split("; "):
            assert " ".join(sentence.split()) in shown
    for dtype in hardware.device.peak_flop_per_s:
        assert f"peak {dtype} " in shown


def test_details_show_text_as_it_is() -> None:
    shown = as_text(hardware_details(full_hardware().model_copy(update={"name": "[red]x[/]"})))
    assert "[red]x[/]" in shown
    assert "copy of 1 KiB" in shown
    assert "7 GB/s, measured" in shown


@pytest.mark.parametrize("file", ["devices", "hosts", "links", "device_links", "nodes", "networks", "machines"])
def test_tables_read_one_by_one_are_those_of_the_file(file: str) -> None:
    whole = whole_file(file)
    assert list(machine_sections(file)) == list(whole)
    assert {name: read_machine_table(file, name) for name in whole} == whole

"""The catalogue of machines: figures against the silicon that they come from, and machines from files."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
import pytest
import tomli_w
from hypothesis import given

from protwin.shared.catalogue_files import read_machine_file
from protwin.shared.errors import CatalogueError, FileError, HardwareError
from protwin.shared.hardware import Device, DeviceKind, Hardware, Host, Link, LinkPoint
from protwin.shared.hardware_tables import hardware_details, hardware_table
from protwin.shared.machine_parts import device_part, host_names, host_part, link_names, link_part
from protwin.shared.machines import hardware_to_toml, load_hardware, machine, machine_names
from protwin.shared.tables import as_text
from protwin.shared.workload import DType, OperationClass
from tests.strategies import hardware as random_hardware

GIB = 2**30
REQUIRED = ("rtx-3090", "rtx-4090", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb")


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


SILICON = {
    "rtx-3090": Silicon(82, 512, 1.695e9, 128, 1.695e9, 384, 19.5e9, 24),
    "rtx-3090-ti": Silicon(84, 512, 1.86e9, 128, 1.86e9, 384, 21e9, 24),
    "rtx-4090": Silicon(128, 512, 2.52e9, 128, 2.52e9, 384, 21e9, 24),
    "rtx-5090": Silicon(170, 512, 2.407e9, 128, 2.407e9, 512, 28e9, 32),
    "rtx-a6000": Silicon(84, 1024, 1.8e9, 128, 1.8e9, 384, 16e9, 48),
    "l40s": Silicon(142, 1024, 2.49e9, 128, 2.52e9, 384, 18e9, 48),
    "v100-32gb": Silicon(80, 1024, 1.53e9, 64, 1.53e9, 4096, 1.754e9, 32),
    "a100-40gb": Silicon(108, 2048, 1.41e9, 64, 1.41e9, 5120, 2.43e9, 40),
    "a100-80gb": Silicon(108, 2048, 1.41e9, 64, 1.41e9, 5120, 3.186e9, 80),
    "h100-80gb": Silicon(132, 4096, 1.83e9, 128, 1.98e9, 5120, 5.23e9, 80),
    "h200-141gb": Silicon(132, 4096, 1.83e9, 128, 1.98e9, 6144, 6.25e9, 141),
    "gh200-96gb": Silicon(132, 4096, 1.83e9, 128, 1.98e9, 6144, 5.23e9, 96),
    "mi300x-192gb": Silicon(304, 2048, 2.1e9, 128, 2.1e9, 8192, 5.2e9, 192),
}
"""Processors, clocks and memory buses as published; the Blackwell data sheet names none for the B200."""
TOLERANCE = 0.012
"""Data sheets round to two or three digits."""

CHANNELS = {
    # Memory channels of 8 bytes and transfers per second.
    "desktop-16": (2, 3200e6),
    "desktop-16-ddr5": (2, 5200e6),
    "workstation-32": (8, 3200e6),
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
        (device.peak_flop_per_s[DType.FLOAT32], vector),
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
    assert DType.BFLOAT16 in peaks or name == "v100-32gb"
    assert peaks.get(DType.BFLOAT16, peaks[DType.FLOAT16]) == peaks[DType.FLOAT16]
    assert peaks[DType.FLOAT32] == device.vector_flop_per_s
    for eight_bit in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2):
        assert math.isclose(peaks.get(eight_bit, 2 * peaks[DType.FLOAT16]), 2 * peaks[DType.FLOAT16], rel_tol=0.02)
    assert 0.75 * GIB <= device.reserved_bytes <= 0.1 * device.memory_bytes
    stated_gib = re.search(r"(\d+)gb$", name)
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
    assert 0.7 <= host.memory_bandwidth_bytes_per_s / (num_channels * 8 * transfers_per_s) <= 0.96
    assert host.num_cores == int(re.findall(r"-(\d+)", name)[0])
    assert "memory_bandwidth" in host.source


@pytest.mark.parametrize("name", link_names())
def test_links_reach_what_their_lanes_allow(name: str) -> None:
    pair = link_part(name)
    generation = re.match(r"pcie(\d)-x(\d+)", name)
    if generation is None:
        signalling_bytes_per_s = 450e9  # NVLink-C2C, per direction
    else:
        transfers_per_s = {"3": 8e9, "4": 16e9, "5": 32e9}[generation[1]]
        signalling_bytes_per_s = int(generation[2]) * transfers_per_s * (128 / 130) / 8
    for link in (pair.host_to_device, pair.device_to_host):
        assert 0.65 <= link.bandwidth_bytes_per_s / signalling_bytes_per_s <= 0.92
        assert 1e-6 <= link.latency_s <= 2e-5
        assert "latency_s" in link.source
        assert "full_duplex" in link.source


def test_every_machine_is_made_of_known_parts_and_every_part_is_used() -> None:
    machines = read_machine_file("machines")
    for part, known in (("device", machine_names()), ("host", host_names()), ("link", link_names())):
        assert {parts[part] for parts in machines.values()} == set(known)


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
            efficiency={OperationClass.MATMUL: 0.7, OperationClass.EMBEDDING: 1.0},
            source="a = 1 # no comment",
        ),
        host=Host(
            name="h",
            num_cores=3,
            memory_bytes=2**40,
            memory_bandwidth_bytes_per_s=2.0,
            adam_bytes_per_s=7e9,
            source="'''\"\"\"",
        ),
        host_to_device=Link(name="x", latency_s=1e-6, bandwidth_bytes_per_s=1e9, table=table, source="s"),
        device_to_host=Link(name="y", latency_s=2e-6, bandwidth_bytes_per_s=2e9, table=table[:1], source="t"),
        full_duplex=False,
    )


def read_back(text: str, folder: Path) -> Hardware:
    path = folder / "machine.toml"
    path.write_text(text, encoding="utf-8")
    return Hardware.load(path)


def test_toml_reads_back_equal_in_every_field(tmp_path: Path) -> None:
    hardware = full_hardware()
    assert read_back(hardware_to_toml(hardware), tmp_path) == hardware
    head = {"kind": "hardware", "schema_version": 1}
    for part in (None, "device", "host", "host_to_device", "device_to_host"):
        for field in Hardware.model_fields if part is None else type(getattr(hardware, part)).model_fields:
            content = hardware.model_dump(mode="json")
            del (content if part is None else content[part])[field]  # a writer that forgets one field
            try:
                assert read_back(tomli_w.dumps(head | content), tmp_path) != hardware
            except FileError:
                continue


@given(hardware=random_hardware(), text=st.text(st.characters(exclude_categories=["Cs"])))
def test_random_machines_read_back_equal_from_toml(hardware: Hardware, text: str) -> None:
    named = hardware.model_copy(update={"name": text, "host": hardware.host.model_copy(update={"source": text})})
    content = hardware_to_toml(named)
    assert Hardware.from_mapping(tomllib.loads(content), origin="text") == named


@pytest.mark.parametrize("name", machine_names())
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


@pytest.mark.parametrize("name", machine_names())
def test_details_show_every_figure_and_every_source(name: str) -> None:
    hardware = machine(name)
    shown = " ".join(as_text(hardware_details(hardware), width=100).split())
    for part in (hardware.device, hardware.host, hardware.host_to_device, hardware.device_to_host):
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

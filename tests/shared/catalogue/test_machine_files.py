"""Machines from files and back: every field, units as people write them, and what is refused."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import tomli_w
from hypothesis import given
from pydantic import ValidationError

from protwin.shared.basics.errors import CatalogueError, FileError, HardwareError
from protwin.shared.catalogue.machines import (
    cluster_names,
    hardware_to_toml,
    load_hardware,
    machine,
    machine_names,
)
from protwin.shared.schema.hardware import Hardware, Network, Node, Topology
from protwin.shared.workloads.source import load_workload
from tests.shared.full_machine import FIELDS, full_hardware, read_back
from tests.strategies.machines import hardware as random_hardware
from tests.strategies.machines import links

GIB = 2**30
REQUIRED = ("rtx-3090", "rtx-4090", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb")


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("3090", "rtx-3090"), ("RTX 409", "rtx-4090"), ("a100", "a100-40gb"), ("h-100-81gb", "h100-80gb")],
)
def test_an_unknown_machine_is_answered_with_the_nearest(asked: str, meant: str) -> None:
    with pytest.raises(CatalogueError, match=f"Did you mean .*{meant}") as caught:
        load_hardware(asked)
    assert ".toml" in str(caught.value)


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
        ("memory_bandwidth_bytes_per_s = 936e9", 'memory_bandwidth_bytes_per_s = "936 Gbit/s"', FileError, "as 25GB/s"),
        ("vector_flop_per_s = 35600000000000.0", 'vector_flop_per_s = "35.6 TFLOP/s"', FileError, "FLOP/s as 71e12"),
        ("latency_s = 6e-06", 'latency_s = "6 min"', FileError, "seconds as 5us"),
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
    with pytest.raises(FileError, match="is a folder"):
        load_hardware(tmp_path)


@pytest.mark.parametrize("given", [None, 3, b"rtx-3090", machine("rtx-3090")], ids=lambda given: type(given).__name__)
def test_what_is_no_name_at_all_is_refused_with_what_it_must_be(given: Any) -> None:
    for load, words in ((load_hardware, "the name of a machine"), (load_workload, "the name of a model")):
        with pytest.raises(
            CatalogueError, match=rf"^name_or_path is {re.escape(repr(given)[:40])}.*; it must be {words}"
        ):
            load(given)
    for use in (machine("rtx-3090").save, Hardware.load):
        with pytest.raises(
            FileError, match=rf"^path is {re.escape(repr(given)[:40])}.*; it must be the path of a file"
        ):
            use(given)


def _leaves(content: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where each value of a document stands that holds no others."""
    if not isinstance(content, dict | list):
        yield place
        return
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield from _leaves(value, (*place, key))


def test_no_figure_may_be_a_truth_value() -> None:
    """Python counts true as 1; a file that says so is wrong wherever it does not speak of a property."""
    content = full_hardware().model_dump(mode="json")
    places = list(_leaves(content))
    assert len(places) > 50
    for place in places:
        changed = json.loads(json.dumps(content))
        holder = changed
        for key in place[:-1]:
            holder = holder[key]
        is_property = isinstance(holder[place[-1]], bool)
        holder[place[-1]] = True
        if is_property:
            Hardware.model_validate(changed)
            continue
        with pytest.raises(ValidationError) as caught:
            Hardware.model_validate(changed)
        assert place[:-1] in [error["loc"][: len(place) - 1] for error in caught.value.errors()]

"""``protwin hardware`` for machines with several devices, and machines that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protwin.shared.catalogue.machines import cluster_names, hardware_to_toml, machine, machine_names
from protwin.shared.catalogue.parts import host_names, link_names, network_names, node_names
from protwin.shared.schema.hardware import Hardware
from tests.cli.conftest import Protwin


def test_the_list_for_programs_names_the_parts_of_every_machine(protwin_here: Protwin) -> None:
    result = protwin_here("hardware", "list", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    listed = {entry["name"]: entry for entry in json.loads(result.stdout)}
    assert tuple(listed) == machine_names() + cluster_names()
    assert listed["h100-80gb-x8"] == {
        "name": "h100-80gb-x8",
        "num_devices": 8,
        "device": "h100-80gb",
        "host": "xeon-56",
        "link": "pcie5-x16",
        "node": "hgx-h100-8",
        "network": "infiniband-ndr",
    }
    assert (listed["rtx-3090"]["num_devices"], listed["rtx-3090"]["node"]) == (1, None)


def test_words_choose_machines(protwin_here: Protwin) -> None:
    names = machine_names() + cluster_names()
    for words in (["H100"], ["a100", "x8"], ["rtx 4090"]):
        listed = json.loads(protwin_here("hardware", "list", *words, "--json").stdout)
        keys = [word.lower().replace(" ", "-") for word in words]
        assert [entry["name"] for entry in listed] == [name for name in names if all(key in name for key in keys)]
        shown = {line.split()[0] for line in protwin_here("hardware", "list", *words).stdout.splitlines() if line}
        assert shown & set(names) == {entry["name"] for entry in listed}
    (called,) = json.loads(protwin_here("hardware", "list", "NVIDIA A100-SXM4-80GB", "--json").stdout)
    assert called["name"] == "a100-80gb"
    refused = protwin_here("hardware", "list", "h1000")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no machine of the catalogue has 'h1000' in its name. Did you mean h100-80gb" in refused.stderr


def test_the_list_names_machines_with_several_devices(protwin_here: Protwin) -> None:
    shown = protwin_here("hardware", "list").stdout
    assert all(f"\n{name} " in shown for name in cluster_names())


def test_parts_are_listed_by_the_names_that_set_takes(protwin_here: Protwin) -> None:
    result = protwin_here("hardware", "parts")
    assert result.returncode == 0
    names = (*host_names(), *link_names(), *node_names(), *network_names())
    assert all(f"\n{name} " in result.stdout for name in names)


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_cluster_is_put_together_and_written(protwin_here: Protwin, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"machine.{suffix}"
    changes = {
        "node": "hgx-h100-8",
        "network": "roce-400g",
        "network.num_nodes": "4",
        "network.adapters_per_node": "8",
        "network.link.bandwidth_bytes_per_s": "45GB/s",
        "host.memory_bytes": "80GiB",
        "price_usd_per_hour": "24.5",
    }
    options = [option for name, value in changes.items() for option in ("--set", f"{name}={value}")]
    result = protwin_here("hardware", "show", "h100-80gb", *options, "--output", path)
    assert result.returncode == 0, result.stderr
    written = Hardware.load(path)
    assert (written.num_devices, written.num_nodes, written.price_usd_per_hour) == (32, 4, 24.5)
    assert written.network is not None
    assert written.network.link.bandwidth_bytes_per_s == 45e9
    assert written.host.memory_bytes == 80 * 2**30
    assert "One machine costs 24.5 USD an hour." in result.stdout
    assert "adapters of a node" in result.stdout


IMPOSSIBLE = [
    ("link.bandwidth_bytes_per_s=0", "host_to_device.bandwidth_bytes_per_s"),
    ("link.bandwidth_bytes_per_s=0GB/s", "host_to_device.bandwidth_bytes_per_s"),
    ("device_to_host.bandwidth_bytes_per_s=-1", "device_to_host.bandwidth_bytes_per_s"),
    ("host.num_cores=0", "host.num_cores"),
    ("host.memory_bandwidth_bytes_per_s=0", "host.memory_bandwidth_bytes_per_s"),
    ("device.memory_bytes=64KiB", "memory_bytes"),
    ("device.memory_bytes=2048TiB", "device.memory_bytes"),
    ("device.memory_bytes=4611686018427387904", "device.memory_bytes"),
    ("node.num_devices=0", "node.num_devices"),
    ("node.num_devices=7", "num_devices is 7"),
    ("node.num_devices=4611686018427387904", "num_devices"),
    ("node.sockets=4;4", "node.sockets"),
    ("node.sockets=", "node.sockets"),
    ("node.device_link.bandwidth_bytes_per_s=0", "node.device_link.bandwidth_bytes_per_s"),
    ("node.device_link.latency_s=5parsec", "node.device_link.latency_s"),
    ("node.topology=torus", "node.topology"),
    ("network.num_nodes=1.5", "network.num_nodes"),
    ("network.link.bandwidth_bytes_per_s=400", "network.link.bandwidth_bytes_per_s is 400 B/s"),
    ("network.nodes=4", "Did you mean network.num_nodes"),
    ("network=infiniband-ndr-800", "Did you mean infiniband-ndr"),
    ("node=dgx", "Did you mean"),
    ("price_usd_per_hour=0", "price_usd_per_hour"),
    ("price=3", "Did you mean"),
]


@pytest.mark.parametrize(("assignment", "named"), IMPOSSIBLE)
def test_an_impossible_machine_is_refused_with_its_field(protwin_here: Protwin, assignment: str, named: str) -> None:
    result = protwin_here("hardware", "show", "h100-80gb-x8", "--set", assignment)
    assert result.returncode == 2
    assert result.stdout == ""
    assert named in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert len(result.stderr) < 700


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("num_devices = 8", "num_devices = 6", "hold 8 devices, but num_devices is 6"),
        ("num_devices = 8", "num_device = 8", "node.num_device"),
        ("[network]", "[networks]", "networks"),
        ("adapters_per_node = 8", 'adapters_per_node = "eight"', "network.adapters_per_node"),
        ("num_cores = 56", "num_cores = 0", "host.num_cores"),
    ],
)
def test_a_file_of_an_impossible_machine_is_refused_with_its_field(
    protwin_here: Protwin, tmp_path: Path, old: str, new: str, named: str
) -> None:
    text = hardware_to_toml(machine("h100-80gb-x8"))
    assert old in text
    path = tmp_path / "machine.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    result = protwin_here("hardware", "show", path)
    assert result.returncode == 2
    shown = " ".join(result.stderr.split())
    assert named in shown
    assert "machine.toml" in shown
    assert "Traceback" not in shown

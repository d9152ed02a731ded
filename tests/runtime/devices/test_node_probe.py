"""The node of the machine at hand, by what its driver would say."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from protwin.runtime.devices import node_probe
from protwin.shared.catalogue.machines import machine
from protwin.shared.schema.hardware import Topology

BRIDGED = """\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\t0-15\t0
GPU1\tNV4\t X \t0-15\t0
"""


def pretend(monkeypatch: pytest.MonkeyPatch, num_devices: int, output: str, *, code: int = 0) -> None:
    """As if torch saw so many devices and the driver's tool printed this."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    script = f"import sys; sys.stdout.write({output!r}); sys.exit({code})"
    monkeypatch.setattr(node_probe, "_COMMAND", (sys.executable, "-c", script))


def test_what_was_measured_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    two_sockets = BRIDGED.replace("NV4", "SYS").replace(" X \t0-15\t0\n", " X \t16-31\t1\n")
    pretend(monkeypatch, 2, two_sockets)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda target: SimpleNamespace(multi_processor_count=82))
    measured = machine("rtx-3090")
    found = node_probe.told_by_driver(measured, torch.device("cuda"))
    assert found.device.num_multiprocessors == 82
    assert found.device.source.endswith("; node: as nvidia-smi shows it")
    assert found.node is not None
    assert (found.node.topology, found.node.sockets) == (Topology.HOST, (1, 1))
    assert found.host.num_cores == measured.host.num_cores // 2
    assert found.host.memory_bandwidth_bytes_per_s == measured.host.memory_bandwidth_bytes_per_s / 2
    pretend(monkeypatch, 1, "")
    alone = node_probe.told_by_driver(measured, torch.device("cuda"))
    assert (alone.node, alone.host, alone.device.source) == (None, measured.host, measured.device.source)


def test_two_devices_with_a_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 2, BRIDGED)
    node, said = node_probe.probe_node()
    assert node is not None
    assert (node.num_devices, node.topology) == (2, Topology.PAIRS)
    assert said == "node: as nvidia-smi shows it"


@pytest.mark.parametrize("num_devices", [0, 1])
def test_one_device_is_no_node(monkeypatch: pytest.MonkeyPatch, num_devices: int) -> None:
    pretend(monkeypatch, num_devices, BRIDGED)
    assert node_probe.probe_node() == (None, "")


def test_what_is_not_known_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 3, BRIDGED)
    assert node_probe.probe_node() == (None, "node: not known, since 3 of the machine's 2 devices are visible")
    pretend(monkeypatch, 2, "nothing")
    node, said = node_probe.probe_node()
    assert node is None
    assert "no output of nvidia-smi topo -m" in said
    pretend(monkeypatch, 2, BRIDGED, code=9)
    assert "failed (CalledProcessError)" in node_probe.probe_node()[1]
    monkeypatch.setattr(node_probe, "_COMMAND", ("/nowhere/nvidia-smi", "topo", "-m"))
    assert "failed (FileNotFoundError)" in node_probe.probe_node()[1]


def test_a_tool_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 1)

    pretend(monkeypatch, 2, BRIDGED)
    monkeypatch.setattr(subprocess, "run", hang)
    assert "failed (TimeoutExpired)" in node_probe.probe_node()[1]

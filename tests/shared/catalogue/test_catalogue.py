"""The pages of the catalogue say what the catalogue holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protwin.shared.catalogue.machines import cluster_names, load_hardware, machine, machine_names, override_hardware
from protwin.shared.catalogue.models import model_configuration, model_names
from protwin.shared.catalogue.parts import (
    device_link_names,
    device_link_part,
    device_names,
    device_part,
    host_names,
    host_part,
    link_names,
    link_part,
    network_names,
    network_part,
    node_names,
    node_part,
)
from protwin.shared.cli.options import changes_of
from protwin.shared.schema.workload import DType

DOCS = Path(__file__).parents[3] / "docs"
PAGES = (DOCS / "catalogue.md", DOCS / "machines.md")
TEXT = "\n\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def tables() -> dict[str, dict[str, list[str]]]:
    """Rows of the pages' tables by the first cell, under the heading of the second column."""
    found: dict[str, dict[str, list[str]]] = {}
    heading = None
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            heading = None
        elif heading is None:
            heading = cells[1]
            found[heading] = {}
        elif not set(cells[0]) <= set("-: "):
            found[heading][cells[0]] = cells[1:]
    return found


def test_the_page_lists_exactly_what_there_is() -> None:
    listed = {heading: tuple(rows) for heading, rows in tables().items()}
    assert listed["parameters"] == model_names()
    assert listed["device"] == machine_names()
    assert listed["memory"] == device_names()
    assert listed["cores"] == host_names()
    assert listed["to device"] == link_names()
    assert listed["num_devices"] == cluster_names()
    assert listed["one direction"] == device_link_names()
    assert listed["sockets"] == node_names()
    assert listed["adapter"] == network_names()


@pytest.mark.parametrize("name", model_names())
def test_models_on_the_page(name: str) -> None:
    model = model_configuration(name)
    row = tables()["parameters"][name]
    assert row[0] == f"{model.num_parameters:,}"
    assert row[1] == (model.dtype or "float32")
    assert row[-1].split(";")[0] in model.source


@pytest.mark.parametrize("name", machine_names())
def test_machines_on_the_page(name: str) -> None:
    hardware = machine(name)
    assert tables()["device"][name] == [hardware.device.name, hardware.host.name, hardware.host_to_device.name]


@pytest.mark.parametrize("name", device_names())
def test_devices_on_the_page(name: str) -> None:
    device = device_part(name)
    dtypes = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E4M3FN)
    figures = [
        device.memory_bytes / 2**30,
        device.reserved_bytes / 2**30,
        device.memory_bandwidth_bytes_per_s / 1e9,
        *(device.peak_flop_per_s.get(dtype, 0) / 1e12 for dtype in dtypes),
        device.power_w or 0,
    ]
    assert "; power_w: " in device.source, "a figure has a source"
    assert tables()["memory"][name] == [f"{figure:.4g}" if figure else "–" for figure in figures]
    assert f"- {name}: {device.source.split('; reserved_bytes')[0]}." in TEXT


@pytest.mark.parametrize("name", host_names())
def test_hosts_on_the_page(name: str) -> None:
    host = host_part(name)
    channels = "–" if host.num_memory_channels is None else str(host.num_memory_channels)
    cores, size = f"{host.num_cores}", f"{host.memory_bytes / 2**30:.4g}"
    rate = f"{host.memory_bandwidth_bytes_per_s / 1e9:.4g}"
    assert tables()["cores"][name] == [cores, size, channels, rate, host.source]


@pytest.mark.parametrize("name", link_names())
def test_links_on_the_page(name: str) -> None:
    pair = link_part(name)
    to_device, to_host = pair.host_to_device, pair.device_to_host
    bandwidths = [f"{link.bandwidth_bytes_per_s / 1e9:.4g}" for link in (to_device, to_host)]
    latency = f"{to_device.latency_s * 1e6:.4g} µs"
    duplex = "yes" if pair.full_duplex else "no"
    assert tables()["to device"][name] == [*bandwidths, duplex, latency, to_device.source]


@pytest.mark.parametrize("name", cluster_names())
def test_clusters_on_the_page(name: str) -> None:
    hardware = machine(name)
    assert hardware.node is not None
    network = hardware.network
    joined = "–" if network is None else f"{network.adapters_per_node} x {network.name}"
    parts = [hardware.host.name, hardware.host_to_device.name, hardware.node.name]
    assert tables()["num_devices"][name] == [str(hardware.num_devices), *parts, joined]


@pytest.mark.parametrize(("heading", "name"), [("one direction", n) for n in device_link_names()])
def test_links_between_devices_on_the_page(heading: str, name: str) -> None:
    link = device_link_part(name)
    figures = [f"{link.bandwidth_bytes_per_s / 1e9:.4g}", f"{link.latency_s * 1e6:.4g} µs"]
    assert tables()[heading][name] == [*figures, link.source]


@pytest.mark.parametrize("name", node_names())
def test_nodes_on_the_page(name: str) -> None:
    node = node_part(name)
    row = tables()["sockets"][name]
    for shown, groups in zip(row, (node.sockets, node.pcie_roots), strict=False):
        count, times, size = shown.partition(" x ")
        listed = (int(size),) * int(count) if times else tuple(map(int, shown.split(", ")))
        assert listed == groups
    links = ["–" if link is None else link.name for link in (node.device_link, node.host_path)]
    assert row[2:] == [node.topology, *links, node.source]


@pytest.mark.parametrize("name", network_names())
def test_networks_on_the_page(name: str) -> None:
    link = network_part(name).link
    figures = [f"{link.bandwidth_bytes_per_s / 1e9:.4g}", f"{link.latency_s * 1e6:.4g} µs"]
    assert tables()["adapter"][name] == [*figures, link.source]


def test_the_machine_that_the_page_shows_can_be_read(tmp_path: Path) -> None:
    text, collectives = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    path = tmp_path / "machine.toml"
    for written in (text, text + collectives):
        path.write_text(written, encoding="utf-8")
        hardware = load_hardware(path)
        assert (hardware.num_devices, hardware.price_usd_per_hour) == (2, 0.4)
    assert [one.num_ranks for one in hardware.collectives] == [2]


def test_the_page_shows_overrides_that_work() -> None:
    shown = re.findall(r"`(--set .*?)`", TEXT)
    assert len(shown) >= 9
    for line in shown:
        options = [word for word in line.split() if word != "--set"]
        hardware = override_hardware(machine("v100-32gb-x8"), changes_of(options))
        assert hardware != machine("v100-32gb-x8")

"""The page of the catalogue says what the catalogue holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from protwin.shared.machine_parts import device_names, device_part, host_names, host_part, link_names, link_part
from protwin.shared.machines import machine, machine_names
from protwin.shared.models import model_configuration, model_names
from protwin.shared.workload import DType

PAGE = Path(__file__).parents[2] / "docs" / "catalogue.md"


def tables() -> dict[str, dict[str, list[str]]]:
    """Rows of the page's tables by the first cell, under the first two columns' headings."""
    found: dict[str, dict[str, list[str]]] = {}
    heading = None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
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
    ]
    assert tables()["memory"][name] == [f"{figure:.4g}" if figure else "–" for figure in figures]
    assert f"- {name}: {device.source.split('; reserved_bytes')[0]}." in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", host_names())
def test_hosts_on_the_page(name: str) -> None:
    host = host_part(name)
    figures = (host.num_cores, host.memory_bytes / 2**30, host.memory_bandwidth_bytes_per_s / 1e9)
    assert tables()["cores"][name] == [*(f"{figure:.4g}" for figure in figures), host.source]


@pytest.mark.parametrize("name", link_names())
def test_links_on_the_page(name: str) -> None:
    pair = link_part(name)
    to_device, to_host = pair.host_to_device, pair.device_to_host
    bandwidths = [f"{link.bandwidth_bytes_per_s / 1e9:.4g}" for link in (to_device, to_host)]
    latency = f"{to_device.latency_s * 1e6:.4g} µs"
    duplex = "yes" if pair.full_duplex else "no"
    assert tables()["to device"][name] == [*bandwidths, duplex, latency, to_device.source]

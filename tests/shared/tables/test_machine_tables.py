"""Tables of machines and their parts: a row for each, every figure with its source, within a terminal."""

from __future__ import annotations

import pytest

from protwin.shared.basics.errors import CatalogueError
from protwin.shared.catalogue.data_files import machine_sections, read_machine_table
from protwin.shared.catalogue.machines import (
    cluster_names,
    machine,
    machine_names,
)
from protwin.shared.catalogue.parts import (
    host_names,
    link_names,
    network_names,
    node_names,
)
from protwin.shared.tables.machines import cluster_table, hardware_details, hardware_table, part_tables
from protwin.shared.tables.terminal import as_text
from tests.shared.full_machine import full_hardware, whole_file


def test_the_table_has_a_row_for_every_machine_and_fits_a_terminal() -> None:
    lines = as_text(hardware_table(), width=80).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.split() and line.split()[0] in machine_names()}
    assert tuple(rows) == machine_names()
    assert rows["a100-80gb"] == ["a100-80gb", "80", "2039", "312", "19.5", "64", "512", "171.5", "25.6"]
    assert "…" not in "\n".join(lines)
    with pytest.raises(CatalogueError, match="rtx-3090"):
        hardware_table(["rtx-3091"])


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

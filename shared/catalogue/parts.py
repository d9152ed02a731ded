"""The catalogue's devices, hosts, links, disks, nodes and networks: the parts that machines are put together from."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter

from ..basics.documents import FrozenModel
from ..basics.errors import CatalogueError
from ..basics.suggestions import did_you_mean
from ..schema.hardware import Bandwidth, Device, Disk, Host, Link, Network, Node
from .data_files import machine_sections, read_machine_table
from .names import device_called, written_alike


class LinkPair(FrozenModel):
    """Both directions between host and device."""

    host_to_device: Link
    device_to_host: Link
    full_duplex: bool


def device_names() -> tuple[str, ...]:
    """Names of the catalogue's devices, by vendor and generation."""
    return tuple(machine_sections("devices"))


def host_names() -> tuple[str, ...]:
    """Names of the catalogue's hosts."""
    return tuple(machine_sections("hosts"))


def link_names() -> tuple[str, ...]:
    """Names of the catalogue's links between host and device."""
    return tuple(machine_sections("links"))


def disk_names() -> tuple[str, ...]:
    """Names of the catalogue's disks."""
    return tuple(machine_sections("disks"))


def device_link_names() -> tuple[str, ...]:
    """Names of the catalogue's links between devices."""
    return tuple(machine_sections("device_links"))


def node_names() -> tuple[str, ...]:
    """Names of the catalogue's nodes."""
    return tuple(machine_sections("nodes"))


def network_names() -> tuple[str, ...]:
    """Names of the catalogue's networks."""
    return tuple(machine_sections("networks"))


@cache
def device_part(name: str) -> Device:
    """The catalogue's device of that name.  Raises CatalogueError, with the nearest names, if there is none."""
    table = _table(device_called(name) or name, "devices", "device")
    return Device.model_validate(table)


@cache
def host_part(name: str) -> Host:
    """The catalogue's host of that name.  Raises CatalogueError, with the nearest names, if there is none."""
    return Host.model_validate(_table(name, "hosts", "host"))


@cache
def link_part(name: str) -> LinkPair:
    """The catalogue's link of that name.  Raises CatalogueError, with the nearest names, if there is none."""
    table = _table(name, "links", "link")
    bandwidth = TypeAdapter[float](Bandwidth)
    directions = {
        direction: Link(
            name=table["name"],
            latency_s=table["latency_s"],
            bandwidth_bytes_per_s=bandwidth.validate_python(table[direction]),
            source=table["source"],
        )
        for direction in ("host_to_device", "device_to_host")
    }
    return LinkPair(**directions, full_duplex=table["full_duplex"])


@cache
def disk_part(name: str) -> Disk:
    """The catalogue's disk of that name.  Raises CatalogueError, with the nearest names, if there is none."""
    return Disk.model_validate(_table(name, "disks", "disk"))


@cache
def device_link_part(name: str) -> Link:
    """The catalogue's link between devices.  Raises CatalogueError, with the nearest names, if there is none."""
    return Link.model_validate(_table(name, "device_links", "device link"))


@cache
def node_part(name: str) -> Node:
    """The catalogue's node of that name.  Raises CatalogueError, with the nearest names, if there is none."""
    table = _table(name, "nodes", "node")
    links = {field: device_link_part(table[field]) for field in ("device_link", "host_path") if field in table}
    return Node.model_validate(table | links)


@cache
def network_part(name: str, adapters_per_node: int = 1) -> Network:
    """The catalogue's network of that name, with one node.  Raises CatalogueError, with the nearest names."""
    table = _table(name, "networks", "network")
    return Network(name=table["name"], adapters_per_node=adapters_per_node, link=Link.model_validate(table))


def _table(name: str, file: str, what: str) -> dict[str, Any]:
    """The table of what is called ``name``, with the catalogue's name for it."""
    known = machine_sections(file)
    meant = name if name in known else written_alike(name, known)
    if meant is None:
        raise CatalogueError(f"there is no {what} {name!r} in the catalogue. {did_you_mean(name, known)}")
    return {"name": meant} | read_machine_table(file, meant)

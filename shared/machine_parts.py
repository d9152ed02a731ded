"""The catalogue's devices, hosts and links: the parts that machines are put together from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

from .catalogue_files import read_machine_file
from .errors import CatalogueError
from .files import FrozenModel
from .hardware import Bandwidth, Device, Host, Link
from .nearest import did_you_mean

_Part = TypeVar("_Part")


class LinkPair(FrozenModel):
    """Both directions between host and device."""

    host_to_device: Link
    device_to_host: Link
    full_duplex: bool


def device_names() -> tuple[str, ...]:
    """Names of the catalogue's devices, by vendor and generation."""
    return tuple(_devices())


def host_names() -> tuple[str, ...]:
    """Names of the catalogue's hosts."""
    return tuple(_hosts())


def link_names() -> tuple[str, ...]:
    """Names of the catalogue's links."""
    return tuple(_links())


def device_part(name: str) -> Device:
    """The catalogue's device of that name.  Raises CatalogueError, with the nearest names, if there is none."""
    return _named(name, _devices(), "device")


def host_part(name: str) -> Host:
    """The catalogue's host of that name.  Raises CatalogueError, with the nearest names, if there is none."""
    return _named(name, _hosts(), "host")


def link_part(name: str) -> LinkPair:
    """The catalogue's link of that name.  Raises CatalogueError, with the nearest names, if there is none."""
    return _named(name, _links(), "link")


def _named(name: str, parts: Mapping[str, _Part], what: str) -> _Part:
    if name not in parts:
        raise CatalogueError(f"there is no {what} {name!r} in the catalogue. {did_you_mean(name, parts)}")
    return parts[name]


@cache
def _devices() -> Mapping[str, Device]:
    return _read("devices", lambda name, table: Device.model_validate({"name": name} | table))


@cache
def _hosts() -> Mapping[str, Host]:
    return _read("hosts", lambda name, table: Host.model_validate({"name": name} | table))


@cache
def _links() -> Mapping[str, LinkPair]:
    return _read("links", _link_pair)


def _read(file: str, build: Callable[[str, dict[str, Any]], _Part]) -> Mapping[str, _Part]:
    return {name: build(name, table) for name, table in read_machine_file(file).items()}


def _link_pair(name: str, table: dict[str, Any]) -> LinkPair:
    bandwidth = TypeAdapter[float](Bandwidth)
    directions = {
        direction: Link(
            name=name,
            latency_s=table["latency_s"],
            bandwidth_bytes_per_s=bandwidth.validate_python(table[direction]),
            source=table["source"],
        )
        for direction in ("host_to_device", "device_to_host")
    }
    return LinkPair(**directions, full_duplex=table["full_duplex"])

"""The catalogue of machines, and machine descriptions of the user's own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import tomli_w

from ..basics.arguments import wrong_name
from ..basics.errors import CatalogueError, FileError
from ..basics.suggestions import did_you_mean, listed
from ..schema.hardware import Hardware
from .data_files import machine_sections, read_machine_table
from .names import machine_called, machines_with, plain_key, several_called
from .overrides import override_hardware
from .parts import device_part, host_part, link_part, network_part, node_part
from .plausibility import check_plausible

_SUFFIXES: Final = (".toml", ".json")
_HEADER: Final = '# A machine.  Sizes may be written as "24GiB", bandwidths as "25GB/s"; bare numbers are bytes.\n'


def machine_names() -> tuple[str, ...]:
    """Names of the catalogue's machines with one device, by vendor and generation."""
    return tuple(name for name in machine_sections("machines") if "node" not in _parts(name))


def cluster_names() -> tuple[str, ...]:
    """Names of the catalogue's machines with several devices, by vendor and generation."""
    return tuple(name for name in machine_sections("machines") if "node" in _parts(name))


def machines_with_words(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the catalogue's machines that have all of ``words``, or are called so: with one device, with several.

    Case and separators make no difference.  Raises CatalogueError, with the nearest names, if there is none.
    """
    name = " ".join(words)
    called = machine_called(name) if words else None

    def chosen(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(at for at in names if at == called or all(plain_key(word) in plain_key(at) for word in words))

    alone, several = chosen(machine_names()), chosen(cluster_names())
    if not (alone or several):
        nearest = did_you_mean(name, machine_sections("machines"))
        raise CatalogueError(
            f"no machine of the catalogue has {name!r} in its name. {nearest} protwin hardware list shows all."
        )
    return alone, several


def machine(name: str) -> Hardware:
    """The catalogue's machine of that name, with one device or several, as people write it (``RTX 3090``, ``8xH100``).

    Raises CatalogueError, with the nearest names, if there is none.
    """
    known = machine_sections("machines")
    meant = machine_called(name)
    if meant is None:
        raise CatalogueError(
            f"there is no machine {name!r} in the catalogue. {_of_more_devices(name) or did_you_mean(name, known)} "
            f"protwin hardware list shows them; for a machine of your own, pass the path of its .toml or .json file."
        )
    parts = _parts(meant)
    link = link_part(parts["link"])
    return Hardware(
        name=meant,
        device=device_part(parts["device"]),
        host=host_part(parts["host"]),
        host_to_device=link.host_to_device,
        device_to_host=link.device_to_host,
        full_duplex=link.full_duplex,
        node=node_part(parts["node"]) if "node" in parts else None,
        network=network_part(parts["network"], parts["adapters_per_node"]) if "network" in parts else None,
    )


def _of_more_devices(name: str) -> str:
    """How to ask about some of the devices of a machine that has more; empty where ``name`` asks for no such."""
    asked = several_called(name)
    found = () if asked is None else machines_with(*asked)
    return f"Ask about {asked[1]} devices of {listed(found, 'or')}: --ranks {asked[1]}." if asked and found else ""


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A catalogue machine by name, or the machine that a ``.toml`` or ``.json`` file describes.

    Raises CatalogueError if it is neither a known name nor a file, FileError if the file is damaged or of another
    kind, HardwareError if it describes an impossible machine.
    """
    if not isinstance(name_or_path, str | Path):
        raise wrong_name(name_or_path, "a machine, or the path of its .toml or .json file")
    name = str(name_or_path)
    if name in machine_sections("machines"):
        return machine(name)
    path = Path(name_or_path)
    if path.suffix not in _SUFFIXES:
        # os.path calls what the system refuses to look at no file, such as a name of 300 characters.
        if os.path.isfile(path):
            raise FileError(f"{path} is no machine file: its name must end in .toml or .json.")
        if name and os.path.isdir(path) and machine_called(name) is None:
            raise FileError(f"{path} is a folder; name the .toml or .json file of a machine in it.")
        return machine(name)
    hardware = Hardware.load(path)
    check_plausible(hardware, origin=str(path))
    return hardware


def hardware_to_toml(hardware: Hardware) -> str:
    """``hardware`` as TOML text that ``Hardware.load`` reads back equal; fields that are None are left out."""
    head = {"kind": hardware.KIND, "schema_version": hardware.SCHEMA_VERSION}
    return _HEADER + tomli_w.dumps(head | _without_none(hardware.model_dump(mode="json")))


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no null; every field that may be None is None by default, so that leaving it out says the same."""
    kept = ((key, value) for key, value in table.items() if value is not None)
    return {key: _without_none(value) if isinstance(value, dict) else value for key, value in kept}


@cache
def _parts(name: str) -> Mapping[str, Any]:
    """The names of a machine's parts."""
    return read_machine_table("machines", name)


__all__ = ["cluster_names", "hardware_to_toml", "load_hardware", "machine", "machine_names", "override_hardware"]

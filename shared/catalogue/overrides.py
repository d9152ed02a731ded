"""A machine with some of its parts or figures replaced.

[Note: Measured figures under an override]
A link's measured table stands in for its bandwidth and latency, a host's measured Adam rate for what its memory
bandwidth would give, and measured collectives for all that carries them.  Changing the figure alone would change
nothing that the simulator reads.  So an override drops the measurement that it contradicts, unless the override sets
that measurement too.  Another number of memory channels scales the host's bandwidth, unless that is set too, and other
FLOP/s of as many multiprocessors scale their clock.  Another number of nodes leaves collectives as they were measured
over fewer ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from math import isfinite
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from ..basics.documents import describe
from ..basics.errors import HardwareError
from ..basics.suggestions import did_you_mean, nearest_names
from ..basics.units import format_rate
from ..schema.hardware import Device, DeviceKind, Disk, Hardware, Host, Link, Network, Node
from ..schema.optimizer import Optimizer
from ..schema.workload import DType, OperationClass
from .parts import device_part, disk_part, host_part, link_part, network_part, node_part
from .plausibility import check_plausible

_CLOCKS_HZ: Final = (1e6, 1e12)
"""Plausible ones: FLOP/s beyond have their own word."""
_DIRECTIONS: Final = ("host_to_device", "device_to_host")
_PARTS: Final[Mapping[str, type[BaseModel]]] = {
    "device": Device,
    "host": Host,
    "link": Link,
    "host_to_device": Link,
    "device_to_host": Link,
    "disk": Disk,
    "node": Node,
    "network": Network,
}
_WITHIN: Final[Mapping[str, type[BaseModel]]] = {
    "node.device_link": Link,
    "node.host_path": Link,
    "network.link": Link,
}
"""Parts of parts; they are no names of the catalogue's."""
_TOP: Final = ("name", "full_duplex", "price_usd_per_hour")
_KEYED: Final[Mapping[str, tuple[str, ...]]] = {
    "device.peak_flop_per_s": tuple(DType),
    "device.efficiency": tuple(OperationClass),
    "device.optimizer_s_per_scalar": tuple(Optimizer),
    "host.optimizer_s_per_scalar": tuple(Optimizer),
}
"""Fields that are tables of their own, with the keys that they may have."""
_UNSETTABLE: Final = ("table",)
"""Fields that one line of text cannot give."""
_STEPS_OF_HOST: Final[tuple[tuple[str, object], ...]] = (
    ("host.adam_bytes_per_s", None),
    ("host.optimizer_s_per_scalar", {}),
)
_MEASURED: Final[Mapping[str, tuple[tuple[str, object], ...]]] = {
    "host.memory_bandwidth_bytes_per_s": _STEPS_OF_HOST,
    "host.num_cores": (*_STEPS_OF_HOST, ("host.matrix_flop_per_s", None)),
    "host.num_memory_channels": _STEPS_OF_HOST,
    "device.memory_bandwidth_bytes_per_s": (("device.optimizer_s_per_scalar", {}),),
    **{
        f"{direction}.{figure}": ((f"{direction}.table", ()),)
        for direction in (*_DIRECTIONS, *_WITHIN)
        for figure in ("bandwidth_bytes_per_s", "latency_s")
    },
}
"""Measurements that replace a figure (see the note), with the value that stands for none."""


def override_fields() -> tuple[str, ...]:
    """Every name that ``override_hardware`` takes."""
    return tuple(_fields())


def override_hardware(hardware: Hardware, overrides: Mapping[str, str]) -> Hardware:
    """``hardware`` with parts or single figures replaced.

    Names are either a part, with the catalogue's name of another as value (``host=epyc-64``, ``link=pcie5-x16``), or a
    dotted field with its new value (``device.memory_bytes=40GiB``, ``link.bandwidth_bytes_per_s=50GB/s``,
    ``device.peak_flop_per_s.bfloat16=100e12``, ``node.sockets=4,4``).  ``link`` means both directions between host and
    device.  The order of ``overrides`` does not matter: parts come before fields, and ``link`` before a single
    direction.  A machine whose device is replaced is named after the new one; another network joins as many nodes with
    as many adapters as the one before; what was set by hand is noted in the source of its part.

    Raises HardwareError if a name is unknown or a value impossible, CatalogueError if there is no such part.
    """
    overrides = {_usual(name): value for name, value in overrides.items()}
    for name in overrides:
        _check_name(name)
    overrides = {name: _MEANT[name](value) if name in _MEANT else value for name, value in overrides.items()}
    content: dict[str, Any] = hardware.model_dump()
    if "device" in overrides:
        content["device"] = device_part(overrides["device"]).model_dump()
    if "host" in overrides:
        content["host"] = host_part(overrides["host"]).model_dump()
    if "disk" in overrides:
        content["disk"] = disk_part(overrides["disk"]).model_dump()
    _replace_links(content, overrides)
    _replace_node_and_network(content, overrides)
    if "device" in overrides:
        node = content["node"]
        content["name"] = content["device"]["name"] + ("" if node is None else f"-x{node['num_devices']}")
    changes = dict(_changes(overrides))
    if any(_carries_collectives(content, name) for name in (*overrides, *changes)):
        content["collectives"] = ()
    if "device.vector_flop_per_s" in changes and not {"device.clock_hz", "device.num_multiprocessors"} & changes.keys():
        _scale_clock(content["device"], changes["device.vector_flop_per_s"])
    for field, value in changes.items():
        _check_present(content, field, hardware.name)
        if field == "host.num_memory_channels" and "host.memory_bandwidth_bytes_per_s" not in changes:
            _scale_host_bandwidth(content["host"], value)
        for measured, nothing in _MEASURED.get(field, ()):
            if not any(name == measured or name.startswith(f"{measured}.") for name in changes):
                _drop(content, measured, nothing)
        _set(content, field, value)
        _note(content, field, value)
    origin = "the machine with " + ", ".join(f"{name}={value}" for name, value in overrides.items())
    content["overrides"] = (*content["overrides"], *(f"{name}={overrides[name]}" for name in sorted(overrides)))
    try:
        changed = Hardware.model_validate(content)
    except ValidationError as error:
        raise HardwareError(f"{origin} is impossible: {describe(error)} {Hardware.FORMS}") from error
    check_plausible(changed, origin=origin)
    return changed


def _carries_collectives(content: Mapping[str, Any], name: str) -> bool:
    """Whether collectives between devices may take another time when the part or field ``name`` is changed.

    A CPU's processes reach each other through its memory, whatever the links between it and itself.
    """
    part, _, field = name.partition(".")
    if part in ("link", *_DIRECTIONS):
        return content["device"]["kind"] is not DeviceKind.CPU
    if part == "network":
        return field not in ("name", "source", "num_nodes")
    return part == "node" or name in ("device", "host")


def _drop(content: dict[str, Any], measured: str, nothing: object) -> None:
    """Take a measurement away if there is one."""
    if _get(content, measured):
        _set(content, measured, copy(nothing))
        _note(content, measured, "none, since it was measured otherwise")


def field_names() -> tuple[str, ...]:
    """What of a machine can be set: parts, and single figures of them."""
    return tuple(_fields())


def _fields() -> Iterator[str]:
    yield from _TOP
    for part, model in {**_PARTS, **_WITHIN}.items():
        if part in _PARTS:
            yield part
        for field in model.model_fields:
            keys = _KEYED.get(f"{part}.{field}")
            if keys is not None:
                yield from (f"{part}.{field}.{key}" for key in keys)
            elif field not in _UNSETTABLE and f"{part}.{field}" not in _WITHIN:
                yield f"{part}.{field}"


_MEANT: Final[Mapping[str, Callable[[str], str]]] = {
    "device": lambda name: device_part(name).name,
    "host": lambda name: host_part(name).name,
    **dict.fromkeys(("link", *_DIRECTIONS), lambda name: link_part(name).host_to_device.name),
    "disk": lambda name: disk_part(name).name,
    "node": lambda name: node_part(name).name,
    "network": lambda name: network_part(name).name,
}
"""The catalogue's name of a part as people write it, by the part."""


def _usual(name: str) -> str:
    """``name`` with an element type as the fields call it: ``device.peak_flop_per_s.bf16``."""
    table, _, key = name.rpartition(".")
    if table == "device.peak_flop_per_s":
        with suppress(ValueError):
            return f"{table}.{DType(key)}"
    return name


def _check_name(name: str) -> None:
    if name in _fields():
        return
    part, _, field = name.partition(".")
    if part in _PARTS and field.rpartition(".")[2] in _UNSETTABLE:
        raise HardwareError(f"{name} is a table and cannot be set in one line. Write it into a machine's .toml file.")
    if name in _WITHIN:
        raise HardwareError(f"{name} has several figures: set one, as in {name}.bandwidth_bytes_per_s=50GB/s.")
    if name in _KEYED:
        raise HardwareError(f"{name} needs a key: {name}.{_KEYED[name][0]}, for one of {', '.join(_KEYED[name])}.")
    candidates = [known for known in _fields() if part in _PARTS and known.startswith(f"{part}.")] or list(_fields())
    advice = (
        did_you_mean(name, candidates)
        if nearest_names(name, candidates)
        else f"Its parts are {', '.join(_PARTS)}; a field is written as device.memory_bytes."
    )
    raise HardwareError(f"a machine has no part or field {name!r}. {advice}")


def _replace_links(content: dict[str, Any], overrides: Mapping[str, str]) -> None:
    """Put links of the catalogue into the machine.  Both run at full speed side by side if neither is known not to."""
    names = {direction: overrides.get(direction, overrides.get("link")) for direction in _DIRECTIONS}
    pairs = {direction: link_part(name) for direction, name in names.items() if name is not None}
    for direction, pair in pairs.items():
        content[direction] = getattr(pair, direction).model_dump()
    if pairs:
        stays = len(pairs) == len(_DIRECTIONS) or content["full_duplex"]
        content["full_duplex"] = stays and all(pair.full_duplex for pair in pairs.values())


def _replace_node_and_network(content: dict[str, Any], overrides: Mapping[str, str]) -> None:
    if "node" in overrides:
        content["node"] = node_part(overrides["node"]).model_dump()
    if "network" in overrides:
        before = content["network"] or {}
        counts = {field: before[field] for field in ("num_nodes", "adapters_per_node") if field in before}
        content["network"] = network_part(overrides["network"]).model_dump() | counts


def _scale_host_bandwidth(host: dict[str, Any], num_channels: str) -> None:
    """Channels carry equal shares of a host's bandwidth."""
    before = host["num_memory_channels"]
    if before is None:
        raise HardwareError(
            f"{host['name']} does not state how many memory channels its bandwidth is of. "
            f"Set host.memory_bandwidth_bytes_per_s instead of host.num_memory_channels, or both."
        )
    if not num_channels.isdecimal():
        return  # what it says of itself is refused with its name
    host["memory_bandwidth_bytes_per_s"] *= float(num_channels) / before  # infinite for more digits than a float has
    shown = format_rate(host["memory_bandwidth_bytes_per_s"])
    host["source"] += (
        f"{'; ' if host['source'] else ''}set by hand: memory_bandwidth_bytes_per_s = {shown}, as its channels"
    )


def _scale_clock(device: dict[str, Any], flop_per_s: str) -> None:
    """More FLOP/s of as many multiprocessors are a higher clock of the same units, and no other kind of units."""
    before = Device.model_validate(device)
    if before.num_multiprocessors is None:
        return
    with suppress(ValueError):  # what it says of itself is refused with its name
        clock_hz = before.told_clock_hz * (float(flop_per_s) / before.vector_flop_per_s)
        if isfinite(clock_hz):
            device["clock_hz"] = min(max(clock_hz, _CLOCKS_HZ[0]), _CLOCKS_HZ[1])


def _check_present(content: Mapping[str, Any], field: str, machine_name: str) -> None:
    """Raise HardwareError if ``field`` belongs to a part that the machine does not have."""
    within: Any = content
    *path, _ = field.split(".")
    for step in path:
        within = within[step]
        if within is None:
            part, _, inner = field.partition(".")
            advice = (
                f"Choose one with {part}=NAME (protwin hardware parts lists them), or write it into a machine's file"
                if step == part
                else "Write it into a machine's file"
            )
            missing = part if step == part else f"{part}.{inner.partition('.')[0]}"
            raise HardwareError(f"{machine_name} has no {missing}, so that {field} cannot be set. {advice}.")


def _changes(overrides: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Single fields and their values, ``link`` spelt out, what is more specific last."""
    fields = {name: value for name, value in overrides.items() if name not in _PARTS}
    for name, value in fields.items():
        if name.startswith("link."):
            for direction in _DIRECTIONS:
                yield f"{direction}.{name.removeprefix('link.')}", value
    for name, value in fields.items():
        if not name.startswith("link."):
            yield name, value


def _get(content: dict[str, Any], field: str) -> object:
    """None where a machine leaves the field out."""
    *path, last = field.split(".")
    value: Any = content
    for step in path:
        value = value[step]
    return value.get(last)


def _set(content: dict[str, Any], field: str, value: object) -> None:
    *path, last = field.split(".")
    for step in path:
        content = content[step]
    content[last] = value


def _note(content: dict[str, Any], field: str, value: str) -> None:
    part, _, rest = field.partition(".")
    if rest and rest not in ("name", "source"):
        source = content[part]["source"]
        content[part]["source"] = f"{source}{'; ' if source else ''}set by hand: {rest} = {value}"

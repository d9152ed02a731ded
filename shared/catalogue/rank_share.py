"""The part of a machine that one of several equal ranks has, when all of them do the same at the same time.

[Note: A CPU of several ranks]
Where the CPU is the device, ranks are processes that share its cores, its memory and the bandwidth of its memory.  A
node of N such processes has N devices at one socket, each of which is what one process reaches while all of them do
the same: its part of the memory, its threads, its copies.  The host is the whole machine, whose cores, memory and
bandwidth ranks divide as they do elsewhere, except that processes may outnumber the cores and then share them: what
they reach was measured so.  ``protwin hardware probe --ranks N`` describes such a node.
"""

from __future__ import annotations

from itertools import islice

from ..basics.errors import HardwareError
from ..basics.suggestions import listed
from ..schema.hardware import DeviceKind, Hardware, Host, Link, LinkPoint
from .names import machines_with


def machine_of_rank(hardware: Hardware, num_ranks: int) -> Hardware:
    """The machine of one device that the slowest of ``num_ranks`` equal ranks works on.

    Ranks take the devices of a node in order and fill a node before the next.  Those at one socket divide its cores,
    memory and memory bandwidth evenly, those below one PCIe root its bandwidth in each direction: fair shares of equal
    users that want the same at every moment.  One rank alone has the machine's own figures.

    Raises HardwareError if there are more ranks than devices, or fewer cores at a socket than ranks; see [Note: A CPU
    of several ranks].
    """
    if not 1 <= num_ranks <= hardware.num_devices:
        advice = probe_advice(hardware, num_ranks)
        has = f"one device. {advice}" if advice else f"{_devices_of(hardware, num_ranks)}."
        raise HardwareError(f"{num_ranks} ranks do not fit on {hardware.name}, which has {has}")
    alone = hardware.model_copy(update={"node": None, "network": None, "collectives": ()})
    node = hardware.node
    if node is None:
        return alone
    on_node = min(num_ranks, node.num_devices)
    at_socket, below_root = _most(node.sockets, on_node), _most(node.pcie_roots, on_node)
    root = node.root_bandwidth_bytes_per_s
    links = {
        direction: _capped(link, None if root is None else root / below_root)
        for direction, link in (
            ("host_to_device", hardware.host_to_device),
            ("device_to_host", hardware.device_to_host),
        )
    }
    share = host_share(hardware.host, at_socket, shares_cores=hardware.device.kind is DeviceKind.CPU)
    return alone.model_copy(update={"host": share, **links})


def probe_advice(hardware: Hardware, num_ranks: int) -> str:
    """What to do where one process on a CPU was described and ``num_ranks`` are asked for; else nothing."""
    if hardware.device.kind is not DeviceKind.CPU or hardware.num_devices > 1 or num_ranks < 2:
        return ""
    return (
        f"The device is its CPU, which several processes share: describe it as they reach it by protwin hardware probe "
        f"--ranks {num_ranks} --output machine.toml."
    )


def _devices_of(hardware: Hardware, num_ranks: int) -> str:
    """In words, with what to do where they are too few."""
    if hardware.num_devices == 1:
        larger = machines_with(hardware.name, num_ranks)
        named = f": {listed(larger, 'or')}" if larger else ""
        return f"one device. Use one rank, or a machine with more{named}"
    nodes = f", {hardware.devices_per_node} in each of {hardware.num_nodes} nodes" if hardware.num_nodes > 1 else ""
    more = "" if hardware.network is None else ", or set network.num_nodes"
    return f"{hardware.num_devices} devices{nodes}. Use between 1 and that many{more}"


def price_of_ranks(hardware: Hardware, num_ranks: int) -> float | None:
    """US dollars per hour for so many devices and their shares of the machine; None where no price is known."""
    price = hardware.price_usd_per_hour
    return None if price is None else price / hardware.devices_per_node * num_ranks


def rent_of_ranks(hardware: Hardware, num_ranks: int) -> float | None:
    """US dollars per hour for the machines that ``num_ranks`` devices are in; None where no price is known.

    Machines are rented whole: devices that nobody uses are paid for as well.
    """
    price = hardware.price_usd_per_hour
    return None if price is None else price * -(-num_ranks // hardware.devices_per_node)


def rent_of_stage(hardware: Hardware, num_ranks: int, num_stages: int) -> float | None:
    """US dollars per hour that the ``num_ranks`` of one of several equal stages pay of ``rent_of_ranks`` for all."""
    rent = rent_of_ranks(hardware, num_ranks * num_stages)
    return None if rent is None else rent / num_stages


def _most(groups: tuple[int, ...], num_ranks: int) -> int:
    """Ranks in the fullest group, when they fill the groups in order."""
    places = (group for group, size in enumerate(groups) for _ in range(size))
    taken = list(islice(places, num_ranks))
    return max(taken.count(group) for group in set(taken))


def host_share(host: Host, num_ranks: int, *, shares_cores: bool = False) -> Host:
    """One of ``num_ranks`` equal parts of a host.

    Raises HardwareError if it has fewer cores, unless ``shares_cores``: parts then have one each, be it the same.
    """
    if num_ranks > host.num_cores and not shares_cores:
        cores = "1 core" if host.num_cores == 1 else f"{host.num_cores} cores"
        raise HardwareError(
            f"{num_ranks} ranks share a socket of {host.name} but it has {cores} (host.num_cores). "
            f"Each rank needs one at least: use a larger host, or fewer ranks."
        )
    if num_ranks == 1:
        return host
    adam, products = host.adam_bytes_per_s, host.matrix_flop_per_s
    return host.model_copy(
        update={
            "num_cores": max(1, host.num_cores // num_ranks),
            "memory_bytes": host.memory_bytes // num_ranks,
            "memory_bandwidth_bytes_per_s": host.memory_bandwidth_bytes_per_s / num_ranks,
            "adam_bytes_per_s": None if adam is None else adam / num_ranks,
            "matrix_flop_per_s": None if products is None else products / num_ranks,
            "optimizer_s_per_scalar": {name: num_ranks * own_s for name, own_s in host.optimizer_s_per_scalar.items()},
        }
    )


def _capped(link: Link, bandwidth_bytes_per_s: float | None) -> Link:
    """``link`` with no more than this bandwidth; measured copies take as long as they did, or as the cap makes them."""
    if bandwidth_bytes_per_s is None or bandwidth_bytes_per_s >= link.bandwidth_bytes_per_s:
        return link
    table = tuple(
        LinkPoint(
            size_bytes=point.size_bytes,
            seconds=max(point.seconds, link.latency_s + point.size_bytes / bandwidth_bytes_per_s),
        )
        for point in link.table
    )
    return link.model_copy(update={"bandwidth_bytes_per_s": bandwidth_bytes_per_s, "table": table})

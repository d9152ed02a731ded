"""Machines with one part twice as fast, and the rest as it is."""

from __future__ import annotations

from ...shared.schema.hardware import Hardware, Link
from ..costs.fabrics import with_collectives_scaled


def faster_host(box: Hardware) -> Hardware:
    """Twice the cores and host memory bandwidth, and CPU Adam and products twice as fast where they are measured."""
    host = box.host
    faster = {
        "num_cores": 2 * host.num_cores,
        "memory_bandwidth_bytes_per_s": 2 * host.memory_bandwidth_bytes_per_s,
        "adam_bytes_per_s": None if host.adam_bytes_per_s is None else 2 * host.adam_bytes_per_s,
        "matrix_flop_per_s": None if host.matrix_flop_per_s is None else 2 * host.matrix_flop_per_s,
        "optimizer_s_per_scalar": {name: own_s / 2 for name, own_s in host.optimizer_s_per_scalar.items()},
    }
    return box.model_copy(update={"host": host.model_copy(update=faster)})


def faster_device(box: Hardware) -> Hardware:
    """A device with twice the arithmetic and memory bandwidth: units of the same kind, at twice the clock."""
    device = box.device
    clock = None if device.num_multiprocessors is None else 2 * device.told_clock_hz
    faster_device = device.model_copy(
        update={
            "peak_flop_per_s": {dtype: 2 * peak for dtype, peak in device.peak_flop_per_s.items()},
            "vector_flop_per_s": 2 * device.vector_flop_per_s,
            "clock_hz": clock,
            "optimizer_s_per_scalar": {name: own_s / 2 for name, own_s in device.optimizer_s_per_scalar.items()},
            "memory_bandwidth_bytes_per_s": 2 * device.memory_bandwidth_bytes_per_s,
        }
    )
    return box.model_copy(update={"device": faster_device})


def faster_links(box: Hardware) -> Hardware:
    """Both ways to the host twice as fast, and what devices share of them."""
    links = {name: _twice_as_fast(getattr(box, name)) for name in ("host_to_device", "device_to_host")}
    faster = box.model_copy(update=links)
    if box.node is None:
        return faster
    root = box.node.root_bandwidth_bytes_per_s
    faster = faster.model_copy(
        update={"node": box.node.model_copy(update={"root_bandwidth_bytes_per_s": None if root is None else 2 * root})}
    )
    if box.node.host_path is not None:
        faster = _with_node(faster, host_path=box.node.host_path)
    return with_collectives_scaled(box, faster)


def faster_disk(box: Hardware) -> Hardware:
    """The disk, of a machine that has one, twice as fast in both directions."""
    assert box.disk is not None
    rates = {name: 2 * getattr(box.disk, name) for name in ("read_bytes_per_s", "write_bytes_per_s")}
    return box.model_copy(update={"disk": box.disk.model_copy(update=rates)})


def faster_device_links(box: Hardware) -> Hardware:
    """Links between the devices of a node, of a machine that has them, twice as fast."""
    assert box.node is not None
    assert box.node.device_link is not None
    return with_collectives_scaled(box, _with_node(box, device_link=box.node.device_link))


def faster_network(box: Hardware) -> Hardware:
    """The network between nodes, of a machine that has one, twice as fast."""
    assert box.network is not None
    network = box.network.model_copy(update={"link": _twice_as_fast(box.network.link)})
    return with_collectives_scaled(box, box.model_copy(update={"network": network}))


def _with_node(box: Hardware, **links: Link) -> Hardware:
    """The machine with these links of its node twice as fast."""
    assert box.node is not None
    faster = {name: _twice_as_fast(link) for name, link in links.items()}
    return box.model_copy(update={"node": box.node.model_copy(update=faster)})


def _twice_as_fast(link: Link) -> Link:
    table = tuple(point.model_copy(update={"seconds": point.seconds / 2}) for point in link.table)
    return link.model_copy(update={"bandwidth_bytes_per_s": 2 * link.bandwidth_bytes_per_s, "table": table})

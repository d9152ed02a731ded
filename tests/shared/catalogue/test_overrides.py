"""Machines with parts and figures replaced: what changes, what stays, and what is refused."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from pydantic import ValidationError

from protwin.shared.basics.errors import CatalogueError, HardwareError
from protwin.shared.catalogue.machines import machine, override_hardware
from protwin.shared.catalogue.overrides import override_fields
from protwin.shared.catalogue.parts import (
    device_link_part,
    device_part,
    disk_part,
    host_part,
    link_part,
    network_part,
    node_part,
)
from protwin.shared.catalogue.plausibility import check_plausible
from protwin.shared.schema.hardware import Hardware, LinkPoint
from protwin.sim.operations.efficiency import has_half_the_lanes
from tests.strategies.machines import hardware as random_hardware

VALUES = {
    "memory_bytes": ("40GiB", 40 * 2**30),
    "capacity_bytes": ("4TB", 4 * 10**12),
    "read_bytes_per_s": ("14 GB/s", 14e9),
    "write_bytes_per_s": ("7GB/s", 7e9),
    "reserved_bytes": ("1.5GiB", 3 * 2**29),
    "memory_bandwidth_bytes_per_s": ("123GB/s", 123e9),
    "bandwidth_bytes_per_s": ("50 GB/s", 50e9),
    "adam_bytes_per_s": ("33e9", 33e9),
    "vector_flop_per_s": ("1.5e12", 1.5e12),
    "matrix_flop_per_s": ("2e12", 2e12),
    "launch_overhead_s": ("7us", 7e-6),
    "latency_s": ("0.01 ms", 1e-5),
    "num_cores": ("12", 12),
    "num_memory_channels": ("4", 4),
    "num_multiprocessors": ("100", 100),
    "attention_kernel": ("flash-1", "flash-1"),
    "clock_hz": ("1.4e9", 1.4e9),
    "sustained_frac": ("0.7", 0.7),
    "power_limit_w": ("200", 200.0),
    "name": ("another", "another"),
    "source": ("my notes", "my notes"),
    "kind": ("cpu", "cpu"),
    "full_duplex": ("false", False),
    "price_usd_per_hour": ("2.5", 2.5),
    "root_bandwidth_bytes_per_s": ("11 GB/s", 11e9),
    "num_nodes": ("5", 5),
    "adapters_per_node": ("3", 3),
    "sockets": ("2, 6", (2, 6)),
    "pcie_roots": ("4,2,2", (4, 2, 2)),
    "through_host_memory": ("true", True),
    "reduces_in_switch": ("true", True),
    "topology": ("mesh", "mesh"),
    "num_devices": ("8", 8),
}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a machine by its dotted name."""
    if not isinstance(value, dict):
        return {path: value}
    return {name: leaf for key, part in value.items() for name, leaf in flat(part, f"{path}.{key}".strip(".")).items()}


def changes(before: Hardware, after: Hardware) -> dict[str, Any]:
    old, new = flat(before.model_dump()), flat(after.model_dump())
    return {name: new.get(name) for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


def cluster() -> Hardware:
    """A machine that has every part that a machine can have."""
    base = machine("h100-80gb-x8")
    assert base.node is not None
    changes = {"host_path": device_link_part("pcie5-peer"), "reduces_in_switch": False}
    disk = disk_part("nvme-pcie4-2tb")
    return base.model_copy(update={"node": base.node.model_copy(update=changes), "disk": disk})


def measured_machine() -> Hardware:
    """A machine as a probe leaves it: copies and Adam were measured."""
    base = machine("rtx-3090")
    table = (LinkPoint(size_bytes=2**20, seconds=1e-4), LinkPoint(size_bytes=2**28, seconds=1e-2))
    return base.model_copy(
        update={
            "host": base.host.model_copy(update={"adam_bytes_per_s": 30e9}),
            "host_to_device": base.host_to_device.model_copy(update={"table": table}),
            "device_to_host": base.device_to_host.model_copy(update={"table": table}),
        }
    )


@pytest.mark.parametrize("field", [name for name in override_fields() if "." in name or name in VALUES])
def test_a_field_changes_itself_alone_and_says_so(field: str) -> None:
    before = cluster()
    part, _, rest = field.partition(".")
    text, value = VALUES.get(field.rpartition(".")[2], ("0.5", 0.5))
    if rest.startswith("peak_flop_per_s"):
        text, value = "7e13", 7e13
    if rest.startswith("optimizer_s_per_scalar"):
        text, value = "7e-12", 7e-12
    after = override_hardware(before, {field: text})
    parts = ("host_to_device", "device_to_host") if part == "link" else (part,)
    names = {f"{target}.{rest}".strip(".") for target in parts}
    found = changes(before, after)
    new = flat(after.model_dump())
    assert {name: new[name] for name in names} == dict.fromkeys(names, value)
    notes = {f"{target}.source" for target in parts} if rest not in ("", "name", "source") else set()
    follows = {"host.memory_bandwidth_bytes_per_s"} if field == "host.num_memory_channels" else set()
    follows |= {"device.clock_hz"} if field == "device.vector_flop_per_s" else set()
    assert found.keys() == names - {"node.num_devices"} | notes | follows | {"overrides"}
    assert after.overrides == (f"{field}={text}",)
    for note in notes:
        assert found[note].endswith(f"set by hand: {rest} = {text}")


NUMBERS = (0, 1, 2, -1, 0.0, 0.5, 1.0, -0.5, 1e-30, 2**40, 10**13, 2**62, 1e300, float("inf"), float("nan"))
NUMERIC = ["price_usd_per_hour"] + [
    name
    for name in override_fields()
    if "." in name and type(VALUES.get(name.rpartition(".")[2], ("", 0.5))[1]) in (int, float)
]


def is_taken_as_a_number(field: str, number: float) -> bool:
    """Whether the schema and the range of real machines allow it there: by the number itself, without texts."""
    *path, last = field.replace("link.", "host_to_device.", 1).split(".") if field[:5] == "link." else field.split(".")
    content = cluster().model_dump()
    holder = content
    for step in path:
        holder = holder[step]
    holder[last] = number
    try:
        check_plausible(Hardware.model_validate(content), origin="test")
    except (ValidationError, HardwareError):
        return False
    return True


def is_taken_as_text(field: str, number: float) -> bool:
    try:
        override_hardware(cluster(), {field: repr(number)})
    except HardwareError:
        return False
    return True


@pytest.mark.parametrize("field", NUMERIC)
def test_a_number_is_taken_if_the_schema_takes_it(field: str) -> None:
    """What may be 0, negative or infinite is said in one place, and texts follow it."""
    numbers: list[float] = list(NUMBERS)
    if "bytes" in field:
        numbers = [number for number in numbers if not number % 1]  # fractions of a byte are rounded in texts
    if field == "host.num_memory_channels":
        numbers = [0, -1]  # others scale the bandwidth, which may be refused in its place
    taken = [number for number in numbers if is_taken_as_text(field, number)]
    assert taken == [number for number in numbers if is_taken_as_a_number(field, number)]


def test_nothing_reserved_is_nothing_reserved() -> None:
    for zero in ("0", "0GiB", "0 B", "0.0"):
        assert override_hardware(machine("rtx-3090"), {"device.reserved_bytes": zero}).device.reserved_bytes == 0
    for zero in ("0", "0GiB"):
        with pytest.raises(HardwareError, match=r"device\.memory_bytes: .*greater than 0"):
            override_hardware(machine("rtx-3090"), {"device.memory_bytes": zero})


@given(hardware=random_hardware())
def test_nothing_overridden_changes_nothing(hardware: Hardware) -> None:
    assert override_hardware(hardware, {}) == hardware


def test_parts_come_from_the_catalogue() -> None:
    before = machine("rtx-3090")
    assert override_hardware(before, {"host": "epyc-64"}) == before.model_copy(
        update={"host": host_part("epyc-64"), "overrides": ("host=epyc-64",)}
    )
    fast = override_hardware(before, {"link": "pcie5-x16"})
    assert (fast.host_to_device, fast.device_to_host) == (
        link_part("pcie5-x16").host_to_device,
        link_part("pcie5-x16").device_to_host,
    )
    one_way = override_hardware(before, {"host_to_device": "pcie5-x16"})
    assert one_way.host_to_device == fast.host_to_device
    assert one_way.device_to_host == before.device_to_host
    other = override_hardware(before, {"device": "h100-80gb"})
    assert (other.name, other.device) == ("h100-80gb", device_part("h100-80gb"))
    assert other.host == before.host


@pytest.mark.parametrize(
    ("base", "overrides", "expected"),
    [
        ("rtx-3090", {"link": "nvlink-c2c"}, False),
        ("rtx-3090", {"host_to_device": "nvlink-c2c"}, False),
        ("gh200-96gb", {"link": "pcie5-x16"}, True),
        ("gh200-96gb", {"host_to_device": "pcie5-x16"}, False),
        ("gh200-96gb", {"host_to_device": "pcie5-x16", "device_to_host": "pcie4-x16"}, True),
        ("gh200-96gb", {"link": "pcie5-x16", "device_to_host": "nvlink-c2c"}, False),
        ("rtx-3090", {"link": "nvlink-c2c", "full_duplex": "true"}, True),
    ],
)
def test_duplex_follows_the_links(base: str, overrides: dict[str, str], expected: bool) -> None:
    assert override_hardware(machine(base), overrides).full_duplex is expected


def test_the_order_of_overrides_does_not_matter() -> None:
    overrides = {
        "device.memory_bytes": "60GiB",
        "device": "a100-80gb",
        "host_to_device.bandwidth_bytes_per_s": "20GB/s",
        "link.bandwidth_bytes_per_s": "40GB/s",
        "link": "pcie5-x16",
    }
    results = [
        override_hardware(machine("rtx-3090"), {name: overrides[name] for name in order})
        for order in permutations(overrides)
    ]
    assert all(result == results[0] for result in results)
    assert results[0].device.memory_bytes == 60 * 2**30
    assert results[0].host_to_device.bandwidth_bytes_per_s == 20e9
    assert results[0].device_to_host.bandwidth_bytes_per_s == 40e9


def effective_copy_s(hardware: Hardware, size_bytes: int) -> float:
    """What a copy to the device takes, as a reader of the schema understands it."""
    link = hardware.host_to_device
    if link.table and link.table[0].size_bytes <= size_bytes <= link.table[-1].size_bytes:
        return next(point.seconds for point in link.table if point.size_bytes >= size_bytes)
    return link.latency_s + size_bytes / link.bandwidth_bytes_per_s


def naive_override(hardware: Hardware) -> Hardware:
    """The wrong variant: the figure changes, the measurement that replaces it stays."""
    link = hardware.host_to_device.model_copy(update={"bandwidth_bytes_per_s": 100e9})
    return hardware.model_copy(update={"host_to_device": link})


def test_an_override_takes_effect_where_the_figure_was_measured() -> None:
    before = measured_machine()
    size_bytes = 2**28
    assert effective_copy_s(naive_override(before), size_bytes) == effective_copy_s(before, size_bytes)
    after = override_hardware(before, {"link.bandwidth_bytes_per_s": "100GB/s"})
    assert effective_copy_s(after, size_bytes) < 0.5 * effective_copy_s(before, size_bytes)
    assert after.device_to_host.table == ()
    assert "table = none" in after.host_to_device.source


@pytest.mark.parametrize("field", ["host.memory_bandwidth_bytes_per_s", "host.num_cores"])
def test_a_measured_adam_rate_does_not_outlive_what_it_was_measured_on(field: str) -> None:
    value = "32" if field == "host.num_cores" else "200GB/s"
    assert override_hardware(measured_machine(), {field: value}).host.adam_bytes_per_s is None
    both = override_hardware(measured_machine(), {"host.adam_bytes_per_s": "50GB/s", field: value})
    assert both.host.adam_bytes_per_s == 50e9
    assert override_hardware(measured_machine(), {"host.memory_bytes": "64GiB"}).host.adam_bytes_per_s == 30e9


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("device.memory_bytes", "nan", "device.memory_bytes"),
        ("device.memory_bytes", "0", "device.memory_bytes"),
        ("device.memory_bytes", "-1GiB", "device.memory_bytes"),
        ("device.memory_bytes", "40GB/s", "device.memory_bytes"),
        ("device.memory_bytes", "", "device.memory_bytes"),
        ("device.memory_bytes", "1e30", "device.memory_bytes"),
        ("device.memory_bytes", "900TiB", None),
        ("device.memory_bytes", "2048TiB", "device.memory_bytes is 2.25"),
        ("device.memory_bytes", "1GiB", "leaves nothing of memory_bytes"),
        ("host.memory_bytes", "256", "host.memory_bytes is 256 B"),
        ("host.num_cores", "1.5", "host.num_cores"),
        ("host.num_cores", "-3", "host.num_cores"),
        ("host.num_cores", "many", "host.num_cores"),
        ("device.memory_bandwidth_bytes_per_s", "inf", "device.memory_bandwidth_bytes_per_s"),
        ("device.memory_bandwidth_bytes_per_s", "936", "device.memory_bandwidth_bytes_per_s is 936 B/s"),
        ("link.bandwidth_bytes_per_s", "0GB/s", "host_to_device.bandwidth_bytes_per_s"),
        ("link.bandwidth_bytes_per_s", "1e20", "host_to_device.bandwidth_bytes_per_s is 1e\\+20"),
        ("device_to_host.latency_s", "-1e-6", "device_to_host.latency_s"),
        ("device_to_host.latency_s", "10", "device_to_host.latency_s is 10 s"),
        ("device.launch_overhead_s", "nan", "device.launch_overhead_s"),
        ("device.launch_overhead_s", "5min", "device.launch_overhead_s"),
        ("device.peak_flop_per_s.bfloat16", "71", "device.peak_flop_per_s.bfloat16 is 71 FLOP/s"),
        ("device.peak_flop_per_s.bfloat16", "71TFLOPS", "device.peak_flop_per_s.bfloat16"),
        ("device.efficiency.matmul", "1.5", "device.efficiency.matmul"),
        ("device.kind", "tpu", "device.kind"),
        ("full_duplex", "maybe", "full_duplex"),
        ("device.memory_byte", "1GiB", "Did you mean device.memory_bytes"),
        ("memory_bytes", "1GiB", "Did you mean .*device.memory_bytes"),
        ("gpu.memory_bytes", "1GiB", "Did you mean .*device.memory_bytes"),
        ("price_usd_per_hour", "-1", "price_usd_per_hour"),
        ("price_usd_per_hour", "free", "price_usd_per_hour"),
        (
            "node.num_devices",
            "4",
            "rtx-3090 has no node, so that node.num_devices cannot be set. Choose one with node=",
        ),
        ("network.link.latency_s", "1e-6", "rtx-3090 has no network, .* Choose one with network=NAME"),
        ("node.device_link", "nvlink4-h100", "has several figures: set one, as in node.device_link.bandwidth"),
        ("node.device_link.table", "1", "cannot be set in one line"),
        ("node.device_link.bandwith", "1GB/s", "Did you mean node.device_link.bandwidth_bytes_per_s"),
        ("host.num_memory_channels", "0", "host.memory_bandwidth_bytes_per_s|host.num_memory_channels"),
        ("host.num_memory_channels", "two", "host.num_memory_channels"),
        ("host.num_memory_channels", "9" * 30, "host.num_memory_channels is 1e"),
        ("host.num_memory_channels", "9" * 400, "host.memory_bandwidth_bytes_per_s|host.num_memory_channels"),
        ("host.num_memory_channels", "9" * 5000, "host.memory_bandwidth_bytes_per_s|host.num_memory_channels"),
        ("host.num_memory_channels", "1000000", "host.num_memory_channels is 1e"),
        ("zzz", "1", "parts are device, host, link"),
        ("", "1", "parts are device, host, link"),
        ("link.table", "1", "cannot be set in one line"),
        ("device.peak_flop_per_s", "1e12", "needs a key"),
        ("device.peak_flop_per_s.bf17", "1e12", "Did you mean device.peak_flop_per_s"),
    ],
)
def test_an_impossible_override_is_refused_with_its_field(name: str, value: str, message: str | None) -> None:
    if message is None:
        assert override_hardware(machine("rtx-3090"), {name: value})
        return
    with pytest.raises(HardwareError, match=message):
        override_hardware(machine("rtx-3090"), {name: value})


@pytest.mark.parametrize(
    ("part", "asked", "meant"),
    [
        ("host", "epic-64", "epyc-64"),
        ("link", "pcie5", "pcie5-x16"),
        ("device", "a100", "a100"),
        ("node", "hgx-h100", "hgx-h100-8"),
        ("network", "infiniband", "infiniband-ndr"),
    ],
)
def test_an_unknown_part_is_answered_with_the_nearest(part: str, asked: str, meant: str) -> None:
    with pytest.raises(CatalogueError, match=f"no {part} '{asked}' in the catalogue. Did you mean .*{meant}"):
        override_hardware(machine("rtx-3090"), {part: asked})


def test_half_of_the_memory_channels_carry_half() -> None:
    whole, half = machine("a100-80gb").host, {"host.num_memory_channels": "4"}
    assert override_hardware(machine("a100-80gb"), half).host.memory_bandwidth_bytes_per_s == pytest.approx(
        whole.memory_bandwidth_bytes_per_s / 2
    )
    assert override_hardware(measured_machine(), {"host.num_memory_channels": "1"}).host.adam_bytes_per_s is None
    stated = override_hardware(machine("a100-80gb"), half | {"host.memory_bandwidth_bytes_per_s": "99GB/s"})
    assert stated.host.memory_bandwidth_bytes_per_s == 99e9
    told = half | {"host.adam_bytes_per_s": "50GB/s"}
    for order in permutations(told):
        assert override_hardware(measured_machine(), {name: told[name] for name in order}).host.adam_bytes_per_s == 50e9
    with pytest.raises(HardwareError, match="grace-72 does not state how many memory channels"):
        override_hardware(machine("gh200-96gb"), half)


# -- several devices -------------------------------------------------------------------------------------------------


def test_nodes_and_networks_come_from_the_catalogue() -> None:
    alone = machine("h100-80gb")
    eight = override_hardware(alone, {"node": "hgx-h100-8"})
    assert eight.node == node_part("hgx-h100-8")
    assert eight.model_copy(update={"node": None, "overrides": ()}) == alone
    joined = override_hardware(eight, {"network": "roce-400g", "network.num_nodes": "16"})
    assert joined.network is not None
    assert joined.network.link == network_part("roce-400g").link
    assert (joined.num_nodes, joined.num_devices) == (16, 128)


def test_another_network_joins_the_same_machines() -> None:
    before = override_hardware(machine("h100-80gb-x8"), {"network.num_nodes": "4"})
    after = override_hardware(before, {"network": "ethernet-100g"})
    assert before.network is not None
    assert after.network is not None
    assert (after.network.num_nodes, after.network.adapters_per_node) == (4, before.network.adapters_per_node)
    assert after.network.link == network_part("ethernet-100g").link


def test_a_cluster_of_other_devices_is_named_after_them() -> None:
    assert override_hardware(machine("h100-80gb-x8"), {"device": "h200-141gb"}).name == "h200-141gb-x8"
    assert override_hardware(machine("h100-80gb"), {"device": "l40s", "node": "pcie4-8"}).name == "l40s-x8"


def test_fewer_devices_need_fewer_places() -> None:
    eight = machine("h100-80gb-x8")
    with pytest.raises(HardwareError, match=r"sockets 4,4 hold 8 devices, but num_devices is 4; change both"):
        override_hardware(eight, {"node.num_devices": "4"})
    four = override_hardware(eight, {"node.num_devices": "4", "node.sockets": "2,2", "node.pcie_roots": "1,1,1,1"})
    assert four.node is not None
    assert (four.node.num_devices, four.node.sockets) == (4, (2, 2))


def test_a_part_that_the_node_lacks_has_no_figures() -> None:
    with pytest.raises(HardwareError, match=r"has no node.device_link, so that .* Write it into a machine's file"):
        override_hardware(machine("rtx-4090-x8"), {"node.device_link.latency_s": "1e-6"})


def test_a_measured_table_between_devices_does_not_outlive_its_bandwidth() -> None:
    before = cluster()
    assert before.node is not None
    assert before.node.device_link is not None
    table = (LinkPoint(size_bytes=2**20, seconds=1e-4),)
    link = before.node.device_link.model_copy(update={"table": table})
    measured = before.model_copy(update={"node": before.node.model_copy(update={"device_link": link})})
    after = override_hardware(measured, {"node.device_link.bandwidth_bytes_per_s": "100GB/s"})
    assert after.node is not None
    assert after.node.device_link is not None
    assert after.node.device_link.table == ()
    assert "device_link.table = none" in after.node.source


def test_a_disk_is_chosen_by_name_and_changed_by_figure() -> None:
    """By default a machine has none; ``--what-if disk.read_bytes_per_s=14GB/s`` takes the same names."""
    assert machine("rtx-3090").disk is None
    chosen = override_hardware(machine("rtx-3090"), {"disk": "NVMe PCIe4 2TB", "disk.read_bytes_per_s": "14GB/s"})
    assert chosen.disk is not None
    assert (chosen.disk.name, chosen.disk.read_bytes_per_s) == ("nvme-pcie4-2tb", 14e9)
    assert chosen.disk.write_bytes_per_s == disk_part("nvme-pcie4-2tb").write_bytes_per_s
    assert "set by hand: read_bytes_per_s = 14GB/s" in chosen.disk.source
    with pytest.raises(HardwareError, match=r"rtx-3090 has no disk.*Choose one with disk=NAME"):
        override_hardware(machine("rtx-3090"), {"disk.read_bytes_per_s": "14GB/s"})
    with pytest.raises(HardwareError, match=r"disk\.read_bytes_per_s is 14 B/s"):
        override_hardware(chosen, {"disk.read_bytes_per_s": "14"})


@pytest.mark.parametrize("name", ["v100-16gb", "a100-80gb", "t4", "h100-80gb", "mi210-64gb"])
def test_more_flop_per_s_are_a_higher_clock_of_the_same_units(name: str) -> None:
    """Of a V100 with 5 % more it was said that it has 128 units in each multiprocessor, at half the clock."""
    before = machine(name)
    device = before.device
    for factor in (0.5, 1.05, 1.5, 3.0):
        flop_per_s = device.vector_flop_per_s * factor
        changed = override_hardware(before, {"device.vector_flop_per_s": repr(flop_per_s)}).device
        assert changed.told_clock_hz == pytest.approx(device.told_clock_hz * factor)
        assert has_half_the_lanes(changed) == has_half_the_lanes(device)
    # Who says more says all.
    stated = {"device.vector_flop_per_s": "2e13", "device.clock_hz": "1.9e9"}
    assert override_hardware(before, stated).device.clock_hz == 1.9e9
    other = {"device.vector_flop_per_s": "2e13", "device.num_multiprocessors": "120"}
    assert override_hardware(before, other).device.clock_hz is None

"""What one of several equal ranks has of a machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.basics.errors import HardwareError
from protwin.shared.catalogue.machines import cluster_names, machine, override_hardware
from protwin.shared.catalogue.rank_share import machine_of_rank, price_of_ranks
from protwin.shared.schema.hardware import DeviceKind, Hardware, LinkPoint
from protwin.sim.costs.copies import copy_time_s
from protwin.sim.costs.fabrics import fabric_levels
from protwin.sim.costs.fair_share import fair_shares
from protwin.sim.costs.task_costs import host_adam_bytes_per_s


def test_one_rank_alone_has_all_that_a_machine_with_one_device_has() -> None:
    for name in cluster_names():
        alone = machine_of_rank(machine(name), 1)
        one = machine(name.partition("-x")[0])
        assert (alone.device, alone.node, alone.network) == (one.device, None, None)
        assert alone.host == machine(name).host
    assert machine_of_rank(machine("rtx-3090"), 1) == machine("rtx-3090")


def test_ranks_pay_for_their_devices_wherever_these_are() -> None:
    whole = machine("a100-80gb-x8").model_copy(update={"price_usd_per_hour": 16.0})
    assert [price_of_ranks(whole, ranks) for ranks in (1, 3, 8, 16)] == [2.0, 6.0, 16.0, 32.0]
    assert price_of_ranks(machine("rtx-3090").model_copy(update={"price_usd_per_hour": None}), 1) is None


def copy_rates_by_fair_sharing(hardware: Hardware, num_ranks: int) -> list[float]:
    """Bytes per second of every rank's copies to its device when all copy at once, root by root."""
    node = hardware.node
    assert node is not None
    assert node.root_bandwidth_bytes_per_s is not None
    root_of = [root for root, size in enumerate(node.pcie_roots) for _ in range(size)][:num_ranks]
    rate = hardware.host_to_device.bandwidth_bytes_per_s
    shares = fair_shares(
        [{root: rate} for root in root_of], dict.fromkeys(range(len(node.pcie_roots)), node.root_bandwidth_bytes_per_s)
    )
    return [share * rate for share in shares]


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
        lambda roots: st.tuples(st.just(roots), st.integers(1, sum(roots)), st.floats(1, 100))
    )
)
def test_links_are_those_of_the_slowest_when_all_copy(drawn: tuple[list[int], int, float]) -> None:
    roots, num_ranks, root_rate = drawn
    count = str(sum(roots))
    hardware = override_hardware(
        machine("l40s-x8"),
        {
            "node.num_devices": count,
            "node.sockets": count,
            "node.pcie_roots": ",".join(map(str, roots)),
            "node.root_bandwidth_bytes_per_s": f"{root_rate}GB/s",
        },
    )
    slowest = min(copy_rates_by_fair_sharing(hardware, num_ranks))
    assert machine_of_rank(hardware, num_ranks).host_to_device.bandwidth_bytes_per_s == pytest.approx(slowest)


def test_ranks_at_a_socket_divide_it() -> None:
    whole = machine("h100-80gb-x8").host
    for num_ranks, at_socket in ((1, 1), (2, 2), (4, 4), (5, 4), (8, 4)):
        host = machine_of_rank(machine("h100-80gb-x8"), num_ranks).host
        assert host.num_cores == whole.num_cores // at_socket
        assert host.memory_bytes == whole.memory_bytes // at_socket
        assert host.memory_bandwidth_bytes_per_s == pytest.approx(whole.memory_bandwidth_bytes_per_s / at_socket)
        assert host_adam_bytes_per_s(host) * at_socket <= host_adam_bytes_per_s(whole) * (1 + 1e-9)


def test_a_measured_rate_of_adam_and_measured_copies_are_divided_too() -> None:
    base = machine("a100-80gb-x8")
    table = (LinkPoint(size_bytes=2**20, seconds=1e-4), LinkPoint(size_bytes=2**28, seconds=2**28 / 25e9))
    measured = base.model_copy(
        update={
            "host": base.host.model_copy(update={"adam_bytes_per_s": 100e9}),
            "host_to_device": base.host_to_device.model_copy(update={"table": table}),
        }
    )
    share = machine_of_rank(measured, 8)
    assert share.host.adam_bytes_per_s == 25e9
    # Two devices below each root: a large copy takes twice as long, a small one is held up by its latency as before.
    assert copy_time_s(2**28, share.host_to_device) == pytest.approx(6e-6 + 2**28 / 12.8e9)
    assert copy_time_s(2**20, share.host_to_device) == pytest.approx(1e-4)
    assert machine_of_rank(measured, 1).host_to_device.table == table


@pytest.mark.parametrize("num_ranks", [0, 9])
def test_ranks_that_do_not_fit_are_refused(num_ranks: int) -> None:
    with pytest.raises(HardwareError, match=r"do not fit on h100-80gb-x8, which has 8 devices\. Use"):
        machine_of_rank(machine("h100-80gb-x8"), num_ranks)


def test_every_rank_needs_a_core() -> None:
    small = override_hardware(machine("h100-80gb-x8"), {"host.num_cores": "3"})
    with pytest.raises(HardwareError, match=r"4 ranks share a socket of .* 3 cores \(host.num_cores\)"):
        machine_of_rank(small, 8)
    enough = override_hardware(machine("h100-80gb-x8"), {"host.num_cores": "4"})
    assert machine_of_rank(enough, 8).host.num_cores == 1


def cpu_of(num_ranks: int) -> Hardware:
    """Four cores that are the device of so many processes."""
    one = override_hardware(machine("l40s-x8"), {"host.num_cores": "4", "node.sockets": "8", "node.pcie_roots": "8"})
    assert one.node is not None
    device = one.device.model_copy(update={"kind": DeviceKind.CPU})
    node = None
    if num_ranks > 1:
        counts = {"num_devices": num_ranks, "sockets": (num_ranks,), "pcie_roots": (num_ranks,)}
        node = one.node.model_copy(update=counts)
    return one.model_copy(update={"name": "four cores", "device": device, "node": node, "network": None})


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_processes_may_outnumber_the_cores_of_a_cpu(num_ranks: int) -> None:
    whole = cpu_of(num_ranks)
    share = machine_of_rank(whole, num_ranks)
    assert share.host.num_cores == max(1, 4 // num_ranks)
    assert share.host.memory_bandwidth_bytes_per_s * num_ranks == pytest.approx(whole.host.memory_bandwidth_bytes_per_s)
    assert share.device == whole.device, "a device is what one process reaches beside the others"


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_a_cpu_that_one_process_measured_says_how_to_measure_it_for_several(num_ranks: int) -> None:
    for ask in (machine_of_rank, fabric_levels):
        with pytest.raises(HardwareError, match=rf"protwin hardware probe --ranks {num_ranks} --output machine\.toml"):
            ask(cpu_of(1), num_ranks)
        with pytest.raises(HardwareError) as caught:
            ask(machine("rtx-3090"), num_ranks)
        assert "probe" not in str(caught.value)

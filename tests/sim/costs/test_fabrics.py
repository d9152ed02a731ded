"""Collectives on machines of the catalogue: beside published measurements, and beside what their parts allow."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protwin.shared.basics.errors import HardwareError, PlanError
from protwin.shared.catalogue.machines import cluster_names, machine, override_hardware
from protwin.shared.schema.hardware import Hardware
from protwin.sim.costs.collectives import Algorithm, Collective, Shape, hierarchical_s
from protwin.sim.costs.fabrics import CALL_OVERHEAD_S, fabric_levels, flat_fabric, machine_collective
from tests.sim.several_nodes import with_nodes

GIB = 2**30


def bus_bytes_per_s(hardware: Hardware, num_ranks: int, algorithm: Algorithm | None = None) -> float:
    """What nccl-tests call the bus bandwidth of a large all_reduce: 2 (p - 1) / p of the buffer, over the seconds."""
    size_bytes = 8 * GIB
    seconds = machine_collective(Collective.ALL_REDUCE, size_bytes, hardware, num_ranks, algorithm).seconds
    return 2 * (num_ranks - 1) / num_ranks * size_bytes / seconds


# Figures in the third column did not make the catalogue's: they are predicted.
PUBLISHED = [
    # github.com/NVIDIA/nccl issue 1807: eight B200, "830+".
    ("b200-180gb-x8", 8, 830e9, None),
    # github.com/NVIDIA/nccl-tests issue 272: eight H200, 475.
    ("h200-141gb-x8", 8, 475e9, None),
    # github.com/NVIDIA/nccl issue 1639: eight RTX 5090 at 28, where four made the figure of their path.
    ("rtx-5090-x8", 8, 28e9, None),
    # github.com/NVIDIA/nccl-tests issue 212: rings on eight H100.
    ("h100-80gb-x8", 8, 370e9, Algorithm.RING),
    # github.com/NVIDIA/nccl-tests issue 178: three A100 PCIe, of which two have a bridge.
    ("a100-80gb-pcie-x8", 3, 20e9, None),
]


@pytest.mark.parametrize(("name", "num_ranks", "measured", "algorithm"), PUBLISHED)
def test_published_all_reduces(name: str, num_ranks: int, measured: float, algorithm: Algorithm | None) -> None:
    assert bus_bytes_per_s(machine(name), num_ranks, algorithm) == pytest.approx(measured, rel=0.15)


def test_published_all_reduces_over_nodes() -> None:
    # Two nodes of eight A100 with four HDR adapters: 86 GB/s (github.com/NVIDIA/nccl-tests issue 175).
    two = with_nodes("a100-80gb-x8", 2, network__adapters_per_node="4")
    assert bus_bytes_per_s(two, 16, Algorithm.RING) == pytest.approx(86e9, rel=0.15)


def test_what_ranks_share_slows_them() -> None:
    eight = machine("rtx-5090-x8")
    four_of_a_socket = flat_fabric(eight, 4).bandwidth_bytes_per_s
    assert flat_fabric(eight, 2).bandwidth_bytes_per_s == 35e9
    # Four times 35 GB/s, written and read: 280 of the 245 GB/s of the socket's memory.
    assert four_of_a_socket == pytest.approx(245e9 / 8)
    roots = override_hardware(
        machine("l40s-x8"), {"node.pcie_roots": "4,4", "node.root_bandwidth_bytes_per_s": "15GB/s"}
    )
    # Devices 3 and 7 send across the sockets and have their roots to themselves; all others stay below theirs.
    assert flat_fabric(roots, 8).bandwidth_bytes_per_s == 15e9
    assert flat_fabric(roots, 4).bandwidth_bytes_per_s == 20e9
    narrow = override_hardware(machine("rtx-4090-x8"), {"node.root_bandwidth_bytes_per_s": "5GB/s"})
    assert flat_fabric(narrow, 8).bandwidth_bytes_per_s == 5e9


def test_the_way_through_the_host_is_no_wider_than_the_links_to_it() -> None:
    narrow = override_hardware(machine("rtx-5090-x8"), {"link": "pcie3-x8"})
    assert flat_fabric(narrow, 2).bandwidth_bytes_per_s == 6.05e9
    one_way = override_hardware(narrow, {"full_duplex": "false"})
    assert flat_fabric(one_way, 2).bandwidth_bytes_per_s == 6.05e9 / 2
    unstated = narrow.model_copy(update={"node": narrow.node and narrow.node.model_copy(update={"host_path": None})})
    assert flat_fabric(unstated, 2).bandwidth_bytes_per_s == 6.05e9
    assert flat_fabric(unstated, 2).latency_s == 12e-6


def test_pairs_are_a_level_of_their_own() -> None:
    pairs = machine("h100-94gb-nvl-x8")
    inner, outer = fabric_levels(pairs, 8)
    assert (inner.num_ranks, inner.bandwidth_bytes_per_s) == (2, 247e9)
    assert (outer.num_ranks, outer.bandwidth_bytes_per_s) == (4, 35e9)
    assert len(fabric_levels(pairs, 2)) == 1
    assert len(fabric_levels(pairs, 3)) == 1
    best = machine_collective(Collective.ALL_REDUCE, GIB, pairs, 8)
    assert best.algorithm is Algorithm.HIERARCHICAL
    assert best.seconds < machine_collective(Collective.ALL_REDUCE, GIB, pairs, 8, Algorithm.RING).seconds


def test_nodes_share_their_adapters() -> None:
    two = with_nodes("h100-80gb-x8", 2)
    inner, outer = fabric_levels(two, 16)
    assert (inner.num_ranks, inner.reduces_in_switch) == (8, True)
    assert (outer.num_ranks, outer.bandwidth_bytes_per_s) == (2, 48e9)  # an adapter for each of eight ranks
    assert flat_fabric(two, 16).bandwidth_bytes_per_s == 370e9  # eight rings, one through each adapter: 384 GB/s
    few = with_nodes("h100-80gb-x8", 2, network__adapters_per_node="2")
    assert fabric_levels(few, 16)[1].bandwidth_bytes_per_s == 12e9
    assert flat_fabric(few, 16).bandwidth_bytes_per_s == 96e9


def test_a_network_alone_joins_machines_of_one_device() -> None:
    four = override_hardware(machine("rtx-4090"), {"network": "ethernet-25g", "network.num_nodes": "4"})
    (only,) = fabric_levels(four, 4)
    assert (only.num_ranks, only.bandwidth_bytes_per_s, only.shape) == (4, 2.94e9, Shape.NETWORK)
    assert machine_collective(Collective.ALL_GATHER, GIB, four, 4).seconds >= 3 / 4 * GIB / 2.94e9


@pytest.mark.parametrize("collective", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER])
def test_latency_grows_with_the_nodes(collective: Collective) -> None:
    """By rings; the wrong variant, a switch between nodes, sends to thousands of them in one turn."""
    levels = fabric_levels(with_nodes("h100-80gb-x8", 1_000), 8_000)
    latency_s = 999 * levels[-1].latency_s
    assert hierarchical_s(collective, 10**6, levels) >= latency_s
    assert hierarchical_s(collective, 10**6, (*levels[:-1], replace(levels[-1], shape=Shape.SWITCH))) < latency_s / 100
    # A sum may go through trees.
    assert hierarchical_s(Collective.ALL_REDUCE, 10**6, levels) < latency_s


@pytest.mark.parametrize("name", cluster_names())
@pytest.mark.parametrize("collective", list(Collective))
def test_every_cluster_carries_out_every_collective(name: str, collective: Collective) -> None:
    hardware = machine(name)
    previous = 0.0
    for size_bytes in (0, 10**4, 10**7, 10**10):
        time = machine_collective(collective, size_bytes, hardware, hardware.num_devices)
        assert previous < time.seconds < inf
        assert time.seconds > CALL_OVERHEAD_S
        previous = time.seconds
    assert machine_collective(collective, 10**9, hardware, 1).seconds == 0.0


@given(
    st.sampled_from(["h100-80gb-x8", "a100-80gb-pcie-x8", "rtx-5090-x8", "mi300x-192gb-x8", "v100-32gb-x8"]),
    st.integers(1, 128),
    st.sampled_from(list(Collective)),
    st.integers(1, 2**34),
)
def test_the_fastest_is_no_slower_than_any_that_is_named(
    name: str, num_nodes: int, collective: Collective, size_bytes: int
) -> None:
    base = {"network": "infiniband-hdr", "network.num_nodes": str(num_nodes)}
    hardware = override_hardware(machine(name), base)
    best = machine_collective(collective, size_bytes, hardware, hardware.num_devices)
    for algorithm in Algorithm:
        try:
            named = machine_collective(collective, size_bytes, hardware, hardware.num_devices, algorithm)
        except HardwareError:
            # The wrong variant refuses groups where there are some; only a machine of one level has none.
            assert algorithm is Algorithm.HIERARCHICAL
            assert len(fabric_levels(hardware, hardware.num_devices)) == 1
            continue
        except PlanError:
            assert algorithm not in (Algorithm.RING, Algorithm.HIERARCHICAL)
            continue
        assert named.algorithm is algorithm
        assert best.seconds <= named.seconds


@pytest.mark.parametrize(
    ("num_ranks", "message"),
    [
        (9, "9 ranks need as many devices but h100-80gb-x8 has 8"),
        (10**9, "ranks need as many devices"),
    ],
)
def test_ranks_need_devices(num_ranks: int, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        machine_collective(Collective.ALL_REDUCE, 1, machine("h100-80gb-x8"), num_ranks)


def test_ranks_fill_nodes() -> None:
    with pytest.raises(HardwareError, match=r"12 ranks do not fill nodes of 8 devices .* Use 8 or 16 ranks"):
        fabric_levels(with_nodes("h100-80gb-x8", 4), 12)
    with pytest.raises(HardwareError, match="has no groups of devices among 8 ranks"):
        machine_collective(Collective.ALL_REDUCE, 1, machine("h100-80gb-x8"), 8, Algorithm.HIERARCHICAL)

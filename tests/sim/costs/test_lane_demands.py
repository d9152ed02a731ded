"""What lanes draw on, against figures by hand: no rate is taken from the code, and no table is left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import pytest

from protwin.shared.schema.hardware import DeviceKind, Hardware, Link, Network, Node, Topology
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.schedule import Lane
from protwin.sim.costs.lane_demands import Resource, lane_demands
from tests.sim.hand_made import machine

GB: Final = 1e9
COMPUTE, H2D, D2H, CPU_OPTIM = Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.CPU_OPTIM
MEMORY, CORES, OF_DEVICE, PROCESSORS = (
    Resource.HOST_MEMORY,
    Resource.CORES,
    Resource.DEVICE_MEMORY,
    Resource.PROCESSORS,
)
LINK, DOWN, UP = Resource.LINK, Resource.TO_DEVICE, Resource.FROM_DEVICE
BESIDE_COMPUTE: Final = {OF_DEVICE: 0.42, PROCESSORS: 1.0}
"""arXiv 2007.00072; the products have all processors."""
OF_COLLECTIVES: Final = 20 / 132
"""arXiv 2412.19437."""

Table = dict[Lane, dict[Resource, float]]


def node(
    topology: Topology,
    *,
    link_rate: float | None = None,
    through_host_memory: bool = False,
    at_sockets: tuple[int, ...] = (2, 2),
) -> Node:
    """Four devices at two sockets, or so many, each with a way of its own."""
    return Node(
        name="node",
        num_devices=sum(at_sockets),
        sockets=at_sockets,
        pcie_roots=(1,) * sum(at_sockets),
        topology=topology,
        device_link=None if link_rate is None else Link(name="own", latency_s=0.0, bandwidth_bytes_per_s=link_rate),
        through_host_memory=through_host_memory,
    )


def of(
    *,
    kind: DeviceKind = DeviceKind.CUDA,
    full_duplex: bool = True,
    of: Node | None = None,
    network: Network | None = None,
    num_cores: int = 16,
) -> Hardware:
    """Copies at 10 and 8 GB/s, CPU Adam at 20, beside host memory of 100 and device memory of 1 000."""
    base = machine(kind=kind, full_duplex=full_duplex)
    copies = {
        direction: Link(name=direction, latency_s=0.0, bandwidth_bytes_per_s=rate)
        for direction, rate in (("host_to_device", 10 * GB), ("device_to_host", 8 * GB))
    }
    memory = {"memory_bandwidth_bytes_per_s": 100 * GB}
    host = {"num_cores": num_cores, "adam_bytes_per_s": 20 * GB, **memory}
    return base.model_copy(
        update={
            "device": base.device.model_copy(update={"memory_bandwidth_bytes_per_s": 1000 * GB}),
            "host": base.host.model_copy(update=host),
            "node": of,
            "network": network,
            **copies,
        }
    )


def network(rate: float, num_nodes: int) -> Network:
    link = Link(name="between", latency_s=0.0, bandwidth_bytes_per_s=rate)
    return Network(name="network", num_nodes=num_nodes, link=link)


@dataclass(frozen=True)
class Case:
    """A machine, so many ranks on it, and what each lane of one of them draws."""

    hardware: Hardware
    expected: Table
    num_ranks: int = 1
    collective: dict[Resource, float] = field(default_factory=dict)


def alone(*, num_sharing: int = 1, link: bool = False, own_ways: bool = False) -> Table:
    """Beside a device, where so many ranks divide the host's memory (and Adam's rate) evenly."""
    in_each = ({LINK: 1.0} if link else {}, {DOWN: 1.0} if own_ways else {}, {UP: 1.0} if own_ways else {})
    both, down, up = in_each
    return {
        COMPUTE: BESIDE_COMPUTE,
        H2D: {MEMORY: 0.1 * num_sharing, **both, **down},
        D2H: {MEMORY: 0.08 * num_sharing, **both, **up},
        CPU_OPTIM: {MEMORY: 0.2},
    }


CASES: Final = {
    "one device": Case(of(), alone()),
    "one direction at a time": Case(of(full_duplex=False), alone(link=True)),
    # A copy on a CPU reads and writes: 20 and 16 GB/s.  A core streams 10.
    "a cpu": Case(
        of(kind=DeviceKind.CPU),
        {
            COMPUTE: {MEMORY: 0.23, CORES: 15 / 16},
            H2D: {MEMORY: 0.2, CORES: 2 / 16},
            D2H: {MEMORY: 0.16, CORES: 1.6 / 16},
            CPU_OPTIM: {MEMORY: 0.2, CORES: 2 / 16},
        },
    ),
    # One core cannot be left to others, and nobody draws more than there is.
    "a cpu of one core": Case(
        of(kind=DeviceKind.CPU, num_cores=1),
        {
            COMPUTE: {MEMORY: 0.23, CORES: 1.0},
            H2D: {MEMORY: 0.2, CORES: 1.0},
            D2H: {MEMORY: 0.16, CORES: 1.0},
            CPU_OPTIM: {MEMORY: 0.2, CORES: 1.0},
        },
    ),
    # Links of 200 GB/s: three passes are 600 of the device's 1 000.
    "a switch": Case(
        of(of=node(Topology.SWITCH, link_rate=200 * GB)),
        alone(num_sharing=2, own_ways=True),
        num_ranks=4,
        collective={OF_DEVICE: 0.6, PROCESSORS: OF_COLLECTIVES},
    ),
    "links faster than memory": Case(
        of(of=node(Topology.SWITCH, link_rate=400 * GB)),
        alone(num_sharing=2, own_ways=True),
        num_ranks=4,
        collective={OF_DEVICE: 1.0, PROCESSORS: OF_COLLECTIVES},
    ),
    # Through the host at the slower copy's 8 GB/s.
    "device to device over the host": Case(
        of(of=node(Topology.HOST)),
        alone(num_sharing=2, own_ways=True),
        num_ranks=4,
        collective={OF_DEVICE: 0.024, PROCESSORS: OF_COLLECTIVES, DOWN: 0.8, UP: 1.0},
    ),
    # Sending and receiving at once halves that; each crosses the one link.
    "over the host, one direction at a time": Case(
        of(full_duplex=False, of=node(Topology.HOST)),
        alone(num_sharing=2, link=True, own_ways=True),
        num_ranks=4,
        collective={OF_DEVICE: 0.012, PROCESSORS: OF_COLLECTIVES, DOWN: 0.4, UP: 0.5, LINK: 0.9},
    ),
    # Written to the socket's memory and read from there: 16 of a rank's 50 GB/s.
    "through the host's memory": Case(
        of(of=node(Topology.HOST, through_host_memory=True)),
        alone(num_sharing=2, own_ways=True),
        num_ranks=4,
        collective={OF_DEVICE: 0.024, PROCESSORS: OF_COLLECTIVES, DOWN: 0.8, UP: 1.0, MEMORY: 0.32},
    ),
    "a pair": Case(
        of(of=node(Topology.PAIRS, link_rate=50 * GB)),
        alone(num_sharing=2, own_ways=True),
        num_ranks=2,
        collective={OF_DEVICE: 0.15, PROCESSORS: OF_COLLECTIVES},
    ),
    "two pairs meet at the host": Case(
        of(of=node(Topology.PAIRS, link_rate=50 * GB)),
        alone(num_sharing=2, own_ways=True),
        num_ranks=4,
        collective={OF_DEVICE: 0.024, PROCESSORS: OF_COLLECTIVES, DOWN: 0.8, UP: 1.0},
    ),
    "a pair and a half": Case(
        of(of=node(Topology.PAIRS, link_rate=50 * GB)),
        alone(num_sharing=2, own_ways=True),
        num_ranks=3,
        collective={OF_DEVICE: 0.024, PROCESSORS: OF_COLLECTIVES, DOWN: 0.8, UP: 1.0},
    ),
    "two nodes with links": Case(
        of(of=node(Topology.SWITCH, link_rate=200 * GB), network=network(5 * GB, 2)),
        alone(num_sharing=2, own_ways=True),
        num_ranks=8,
        # Rings through both nodes: three passes at the adapter's 5 GB/s.
        collective={OF_DEVICE: 0.015, PROCESSORS: OF_COLLECTIVES},
    ),
    # The pairs lie within the nodes, and a link of a device that has no neighbour leads nowhere.
    "two nodes of one pair": Case(
        of(of=node(Topology.PAIRS, link_rate=50 * GB, at_sockets=(2,)), network=network(5 * GB, 2)),
        alone(num_sharing=2, own_ways=True),
        num_ranks=4,
        collective={OF_DEVICE: 0.015, PROCESSORS: OF_COLLECTIVES},
    ),
    "nodes of one device with a link": Case(
        of(of=node(Topology.SWITCH, link_rate=200 * GB, at_sockets=(1,)), network=network(4 * GB, 2)),
        alone(own_ways=True),
        num_ranks=2,
        collective={OF_DEVICE: 0.012, PROCESSORS: OF_COLLECTIVES, DOWN: 0.4, UP: 0.5},
    ),
    # What leaves a machine of one device passes its link to the host.
    "machines of one device": Case(
        of(network=network(4 * GB, 2)),
        alone(own_ways=True),
        num_ranks=2,
        collective={OF_DEVICE: 0.012, PROCESSORS: OF_COLLECTIVES, DOWN: 0.4, UP: 0.5},
    ),
    # Three passes of 4 GB/s in memory of 100; a core streams 10.
    "cpus over a network": Case(
        of(kind=DeviceKind.CPU, network=network(4 * GB, 2)),
        {
            COMPUTE: {MEMORY: 0.23, CORES: 15 / 16},
            H2D: {MEMORY: 0.2, CORES: 2 / 16, DOWN: 1.0},
            D2H: {MEMORY: 0.16, CORES: 1.6 / 16, UP: 1.0},
            CPU_OPTIM: {MEMORY: 0.2, CORES: 2 / 16},
        },
        num_ranks=2,
        collective={MEMORY: 0.12, CORES: 1.2 / 16},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_lanes_draw_what_their_rates_take(case: Case) -> None:
    found = lane_demands(case.hardware, case.num_ranks)
    expected = case.expected | ({Lane.COLLECTIVE: case.collective} if case.collective else {})
    assert found.keys() == expected.keys()
    for lane, demand in expected.items():
        assert found[lane] == pytest.approx(demand), lane


def test_an_optimizer_that_computes_longer_than_it_reads_leaves_the_memory_alone() -> None:
    """8-bit AdamW by hand: 112 bytes in 22 ns of a core; Lion: 68 in 2.5; fused ones and Adafactor stream."""

    def drawn(optimizer: Optimizer, num_cores: int, kind: DeviceKind) -> dict[Resource, float]:
        return lane_demands(of(kind=kind, num_cores=num_cores), optimizer=optimizer)[CPU_OPTIM]

    for optimizer in (Optimizer.ADAMW, Optimizer.SGD, Optimizer.ADAFACTOR, Optimizer.ADAMW_BF16):
        assert drawn(optimizer, 16, DeviceKind.CUDA) == {MEMORY: 0.2}
    # Sixteen cores quantize at 81 GB/s, four at 20.4, two at 10.2.
    assert drawn(Optimizer.ADAMW_8BIT, 16, DeviceKind.CUDA) == {MEMORY: 0.2}
    assert drawn(Optimizer.PAGED_ADAMW_8BIT, 2, DeviceKind.CUDA)[MEMORY] == pytest.approx(112 / 11 / 100)
    assert drawn(Optimizer.LION, 2, DeviceKind.CUDA) == {MEMORY: 0.2}
    # Where the CPU is the device, one of its cores is left to other lanes, and the rest are busy.
    on_cpu = drawn(Optimizer.ADAMW_8BIT, 2, DeviceKind.CPU)
    assert on_cpu == pytest.approx({MEMORY: 112 / 22 / 100, CORES: 0.5})
    assert drawn(Optimizer.ADAMW, 2, DeviceKind.CPU) == pytest.approx({MEMORY: 0.2, CORES: 1.0})


@pytest.mark.parametrize(
    ("of_node", "adapters", "num_ranks", "channels"),
    [
        (node(Topology.SWITCH, link_rate=200 * GB), 0, 4, 24),
        (node(Topology.SWITCH, link_rate=200 * GB), 8, 8, 16),
        (node(Topology.SWITCH, link_rate=200 * GB), 1, 8, 2),
        (node(Topology.SWITCH, link_rate=200 * GB), 32, 8, 24),
        (node(Topology.PAIRS, link_rate=50 * GB), 0, 2, 4),
        (node(Topology.PAIRS, link_rate=50 * GB), 0, 4, 4),
        (node(Topology.HOST), 0, 4, 4),
        (node(Topology.HOST, through_host_memory=True), 0, 4, 2),
    ],
)
def test_a_collective_holds_a_processor_for_each_channel(
    of_node: Node, adapters: int, num_ranks: int, channels: int
) -> None:
    between = None if adapters == 0 else network(25 * GB, 2).model_copy(update={"adapters_per_node": adapters})
    hardware = of(of=of_node, network=between)
    device = hardware.device.model_copy(update={"num_multiprocessors": 100})
    found = lane_demands(hardware.model_copy(update={"device": device}), num_ranks)
    assert found[Lane.COLLECTIVE][PROCESSORS] == channels / 100


def test_half_of_few_processors_are_left_to_compute() -> None:
    hardware = of(of=node(Topology.SWITCH, link_rate=200 * GB))
    device = hardware.device.model_copy(update={"num_multiprocessors": 30})
    assert lane_demands(hardware.model_copy(update={"device": device}), 4)[Lane.COLLECTIVE][PROCESSORS] == 0.5

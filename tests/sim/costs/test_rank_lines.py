"""Collectives of shard groups and of replicas: which links they pass, and what they share with the other groups."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import HardwareError
from protwin.shared.catalogue.machines import cluster_names, machine, override_hardware
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.hardware import DeviceKind, Hardware, Topology
from protwin.shared.schema.plan import ParallelMode
from protwin.shared.schema.schedule import RankAxis, TaskKind
from protwin.sim.costs.collectives import Collective, Shape
from protwin.sim.costs.fabrics import fabric_levels, flat_fabric, machine_collective
from protwin.sim.costs.rank_lines import RankLine
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.memory.libraries import collective_bytes, rank_device_bytes
from tests.shared.small_models import chain, plan
from tests.sim.several_nodes import with_nodes

GIB = 2**30
COLLECTIVES = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


def lines(num_ranks: int, shard_ranks: int) -> tuple[RankLine, RankLine]:
    """A shard group, and the replicas of one part."""
    return RankLine.of(RankAxis.SHARD, num_ranks, shard_ranks), RankLine.of(RankAxis.REPLICA, num_ranks, shard_ranks)


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_a_group_that_fills_a_node_never_meets_the_network() -> None:
    within, across = lines(32, 8)
    four = with_nodes("h100-80gb-x8", 4, network__adapters_per_node="2")
    assert fabric_levels(four, within) == fabric_levels(machine("h100-80gb-x8"), 8)
    # The eight ranks of a node each have a ring of their own: they share the two adapters of 48 GB/s.
    (network,) = fabric_levels(four, across)
    assert (network.num_ranks, network.bandwidth_bytes_per_s, network.shape) == (4, 12e9, Shape.NETWORK)


def test_a_group_of_two_nodes_has_its_replicas_in_the_nodes_after_it() -> None:
    within, across = lines(32, 16)
    four = with_nodes("h100-80gb-x8", 4)
    assert fabric_levels(four, within) == fabric_levels(with_nodes("h100-80gb-x8", 2), 16)
    assert [(level.num_ranks, level.bandwidth_bytes_per_s) for level in fabric_levels(four, across)] == [(2, 48e9)]


def test_groups_of_half_a_node_have_replicas_beside_them_and_in_other_nodes() -> None:
    within, across = lines(16, 4)
    two = with_nodes("h100-80gb-x8", 2, network__adapters_per_node="4")
    assert [level.num_ranks for level in fabric_levels(two, within)] == [4]
    beside, between = fabric_levels(two, across)
    assert (beside.num_ranks, beside.shape) == (2, Shape.SWITCH)
    assert (between.num_ranks, between.bandwidth_bytes_per_s) == (2, 24e9)
    # A ring of two ranks in each of two nodes crosses the adapters once: four lines share what four adapters carry.
    assert flat_fabric(two, across).bandwidth_bytes_per_s == 48e9


def test_replicas_below_two_roots_cross_them_together() -> None:
    """Groups of four stay below their root; each replica's message crosses both, and four of them share 15 GB/s."""
    roots = override_hardware(
        machine("l40s-x8"), {"node.pcie_roots": "4,4", "node.root_bandwidth_bytes_per_s": "15GB/s"}
    )
    within, across = lines(8, 4)
    assert flat_fabric(roots, within).bandwidth_bytes_per_s == 20e9
    assert flat_fabric(roots, across).bandwidth_bytes_per_s == pytest.approx(15e9 / 4)


def test_groups_side_by_side_share_the_memory_of_their_socket() -> None:
    """Two groups of two at a socket write and read four messages there, as four ranks of one group do."""
    eight = machine("rtx-5090-x8")
    within, _ = lines(4, 2)
    assert flat_fabric(eight, 2).bandwidth_bytes_per_s == 35e9
    assert flat_fabric(eight, within).bandwidth_bytes_per_s == flat_fabric(eight, 4).bandwidth_bytes_per_s < 35e9


def test_on_a_ring_replicas_pass_the_devices_between_them() -> None:
    node = machine("h100-80gb-x8").node
    assert node is not None
    ring = machine("h100-80gb-x8").model_copy(
        update={"node": node.model_copy(update={"topology": Topology.RING, "reduces_in_switch": False})}
    )
    within, across = (fabric_levels(ring, line)[0] for line in lines(8, 4))
    whole = fabric_levels(ring, 8)[0]
    assert (within.bandwidth_bytes_per_s, within.latency_s) == (whole.bandwidth_bytes_per_s, whole.latency_s)
    assert (across.bandwidth_bytes_per_s, across.latency_s) == (whole.bandwidth_bytes_per_s / 4, 4 * whole.latency_s)


# -- on any machine --------------------------------------------------------------------------------------------------


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Hardware, int, int]:
    """A machine of the catalogue with some nodes, all of its devices, and ranks of a group that fit them evenly."""
    name = draw(st.sampled_from(cluster_names()))
    hardware = machine(name)
    if hardware.network is not None:
        hardware = with_nodes(name, draw(st.integers(1, 6)), network__adapters_per_node=str(draw(st.integers(1, 8))))
    num_ranks, per_node = hardware.num_devices, hardware.devices_per_node
    sizes = [size for size in range(2, num_ranks + 1) if num_ranks % size == 0]
    return (
        hardware,
        num_ranks,
        draw(st.sampled_from([size for size in sizes if max(size, per_node) % min(size, per_node) == 0])),
    )


@settings(max_examples=80)
@given(clusters(), st.sampled_from(COLLECTIVES), st.integers(1, 10**10))
def test_nothing_passes_more_than_the_adapters_carry(
    drawn: tuple[Hardware, int, int], collective: Collective, size_bytes: int
) -> None:
    """Of each line's buffer, a node that has k of its n ranks receives the others' share, and all lines at once.

    Oracle: what has to come in at least.  Every rank ends up with what all have, so a node lacks (n - k) / n of it.
    """
    hardware, num_ranks, shard_ranks = drawn
    per_node = hardware.devices_per_node
    for line, stride in zip(lines(num_ranks, shard_ranks), (1, shard_ranks), strict=True):
        seconds = machine_collective(collective, size_bytes, hardware, line).seconds
        members = {rank // per_node for rank in range(0, line.num_ranks * stride, stride)}
        if len(members) == 1:
            continue
        assert hardware.network is not None
        here = line.num_ranks // len(members)
        lines_here = per_node // here
        passes = 2 if collective is Collective.ALL_REDUCE else 1
        # In-network sums are unknown here: what is reduced goes out once and comes back once.
        least_bytes = passes * lines_here * (line.num_ranks - here) / line.num_ranks * size_bytes
        together = hardware.network.adapters_per_node * hardware.network.link.bandwidth_bytes_per_s
        assert seconds >= least_bytes / together * (1 - 1e-9)


@given(clusters(), st.sampled_from(COLLECTIVES), st.integers(0, 10**10))
def test_one_group_of_all_ranks_is_all_ranks(
    drawn: tuple[Hardware, int, int], collective: Collective, size_bytes: int
) -> None:
    hardware, num_ranks, _ = drawn
    whole = machine_collective(collective, size_bytes, hardware, num_ranks)
    assert machine_collective(collective, size_bytes, hardware, RankLine(num_ranks, 1, num_ranks)) == whole


def test_groups_across_nodes_that_others_are_within_are_refused() -> None:
    three = with_nodes("h100-80gb-x8", 3)
    for line in lines(24, 6):
        with pytest.raises(
            HardwareError, match=r"groups of 6 ranks lie across nodes of 8 .* Use groups of 2 or 4 or 8 or 24 "
        ):
            fabric_levels(three, line)


# -- prices of tasks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DeviceKind.CPU, DeviceKind.CUDA])
def test_tasks_cost_what_their_axis_costs(kind: DeviceKind) -> None:
    """Chunks that stay whole are added up by way of both axes on hosts, and by NCCL over all ranks at once."""
    hardware, model = with_nodes("h100-80gb-x8", 4), chain(3)
    update = {"parallel": ParallelMode.SHARDED, "num_ranks": 32, "shard_ranks": 8, "n_persist": 1, "n_shard": 1}
    schedule = compile_schedule(plan(model, n_buffer=2).model_copy(update=update), model)
    own = hardware.model_copy(update={"device": hardware.device.model_copy(update={"kind": kind})})
    durations_s = CostModel(own, use_measured=True, together=hardware).durations_s(schedule)
    within, across = lines(32, 8)
    seen: set[tuple[TaskKind, RankAxis]] = set()
    for task in schedule.tasks:
        if task.num_ranks == 1:
            continue
        seen.add((task.kind, task.axis))
        lines_of = {RankAxis.SHARD: within, RankAxis.REPLICA: across, RankAxis.WORLD: RankLine(32)}
        parts = [(Collective(task.kind.value), task.moved_bytes, lines_of[task.axis])]
        if task.axis is RankAxis.WORLD and kind is DeviceKind.CPU:
            parts = [
                (Collective.REDUCE_SCATTER, task.moved_bytes, within),
                (Collective.ALL_REDUCE, -(-task.moved_bytes // 8), across),
                (Collective.ALL_GATHER, task.moved_bytes, within),
            ]
        expected = sum(machine_collective(what, size, hardware, line).seconds for what, size, line in parts)
        if task.kind is TaskKind.REDUCE_SCATTER and kind is DeviceKind.CUDA:
            # Gradients are laid flat before: zeros are written, then they are read and written, at 0.85 of 3.35 TB/s.
            expected += 3 * task.moved_bytes / (0.85 * 3.35e12)
        assert durations_s[task.id] == pytest.approx(expected), task
    assert len(seen) == 4


def test_every_axis_has_a_communicator_on_the_devices() -> None:
    box = machine("h100-80gb-x8")
    assert collective_bytes(box, 8, 4) == 3 * collective_bytes(box, 8)
    assert rank_device_bytes(box, 8) - rank_device_bytes(box, 8, 4) == 2 * collective_bytes(box, 8)

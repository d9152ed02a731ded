"""What collectives of several ranks draw on, and what carries them."""

from __future__ import annotations

import pytest

from protwin.shared.basics.errors import HardwareError
from protwin.shared.catalogue.machines import machine as known_machine
from protwin.shared.families.shipped import shipped_family
from protwin.shared.layout.layout import build_layout
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.schedule import LANES_ALONE, Lane
from protwin.shared.schema.workload import DType
from protwin.sim import simulate
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.fabrics import fabric_levels
from protwin.sim.costs.lane_demands import Resource, lane_demands
from protwin.sim.memory.libraries import collective_bytes, rank_device_bytes, rank_host_bytes

COPIES = (Lane.H2D, Lane.D2H)


def test_one_rank_has_no_lane_of_collectives() -> None:
    hardware = known_machine("a100-80gb-x8")
    assert set(lane_demands(hardware)) == set(LANES_ALONE)
    assert set(lane_demands(hardware, 8)) == {*LANES_ALONE, Lane.COLLECTIVE}


def test_collectives_over_links_of_their_own_leave_copies_alone() -> None:
    rates = ContentionModel.of(known_machine("a100-80gb-x8"), num_ranks=8).rates
    for copy in COPIES:
        assert rates(frozenset({copy, Lane.COLLECTIVE})) == {copy: 1.0, Lane.COLLECTIVE: 1.0}


def test_collectives_through_the_host_share_its_links_with_copies() -> None:
    hardware = known_machine("rtx-3090-x4")
    demands = lane_demands(hardware, 4)
    rate = fabric_levels(hardware, 4)[0].ring_bytes_per_s
    rates = ContentionModel.of(hardware, num_ranks=4).rates
    for copy, link, crossed in (
        (Lane.H2D, hardware.host_to_device, Resource.TO_DEVICE),
        (Lane.D2H, hardware.device_to_host, Resource.FROM_DEVICE),
    ):
        share = rate / link.bandwidth_bytes_per_s
        assert demands[Lane.COLLECTIVE][crossed] == pytest.approx(share)
        both = rates(frozenset({copy, Lane.COLLECTIVE}))
        # Both cross one direction of the link: together they draw what it has, and slow alike.
        assert both[copy] == pytest.approx(both[Lane.COLLECTIVE])
        assert both[copy] <= 1 / (1 + share) * (1 + 1e-9)
    assert rates(frozenset(COPIES))[Lane.H2D] >= rates(frozenset({*COPIES, Lane.COLLECTIVE}))[Lane.H2D]


def test_the_wrong_variant_lets_copies_pass_for_nothing() -> None:
    """With the devices' own links assumed where there are none, copies would not notice collectives."""
    hardware = known_machine("rtx-3090-x4")
    assert hardware.node is not None
    link = hardware.host_to_device
    wrong = hardware.model_copy(
        update={"node": hardware.node.model_copy(update={"device_link": link, "topology": "switch"})}
    )
    assert ContentionModel.of(wrong, num_ranks=4).rates(frozenset({Lane.H2D, Lane.COLLECTIVE}))[Lane.H2D] == 1.0


def test_communicators_take_device_memory_by_their_channels() -> None:
    mib = 2**20
    assert collective_bytes(known_machine("h100-80gb-x8"), 8) == 640 * mib
    assert collective_bytes(known_machine("rtx-4090-x8"), 8) == 40 * mib
    assert collective_bytes(known_machine("rtx-3090"), 1) == 0
    hardware = known_machine("h100-80gb-x8")
    assert rank_device_bytes(hardware, 1) - rank_device_bytes(hardware, 8) == 640 * mib


def test_what_carries_collectives_is_no_memory_of_the_allocator() -> None:
    hardware = known_machine("h100-80gb-x8")
    model = shipped_family("gpt2", DType.FLOAT32).at(batch_size=1, sequence_length=16)
    layout = build_layout(model.parameters, num_blocks=model.num_blocks, chunk_bytes=2**28)
    alone = Plan(workload_id=model.identity, chunk_bytes=2**28, n_persist=len(layout.chunks), n_buffer=0)
    together = alone.model_copy(update={"parallel": ParallelMode.DDP, "num_ranks": 8})
    accounts = [simulate(one, model, hardware).device_reserved for one in (alone, together)]
    of_one, of_eight = (account for account in accounts if account is not None)
    assert of_eight.outside_bytes - of_one.outside_bytes == 640 * 2**20
    assert of_one.limit_bytes - of_eight.limit_bytes == 640 * 2**20


def test_a_rank_has_its_share_of_a_sockets_memory() -> None:
    hardware = known_machine("a100-80gb-x8")
    assert hardware.node is not None
    assert rank_host_bytes(hardware, 1) == hardware.host.memory_bytes
    assert rank_host_bytes(hardware, 8) == hardware.host.memory_bytes // max(hardware.node.sockets)
    with pytest.raises(HardwareError, match="9 ranks do not fit"):
        rank_host_bytes(hardware, 9)

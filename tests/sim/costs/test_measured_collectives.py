"""Collectives that a machine has measured: their own seconds, and the model scaled to them elsewhere."""

from __future__ import annotations

from itertools import pairwise
from math import log

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from protwin.shared.catalogue.machines import machine, override_hardware
from protwin.shared.catalogue.rank_share import machine_of_rank
from protwin.shared.schema.hardware import Collective, Hardware, LinkPoint, MeasuredCollective
from protwin.shared.schema.schedule import Lane
from protwin.sim.costs.collectives import Algorithm
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.fabrics import machine_collective, modelled_collective, with_collectives_scaled
from protwin.sim.questions.faster_parts import faster_device_links, faster_network

COLLECTIVES = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)
SIZES = tuple(4**power for power in range(6, 15))
MACHINES = st.sampled_from(("rtx-3090-x4", "a100-80gb-x8", "a100-80gb-pcie-x8", "h100-80gb-x8"))
BOTH = frozenset({Lane.COMPUTE, Lane.COLLECTIVE})


def with_table(hardware: Hardware, *tables: MeasuredCollective) -> Hardware:
    return Hardware.model_validate(hardware.model_dump() | {"collectives": [table.model_dump() for table in tables]})


def from_model(hardware: Hardware, collective: Collective, num_ranks: int, slower: float = 1.0) -> MeasuredCollective:
    """What a machine that is the model, or slower, would measure."""
    seconds = [modelled_collective(collective, size, hardware, num_ranks).seconds for size in SIZES]
    points = [LinkPoint(size_bytes=size, seconds=slower * one_s) for size, one_s in zip(SIZES, seconds, strict=True)]
    return MeasuredCollective(collective=collective, num_ranks=num_ranks, table=tuple(points))


def seconds(collective: Collective, size_bytes: int, hardware: Hardware, num_ranks: int) -> float:
    return machine_collective(collective, size_bytes, hardware, num_ranks).seconds


@st.composite
def measured(draw: st.DrawFn) -> tuple[Hardware, MeasuredCollective]:
    """Any table, noisy ones that dip among them."""
    hardware = machine(draw(MACHINES))
    sizes = sorted(draw(st.sets(st.integers(1, 2**30), min_size=1, max_size=5)))
    table = MeasuredCollective(
        collective=draw(st.sampled_from(COLLECTIVES)),
        num_ranks=draw(st.integers(2, hardware.devices_per_node)),
        table=tuple(LinkPoint(size_bytes=size, seconds=draw(st.floats(1e-6, 10))) for size in sizes),
    )
    return with_table(hardware, table), table


@given(measured(), st.lists(st.integers(0, 2**33), min_size=2, max_size=6), st.integers(2, 8))
def test_more_bytes_never_take_less_time(
    drawn: tuple[Hardware, MeasuredCollective], sizes: list[int], num_ranks: int
) -> None:
    """Over the ranks that were measured, and over any other number of them."""
    hardware, table = drawn
    num_ranks = min(num_ranks, hardware.devices_per_node)
    taken = [seconds(table.collective, size, hardware, num_ranks) for size in sorted(sizes)]
    assert all(less <= more * (1 + 1e-12) for less, more in pairwise(taken))


@given(MACHINES, st.sampled_from(COLLECTIVES), st.data())
def test_a_table_made_from_the_model_gives_the_model(name: str, collective: Collective, data: st.DataObject) -> None:
    """At its sizes exactly, whichever number of ranks is asked about; twice the model everywhere gives twice it."""
    hardware = machine(name)
    num_measured, num_ranks = (data.draw(st.integers(2, hardware.devices_per_node)) for _ in range(2))
    slower = data.draw(st.floats(0.1, 10))
    known = with_table(hardware, from_model(hardware, collective, num_measured, slower))
    for size_bytes in SIZES:
        modelled_s = modelled_collective(collective, size_bytes, hardware, num_ranks).seconds
        assert seconds(collective, size_bytes, known, num_ranks) == pytest.approx(slower * modelled_s)
    # A line a + b S and the power law through two of its points, S and 4 S, differ by 6 % at most: (x + 1)(x + 4) over
    # (x + 2)^2 is largest at x = 2.  Where the fastest algorithm changes between them, it is more.
    between = data.draw(st.integers(SIZES[0], SIZES[-1]))
    modelled_s = modelled_collective(collective, between, hardware, num_ranks).seconds
    assert seconds(collective, between, known, num_ranks) == pytest.approx(slower * modelled_s, rel=0.25)


def test_measured_seconds_are_read_as_those_of_a_link() -> None:
    points = (LinkPoint(size_bytes=2**12, seconds=1e-3), LinkPoint(size_bytes=2**16, seconds=4e-3))
    table = MeasuredCollective(collective=Collective.ALL_GATHER, num_ranks=4, table=points)
    hardware = with_table(machine("rtx-3090-x4"), table)
    assert seconds(Collective.ALL_GATHER, 8, hardware, 4) == 1e-3, "latency"
    assert seconds(Collective.ALL_GATHER, 2**14, hardware, 4) == pytest.approx(2e-3), "halfway in logarithms"
    assert seconds(Collective.ALL_GATHER, 2**20, hardware, 4) == pytest.approx(64e-3), "the bandwidth of the last"
    found = machine_collective(Collective.ALL_GATHER, 2**14, hardware, 4)
    assert found.algorithm is None
    plain = modelled_collective(Collective.ALL_REDUCE, 2**14, hardware, 4)
    assert machine_collective(Collective.ALL_REDUCE, 2**14, hardware, 4) == plain, "no table of that one"
    assert plain.algorithm is not None
    assert machine_collective(Collective.ALL_GATHER, 2**14, hardware, 4, Algorithm.RING).seconds < 1e-3
    assert seconds(Collective.ALL_GATHER, 2**14, hardware, 1) == 0.0


@given(MACHINES, st.integers(2, 8), st.integers(2, 8), st.integers(2, 8))
def test_the_nearest_number_of_ranks_is_scaled(name: str, asked: int, one: int, other: int) -> None:
    hardware = machine(name)
    asked, one, other = (min(ranks, hardware.devices_per_node) for ranks in (asked, one, other))
    assume(one != other)
    tables = [from_model(hardware, Collective.ALL_REDUCE, one, 3.0), from_model(hardware, Collective.ALL_REDUCE, other)]
    nearest = min((abs(log(one / asked)), one, 3.0), (abs(log(other / asked)), other, 1.0))
    expected = nearest[2] * modelled_collective(Collective.ALL_REDUCE, SIZES[3], hardware, asked).seconds
    assert seconds(Collective.ALL_REDUCE, SIZES[3], with_table(hardware, *tables), asked) == pytest.approx(expected)


def test_more_nodes_than_were_measured_keep_the_ratio() -> None:
    node = machine("h100-80gb-x8")
    known = with_table(node, from_model(node, Collective.ALL_REDUCE, 8, 2.0))
    four = override_hardware(known, {"network.num_nodes": "4"})
    modelled_s = modelled_collective(Collective.ALL_REDUCE, SIZES[-1], four, 32).seconds
    assert seconds(Collective.ALL_REDUCE, SIZES[-1], four, 32) == pytest.approx(2 * modelled_s)


@pytest.mark.parametrize(
    "change",
    [
        {"node": "hgx-h100-8"},
        {"node.device_link.bandwidth_bytes_per_s": "300GB/s"},
        {"node.num_devices": "4", "node.sockets": "4", "node.pcie_roots": "1,1,1,1"},
        {"link": "pcie4-x16"},
        {"host_to_device.bandwidth_bytes_per_s": "9GB/s"},
        {"device": "h200-141gb"},
        {"network.link.latency_s": "9e-6"},
    ],
)
def test_another_way_between_devices_drops_what_was_measured(change: dict[str, str]) -> None:
    hardware = machine("h100-80gb-x8")
    known = with_table(hardware, from_model(hardware, Collective.ALL_REDUCE, 8, 2.0))
    assert override_hardware(known, change).collectives == ()
    assert override_hardware(known, {"device.memory_bytes": "70GiB"}).collectives == known.collectives


def test_faster_links_make_measured_collectives_faster_as_the_model() -> None:
    hardware = machine("a100-80gb-x8")
    known = with_table(hardware, from_model(hardware, Collective.ALL_GATHER, 8, 1.5))
    faster = faster_device_links(known)
    modelled_s = modelled_collective(Collective.ALL_GATHER, SIZES[-1], faster, 8).seconds
    assert seconds(Collective.ALL_GATHER, SIZES[-1], faster, 8) == pytest.approx(1.5 * modelled_s)
    assert modelled_s < modelled_collective(Collective.ALL_GATHER, SIZES[-1], hardware, 8).seconds
    assert faster_network(known).collectives == known.collectives, "one node has no network to pass"
    assert with_collectives_scaled(known, known).collectives == known.collectives


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_ranks": 1}, "num_ranks"),
        ({"num_ranks": 5}, "a table of 5 ranks, but the machine has 4 devices"),
        ({"table": ()}, "table"),
        ({"table": ({"size_bytes": 2, "seconds": 1.0}, {"size_bytes": 2, "seconds": 2.0})}, "ascend strictly"),
        ({"beside_compute": ({"size_bytes": 2, "seconds": 1.0},)}, "must have the sizes of table"),
        ({"compute_slowdown": 0.9}, "compute_slowdown"),
    ],
)
def test_an_impossible_table_is_refused(changes: dict[str, object], told: str) -> None:
    hardware = machine("rtx-3090-x4")
    table = from_model(hardware, Collective.ALL_GATHER, 4).model_dump()
    with pytest.raises(ValidationError, match=told):
        Hardware.model_validate(hardware.model_dump() | {"collectives": [table | changes]})
    with pytest.raises(ValidationError, match="two tables of one collective"):
        Hardware.model_validate(hardware.model_dump() | {"collectives": [table, table]})


@given(st.floats(1, 9), st.floats(1, 9), MACHINES, st.integers(2, 8))
def test_slowdowns_beside_compute_are_those_that_were_measured(
    collective: float, compute: float, name: str, num_ranks: int
) -> None:
    """Of both lanes in every set that has both; no lane is faster beside more lanes, and other sets stay."""
    hardware = machine(name)
    num_ranks = min(num_ranks, hardware.devices_per_node)
    alone = from_model(hardware, Collective.ALL_GATHER, num_ranks)
    points = tuple(point.model_copy(update={"seconds": collective * point.seconds}) for point in alone.table)
    known = with_table(hardware, alone.model_copy(update={"beside_compute": points, "compute_slowdown": compute}))
    found = ContentionModel.of(known, num_ranks=num_ranks).slowdowns
    modelled = ContentionModel.of(hardware, num_ranks=num_ranks).slowdowns
    assert found[BOTH] == pytest.approx({Lane.COMPUTE: compute, Lane.COLLECTIVE: collective})
    for lanes, slowdowns in found.items():
        if not lanes >= BOTH:
            assert slowdowns == modelled[lanes]
        for other in lanes if len(lanes) > 1 else ():
            fewer = found[lanes - {other}]
            assert all(slowdowns[lane] >= fewer[lane] * (1 - 1e-12) for lane in fewer)


def test_one_rank_of_several_has_no_collectives_of_its_own() -> None:
    hardware = machine("rtx-3090-x4")
    known = with_table(hardware, from_model(hardware, Collective.ALL_GATHER, 4))
    assert machine_of_rank(known, 4).collectives == ()

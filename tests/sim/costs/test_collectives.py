"""Collectives against published lower bounds, and against themselves carried out message by message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from math import ceil, inf, log2

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from protwin.shared.basics.errors import PlanError
from protwin.sim.costs.collectives import (
    Algorithm,
    Collective,
    Fabric,
    Shape,
    algorithm_s,
    collective_time,
    hierarchical_s,
    tree_steps,
)
from tests.sim.double_tree import DoubleTree, double_tree
from tests.sim.messages import (
    Contents,
    Message,
    World,
    all_parts,
    only_root,
    own_parts,
    ring_all_reduce,
    ring_all_to_all,
    ring_gather,
    ring_reduce,
)

AR, RS, AG, A2A = Collective
latencies = st.just(0.0) | st.floats(1e-7, 1e-3)
rates = st.floats(1e6, 1e12)
sizes = st.integers(0, 2**34)


@st.composite
def fabrics(draw: st.DrawFn, shape: Shape | None = None) -> Fabric:
    chosen = draw(st.sampled_from(Shape)) if shape is None else shape
    return Fabric(
        num_ranks=draw(st.integers(2, 70)),
        latency_s=draw(latencies),
        bandwidth_bytes_per_s=draw(rates),
        shape=chosen,
        reduces_in_switch=chosen is Shape.SWITCH and draw(st.booleans()),
        reduce_bytes_per_s=draw(st.just(inf) | rates),
    )


# -- lower bounds (Chan et al., doi 10.1002/cpe.1206, table 1) ---------------------------------------------------------


def lower_bounds_s(collective: Collective, size_bytes: float, fabric: Fabric) -> tuple[float, float, float]:
    """Least seconds of latency, of transfer and of adding, where a rank sends and receives one message at a time.

    For all-to-all: every rank sends its parts for the others, and hears of them all after log2 p steps at best.
    """
    ranks = fabric.num_ranks
    most_of_it = (ranks - 1) / ranks * size_bytes
    sent_bytes = {AR: 2 * most_of_it, RS: most_of_it, AG: most_of_it, A2A: most_of_it}[collective]
    latency_s = ceil(log2(ranks)) * fabric.latency_s
    adding_s = most_of_it / fabric.reduce_bytes_per_s if collective in (AR, RS) else 0.0
    return latency_s, sent_bytes / fabric.total_bytes_per_s, adding_s


@given(fabrics(), st.sampled_from(Collective), sizes, st.sampled_from([Algorithm.RING, Algorithm.TREE]))
def test_one_message_at_a_time_never_beats_the_lower_bounds(
    fabric: Fabric, collective: Collective, size_bytes: int, algorithm: Algorithm
) -> None:
    seconds = algorithm_s(collective, size_bytes, fabric, algorithm)
    assume(seconds is not None)
    assert seconds is not None
    for bound_s in lower_bounds_s(collective, size_bytes, fabric):
        assert seconds >= bound_s * (1 - 1e-9)


@given(fabrics(), st.sampled_from(Collective), sizes)
def test_sending_to_many_at_once_saves_latency_alone(fabric: Fabric, collective: Collective, size_bytes: int) -> None:
    for algorithm in (Algorithm.DIRECT, Algorithm.ONE_SHOT):
        seconds = algorithm_s(collective, size_bytes, fabric, algorithm)
        if seconds is not None:
            _, transfer_s, adding_s = lower_bounds_s(collective, size_bytes, fabric)
            assert seconds >= max(fabric.latency_s, transfer_s, adding_s) * (1 - 1e-9)


@given(fabrics(Shape.SWITCH), st.sampled_from(Collective), sizes)
def test_a_switch_that_adds_still_needs_every_byte_once(
    fabric: Fabric, collective: Collective, size_bytes: int
) -> None:
    seconds = algorithm_s(collective, size_bytes, fabric, Algorithm.IN_SWITCH)
    if seconds is None:
        assert not fabric.reduces_in_switch or collective is A2A
    else:
        least_bytes = (fabric.num_ranks - 1) / fabric.num_ranks * size_bytes
        assert seconds >= fabric.latency_s + least_bytes / fabric.bandwidth_bytes_per_s


@given(fabrics(), st.sampled_from([AR, RS, AG]), sizes)
def test_rings_reach_the_bound_of_transfer(fabric: Fabric, collective: Collective, size_bytes: int) -> None:
    # Patarasuk, Yuan, doi 10.1016/j.jpdc.2008.09.002: with latency out of the way, nothing is left to gain.
    assume(fabric.shape is not Shape.MESH or fabric.num_ranks not in (4, 6))
    free = Fabric(fabric.num_ranks, 0.0, fabric.bandwidth_bytes_per_s, fabric.shape)
    _, transfer_s, _ = lower_bounds_s(collective, size_bytes, free)
    assert algorithm_s(collective, size_bytes, free, Algorithm.RING) == pytest.approx(transfer_s)


@given(st.integers(2, 70), rates)
def test_trees_pass_large_buffers_at_full_bandwidth_either_way(ranks: int, rate: float) -> None:
    free = Fabric(ranks, 0.0, rate)
    size_bytes = 2**34
    assert algorithm_s(AR, size_bytes, free, Algorithm.TREE) == pytest.approx(2 * size_bytes / rate, rel=1e-5)


@given(fabrics(), st.sampled_from([AR, RS]), sizes, rates)
def test_adding_takes_what_its_bytes_take(
    fabric: Fabric, collective: Collective, size_bytes: int, reduce_rate: float
) -> None:
    for algorithm, of_buffer in (
        (Algorithm.RING, (fabric.num_ranks - 1) / fabric.num_ranks),
        (Algorithm.DIRECT, (fabric.num_ranks - 1) / fabric.num_ranks),
        (Algorithm.ONE_SHOT, fabric.num_ranks - 1),
    ):
        slow, free = (
            algorithm_s(collective, size_bytes, replace(fabric, reduce_bytes_per_s=rate), algorithm)
            for rate in (reduce_rate, inf)
        )
        assert (slow is None) == (free is None)
        if slow is not None and free is not None:
            assert slow == pytest.approx(free + of_buffer * size_bytes / reduce_rate)


@given(fabrics(Shape.SWITCH), st.integers(0, 300))
def test_packets_are_as_many_as_are_best(fabric: Fabric, size_bytes: int) -> None:
    """Against every number of them, down to packets of one byte."""
    ranks, latency_s = fabric.num_ranks, fabric.latency_s
    byte_s = 1 / fabric.bandwidth_bytes_per_s
    first = double_tree(ranks).num_steps_of_first

    def in_tree_s(of_byte_s: float) -> float:
        half_s = size_bytes / 2 * of_byte_s
        most = max(1, size_bytes // 2)
        return min((first + 2 * (count - 1)) * (latency_s + half_s / count) for count in range(1, most + 1))

    summed_s = in_tree_s(byte_s + 1 / fabric.reduce_bytes_per_s)
    assert algorithm_s(AR, size_bytes, fabric, Algorithm.TREE) == pytest.approx(in_tree_s(byte_s) + summed_s)


def test_a_switch_that_adds_moves_the_buffer_and_one_part_either_way() -> None:
    # Klenk et al.: the sum is scattered, then gathered.  200 bytes and a fifth of them, at 0.84 of 100 bytes/s.
    fabric = Fabric(5, 3.0, 100.0, Shape.SWITCH, reduces_in_switch=True)
    for collective, turns, moved_bytes in ((AR, 2, 240), (RS, 1, 200), (AG, 1, 200)):
        expected = pytest.approx(turns * 3 + moved_bytes / 84)
        assert algorithm_s(collective, 200, fabric, Algorithm.IN_SWITCH) == expected


def test_trees_pass_a_few_steps_where_rings_pass_all() -> None:
    many = Fabric(64, 1e-5, 1e11)
    tree_s, ring_s = (algorithm_s(AR, 1000, many, algorithm) for algorithm in (Algorithm.TREE, Algorithm.RING))
    assert tree_s is not None
    assert ring_s is not None
    assert tree_s < ring_s / 4
    assert collective_time(AR, 2**33, many, [Algorithm.TREE, Algorithm.RING]).algorithm is Algorithm.RING


@given(fabrics(), st.sampled_from(Collective), sizes, sizes)
def test_more_bytes_and_slower_links_take_no_less(fabric: Fabric, collective: Collective, one: int, other: int) -> None:
    small, large = sorted((one, other))
    slower = Fabric(
        fabric.num_ranks,
        2 * fabric.latency_s,
        fabric.bandwidth_bytes_per_s / 2,
        fabric.shape,
        fabric.reduces_in_switch,
        fabric.reduce_bytes_per_s / 2,
    )
    for algorithm in Algorithm:
        times = [
            algorithm_s(collective, small, fabric, algorithm),
            algorithm_s(collective, large, fabric, algorithm),
            algorithm_s(collective, large, slower, algorithm),
        ]
        known = [seconds for seconds in times if seconds is not None]
        assert len(known) in (0, 3)
        assert all(before <= after * (1 + 1e-9) for before, after in pairwise(known))


def disjoint_rings(ranks: int) -> int:
    """The most directed rings through all ranks of a mesh that share no link, found by trying all sets of them."""
    rings = [frozenset(pairwise((0, *order, 0))) for order in permutations(range(1, ranks))]

    def most(first: int, taken: frozenset[tuple[int, int]]) -> int:
        found = 0
        for index in range(first, len(rings)):
            if not rings[index] & taken:
                found = max(found, 1 + most(index + 1, taken | rings[index]))
                if found == ranks - 1:
                    break
        return found

    return most(0, frozenset())


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6])
def test_a_mesh_carries_as_many_rings_as_can_be_laid_side_by_side(ranks: int) -> None:
    assert Fabric(ranks, 0.0, 1.0, Shape.MESH).ring_bytes_per_s == disjoint_rings(ranks)


def test_one_rank_has_nothing_to_do_and_rings_always_work() -> None:
    alone = Fabric(1, 1e-5, 1e9)
    assert all(collective_time(collective, 10**9, alone).seconds == 0 for collective in Collective)
    with pytest.raises(PlanError, match="Every fabric allows ring"):
        collective_time(A2A, 1, Fabric(4, 1e-5, 1e9, Shape.RING), [Algorithm.TREE])
    for shape in Shape:
        for collective in Collective:
            assert collective_time(collective, 1, Fabric(4, 1e-5, 1e9, shape), [Algorithm.RING]).seconds > 0


# -- message by message ----------------------------------------------------------------------------------------------


@st.composite
def hops(draw: st.DrawFn) -> list[tuple[float, float]]:
    """Latency and bandwidth from every rank of a ring to the next, no two alike."""
    count = draw(st.integers(2, 9))
    return [(draw(latencies), draw(rates)) for _ in range(count)]


def ring_world(ways: Sequence[tuple[float, float]], holds: list[Contents], part_bytes: dict[int, float]) -> World:
    def message_s(source: int, target: int, size_bytes: float) -> float:
        assert target == (source + 1) % len(ways)
        latency_s, rate = ways[source]
        return latency_s + size_bytes / rate

    return World(len(ways), message_s, part_bytes, holds)


def slowest(ways: Sequence[tuple[float, float]], size_bytes: float) -> Fabric:
    """The ring whose every hop is the one of ``ways`` that takes longest for a message of this size."""
    latency_s, rate = max(ways, key=lambda way: way[0] + size_bytes / way[1])
    return Fabric(len(ways), latency_s, rate, Shape.RING)


@given(hops(), st.integers(1, 10**9))
def test_rings_of_unequal_hops_keep_pace_with_the_slowest(ways: list[tuple[float, float]], part_bytes: int) -> None:
    ranks = len(ways)
    parts = dict.fromkeys(range(ranks), float(part_bytes))
    fabric = slowest(ways, part_bytes)
    everybody = Counter(range(ranks))

    gathered = ring_world(ways, own_parts(ranks), parts)
    assert gathered.run(ring_gather(ranks)) == pytest.approx(
        algorithm_s(AG, ranks * part_bytes, fabric, Algorithm.RING)
    )
    assert all(holds == {part: Counter([part]) for part in range(ranks)} for holds in gathered.holds)

    reduced = ring_world(ways, all_parts(ranks, range(ranks)), parts)
    assert reduced.run(ring_reduce(ranks)) == pytest.approx(algorithm_s(RS, ranks * part_bytes, fabric, Algorithm.RING))
    assert all(reduced.holds[rank][(rank + 1) % ranks] == everybody for rank in range(ranks))

    both = ring_world(ways, all_parts(ranks, range(ranks)), parts)
    assert both.run(ring_all_reduce(ranks)) == pytest.approx(
        algorithm_s(AR, ranks * part_bytes, fabric, Algorithm.RING)
    )
    assert all(holds == dict.fromkeys(range(ranks), everybody) for holds in both.holds)


def test_the_messages_show_what_is_passed_on_too_early() -> None:
    ways = [(0.0, 1.0)] * 3
    world = ring_world(ways, own_parts(3), dict.fromkeys(range(3), 1.0))
    with pytest.raises(AssertionError, match="rank 1 sends part 0, which it does not have"):
        world.run([Message(1, 2, (0,)), Message(0, 1, (0,))])
    twice = ring_world(ways, all_parts(3, [0]), {0: 1.0})
    twice.run([Message(0, 1, (0,), adds=True), Message(0, 1, (0,), adds=True)])
    assert twice.holds[1][0] != Counter([0, 1])


@given(st.integers(2, 9), latencies, rates, st.integers(1, 10**9))
def test_all_to_all_around_a_ring(ranks: int, latency_s: float, rate: float, part_bytes: int) -> None:
    parts = dict.fromkeys(range(ranks * ranks), float(part_bytes))
    begin: list[Contents] = [
        {rank * ranks + target: Counter([rank]) for target in range(ranks)} for rank in range(ranks)
    ]
    world = ring_world([(latency_s, rate)] * ranks, begin, parts)
    seconds = world.run(ring_all_to_all(ranks))
    for target in range(ranks):
        assert all(world.holds[target][source * ranks + target] == Counter([source]) for source in range(ranks))
    fabric = Fabric(ranks, latency_s, rate, Shape.RING)
    assert algorithm_s(A2A, ranks * part_bytes, fabric, Algorithm.RING) == pytest.approx(seconds)


@given(st.integers(2, 12), latencies, rates, st.integers(1, 10**9), st.booleans())
def test_sending_directly_shares_the_port_out(
    ranks: int, latency_s: float, rate: float, part_bytes: int, is_mesh: bool
) -> None:
    # Bytes leave one after another (on a mesh: by as many links side by side), and each message flies on its own.
    sent_s = part_bytes / rate if is_mesh else (ranks - 1) * part_bytes / rate
    arrivals = []
    for source in range(ranks):
        for turn in range(1, ranks):
            begun_s = 0.0 if is_mesh else (turn - 1) * part_bytes / rate
            arrivals.append(((source + turn) % ranks, begun_s, begun_s + part_bytes / rate + latency_s))
    for target in range(ranks):
        received = sorted((begun_s, end_s) for to, begun_s, end_s in arrivals if to == target)
        if not is_mesh:  # nobody hears two at once
            assert all(end - latency_s <= later + 1e-9 * end for (_, end), (later, _) in pairwise(received))
    fabric = Fabric(ranks, latency_s, rate, Shape.MESH if is_mesh else Shape.SWITCH)
    for collective, turns in ((AG, 1), (A2A, 1), (RS, 1), (AR, 2)):
        seconds = algorithm_s(collective, ranks * part_bytes, fabric, Algorithm.DIRECT)
        assert seconds == pytest.approx(turns * (latency_s + sent_s))
        assert max(end_s for *_, end_s in arrivals) == pytest.approx(latency_s + sent_s)


# -- double trees ----------------------------------------------------------------------------------------------------


def steps_of(trees: DoubleTree, num_packets: int) -> dict[int, list[tuple[int, int, int]]]:
    """(source, target, part) of every step; parts are numbered by packet and tree."""
    has_after = {(tree, 0): 0 for tree in (0, 1)}
    steps: dict[int, list[tuple[int, int, int]]] = {}
    waiting = list(trees.edges)
    while waiting:
        edge = next(edge for edge in waiting if (edge.tree, edge.parent) in has_after)
        waiting.remove(edge)
        first = has_after[edge.tree, edge.parent]
        first += (first - edge.colour) % 2
        has_after[edge.tree, edge.child] = first + 1
        for packet in range(num_packets):
            steps.setdefault(first + 2 * packet, []).append((edge.parent, edge.child, 2 * packet + edge.tree))
    return steps


@pytest.mark.parametrize("ranks", [*range(2, 41), 63, 64, 65, 128, 257])
def test_both_trees_bring_everything_with_one_send_and_one_receive_a_step(ranks: int) -> None:
    num_packets = 3
    trees = double_tree(ranks)
    steps = steps_of(trees, num_packets)
    world = World(ranks, lambda *_: 1.0, dict.fromkeys(range(6), 1.0), only_root(ranks, range(6)))
    for step in sorted(steps):
        sources, targets, _ = zip(*steps[step], strict=True)
        assert len(set(sources)) == len(sources)
        assert len(set(targets)) == len(targets)
        world.run([Message(source, target, (part,)) for source, target, part in sorted(steps[step])])
    assert all(holds.keys() == set(range(6)) for holds in world.holds)
    assert max(steps) + 1 == trees.num_steps_of_first + 2 * (num_packets - 1)
    assert trees.num_steps_of_first == tree_steps(ranks)
    inner = [{edge.parent for edge in trees.edges if edge.tree == tree} - {0} for tree in (0, 1)]
    assert not inner[0] & inner[1]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 13, 16, 33])
@pytest.mark.parametrize("num_packets", [1, 2, 7])
def test_reductions_take_the_trees_the_other_way(ranks: int, num_packets: int) -> None:
    steps = steps_of(double_tree(ranks), num_packets)
    parts = range(2 * num_packets)
    world = World(ranks, lambda *_: 1.0, dict.fromkeys(parts, 1.0), all_parts(ranks, parts))
    for step in sorted(steps, reverse=True):
        world.run([Message(child, parent, (part,), adds=True) for parent, child, part in steps[step]])
    assert world.holds[0] == {key: Counter(range(ranks)) for key in parts}


@given(st.integers(2, 40), latencies, rates, st.integers(2, 10**7))
def test_trees_take_as_many_steps_as_they_say_and_the_best_number_of_packets(
    ranks: int, latency_s: float, rate: float, size_bytes: int
) -> None:
    fabric = Fabric(ranks, latency_s, rate)
    closed_s = algorithm_s(AR, size_bytes, fabric, Algorithm.TREE)
    assert closed_s is not None
    by_count = {}
    for count in (1, 2, 4, 9, 30):
        if 2 * count <= size_bytes:
            num_steps = max(steps_of(double_tree(ranks), count)) + 1
            by_count[count] = 2 * num_steps * (latency_s + size_bytes / (2 * count) / rate)
    assert closed_s <= min(by_count.values()) * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [*range(2, 300), 511, 512, 513, 1023, 1024, 4095, 4096])
def test_the_depth_in_closed_form_is_that_of_the_built_trees(ranks: int) -> None:
    assert tree_steps(ranks) == double_tree(ranks).num_steps_of_first


# -- hierarchies -----------------------------------------------------------------------------------------------------


@given(st.integers(2, 5), st.integers(2, 5), latencies, rates, latencies, rates, st.integers(1, 10**8))
def test_two_levels_of_rings_are_their_messages(
    inside: int, groups: int, near_s: float, near: float, far_s: float, far: float, part_bytes: int
) -> None:
    ranks = inside * groups
    size_bytes = ranks * part_bytes
    levels = (Fabric(inside, near_s, near, Shape.RING), Fabric(groups, far_s, far, Shape.RING))
    parts = dict.fromkeys(range(ranks), float(part_bytes))

    def message_s(source: int, target: int, size: float) -> float:
        is_near = source // inside == target // inside
        return (near_s + size / near) if is_near else (far_s + size / far)

    world = World(ranks, message_s, parts, all_parts(ranks, range(ranks)))
    assert world.run(two_level_all_reduce(inside, groups)) == pytest.approx(hierarchical_s(AR, size_bytes, levels))
    assert all(holds == {key: Counter(range(ranks)) for key in range(ranks)} for holds in world.holds)
    gathered = hierarchical_s(AG, size_bytes, levels)
    assert hierarchical_s(RS, size_bytes, levels) == pytest.approx(gathered)
    assert hierarchical_s(AR, size_bytes, levels) == pytest.approx(2 * gathered)


def two_level_all_reduce(inside: int, groups: int) -> list[Message]:
    """Reduced within groups, all-reduced between equal places of the groups, gathered within groups.

    A member's share within its group is one part per group.
    """
    messages: list[Message] = []
    last: dict[int, int] = {}

    def send(source: int, target: int, parts: tuple[int, ...], *, adds: bool, waits: int | None) -> int:
        messages.append(Message(source, target, parts, adds, () if waits is None else (waits,)))
        return len(messages) - 1

    def around(members: list[list[int]], shares: list[list[tuple[int, ...]]], shift: int, *, adds: bool) -> None:
        count = len(members[0])
        for step in range(count - 1):
            brought = {}
            for ring, owned in zip(members, shares, strict=True):
                for place, rank in enumerate(ring):
                    target = ring[(place + 1) % count]
                    share = owned[(place + shift - step) % count]
                    brought[target] = send(rank, target, share, adds=adds, waits=last.get(rank))
            last.update(brought)

    within = [[group * inside + place for place in range(inside)] for group in range(groups)]
    share = [tuple(place * groups + group for group in range(groups)) for place in range(inside)]
    between = [[group * inside + place for group in range(groups)] for place in range(inside)]
    # After the first turn the member at ``place`` has the whole of share place + 1.
    part = [[(one,) for one in share[(place + 1) % inside]] for place in range(inside)]
    around(within, [share] * groups, 0, adds=True)
    around(between, part, 0, adds=True)
    around(between, part, 1, adds=False)
    around(within, [share] * groups, 1, adds=False)
    return messages


def test_groups_pay_where_the_links_between_them_are_slow() -> None:
    near, far = Fabric(8, 3e-6, 3e11), Fabric(4, 1e-5, 5e9)
    flat = Fabric(32, 1e-5, 5e9, Shape.RING)
    size_bytes = 2**30
    assert hierarchical_s(AR, size_bytes, (near, far)) < collective_time(AR, size_bytes, flat).seconds

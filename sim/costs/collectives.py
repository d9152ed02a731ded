"""How long a collective takes, by latency and bandwidth.

[Note: Cost of collectives]
A message of m bytes takes latency_s + m / bandwidth.  A rank sends one message and receives one at a time, both side
by side; adding what it received takes m / reduce_bytes_per_s more.  The formulas are those of Chan, Heimlich,
Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience", doi 10.1002/cpe.1206, and of
Patarasuk, Yuan, doi 10.1016/j.jpdc.2008.09.002, for rings; for trees see [Note: Double trees].  Where a switch or a
mesh lets a rank have messages to several others under way at once (DIRECT, ONE_SHOT, IN_SWITCH), their latencies
pass side by side and their bytes share the rank's links.  Over a network of nodes NCCL gathers, scatters and reduces by
rings and trees alone ("Demystifying NCCL", arXiv 2507.04786), so that latency grows with the nodes.

[Note: Double trees]
In one binary tree half of the ranks are leaves and never send.  Two trees that divide the inner nodes between them,
and carry half of the data each, let every rank send and receive all of the time (Sanders, Speck, Träff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", doi 10.1016/j.parco.2009.09.001; NCCL's tree algorithm).
Time is cut into steps in which a rank sends one packet and receives one; each edge carries a packet in every second
step.  ``tree_steps`` counts such steps.

[Note: Size of a collective]
``size_bytes`` is the whole buffer: what every rank ends up with (ALL_GATHER, ALL_REDUCE), what every rank begins with
(REDUCE_SCATTER), or what every rank has for all ranks together, itself included (ALL_TO_ALL).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf, sqrt
from typing import Final

from ...shared.basics.errors import PlanError
from ...shared.schema.hardware import Collective as Collective


class Algorithm(StrEnum):
    """How they do it."""

    RING = "ring"
    TREE = "tree"
    """The double binary tree, in packets."""
    DIRECT = "direct"
    """Every rank sends to every other one what that one needs; ALL_REDUCE in two turns, scattered and gathered."""
    ONE_SHOT = "one_shot"
    """Every rank sends all that it has to all others, and each adds it up for itself."""
    IN_SWITCH = "in_switch"
    """The switch adds and copies (NVLink SHARP)."""
    HIERARCHICAL = "hierarchical"
    """Within groups, between them, and within them again."""


class Shape(StrEnum):
    """Which ranks have a link between them."""

    RING = "ring"
    MESH = "mesh"
    SWITCH = "switch"
    NETWORK = "network"
    """Everybody reaches everybody, message by message: a rank does not write to all others at once."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """Equal ranks with equal links."""

    num_ranks: int
    latency_s: float
    bandwidth_bytes_per_s: float
    """What a rank sends in one direction while it receives as much: RING and SWITCH all together, MESH per link."""
    shape: Shape = Shape.SWITCH
    reduces_in_switch: bool = False
    reduce_bytes_per_s: float = inf
    """Rate at which a rank adds what it has received."""

    @property
    def total_bytes_per_s(self) -> float:
        """What a rank can send on all of its links at once."""
        links = max(1, self.num_ranks - 1) if self.shape is Shape.MESH else 1
        return links * self.bandwidth_bytes_per_s

    @property
    def ring_bytes_per_s(self) -> float:
        """What rings through all ranks carry in parallel, each rank sending on all links that a ring can use.

        A complete graph with links both ways falls apart into p - 1 rings, but for p = 4 and p = 6, where one is lost
        (Tillson, "A Hamiltonian decomposition of K*2m, 2m >= 8", Journal of Combinatorial Theory B 29, 1980).
        """
        if self.shape is not Shape.MESH:
            return self.bandwidth_bytes_per_s
        num_rings = max(1, self.num_ranks - (2 if self.num_ranks in (4, 6) else 1))
        return num_rings * self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """A collective's seconds and how it gets there."""

    seconds: float
    algorithm: Algorithm | None
    """None: measured."""


_IN_SWITCH_FRAC: Final = 0.84
"""Share of the links' rate that loads through a reducing switch reach: the requests travel beside the data.

Measured on eight H100: 275 GB/s of the buffer, where links of 370 GB/s would carry 329 (github.com/NVIDIA/nccl-tests
issue 212).
"""


def collective_time(
    collective: Collective, size_bytes: int, fabric: Fabric, algorithms: Iterable[Algorithm] = Algorithm
) -> CollectiveTime:
    """The fastest of ``algorithms`` that the fabric allows; of equal ones the first.  One rank alone takes no time.

    Raises PlanError if the fabric allows none of them.
    """
    times = [
        CollectiveTime(seconds, algorithm)
        for algorithm in algorithms
        if (seconds := algorithm_s(collective, size_bytes, fabric, algorithm)) is not None
    ]
    if not times:
        raise PlanError(
            f"no algorithm that was named carries out {collective} over {fabric.num_ranks} ranks on a {fabric.shape}. "
            f"Every fabric allows {Algorithm.RING}."
        )
    return min(times, key=lambda time: time.seconds)


def algorithm_s(collective: Collective, size_bytes: int, fabric: Fabric, algorithm: Algorithm) -> float | None:
    """Seconds of ``collective`` by one algorithm on an otherwise idle fabric; None if it cannot be done that way."""
    if algorithm is Algorithm.HIERARCHICAL:
        return None
    if fabric.num_ranks == 1:
        return 0.0
    match algorithm:
        case Algorithm.RING:
            return _ring_s(collective, size_bytes, fabric)
        case Algorithm.TREE:
            return _tree_s(collective, size_bytes, fabric)
        case Algorithm.DIRECT:
            return _direct_s(collective, size_bytes, fabric)
        case Algorithm.ONE_SHOT:
            return _one_shot_s(collective, size_bytes, fabric)
        case Algorithm.IN_SWITCH:
            return _in_switch_s(collective, size_bytes, fabric)


def _ring_s(collective: Collective, size_bytes: int, fabric: Fabric) -> float:
    """One step less than ranks, in each of which every rank passes on its share; what is reduced is added on its way.

    On a ring, parts of an all-to-all travel to the rank that they are for: p - 1 of them in the first step, one less
    in each that follows.
    """
    ranks, latency_s = fabric.num_ranks, fabric.latency_s
    part_bytes = size_bytes / ranks
    part_s = part_bytes / fabric.ring_bytes_per_s
    adding_s = part_bytes / fabric.reduce_bytes_per_s
    gather_s = (ranks - 1) * (latency_s + part_s)
    match collective:
        case Collective.ALL_GATHER:
            return gather_s
        case Collective.REDUCE_SCATTER:
            return gather_s + (ranks - 1) * adding_s
        case Collective.ALL_REDUCE:
            return 2 * gather_s + (ranks - 1) * adding_s
        case Collective.ALL_TO_ALL:
            return (ranks - 1) * latency_s + part_s * ranks * (ranks - 1) / 2


def _tree_s(collective: Collective, size_bytes: int, fabric: Fabric) -> float | None:
    """A reduction to the root and a broadcast from it.  Only a switch joins parents and children."""
    if collective is not Collective.ALL_REDUCE or fabric.shape is Shape.RING:
        return None
    # On a mesh an edge is one link: a rank's three neighbours in a tree do not share it.
    return _tree_pass_s(size_bytes, fabric, inf) + _tree_pass_s(size_bytes, fabric, fabric.reduce_bytes_per_s)


def _tree_pass_s(size_bytes: int, fabric: Fabric, reduce_bytes_per_s: float) -> float:
    """One way through both trees, each with half of the bytes, in as many packets as are best."""
    first = tree_steps(fabric.num_ranks)
    half_s = size_bytes / 2 * (1 / fabric.bandwidth_bytes_per_s + 1 / reduce_bytes_per_s)
    num_packets = _best_packets((first - 2) / 2, half_s, fabric.latency_s, size_bytes // 2)
    return (first + 2 * (num_packets - 1)) * (fabric.latency_s + half_s / num_packets)


def tree_steps(num_ranks: int) -> int:
    """Steps until every rank of a double tree, 2 or more, has the first packet of both trees.

    Each further packet takes two steps more.  The tests build the trees, pass packets along their edges, and find the
    same number ([Note: Double trees]).
    """
    depth = (num_ranks - 1).bit_length()
    return 2 * depth - 1 + (num_ranks % 4 == 3 or num_ranks == 1 << depth)


def _best_packets(extra_steps: float, whole_s: float, latency_s: float, most: int) -> int:
    """The whole number k >= 1, at most ``most``, that minimizes (extra_steps + k) * (latency_s + whole_s / k).

    Its derivative vanishes at k = sqrt(extra_steps * whole_s / latency_s); it falls before and rises after.
    """
    if extra_steps <= 0 or most <= 1:
        return 1
    best = sqrt(extra_steps * whole_s / latency_s) if latency_s > 0 else inf
    low = int(min(max(1.0, best), most))
    return min(low, min(low + 1, most), key=lambda k: (extra_steps + k) * (latency_s + whole_s / k))


def _direct_s(collective: Collective, size_bytes: int, fabric: Fabric) -> float | None:
    """One message to each of the others, all under way together."""
    if fabric.shape is Shape.RING or (fabric.shape is Shape.NETWORK and collective is not Collective.ALL_TO_ALL):
        return None
    part_bytes = size_bytes / fabric.num_ranks
    others = fabric.num_ranks - 1
    turn_s = fabric.latency_s + others * part_bytes / fabric.total_bytes_per_s
    adding_s = others * part_bytes / fabric.reduce_bytes_per_s
    match collective:
        case Collective.ALL_GATHER | Collective.ALL_TO_ALL:
            return turn_s
        case Collective.REDUCE_SCATTER:
            return turn_s + adding_s
        case Collective.ALL_REDUCE:
            return 2 * turn_s + adding_s


def _one_shot_s(collective: Collective, size_bytes: int, fabric: Fabric) -> float | None:
    if collective is not Collective.ALL_REDUCE or fabric.shape in (Shape.RING, Shape.NETWORK):
        return None
    others_bytes = (fabric.num_ranks - 1) * size_bytes
    return fabric.latency_s + others_bytes / fabric.total_bytes_per_s + others_bytes / fabric.reduce_bytes_per_s


def _in_switch_s(collective: Collective, size_bytes: int, fabric: Fabric) -> float | None:
    """Loads that the switch adds up from all ranks, stores that it copies to all (Klenk et al., ISCA 2020).

    Doi 10.1109/ISCA45697.2020.00085.  Per rank and direction: scattering a sum sends the whole buffer and receives a
    part of it, gathering the other way round.  Together the buffer and one part go either way.
    """
    if not fabric.reduces_in_switch:
        return None
    rate = fabric.bandwidth_bytes_per_s * _IN_SWITCH_FRAC
    match collective:
        case Collective.REDUCE_SCATTER | Collective.ALL_GATHER:
            return fabric.latency_s + size_bytes / rate
        case Collective.ALL_REDUCE:
            return 2 * fabric.latency_s + size_bytes * (1 + 1 / fabric.num_ranks) / rate
        case Collective.ALL_TO_ALL:
            return None


def hierarchical_s(collective: Collective, size_bytes: int, levels: tuple[Fabric, ...]) -> float:
    """Seconds over groups of groups: ``levels`` from the innermost, each joining one rank of every group below it.

    Every rank of a group takes part in the next level with its own part of the buffer, so that all links between groups
    are used: reduce-scatter within, all-reduce between, all-gather within.  Each level uses its fastest algorithm.
    """
    inner, outer = levels[0], levels[1:]
    if not outer:
        return collective_time(collective, size_bytes, inner).seconds

    def within_s(what: Collective) -> float:
        return collective_time(what, size_bytes, inner).seconds

    part_bytes = ceil(size_bytes / inner.num_ranks)
    match collective:
        case Collective.ALL_REDUCE:
            between_s = hierarchical_s(collective, part_bytes, outer)
            return within_s(Collective.REDUCE_SCATTER) + between_s + within_s(Collective.ALL_GATHER)
        case Collective.REDUCE_SCATTER | Collective.ALL_GATHER:
            return within_s(collective) + hierarchical_s(collective, part_bytes, outer)
        case Collective.ALL_TO_ALL:
            # First to the member of the own group that has the target's place, then to the target's group.
            return within_s(collective) + hierarchical_s(collective, size_bytes, outer)

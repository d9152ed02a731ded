"""Two binary trees over the same ranks, in which every rank is an inner node at most once: built and coloured.

In one binary tree half of the ranks are leaves and never send.  Two trees that divide the inner nodes between them,
and carry half of the data each, let every rank send and receive all of the time (Sanders, Speck, Träff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", doi 10.1016/j.parco.2009.09.001; NCCL's tree algorithm).
Time is cut into steps in which a rank sends one packet and receives one.  The edges of both trees get one of two
colours, such that the edges that a rank sends on differ in colour, and so do those that it receives on; edges of
colour c carry a packet in the steps that leave c when divided by two.  Such a colouring exists, since the graph of
senders and receivers is bipartite and nobody has more than two edges on a side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Edge:
    """A parent that sends to a child; the root, rank 0, is outside of both trees and sends to the top of each."""

    tree: int
    parent: int
    child: int
    colour: int


@dataclass(frozen=True)
class DoubleTree:
    """Both trees over ranks 0 to p - 1, rank 0 being the root."""

    edges: tuple[Edge, ...]
    num_steps_of_first: int
    """Steps until every rank has the first packet of its last tree; each further packet per tree takes two more."""


@cache
def double_tree(num_ranks: int) -> DoubleTree:
    """The trees for so many ranks, at least 2."""
    assert num_ranks >= 2
    parents = _parents(num_ranks - 1)
    uncoloured = [(tree, parent, child) for tree in (0, 1) for child, parent in sorted(parents[tree].items())]
    colours = _colours(uncoloured)
    edges = tuple(Edge(*edge, colours[edge]) for edge in uncoloured)
    return DoubleTree(edges, _num_steps_of_first(edges))


def _parents(size: int) -> tuple[dict[int, int], dict[int, int]]:
    """The parent of ranks 1 to ``size`` in each tree.

    The first is the in-order tree, in which the odd ranks are leaves.  The second is its mirror image where the size is
    even, and the same one with every rank moved by one where it is odd: then the even ranks are leaves.
    """

    def moved(rank: int) -> int:
        if rank == 0:
            return 0
        return size + 1 - rank if size % 2 == 0 else rank % size + 1

    first = _in_order(1, size, 0)
    return first, {moved(child): moved(parent) for child, parent in first.items()}


def _in_order(low: int, high: int, parent: int) -> dict[int, int]:
    """Parents of ranks ``low`` to ``high`` below ``parent``: a full tree on the left, the rest on the right."""
    if low > high:
        return {}
    top = low - 1 + (1 << ((high - low + 1).bit_length() - 1))
    return {top: parent, **_in_order(low, top - 1, top), **_in_order(top + 1, high, top)}


def _colours(edges: list[tuple[int, int, int]]) -> dict[tuple[int, int, int], int]:
    """The colour of each (tree, parent, child); edges with a common sender, or a common receiver, differ."""
    by_sender: dict[int, list[tuple[int, int, int]]] = {}
    by_receiver: dict[int, list[tuple[int, int, int]]] = {}
    for edge in edges:
        by_sender.setdefault(edge[1], []).append(edge)
        by_receiver.setdefault(edge[2], []).append(edge)
    colours: dict[tuple[int, int, int], int] = {}
    for start in edges:
        reached = [] if start in colours else [start]
        if reached:
            colours[start] = 0
        while reached:
            edge = reached.pop()
            for other in (*by_sender[edge[1]], *by_receiver[edge[2]]):
                if other not in colours:
                    colours[other] = 1 - colours[edge]
                    reached.append(other)
    return colours


def _num_steps_of_first(edges: tuple[Edge, ...]) -> int:
    """Steps until the first packet of both trees has come to every rank."""
    has_after = {(0, 0): 0, (1, 0): 0}
    waiting = list(edges)
    while waiting:
        still_waiting = []
        for edge in waiting:
            parent = has_after.get((edge.tree, edge.parent))
            if parent is None:
                still_waiting.append(edge)
            else:
                has_after[edge.tree, edge.child] = parent + (parent + edge.colour) % 2 + 1
        waiting = still_waiting
    return max(has_after.values())

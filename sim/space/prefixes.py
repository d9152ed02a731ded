"""Which pairs of persistent and sharded chunks the space has, each choice of chunks once.

[Note: Shards in the space]
Every pair of ``n_persist`` and ``n_shard`` would square the space.  Unless values of ``n_shard`` are named, which then
go with every ``n_persist``, it has the pairs without shards; those without offloaded chunks, for every ``n_persist``;
and, for the smallest ``n_persist``, every ``n_shard``, with the rest offloaded.  Left out is what has whole chunks on
every device and shards and offloaded chunks all at once: to shard one of the whole chunks makes room for the parts of
others, so that fewer travel from the hosts, which pays wherever collectives are cheaper than the copies that they
spare.  Where they are not, a plan that is left out may be faster; what a search proves is about the plans that are
there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...shared.layout.layout import Layout


@dataclass(frozen=True)
class Placement:
    """One choice of persistent and sharded chunks."""

    n_persist: int
    """The smallest that keeps these chunks."""
    n_shard: int
    fewest: int
    """Buffers that the block with the most gathered chunks needs."""
    num_gathered: int
    """Chunks that are not persistent."""


def distinct_prefixes(
    layout: Layout, n_persist: Iterable[int] | None, n_shard: Iterable[int] | None = (0,)
) -> list[Placement]:
    """Distinct choices of persistent and sharded chunks; None for everything that [Note: Shards in the space] names."""
    num_chunks = len(layout.chunks)
    is_owned = np.array([bool(chunk.blocks) for chunk in layout.chunks], dtype=bool)
    needs = np.zeros((layout.num_blocks, num_chunks), dtype=np.int64)
    for block, chunks in enumerate(layout.chunks_of_block):
        needs[block, list(chunks)] = 1
    # needed_after[b, p]: chunks of block b at or after position p, those left when p chunks are persistent.
    needed_after = np.zeros((layout.num_blocks, num_chunks + 1), dtype=np.int64)
    needed_after[:, :num_chunks] = needs[:, ::-1].cumsum(axis=1)[:, ::-1]
    fewest = needed_after.max(axis=0)
    num_from = np.append(is_owned[::-1].cumsum()[::-1], 0).tolist()
    candidates = range(num_chunks + 1) if n_persist is None else sorted(set(n_persist))
    firsts: dict[int, int] = {}
    for first in candidates:
        if first <= num_chunks:
            firsts.setdefault(num_from[first], first)
    pairs: dict[tuple[int, int], Placement] = {}
    for number, first in enumerate(firsts.values()):
        for count in _shard_counts(num_chunks - first, n_shard, is_first=number == 0):
            left = num_from[first], num_from[first + count]
            pairs.setdefault(left, Placement(first, count, int(fewest[first]), left[0]))
    return list(pairs.values())


def _shard_counts(most: int, wanted: Iterable[int] | None, *, is_first: bool) -> Iterable[int]:
    """Values of ``n_shard`` that go with an ``n_persist``, ascending; ``is_first``: with the smallest one."""
    if wanted is not None:
        return sorted({n_shard for n_shard in wanted if n_shard <= most})
    return range(most + 1) if is_first else sorted({0, most})

"""Which chunks of a layout are persistent, sharded over devices, or offloaded: the pairs of knobs that a search tries.

[Note: Prefixes]
Chunks follow execution order, the first ``n_persist`` are persistent, the next ``n_shard`` sharded over the devices,
and the rest offloaded.  A *prefix* is such a pair by its number: prefix p, up to the number of chunks, has
``n_persist`` = p and no shards; pairs with shards come after these.  Tables that depend on where chunks lie are indexed
by it.

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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from ...shared.layout.layout import Layout

_Integers = npt.NDArray[np.int64]
_Numbers = TypeVar("_Numbers", npt.NDArray[np.int64], npt.NDArray[np.float64])
_Booleans = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Placements:
    """Shapes: P prefixes, C chunks."""

    num_chunks: int
    n_persist: _Integers
    """(P,) the knob."""
    n_shard: _Integers
    """(P,) 0 for the first C + 1."""

    @classmethod
    def of(cls, layout: Layout, shards: Sequence[tuple[int, int]] = ()) -> Self:
        """Every ``n_persist`` without shards, and the pairs ``shards`` of ``n_persist`` and ``n_shard``."""
        num_chunks = len(layout.chunks)
        return cls(
            num_chunks=num_chunks,
            n_persist=np.array([*range(num_chunks + 1), *(n_persist for n_persist, _ in shards)], dtype=np.int64),
            n_shard=np.array([*([0] * (num_chunks + 1)), *(n_shard for _, n_shard in shards)], dtype=np.int64),
        )

    @property
    def all(self) -> _Integers:
        """(P,) every prefix."""
        return np.arange(len(self.n_persist))

    @property
    def has_shards(self) -> bool:
        """Whether any prefix has chunks that are sharded over the devices."""
        return len(self.n_persist) > self.num_chunks + 1

    def is_gathered(self, prefix: int | _Integers) -> _Booleans:
        """(..., C) whether a chunk is not persistent, for each entry of ``prefix``."""
        return self._from(self.n_persist[prefix])

    def is_offloaded(self, prefix: int | _Integers) -> _Booleans:
        """(..., C) whether a chunk is offloaded."""
        return self._from(self.n_persist[prefix] + self.n_shard[prefix])

    def is_sharded(self, prefix: int | _Integers) -> _Booleans:
        """(..., C) whether a chunk is sharded over the devices."""
        is_sharded: _Booleans = self.is_gathered(prefix) & ~self.is_offloaded(prefix)
        return is_sharded

    def persistent_sum(self, values: _Numbers) -> _Numbers:
        """(P,) the sum of ``values`` (C,) over persistent chunks."""
        total: _Numbers = values.sum() - self._sum_from(values)[self.n_persist]
        return total

    def sharded_sum(self, values: _Numbers) -> _Numbers:
        """(P,) the sum of ``values`` (C,) over chunks that are sharded over the devices."""
        until = self._sum_from(values)
        total: _Numbers = until[self.n_persist] - until[self.n_persist + self.n_shard]
        return total

    def offloaded_sum(self, values: _Numbers) -> _Numbers:
        """(P,) the sum of ``values`` (C,) over offloaded chunks."""
        total: _Numbers = self._sum_from(values)[self.n_persist + self.n_shard]
        return total

    def _from(self, first: int | _Integers) -> _Booleans:
        """(..., C) whether a chunk comes no sooner than ``first``."""
        is_from: _Booleans = np.arange(self.num_chunks) >= np.asarray(first)[..., None]
        return is_from

    def _sum_from(self, values: _Numbers) -> _Numbers:
        """(C + 1,) the sum of ``values`` (C,) over the chunks from each place on."""
        found: _Numbers = np.append(values[::-1].cumsum()[::-1], 0)
        return found


# -- placements of the space -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """One choice of persistent and sharded chunks."""

    n_persist: int
    n_shard: int
    fewest: int
    """Buffers that the section with the most gathered chunks needs."""
    num_gathered: int
    """Chunks that are not persistent."""


def distinct_prefixes(
    layout: Layout, n_persist: Iterable[int] | None, n_shard: Iterable[int] | None = (0,)
) -> list[Placement]:
    """Distinct choices of persistent and sharded chunks; None for everything that [Note: Shards in the space] names."""
    num_chunks = len(layout.chunks)
    needs = np.zeros((len(layout.needed), num_chunks), dtype=np.int64)
    for step, chunks in enumerate(layout.needed):
        needs[step, list(chunks)] = 1
    # needed_after[s, p]: chunks of step s at or after position p, those left when p chunks are persistent.
    needed_after = np.zeros((len(needs), num_chunks + 1), dtype=np.int64)
    needed_after[:, :num_chunks] = needs[:, ::-1].cumsum(axis=1)[:, ::-1]
    fewest = needed_after.max(axis=0)
    candidates = range(num_chunks + 1) if n_persist is None else sorted(set(n_persist))
    firsts = [first for first in candidates if first <= num_chunks]
    pairs: dict[tuple[int, int], Placement] = {}
    for number, first in enumerate(firsts):
        for count in _shard_counts(num_chunks - first, n_shard, is_first=number == 0):
            left = num_chunks - first, num_chunks - first - count
            pairs.setdefault(left, Placement(first, count, int(fewest[first]), left[0]))
    return list(pairs.values())


def _shard_counts(most: int, wanted: Iterable[int] | None, *, is_first: bool) -> Iterable[int]:
    """Values of ``n_shard`` that go with an ``n_persist``, ascending; ``is_first``: with the smallest one."""
    if wanted is not None:
        return sorted({n_shard for n_shard in wanted if n_shard <= most})
    return range(most + 1) if is_first else sorted({0, most})

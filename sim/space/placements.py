"""Which chunks of a layout have which residency: the numbers of chunks that a search tries, residency by residency.

[Note: Prefixes]
Chunks follow execution order, and residencies theirs ([Note: Order of residencies] in
``shared/layout/residencies.py``): the first ``n_persist`` chunks are persistent, the next ``n_host_stepped`` stay on
the device and are stepped on the host, the next ``n_shard`` are sharded over the devices, and the rest are offloaded.
A *prefix* is such a choice by its number, with what of offloaded chunks lies on a disk ([Note: Chunks on the disk] in
``disk_choices.py``).  Tables that depend on where chunks lie are indexed by it.

[Note: Mixtures in the space]
Every combination of the numbers would multiply the space by the number of chunks for each residency.  A number that is
named goes with every other.  Where none is named, the space has, for every choice of the residencies before, none and
all of the chunks that are left; and, where all residencies before have the smallest number that they may have, every
number, with the rest offloaded.  So of ``n_shard`` it has the pairs without shards; those without offloaded chunks, for
every ``n_persist``; and, for the smallest ``n_persist``, every ``n_shard``.  Left out is what has whole chunks on every
device and shards and offloaded chunks all at once: to shard one of the whole chunks makes room for the parts of others,
so that fewer travel from the hosts, which pays wherever collectives are cheaper than the copies that they spare.  Where
they are not, a plan that is left out may be faster; what a search proves is about the plans that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

from ...shared.compile.family import is_among
from ...shared.layout.layout import Layout
from ...shared.layout.residencies import GATHERED, ChunkResidency
from .disk_choices import ON_HOST, DiskChoice, OnDisk, distinct_choices

_Integers = npt.NDArray[np.int64]
_Numbers = TypeVar("_Numbers", npt.NDArray[np.int64], npt.NDArray[np.float64])
_Booleans = npt.NDArray[np.bool_]

COUNTED: Final = tuple(residency for residency in ChunkResidency if residency.knob is not None)
"""The residencies that a knob counts: all but the last."""


@dataclass(frozen=True, eq=False)
class Placements:
    """Shapes: P prefixes, C chunks, Q residencies."""

    counts: _Integers
    """(P, Q) chunks of every residency as knobs count them; C together."""
    is_trainable: _Booleans
    """(C,) whether a chunk is stepped; others may have another residency than the knobs say."""
    on_disk: _Integers
    """(P, 3) what of the offloaded chunks lies on a disk, as ``DiskChoice``."""

    @classmethod
    def of(
        cls,
        layout: Layout,
        counted: Iterable[Sequence[int]] | None = None,
        on_disk: Sequence[DiskChoice] | None = None,
    ) -> Self:
        """The prefixes with these numbers of chunks of the residencies ``COUNTED``, and these choices of the disk.

        By default every ``n_persist`` in turn, the rest offloaded, and nothing on a disk.
        """
        num_chunks = len(layout.chunks)
        if counted is None:
            counted = ((n_persist, *([0] * (len(COUNTED) - 1))) for n_persist in range(num_chunks + 1))
        rows = [(*counts, num_chunks - sum(counts)) for counts in counted]
        is_trainable = np.array([chunk.is_trainable for chunk in layout.chunks], dtype=np.bool_)
        on_disk = [ON_HOST] * len(rows) if on_disk is None else on_disk
        return cls(
            np.array(rows, dtype=np.int64).reshape(-1, len(ChunkResidency)),
            is_trainable,
            np.array(on_disk, dtype=np.int64).reshape(-1, len(ON_HOST)),
        )

    @property
    def all(self) -> _Integers:
        """(P,) every prefix."""
        return np.arange(len(self.counts))

    @property
    def uses_disk(self) -> bool:
        """Whether a prefix has chunks on a disk."""
        return bool(self.on_disk.any())

    def choice_of_disk(self, prefix: int) -> DiskChoice:
        """What lies on the disk."""
        return DiskChoice(*self.on_disk[prefix].tolist())

    def residency(self, prefix: int) -> _Integers:
        """(C,) the residency of every chunk."""
        by_knobs = np.repeat(np.arange(len(ChunkResidency)), self.counts[prefix])
        found: _Integers = np.where(self.is_trainable, by_knobs, _OF_FROZEN[by_knobs])
        return found

    def is_any_of(self, prefix: int, some: Iterable[ChunkResidency]) -> _Booleans:
        """(C,) whether a chunk has one of these residencies."""
        return is_among(self.residency(prefix), some)

    def num_of(self, *some: ChunkResidency) -> _Integers:
        """(P,) chunks that have one of these residencies."""
        return self.sum_of(np.ones(len(self.is_trainable), dtype=np.int64), *some)

    def sum_of(self, values: _Numbers, *some: ChunkResidency) -> _Numbers:
        """(P,) the sum of ``values`` (C,) over chunks that have one of these residencies."""
        total = np.zeros(len(self.counts), dtype=values.dtype)
        for residency in ChunkResidency:
            if residency in some or residency.of_frozen in some:
                counted = np.where(self.is_trainable, residency in some, residency.of_frozen in some)
                until = np.append(0, np.where(counted, values, 0).cumsum())
                end = self._end[:, residency]
                total = total + until[end] - until[end - self.counts[:, residency]]
        found: _Numbers = total
        return found

    def most_of(self, values: _Integers, *some: ChunkResidency) -> _Integers:
        """(P,) the largest of ``values`` (C,), none below 0, over trainable chunks of these residencies; 0 for none."""
        found = np.zeros(len(self.counts), dtype=np.int64)
        counted = np.append(np.where(self.is_trainable, values, 0), 0)
        for residency in some:
            end = self._end[:, residency]
            stretches = np.stack([end - self.counts[:, residency], end], axis=1)
            # Of a stretch without chunks ``reduceat`` gives the value where it begins.
            most = np.maximum.reduceat(counted, stretches.ravel())[::2]
            found = np.maximum(found, np.where(self.counts[:, residency] > 0, most, 0))
        return found

    @cached_property
    def _end(self) -> _Integers:
        """(P, Q) the chunk after the last one of every residency."""
        return self.counts.cumsum(axis=1)


_OF_FROZEN: Final = np.array([residency.of_frozen for residency in ChunkResidency])


# -- placements of the space -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """One choice of residencies."""

    counts: tuple[int, ...]
    """Chunks of the residencies ``COUNTED``."""
    fewest: int
    """Buffers that the section with the most gathered chunks needs."""
    num_gathered: int
    """Chunks that come to the device for stays."""
    is_persistent: bool
    """Whether every chunk is persistent."""
    on_disk: DiskChoice = ON_HOST

    @property
    def plainness(self) -> tuple[bool, bool]:
        """The less, the plainer: whether chunks lie on a disk, and whether any are neither persistent nor offloaded."""
        return self.on_disk != ON_HOST, any(self.counts[1:])


Wanted = Iterable[int] | None
"""Values of a knob; None for those that [Note: Mixtures in the space] names."""


def distinct_placements(
    layout: Layout,
    n_persist: Wanted,
    others: Mapping[ChunkResidency, Wanted] | None = None,
    on_disk: OnDisk | None = None,
) -> list[Placement]:
    """Distinct choices of residencies, fewest persistent chunks first.

    ``others``: the values of the knobs of other residencies; a residency that is not named has no chunks.
    ``on_disk``: what may lie on the disk, nothing if None.
    """
    num_chunks, others = len(layout.chunks), others or {}
    trained = np.append(0, np.cumsum([chunk.is_trainable for chunk in layout.chunks])).tolist()
    fewest = _fewest_buffers(layout)
    candidates = range(num_chunks + 1) if n_persist is None else sorted(set(n_persist))
    choices: list[tuple[tuple[int, ...], bool]] = [
        ((first,), number == 0) for number, first in enumerate(c for c in candidates if c <= num_chunks)
    ]
    for residency in COUNTED[1:]:
        wanted = others.get(residency, (0,))
        choices = [
            ((*counts, number), is_first and place == 0)
            for counts, is_first in choices
            for place, number in enumerate(_counts(num_chunks - sum(counts), wanted, is_first=is_first))
        ]
    distinct: dict[tuple[int, ...], Placement] = {}
    for counts, _ in choices:
        num_kept = sum(n for residency, n in zip(COUNTED, counts, strict=True) if residency not in GATHERED)
        ends = accumulate(counts)
        # Of a residency that frozen chunks do not have, only trainable ones count.
        effective = [
            number if residency.of_frozen is residency else trained[end] - trained[end - number]
            for residency, number, end in zip(COUNTED, counts, ends, strict=True)
        ]
        key = (num_kept, *effective[1:])
        is_persistent = num_kept == num_chunks and not any(key[1:])
        placement = Placement(counts, int(fewest[num_kept]), num_chunks - num_kept, is_persistent)
        distinct.setdefault(key, placement)
    found = list(distinct.values())
    return found if on_disk is None else _with_disk(layout, found, on_disk)


def _with_disk(layout: Layout, placements: Sequence[Placement], on_disk: OnDisk) -> list[Placement]:
    """Each of ``placements`` with every distinct choice of what lies on the disk."""
    is_trainable = [chunk.is_trainable for chunk in layout.chunks]
    choices = on_disk(layout, [placement.counts for placement in placements])
    return [
        replace(placement, on_disk=choice)
        for placement, of_placement in zip(placements, choices, strict=True)
        for choice in distinct_choices(of_placement, is_trainable)
    ]


def _fewest_buffers(layout: Layout) -> _Integers:
    """(C + 1,) buffers that the section with the most gathered chunks needs, for every number of chunks that stay."""
    num_chunks = len(layout.chunks)
    needs = np.zeros((len(layout.needed), num_chunks), dtype=np.int64)
    for step, chunks in enumerate(layout.needed):
        needs[step, list(chunks)] = 1
    # needed_after[s, p]: chunks of step s at or after position p, those left when p chunks stay.
    needed_after = np.zeros((len(needs), num_chunks + 1), dtype=np.int64)
    needed_after[:, :num_chunks] = needs[:, ::-1].cumsum(axis=1)[:, ::-1]
    fewest: _Integers = needed_after.max(axis=0)
    return fewest


def _counts(most: int, wanted: Wanted, *, is_first: bool) -> Iterable[int]:
    """Values of a knob, ascending; ``is_first``: with the smallest values of the knobs before."""
    if wanted is not None:
        return sorted({number for number in wanted if number <= most})
    return range(most + 1) if is_first else sorted({0, most})

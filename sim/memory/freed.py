"""Which tensors go, of those that are there, when a level falls by so many bytes.

[Note: Which tensors go]
Between two operations of a task tensors go whose bytes are known together, not one by one.  Sizes tell most of them
apart: a fall of 128 MiB is the one tensor of 128 MiB, not two and a half of 48.  So the fewest tensors are taken whose
bytes are those of the fall, up to four, and of equal ones the latest, as the end of a function frees them.  Where no
few have that sum, as at the end of a task, the largest go first that the fall still covers; what is then left of it is
cut off the smallest tensor that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import Final, NamedTuple

_NOTHING: Final[tuple[int, ...]] = ()
_MOST_SIZES: Final = 64
"""Distinct ones among which three or four are looked for; of more, two."""


class Freed(NamedTuple):
    """What goes."""

    places: tuple[int, ...]
    """Of the tensors that go whole."""
    cut: int | None
    """Of the tensor that goes in part: what is left of the fall is less than it has."""


@lru_cache(maxsize=8192)  # equal blocks ask the same
def freed_by(sizes: tuple[int, ...], size_bytes: int) -> Freed:
    """The tensors that go where a level falls by ``size_bytes``, which is positive and at most the sum of ``sizes``.

    ``sizes``: bytes of what is there, in the order in which it came.  See [Note: Which tensors go].
    """
    places: dict[int, list[int]] = {}
    for place in reversed(range(len(sizes))):
        if 0 < sizes[place] <= size_bytes:
            places.setdefault(sizes[place], []).append(place)
    exact = max(_exactly(places, size_bytes), key=sum, default=_NOTHING)
    return Freed(exact, None) if exact else _largest_first(sizes, places, size_bytes)


def _exactly(places: dict[int, list[int]], size_bytes: int) -> Iterable[tuple[int, ...]]:
    """The places of the fewest tensors with so many bytes together, in all ways that there are; none of more than 4."""
    if size_bytes in places:
        return [(places[size_bytes][0],)]
    for sums in _sums(places, size_bytes):
        taken = [found for of_sizes in sums if (found := _latest(places, of_sizes))]
        if taken:
            return taken
    return []


def _sums(places: dict[int, list[int]], size_bytes: int) -> Iterator[list[tuple[int, ...]]]:
    """Sizes with that sum: all pairs, then all threes, then all fours."""
    yield [(size, size_bytes - size) for size in places if 2 * size >= size_bytes and size_bytes - size in places]
    if len(places) > _MOST_SIZES:
        return
    pairs: dict[int, list[tuple[int, int]]] = {}
    for one, other in combinations_with_replacement(sorted(places), 2):
        pairs.setdefault(one + other, []).append((one, other))
    yield [(*pair, size) for size in places for pair in pairs.get(size_bytes - size, ()) if size >= pair[1]]
    yield [
        (*pair, *more)
        for total, of_total in pairs.items()
        if 2 * total <= size_bytes
        for pair in of_total
        for more in pairs.get(size_bytes - total, ())
    ]


def _latest(places: dict[int, list[int]], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The latest tensors of these sizes; none if there are too few of one."""
    taken: list[int] = []
    for size in set(sizes):
        number = sizes.count(size)
        if len(places[size]) < number:
            return _NOTHING
        taken += places[size][:number]
    return tuple(taken)


def _largest_first(sizes: tuple[int, ...], places: dict[int, list[int]], size_bytes: int) -> Freed:
    taken: list[int] = []
    for size in sorted(places, reverse=True):
        number = min(len(places[size]), size_bytes // size)
        taken += places[size][:number]
        size_bytes -= number * size
    if not size_bytes:
        return Freed(tuple(taken), None)
    gone = set(taken)
    larger = [place for place, size in enumerate(sizes) if size > size_bytes and place not in gone]
    return Freed(tuple(taken), min(larger, key=lambda place: (sizes[place], -place)))

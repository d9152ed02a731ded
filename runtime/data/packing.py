"""Packing: documents of different lengths laid into sequences of one length, none of them cut.

Best fit: each document, in the order given, goes into the fullest sequence that still has room for it; if none has, a
new one begins.  Source: D. S. Johnson, "Near-optimal bin packing algorithms" (1973), which bounds the sequences by 1.7
times the fewest possible.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], order: Sequence[int], sequence_length: int) -> list[list[int]]:
    """Sequences of documents by their places in ``lengths``, in the order in which they began.

    No length may exceed ``sequence_length``.
    """
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """(tokens that are free, minus the sequence's number), ascending: of equal ones the latest comes first."""
    for place in order:
        length = lengths[place]
        assert 0 < length <= sequence_length
        found = bisect_left(room, (length, -len(sequences)))
        if found == len(room):
            number, free = len(sequences), sequence_length
            sequences.append([])
        else:
            free, negative = room.pop(found)
            number = -negative
        sequences[number].append(place)
        if free > length:
            insort(room, (free - length, -number))
    return sequences

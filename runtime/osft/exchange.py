"""Matrices that ranks have in parts, sent to their owners whole and back.

See [Note: Owners] in ``shared/layout/owners.py``.

[Note: One exchange, two sides]
Subspaces have two sides, columns of U and rows of V, and a part of a matrix is a run of its scalars: some rows, and
pieces of the first and the last one.  For columns the ranks' products U_high^T dU over own rows could be added up; for
rows they could not: dV V_high^T needs whole rows of V_high, of which the own ones give a block and no summand.  And
neither is any use to a part that ends within a row.  Whole matrices have none of these questions, and give the bits of
one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...shared.layout.layout import aligned
from ...shared.layout.owners import SentMatrix

Send = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]], None]
"""Fills the first tensor with what all ranks have for this one, from the second, what this one has for all: uint8, with
the bytes from and for each rank."""


class Exchange:
    """What one rank sends and gets of some matrices, as its part and as an owner."""

    def __init__(self, sent: Sequence[SentMatrix], rank: int, num_ranks: int) -> None:
        """``rank`` of the ``num_ranks`` of a shard group."""
        self._sent = sent
        self._rank = rank
        self.owned = [place for place, one in enumerate(sent) if one.owner == rank]
        """The places of the matrices that this rank owns."""
        self._by_owner = [place for owner in range(num_ranks) for place, one in enumerate(sent) if one.owner == owner]
        """All places, as this rank's stretches are sent."""
        self._held = [sum(one.bytes_of(rank) for one in sent if one.owner == owner) for owner in range(num_ranks)]
        """Bytes of this rank's stretches, by owner."""
        self._owned = [sum(sent[place].bytes_of(of) for place in self.owned) for of in range(num_ranks)]
        """Bytes of the matrices that it owns, by the rank that has them."""
        self.offsets: dict[int, int] = {}
        """Where each of these lies in the owner's memory."""
        end = 0
        for place in self.owned:
            self.offsets[place] = end
            end += aligned(sent[place].size_bytes)

    def to_owners(
        self,
        own: Sequence[torch.Tensor | None],
        whole: Callable[[int], torch.Tensor],
        passing: torch.Tensor,
        send: Send,
    ) -> None:
        """Fill ``whole`` of the matrices that this rank owns from all ranks' stretches.

        ``own``: this rank's stretch of each matrix, (n,), or None for zeros.  ``whole``: by place, uint8, as long as
        the matrix.  ``passing``: memory for what is sent and what arrives, uint8.
        """
        held, arrived = self._sides(passing)
        at = 0
        for place in self._by_owner:
            size_bytes = self._sent[place].bytes_of(self._rank)
            stretch, there = own[place], held[at : at + size_bytes]
            if stretch is None:
                there.zero_()
            else:
                there.copy_(stretch.view(torch.uint8))
            at += size_bytes
        send(arrived, held, self._owned, self._held)
        for place, begin, stretch in self._arriving(arrived):
            whole(place)[begin : begin + stretch.numel()] = stretch

    def from_owners(
        self,
        whole: Callable[[int], torch.Tensor],
        take: Callable[[int, torch.Tensor], None],
        passing: torch.Tensor,
        send: Send,
    ) -> None:
        """``take`` this rank's stretch of every matrix, uint8, by its place, out of their owners' ``whole``."""
        held, arrived = self._sides(passing)
        for place, begin, stretch in self._arriving(arrived):
            stretch.copy_(whole(place)[begin : begin + stretch.numel()])
        send(held, arrived, self._held, self._owned)
        at = 0
        for place in self._by_owner:
            size_bytes = self._sent[place].bytes_of(self._rank)
            if size_bytes:
                take(place, held[at : at + size_bytes])
            at += size_bytes

    def _sides(self, passing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for this rank's stretches, and for the matrices that it owns."""
        num_held, num_owned = sum(self._held), sum(self._owned)
        return passing[:num_held], passing[num_held : num_held + num_owned]

    def _arriving(self, arrived: torch.Tensor) -> list[tuple[int, int, torch.Tensor]]:
        """Of what an owner gets, rank by rank: place, where a stretch begins in the matrix, its memory."""
        found, at = [], 0
        for rank in range(len(self._owned)):
            for place in self.owned:
                one = self._sent[place]
                size_bytes = one.bytes_of(rank)
                found.append((place, one.ends[rank] * one.item_bytes, arrived[at : at + size_bytes]))
                at += size_bytes
        return found

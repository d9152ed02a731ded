"""What ranks do together with tensors: sums of gradients over all of them, and parts that each sends to all others.

[Note: Who has a gradient]
A parameter that a rank's batch did not use has no gradient there, and zeros in its place would be stepped: weight decay
and moments would change a weight that nobody's batch has used.  So ranks first tell each other which gradients they
have.  One that is missing on some ranks counts as zeros there; one that is missing on all of them stays without.  The
same exchange tells of gradients that are not finite, before a sum spreads them over all ranks: afterwards nobody could
say any more where they came from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from ...shared.basics.errors import RanksError
from . import ordered_sums
from .failures import first_failure
from .world import World

ABSENT: Final = 0
PRESENT: Final = 1


class Collectives:
    """The collectives of one group of ranks; one thread at a time uses them, on all of these in the same order.

    Sums are added up in the order of the ranks ([Note: The order of a sum] in ``ordered_sums``).

    Each raises RanksError if a rank has failed, is gone or does not come in time, with what the first of them has said.
    """

    def __init__(
        self, world: World, group: dist.ProcessGroup, pace: Callable[[float, int], None] | None = None
    ) -> None:
        """``pace`` is called after every one with when it began and the bytes that this rank has sent in it.

        Beginnings are of ``time.perf_counter``; the bytes are those that a ring sends.
        """
        self._pace = pace
        self.world = world
        self.rank = group.rank()
        """Of this process within the group."""
        self.num_ranks = group.size()
        self._group: dist.ProcessGroup | None = group

    @property
    def shard(self) -> Collectives:
        """Of the ranks that have a chunk in parts between them: of all, unless they form groups."""
        return self

    @property
    def replica(self) -> Collectives | None:
        """Of the ranks that have the same part; None where no other rank has."""
        return None

    def who_has(self, is_present: Sequence[bool], is_finite: Sequence[bool]) -> tuple[list[bool], list[int | None]]:
        """Of each gradient: whether any rank has it, and the first rank where it is not finite, None if on none.

        The same on all ranks; see [Note: Who has a gradient].
        """
        not_finite = PRESENT + self.num_ranks - self.rank
        codes = [
            ABSENT if not there else PRESENT if finite else not_finite
            for there, finite in zip(is_present, is_finite, strict=True)
        ]
        shared = torch.tensor(codes, dtype=torch.int32)
        self._together(lambda group: dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group))
        found = shared.tolist()
        ranks = [PRESENT + self.num_ranks - code if code > PRESENT else None for code in found]
        return [code != ABSENT for code in found], ranks

    def numbers(self, own: int) -> list[int]:
        """What every rank gives, in their order."""
        every = torch.empty(self.num_ranks, dtype=torch.int64)
        self.gather(every, torch.tensor([own]))
        return list(map(int, every))

    def give(self, value: torch.Tensor) -> None:
        """The first rank's ``value`` (n,) takes the place of the others'."""
        if value.numel():
            self._together(lambda group: dist.broadcast(value, dist.get_global_rank(group, 0), group=group))

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """The sum over all ranks takes the place of each of ``tensors``, which are contiguous, (n,) or of no axis."""
        flat = [tensor.view(-1) for tensor in tensors]
        if any(tensor.numel() for tensor in flat):
            self._together(lambda group: ordered_sums.add_up(flat, group), 2 * self._sent_bytes(flat))

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """The parts of all ranks, in their order, fill ``whole`` (n,); this one's may lie at its place there."""
        if whole.numel():
            self._together(lambda group: ordered_sums.gather(whole, part, group), self._sent_bytes([whole]))

    def gather_on_first(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """The parts of all ranks, in their order, fill the first rank's ``whole`` (n,); others give theirs alone."""
        if not part.numel():
            return
        parts = list(whole.view(torch.uint8).chunk(self.num_ranks)) if self.rank == 0 else None
        self._together(lambda group: dist.gather(part.view(torch.uint8), parts, group=group, group_dst=0))

    def scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """The sum of ``whole`` (n,) over all ranks; each has its ``part`` of it, in the order of the ranks."""
        if whole.numel():
            self._together(lambda group: ordered_sums.scatter(part, whole, group), self._sent_bytes([whole]))

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, received_bytes: Sequence[int], sent_bytes: Sequence[int]
    ) -> None:
        """What every rank has for this one fills ``received`` (n,), in the order of the ranks; uint8.

        ``sent_bytes`` of ``sent`` (m,) are for each rank, ``received_bytes`` come from each; any of them may be 0.
        """
        others = sum(sent_bytes) - sent_bytes[self.rank]
        self._together(
            lambda group: dist.all_to_all_single(received, sent, list(received_bytes), list(sent_bytes), group=group),
            others,
        )

    def _sent_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """All parts but one of these, which a rank sends where it gathers or scatters them."""
        whole_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return whole_bytes * (self.num_ranks - 1) // self.num_ranks

    def _together(self, collective: Callable[[dist.ProcessGroup], Any], sent_bytes: int = 0) -> None:
        if self._group is None:
            raise RanksError(_SEPARATED)
        since_s = time.perf_counter()
        try:
            collective(self._group)
            if self.world.watch is not None and self.world.watch.has_aborted:
                raise RuntimeError("the collective was aborted")
        except RuntimeError as error:
            said = str(error)
        else:
            if self._pace is not None:
                self._pace(since_s, sent_bytes)
            return
        # Not within the handler: the error holds frames, and these the group, which could not be closed for others.
        word = first_failure(self.world.store)
        raise RanksError(word or f"{_GONE} ({said.splitlines()[0]}). See what its process says.")

    @property
    def is_closed(self) -> bool:
        """Whether the ranks were separated."""
        return self._group is None

    def close(self) -> None:
        """Let go of the group.  Idempotent."""
        self._group = None


_SEPARATED: Final = "the ranks were separated, because training has failed on one of them. Start all of them again."
_GONE: Final = "another rank has ended without a word, or did not come in time"

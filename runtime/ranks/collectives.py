"""What ranks do together with tensors: sums of gradients over all of them, and parts that each sends to all others.

[Note: Who has a gradient]
A parameter that a rank's batch did not use has no gradient there, and zeros in its place would be stepped: weight decay
and moments would change a weight that nobody's batch has used.  So ranks first tell each other which gradients they
have.  One that is missing on some ranks counts as zeros there; one that is missing on all of them stays without.  The
same exchange tells of gradients that are not finite, before a sum spreads them over all ranks: afterwards nobody could
say any more where they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from ...shared.basics.errors import RanksError
from ..model.strides import copy_strided, in_memory_order
from .world import World

ABSENT: Final = 0
PRESENT: Final = 1
# Newer torch has other names for them, and warns of these.
_ALL_GATHER: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """The collectives of one group of all ranks; one thread at a time uses them, on all ranks in the same order.

    Each raises RanksError if a rank has failed, is gone or does not come in time, with what the first of them has said.
    """

    def __init__(self, world: World, group: dist.ProcessGroup) -> None:
        self.world = world
        self.rank = world.rank
        self.num_ranks = world.num_ranks
        self._group: dist.ProcessGroup | None = group

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

    def average(self, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The mean of each gradient over all ranks takes its place: the sum, multiplied once.

        Beside each stands a tensor with the strides in which all ranks add it up.
        """
        # Autograd gives a gradient the strides of its parameter; a hook may have exchanged it on one rank.
        ordered = [
            gradient if gradient.stride() == like.stride() else copy_strided(gradient, like)
            for gradient, like in gradients
        ]
        flat = [in_memory_order(tensor) for tensor in ordered if tensor.numel()]

        def add_up(group: dist.ProcessGroup) -> None:
            # One by one, so that the order of additions depends on no layout: any plan gives the same bits.
            for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in flat]:
                work.wait()

        self._together(add_up)
        for (gradient, _), summed in zip(gradients, ordered, strict=True):
            summed.mul_(1 / self.num_ranks)
            if summed is not gradient:
                gradient.copy_(summed)

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """The parts of all ranks, in their order, fill ``whole`` (n,); this one's may lie at its place there."""
        if whole.numel():
            self._together(lambda group: _ALL_GATHER(whole, part, group=group))

    def scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """The mean of ``whole`` (n,) over all ranks; each has its ``part`` of it."""
        if whole.numel():
            self._together(lambda group: _REDUCE_SCATTER(part, whole, group=group))
            part.mul_(1 / self.num_ranks)

    def add_up(self, value: torch.Tensor) -> None:
        """The sum over all ranks takes the place of ``value``."""
        self._together(lambda group: dist.all_reduce(value, group=group))

    def _together(self, collective: Callable[[dist.ProcessGroup], Any]) -> None:
        if self._group is None:
            raise RanksError(_SEPARATED)
        try:
            collective(self._group)
        except RuntimeError as error:
            said = str(error)
        else:
            return
        # Not within the handler: the error holds frames, and these the group, which could not be closed for others.
        raise RanksError(first_failure(self.world) or f"{_GONE} ({said.splitlines()[0]}). See what its process says.")

    @property
    def is_closed(self) -> bool:
        """Whether the ranks were separated."""
        return self._group is None

    def close(self) -> None:
        """Let go of the group.  Idempotent."""
        self._group = None


_SEPARATED: Final = "the ranks were separated, because training has failed on one of them. Start all of them again."
_GONE: Final = "another rank has ended without a word, or did not come in time"
_FAILURE: Final = "failure"
_PATIENCE: Final = timedelta(seconds=5)


def tell_failure(world: World, error: BaseException) -> None:
    """Let the other ranks know what has ended training here; the first rank's word stands."""
    if isinstance(error, RanksError):
        # It was another rank's.
        return
    with suppress(RuntimeError):
        world.store.compare_set(_FAILURE, "", f"rank {world.rank}: {type(error).__name__}: {error}")


def first_failure(world: World) -> str | None:
    """What the first rank that has failed has said; None if none has within moments."""
    try:
        world.store.wait([_FAILURE], _PATIENCE)
        return f"training was ended by {world.store.get(_FAILURE).decode()}"
    except RuntimeError:
        # Nothing was said, or whoever keeps what is said is gone.
        return None

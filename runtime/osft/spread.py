"""Decompositions of several weights spread over ranks that all have them, over ``torch.distributed``.

Every rank decomposes some of the weights, and sends their factors to the others.  Weights are given away in the order
of their work, n m min(n, m), the most first, each to the rank that has the least so far; so no rank is left with what
does not divide evenly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import distributed

from ...shared.basics.errors import RanksError, WorkloadError
from ...shared.factors.sizes import factor_shapes
from .factorisation import Factors

_DONE: Final = 0
_REFUSED: Final = 1
"""The weight cannot be factorised: it has entries that are not finite."""
_FAILED: Final = 2
"""Anything else went wrong."""


def givers_of(sizes: Sequence[tuple[int, int]], num_ranks: int) -> list[int]:
    """The rank that decomposes each weight, of its outputs and inputs; the same on all ranks."""
    work = [num_out * num_in * min(num_out, num_in) for num_out, num_in in sizes]
    found, load = [0] * len(sizes), [0] * num_ranks
    for place in sorted(range(len(sizes)), key=lambda place: -work[place]):
        found[place] = load.index(min(load))
        load[found[place]] += work[place]
    return found


class SpreadFactors:
    """The factors of several weights, of which this rank makes some."""

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[tuple[int, int]],
        frozen: Sequence[int],
        group: distributed.ProcessGroup,
        decompose: Callable[[int], Factors],
        empty: Callable[[int], Factors],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Make those that are this rank's; to be called on all ranks of ``group``, for the same weights.

        Of each weight ``sizes`` are outputs and inputs, and ``frozen`` directions are kept; ``names`` are for messages.
        ``decompose`` and ``empty`` give factors of a weight by its place, the latter uninitialised.  ``on_progress`` is
        told how many of this rank's are done.  Raises WorkloadError, the same on all ranks, if ranks have other
        weights, or if one cannot be factorised, and RanksError if a rank does not come.
        """
        self._group = group
        self._empty = empty
        self._givers = givers_of(sizes, group.size())
        self._made: dict[int, Factors] = {}
        self._check_alike([(name, *size, kept) for name, size, kept in zip(names, sizes, frozen, strict=True)])
        own = [place for place, giver in enumerate(self._givers) if giver == group.rank()]
        outcome = torch.zeros(len(names), dtype=torch.int64)
        error: BaseException | None = None
        for done, place in enumerate(own):
            if on_progress is not None:
                on_progress(done, len(own))
            try:
                self._made[place] = decompose(place)
            except Exception as raised:
                # Whoever stopped here alone would leave the others waiting.
                outcome[place], error = _REFUSED if isinstance(raised, WorkloadError) else _FAILED, raised
                break
        self._together(outcome, distributed.ReduceOp.MAX)
        for place in outcome.nonzero().flatten().tolist():
            raise _refusal(names[place], int(outcome[place]), self._givers[place]) from error

    def _check_alike(self, facts_of_weights: Sequence[tuple[object, ...]]) -> None:
        """Raise WorkloadError, on all ranks, unless all say the same of their weights."""
        facts = torch.tensor([len(facts_of_weights), _checksum(facts_of_weights)])
        most, least = facts.clone(), -facts
        self._together(most, distributed.ReduceOp.MAX)
        self._together(least, distributed.ReduceOp.MAX)
        if not torch.equal(most, -least):
            raise WorkloadError(
                "ranks that factorise together have other targets, sizes or ratios. Build the same model on all of "
                "them, and name the same targets and ratio."
            )

    def of(self, place: int) -> Factors:
        """The factors of one weight, the same bits on all ranks; to be asked for on all, in the same order.

        They lie where ``decompose`` and ``empty`` put them.
        """
        giver = self._givers[place]
        found = self._made.pop(place, None) if giver == self._group.rank() else self._empty(place)
        assert found is not None
        for factor in found.named().values():
            if factor.numel():
                self._broadcast(factor, distributed.get_global_rank(self._group, giver))
        return found

    def _broadcast(self, factor: torch.Tensor, source: int) -> None:
        sent = factor.detach().to(self._device).contiguous()
        # As bytes: gloo does not send every element type.
        with _telling_of_ended_ranks():
            distributed.broadcast(sent.view(-1).view(torch.uint8), source, group=self._group)
        if sent.data_ptr() != factor.data_ptr():
            factor.copy_(sent)

    def _together(self, numbers: torch.Tensor, operation: distributed.ReduceOp.RedOpType) -> None:
        """Reduce ``numbers`` (n,) over all ranks, in place."""
        sent = numbers.to(self._device)
        with _telling_of_ended_ranks():
            distributed.all_reduce(sent, op=operation, group=self._group)
        numbers.copy_(sent)

    @property
    def _device(self) -> torch.device:
        """Where the group's collectives read and write."""
        is_nccl = distributed.get_backend(self._group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


@contextmanager
def _telling_of_ended_ranks() -> Iterator[None]:
    """Turn what a collective says of a rank that does not come into RanksError."""
    try:
        yield
    except RuntimeError as error:
        raise RanksError(
            f"another rank ended, or did not come in time, while weights were factorised: {error}. Its own message "
            f"says why."
        ) from error


def _checksum(facts: Sequence[tuple[object, ...]]) -> int:
    """A number of 63 bits that tells them apart."""
    digest = hashlib.sha256(repr(list(facts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _refusal(name: str, outcome: int, rank: int) -> WorkloadError:
    if outcome == _REFUSED:
        return WorkloadError(
            f"{name} has entries that are not finite on rank {rank} and cannot be factorised. Load its weights again."
        )
    return WorkloadError(f"{name} could not be factorised on rank {rank}. See what its process says.")


def empty_factors(num_out: int, num_in: int, frozen: int, like: torch.Tensor) -> Factors:
    """Uninitialised factors of a weight (n x m) with ``frozen`` directions apart, as ``like`` is."""
    shapes = factor_shapes(num_out, num_in, frozen).values()
    return Factors(*(torch.empty(shape, dtype=like.dtype, device=like.device) for shape in shapes))

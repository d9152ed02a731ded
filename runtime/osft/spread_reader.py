"""Factors of weights that lie dense in files, each made by one of several ranks while these fill their chunks.

[Note: Rounds]
Ranks ask for the same factors in the same order, but few at a time: whoever made them one after another would leave the
other ranks waiting.  So when a weight is asked for, it is decomposed together with those that follow it, a few for
every rank (``givers_of``).  A rank keeps the factors that it has made until each of them was asked for, and none of
other ranks: neither the dense model nor all factors lie in one place at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from .factorisation import Factors
from .saved_factors import FactorReader, SavedFactor
from .spread import givers_of

_WEIGHTS_OF_A_RANK: Final = 4
"""In one round, on average: more are shared more evenly, and more of their factors are kept meanwhile."""


class SpreadReader:
    """One rank's part of reading factors with others."""

    def __init__(
        self,
        reader: FactorReader,
        factors: Sequence[tuple[SavedFactor, torch.dtype]],
        dense: Callable[[SavedFactor], torch.Tensor],
        made: Callable[[Callable[[], Any]], Any],
        *,
        rank: int,
        num_ranks: int,
    ) -> None:
        """Of all ``factors`` in their element types, one or more of each weight, the same on all ranks.

        ``dense`` reads the weight of a factor.  ``made`` does some work on every rank, and raises on all of them what
        one raises.
        """
        weights = {factor.weight: (factor, dtype) for factor, dtype in factors}
        self._reader, self._dense, self._all_ranks = reader, dense, made
        self._rank, self._num_ranks = rank, num_ranks
        self._of_weights: Mapping[str, tuple[SavedFactor, torch.dtype]] = weights
        self._coming = list(weights)
        """Weights that nobody has asked for or decomposed."""
        self._givers: dict[str, int] = {}
        """Who keeps the factors of a weight."""
        self._kept: dict[str, Factors] = {}
        """Those that this rank has made."""
        self._asked: dict[str, set[str]] = {}
        """Which factors were asked for, of weights that somebody keeps."""

    def read(self, factor: SavedFactor) -> tuple[int, torch.Tensor | None]:
        """The rank that has the factor, and there its values.

        To be called on all ranks, in the same order.  Raises, on all, WorkloadError if a weight is not finite, and what
        reading it does.
        """
        weight = factor.weight
        if weight not in self._givers:
            self._begin_round(weight)
        giver = self._givers[weight]
        found = self._kept[weight].named()[factor.factor] if giver == self._rank else None
        self._asked.setdefault(weight, set()).add(factor.factor)
        if len(self._asked[weight]) == factor.siblings:
            del self._givers[weight], self._asked[weight]
            self._kept.pop(weight, None)
        return giver, found

    def _begin_round(self, first: str) -> None:
        """See [Note: Rounds]."""
        at = self._coming.index(first) if first in self._coming else 0
        following = [weight for weight in self._coming[at:] if weight != first]
        in_round = [first, *following[: _WEIGHTS_OF_A_RANK * self._num_ranks - 1]]
        self._coming = [weight for weight in self._coming if weight not in in_round]
        givers = dict(
            zip(in_round, givers_of([self._size(weight) for weight in in_round], self._num_ranks), strict=True)
        )
        self._givers.update(givers)
        own = [weight for weight, giver in givers.items() if giver == self._rank]
        self._all_ranks(lambda: self._kept.update({weight: self._made(weight) for weight in own}))

    def _size(self, weight: str) -> tuple[int, int]:
        """Its outputs and inputs."""
        factor, _ = self._of_weights[weight]
        first, second = factor.dense_shape
        return (second, first) if factor.is_transposed else (first, second)

    def _made(self, weight: str) -> Factors:
        factor, dtype = self._of_weights[weight]
        return self._reader.make(factor, dtype, lambda: self._dense(factor))

"""How much the lanes of one of several ranks can get done in a stretch of time at most, when they slow each other.

[Note: Collectives beside a resting compute lane]
As in [Note: Throughput bound] of ``sim/bounds/throughput.py``, weights w of lanes turn work into a time.  Where it is
known that so much of the collectives' work, a, is done while compute rests, every w has slack to offer: with

    sum over l in S of w[l] * rate[l, S] + u * rate[COLLECTIVE, S] <= 1

for every set S with collectives and without compute, sum_l w[l] * work[l] + u * a <= length of the stretch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Final, Self

import numpy as np

from ...shared.schema.schedule import Lane
from ..costs.contention import ContentionModel
from ..space.compute_table import FloatArray
from .throughput import weights_with_collectives

_SLACK: Final = 1e-9
"""Relative; covers rounding."""


@dataclass(frozen=True)
class RankWork:
    """Work within a stretch: of compute (..., K), of the other lanes (...)."""

    compute_s: FloatArray
    h2d_s: FloatArray | float = 0.0
    d2h_s: FloatArray | float = 0.0
    cpu_s: FloatArray | float = 0.0
    collective_s: FloatArray | float = 0.0
    alone_s: FloatArray | float = 0.0
    """Of collectives, the part that is guaranteed to lie where compute rests."""


@dataclass(frozen=True, eq=False)
class RankThroughput:
    """What lanes get done side by side; V vertices."""

    weights: FloatArray
    """(V, 5) of all lanes, in the order of ``Lane``."""
    alone: FloatArray
    """(V,) what each adds to that for every second of collectives that is done while compute rests."""

    @classmethod
    def of(cls, contention: ContentionModel) -> Self:
        """Good weights of a machine; see [Note: Collectives beside a resting compute lane]."""
        weights = weights_with_collectives(contention)
        lanes = tuple(Lane)
        others = [lane for lane in lanes if lane not in (Lane.COMPUTE, Lane.COLLECTIVE)]
        slack = np.full(len(weights), np.inf)
        for size in range(len(others) + 1):
            for company in combinations(others, size):
                active = contention.rates(frozenset((*company, Lane.COLLECTIVE)))
                rates = np.array([active.get(lane, 0.0) for lane in lanes])
                slack = np.minimum(slack, (1 - weights @ rates) / active[Lane.COLLECTIVE])
        return cls(weights, np.maximum(slack * (1 - _SLACK), 0.0))

    def least_s(self, work: RankWork) -> FloatArray:
        """(..., K) the least time that a stretch takes."""
        lanes = np.broadcast_arrays(work.h2d_s, work.d2h_s, work.cpu_s, work.collective_s, work.alone_s)
        others = np.stack(lanes, axis=-1) @ np.concatenate([self.weights[:, 1:], self.alone[:, None]], axis=1).T
        of_compute = self.weights[:, 0]
        counts = of_compute > 0
        least_s = others[..., ~counts].max(axis=-1, initial=0.0)[..., None]
        for vertex in np.flatnonzero(counts):
            least_s = np.maximum(least_s, of_compute[vertex] * work.compute_s + others[..., vertex, None])
        found: FloatArray = least_s
        return found

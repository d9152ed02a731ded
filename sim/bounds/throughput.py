"""How much work several lanes can get done in a stretch of time at most, when they slow each other.

[Note: Throughput bound]
Let w be weights of the lanes, none negative, with

    sum over l in S of w[l] * rate[l, S] <= 1        for every set S of lanes,

where rate[l, S] is the progress per second of lane l while exactly the lanes S are active.  Take any stretch of time,
and let t[S] be the seconds of it in which exactly S is active.  If work[l] is the seconds of lane l's tasks (as they
take alone) that lie within the stretch, the progress that lane l makes there is at least work[l], and so

    sum_l w[l] * work[l] <= sum_l w[l] * sum_{S with l} t[S] * rate[l, S]
                          = sum_S t[S] * sum_{l in S} w[l] * rate[l, S] <= sum_S t[S] = length of the stretch.

Every such w gives a lower bound of the length; the best one is a vertex of the polytope that these inequalities
describe (linear programming duality: it is the optimum of the relaxation in which lanes may overlap at will).  There
are four lanes, hence 15 sets and 4 signs, and the vertices are enumerated once per machine.

Where t seconds at least of one lane's work are known to be done while another one is active
(``sim/bounds/side_by_side.py``), or while compute rests, every w has slack to offer: with

    sum over l in S of w[l] * rate[l, S] + u * rate[lane, S] <= 1       for every set S of that sort with the lane,

the same steps give sum_l w[l] * work[l] + u * t <= length of the stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from ...shared.schema.schedule import LANES_ALONE, Lane
from ..costs.contention import ContentionModel

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_COMPUTE: Final = 0
"""The first lane."""
_AT_A_TIME: Final = len(LANES_ALONE)
_SLACK: Final = 1e-9
"""Relative: vertices may violate a constraint by rounding, and are scaled back by what they do."""


@dataclass(frozen=True, eq=False)
class SideBySide:
    """Two lanes, one of which is known to do work while the other is active."""

    lane: int
    beside: int
    least_ratio: float
    """The least rate of ``lane``, in units of the rate of ``beside``, while both are active."""
    slack: FloatArray
    """(V,) what each vertex adds for every second of the lane's work that is done while the other is active."""


@dataclass(frozen=True, eq=False)
class Throughput:
    """What lanes get done side by side; V vertices, L lanes in the order of ``Lane``."""

    weights: FloatArray
    """(V, L): for any work (..., L), ``(work @ weights.T).max(-1)`` is a lower bound of the time that it takes."""
    pairs: tuple[SideBySide, ...]
    """Every pair of the lanes beside compute."""
    resting: FloatArray
    """(V, L) what each vertex adds for every second of a lane's work that is done while compute rests."""

    @classmethod
    def of(cls, contention: ContentionModel) -> Self:
        """The best weights of a machine; see [Note: Throughput bound]."""
        lanes = contention.lanes
        rates = _rates(contention, lanes)
        weights = _vertices(rates) if len(lanes) == _AT_A_TIME else _weights_of_four_at_a_time(contention)
        beside_compute = range(_COMPUTE + 1, len(lanes))
        pairs = []
        for lane, other in combinations(beside_compute, 2):
            both = rates[(rates[:, lane] > 0) & (rates[:, other] > 0)]
            slack = _slack(weights, both, lane)
            pairs.append(SideBySide(lane, other, float((both[:, lane] / both[:, other]).min()), slack))
        resting = np.zeros_like(weights)
        for lane in beside_compute:
            resting[:, lane] = _slack(weights, rates[(rates[:, lane] > 0) & (rates[:, _COMPUTE] == 0)], lane)
        return cls(weights, tuple(pairs), resting)


def _slack(weights: FloatArray, rates: FloatArray, lane: int) -> FloatArray:
    """(V,) the largest further weight of ``lane`` in the sets of lanes with these rates."""
    slack: FloatArray = ((1 - weights @ rates.T) / rates[:, lane]).min(axis=1)
    return np.maximum(slack * (1 - _SLACK), 0.0)


def _weights_of_four_at_a_time(contention: ContentionModel) -> FloatArray:
    """(V, L) weights of all of more than four lanes, in the order of ``Lane``: the best of four lanes at a time.

    No lane is faster beside others, so weights that hold without a lane hold beside it; the vertices of all five lanes
    together are a hundred times as many.  Lanes that one rank alone without a disk does not have are among every four.
    """
    lanes = contention.lanes
    more = [lane for lane in lanes if lane not in LANES_ALONE]
    found = []
    for few in combinations(LANES_ALONE, _AT_A_TIME - len(more)):
        among = [lane for lane in lanes if lane in few or lane in more]
        vertices = _vertices(_rates(contention, among))
        weights = np.zeros((len(vertices), len(lanes)))
        weights[:, [lanes.index(lane) for lane in among]] = vertices
        found.append(weights)
    return _undominated(_distinct(np.concatenate(found)))


def _rates(contention: ContentionModel, among: Sequence[Lane]) -> FloatArray:
    """(sets, lanes) progress per second of every lane in every set of lanes."""
    num_lanes = len(among)
    sets = [lanes for size in range(1, num_lanes + 1) for lanes in combinations(range(num_lanes), size)]
    rates = np.zeros((len(sets), num_lanes))
    for row, lanes in enumerate(sets):
        active = contention.rates(frozenset(among[lane] for lane in lanes))
        for lane in lanes:
            rates[row, lane] = active[among[lane]]
    return rates


def _vertices(rates: FloatArray) -> FloatArray:
    """(V, lanes) the vertices of the polytope of all weights."""
    num_lanes = rates.shape[1]
    # A set whose rates another one matches or exceeds adds nothing, since weights are never negative.
    rates = _undominated(_distinct(rates))
    left = np.concatenate([rates, -np.eye(num_lanes)])
    right = np.concatenate([np.ones(len(rates)), np.zeros(num_lanes)])
    picks = np.array(list(combinations(range(len(left)), num_lanes)))
    matrices = left[picks]
    is_regular = np.abs(np.linalg.det(matrices)) > _SLACK
    solutions = np.linalg.solve(matrices[is_regular], right[picks[is_regular]][..., None])[..., 0]
    is_vertex = (solutions @ left.T <= right + _SLACK).all(axis=1)
    vertices = np.maximum(solutions[is_vertex], 0.0)
    vertices /= np.maximum(1.0, (vertices @ rates.T).max(axis=1, keepdims=True))
    # Work is never negative, so only vertices that none exceeds in every weight can be best.
    return _undominated(_distinct(vertices.round(12)) * (1 - _SLACK))


def _distinct(rows: FloatArray) -> FloatArray:
    """Every row once, in order; ``numpy.unique`` would import the masked arrays for it, which takes longer."""
    return np.array(sorted(set(map(tuple, rows.tolist()))))


def _undominated(rows: FloatArray) -> FloatArray:
    """The distinct rows that no other one matches or exceeds in every entry."""
    is_below: BoolArray = np.asarray(np.all(rows[:, None, :] <= rows[None, :, :], axis=2))
    np.fill_diagonal(is_below, False)
    undominated: FloatArray = rows[~np.any(is_below, axis=1)]
    return undominated

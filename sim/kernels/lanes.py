"""The compiled functions on numpy arrays.  Types, shapes and layouts are checked here; C reads what it is given.

Lanes are numbered as in ``Lane``, compute first; waits are those of [Note: Waits of lanes] in
``shared/drafts/lanes.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import byref, c_double
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .library import BoundedPlans, OrderedLanes, ReplayedLanes, library
from .library import is_available as is_available

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Waits = Mapping[tuple[int, int], IntArray]
"""By lane and another one that it waits for."""

_OUT_OF_MEMORY: Final = 1
_MOST_LANES: Final = 16
"""Of a replay: sets of lanes are bits, and a table has a row for each."""


@dataclass(frozen=True, eq=False)
class Replayable:
    """The lanes of one plan: L of them, of T tasks each."""

    lengths: tuple[int, ...]
    waits: Waits
    """(T,) of each pair."""
    seconds: tuple[FloatArray, ...]
    """(T,) of the lanes beside compute, alone on the machine."""

    @cached_property
    def _addresses(self) -> tuple[npt.NDArray[np.int64], IntArray, IntArray, list[np.ndarray | None]]:
        """Lengths, addresses of waits and of seconds, and what has to live as long."""
        lengths = np.array(self.lengths, dtype=np.int64)
        assert 0 < len(lengths) <= _MOST_LANES, "a table has a row for every set of lanes"
        assert min(self.lengths) >= 0, "lanes have lengths"
        assert self.lengths[0] > 0, "compute has tasks"
        waits = _pairs(self.waits, [(length,) for length in self.lengths])
        seconds = [_array(of, np.float64, (length,)) for of, length in zip(self.seconds, self.lengths[1:], strict=True)]
        return lengths, _addresses(waits), np.array([0, *map(_address, seconds)], dtype=np.int64), [*waits, *seconds]

    def period_s(
        self, compute_s: FloatArray, slowdowns: FloatArray, *, num_iterations: int, steady_frac: float
    ) -> float:
        """The period, NaN where the tasks are not periodic after so many iterations; [Note: Replay] in ``sim/bounds``.

        ``compute_s``: (T,) of the lane of compute.  ``slowdowns``: (2**L, L) by the set of lanes that run, as bits.
        ``steady_frac``: how far tasks may be from periodic, as a share of the period.
        """
        period_s = c_double()
        with self._replayed(compute_s, slowdowns, num_iterations, steady_frac) as replayed:
            _call("protwin_replay", replayed, byref(period_s))
        return period_s.value

    def ends_s(
        self, compute_s: FloatArray, slowdowns: FloatArray, targets: Sequence[int], *, num_iterations: int
    ) -> FloatArray:
        """(iterations, tasks of all lanes) ends of tasks, until every lane has ended as many as ``targets`` say.

        Those that have not ended then are infinite.  Else as of ``period_s``.
        """
        assert len(targets) == len(self.lengths), "every lane has a target"
        assert all(0 <= target <= num_iterations * length for target, length in zip(targets, self.lengths, strict=True))
        ends_s = np.empty((num_iterations, sum(self.lengths)))
        goals = np.array(targets, dtype=np.int64)
        with self._replayed(compute_s, slowdowns, num_iterations, 0.0) as replayed:
            _call("protwin_ends", replayed, _address(goals), _address(ends_s))
        return ends_s

    @contextmanager
    def _replayed(
        self, compute_s: FloatArray, slowdowns: FloatArray, num_iterations: int, steady_frac: float
    ) -> Iterator[ReplayedLanes]:
        """What C reads, for as long as it reads it."""
        lengths, waits, seconds, _ = self._addresses
        compute_s = _array(compute_s, np.float64, (self.lengths[0],))
        slowdowns = _array(slowdowns, np.float64, (1 << len(lengths), len(lengths)))
        assert num_iterations > 1, "a period takes two iterations"
        seconds[0] = _address(compute_s)
        arrays = (_address(of) for of in (lengths, waits, seconds, slowdowns))
        yield ReplayedLanes(len(lengths), *arrays, num_iterations, steady_frac)


def known_before(waits: Waits, lengths: Sequence[int], num_depths: int) -> tuple[IntArray, ...]:
    """By lane, (D, L, T): as of ``sim/space/lane_order.py``.  ``waits``: (D, T) of each pair."""
    assert min(lengths) >= 0, "lanes have lengths"
    known = tuple(np.empty((num_depths, len(lengths), length), dtype=np.int64) for length in lengths)
    pairs = _pairs(waits, [(num_depths, length) for length in lengths])
    arrays = np.array(lengths, dtype=np.int64), _addresses(pairs), _addresses(known)
    _call("protwin_known_before", OrderedLanes(num_depths, len(lengths), *map(_address, arrays)))
    return known


@dataclass(frozen=True, eq=False)
class LaneArrays:
    """The lanes of N plans: L of them, with room for T tasks each."""

    lengths: IntArray
    """(N, L)"""
    waits: Waits
    """(N, T) of each pair."""
    known: tuple[IntArray, ...]
    """(N, L, T) of every lane, as of ``known_before``."""
    seconds: tuple[FloatArray, ...]
    """(N, T) of the lanes beside compute."""
    num_left_out: IntArray
    """(N,) micro-batches that a program stands for and does not have."""
    repeats: IntArray
    """(N, L, 2) the first task of one that repeats, and how many it has; zeros where none is left out."""
    cuts: IntArray
    """(N, L, 2) tasks before everything of the last one, and up to the end of the second one; zeros likewise."""


@dataclass(frozen=True, eq=False)
class StretchRules:
    """How stretches and their chains are valued; V vertices, L lanes, P pairs of them."""

    weights: FloatArray
    """(V, L)"""
    pairs: IntArray
    """(P, 2) lanes, and lanes beside them."""
    ratios: FloatArray
    """(P,)"""
    slack: FloatArray
    """(P, V)"""
    spread: IntArray
    """(L,) events that are spread over every lane; over lanes of at most twice as many tasks, all of them."""
    tie_frac: float
    """By how much chains may differ, as a share of their time, and be as long."""


def least_periods_s(lanes: LaneArrays, compute_s: FloatArray, extremes: IntArray, rules: StretchRules) -> FloatArray:
    """(N, K) lower bounds of the periods: [Note: Stretches] in ``sim/bounds/stretches.py``, without its last factor.

    ``compute_s``: (N, K, T).  ``extremes``: (N, R) rows of compute, of K, whose longest chains are looked for.
    """
    num_plans, num_rows, room = compute_s.shape
    rooms = np.array([room, *(of.shape[1] for of in lanes.seconds)], dtype=np.int64)
    num_lanes, (num_vertices, _) = len(rooms), rules.weights.shape
    assert num_vertices > 0, "sets of lanes have weights"
    lengths = _array(lanes.lengths, np.int64, (num_plans, num_lanes))
    assert ((lengths >= 0) & (lengths <= rooms)).all(), "tasks are in their room"
    assert (lengths[:, 0] > 0).all(), "compute has tasks"
    extremes = _array(extremes, np.int64, (num_plans, extremes.shape[1]))
    assert ((extremes >= 0) & (extremes < num_rows)).all(), "extremes are rows"
    num_left_out = _array(lanes.num_left_out, np.int64, (num_plans,))
    repeats = _array(lanes.repeats, np.int64, (num_plans, num_lanes, 2))
    assert ((num_left_out >= 0) & (repeats.min(axis=(1, 2), initial=0) >= 0)).all(), "what is left out is counted"
    assert (repeats.sum(axis=2) <= lengths).all(), "what repeats is in its lane"
    cuts = _array(lanes.cuts, np.int64, (num_plans, num_lanes, 2))
    pairs = _array(rules.pairs, np.int64, (len(rules.pairs), 2))
    assert ((pairs > 0) & (pairs < num_lanes)).all(), "pairs are of lanes beside compute"
    spread = _array(rules.spread, np.int64, (num_lanes,))
    assert (spread >= 1).all(), "every lane has events"
    waits = _pairs(lanes.waits, [(num_plans, of_lane) for of_lane in rooms.tolist()])
    known = [
        _array(of, np.int64, (num_plans, num_lanes, of_lane))
        for of, of_lane in zip(lanes.known, rooms.tolist(), strict=True)
    ]
    rooms_beside = rooms[1:].tolist()
    seconds = [
        _array(of, np.float64, (num_plans, of_lane)) for of, of_lane in zip(lanes.seconds, rooms_beside, strict=True)
    ]
    compute_s = _array(compute_s, np.float64, compute_s.shape)
    of_plans = (
        *(rooms, lengths, _addresses(waits), _addresses(known)),
        *(np.array([0, *map(_address, seconds)], dtype=np.int64), compute_s, num_left_out, repeats, cuts, extremes),
    )
    of_machine = (
        _array(rules.weights, np.float64, (num_vertices, num_lanes)),
        pairs,
        _array(rules.ratios, np.float64, (len(pairs),)),
        _array(rules.slack, np.float64, (len(pairs), num_vertices)),
        spread,
    )
    found_s = np.empty((num_plans, num_rows))
    plans = BoundedPlans(
        *(num_plans, num_lanes, num_rows, *map(_address, of_plans)),
        *(extremes.shape[1], num_vertices, len(pairs), *map(_address, of_machine)),
        *(rules.tie_frac, _address(found_s)),
    )
    _call("protwin_least_periods", plans)
    return found_s


def _call(name: str, structure: Any, *more: Any) -> None:
    loaded = library()
    assert loaded is not None, "callers ask is_available first"
    function: Callable[..., int] = getattr(loaded, name)
    status = function(byref(structure), *more)
    if status == _OUT_OF_MEMORY:
        raise MemoryError(f"{name} found no memory")
    assert status == 0, "lanes wait for each other, or a task never ends"


def _array(of: np.ndarray, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    """The same numbers as C reads them: in order, without gaps."""
    assert of.shape == shape, f"an array of shape {of.shape} instead of {shape}"
    return np.ascontiguousarray(of, dtype=dtype)


def _pairs(waits: Waits, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray | None]:
    """By lane and other lane; ``shapes``: of each lane."""
    found: list[np.ndarray | None] = [None] * len(shapes) ** 2
    for (lane, other), of_pair in waits.items():
        found[lane * len(shapes) + other] = _array(of_pair, np.int64, shapes[lane])
    return found


def _address(of: np.ndarray) -> int:
    address: int = of.__array_interface__["data"][0]
    return address


def _addresses(arrays: Sequence[np.ndarray | None]) -> IntArray:
    """Of each array, 0 for none; what is addressed has to live as long."""
    return np.array([0 if of is None else _address(of) for of in arrays], dtype=np.int64)

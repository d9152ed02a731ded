"""The longest chain of stretches from an event to its counterpart an iteration later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from ..space.lane_programs import LeftOut
from ..space.prices import FloatArray
from ..space.space import IntArray
from .guaranteed_order import Events

TIE_FRAC: Final = 1e-11
"""Chains that differ by less, as a share of their time, are as long: rounding does not decide which one is taken."""


@dataclass(frozen=True, eq=False)
class Chains:
    """The stretches of a chain for each of N plans and R rows, at most H: (N, R, H) each."""

    begin: IntArray
    """The event that a stretch begins with."""
    gap: IntArray
    """How many events later it ends."""
    times: IntArray
    """How often the chain passes it; 0 where a chain has fewer stretches."""


@dataclass(frozen=True, eq=False)
class Longest:
    """The longest chains from each event over each number of events: N plans, R rows, E events."""

    longest_s: FloatArray
    """(N, R, E, E)"""
    back: IntArray
    """(N, R, E, E) where the last stretch of each begins, counted in events from the chain's first one on."""

    @classmethod
    def of(cls, least_s: FloatArray) -> Self:
        """Of stretches that take ``least_s``, (N, R, E, E), from each event to each of those that follow it.

        Negative infinite where there is no such stretch.
        """
        return cls(*_longest_s(least_s))

    @property
    def rest_s(self) -> FloatArray:
        """(N, R, E, E) of the chains that lead on from the end of each stretch, around to its beginning."""
        num_events = self.longest_s.shape[2]
        begin, gap = np.arange(num_events)[:, None], np.arange(1, num_events)
        rest_s = np.zeros(self.longest_s.shape)
        rest_s[..., :-1] = self.longest_s[:, :, (begin + gap) % num_events, num_events - gap - 1]
        return rest_s

    def around(self, events: Events, left_out: Sequence[LeftOut | None]) -> Chains:
        """The longest chains around an iteration, all micro-batches of it included."""
        longest_s = self.longest_s
        num_events = longest_s.shape[2]
        around_s = longest_s[..., -1]
        start = (around_s >= (1 - TIE_FRAC) * around_s.max(axis=2, keepdims=True)).argmax(axis=2)
        around_s = np.take_along_axis(longest_s[..., -1], start[..., None], axis=2)[..., 0]
        # Two legs: once around, and none.
        begins = np.stack([start, start], axis=2)  # (N, R, 2)
        gaps = np.broadcast_to([num_events, 0], begins.shape).copy()
        times = np.broadcast_to([1, 0], begins.shape).copy()
        for plan, of_plan in enumerate(left_out):
            for event, following in _repeated(events, plan, of_plan) if of_plan is not None else ():
                assert of_plan is not None
                gap, again = following - event, of_plan.num_micro_batches + 1
                once_s, rest_s = longest_s[plan, :, event, gap - 1], longest_s[plan, :, following, num_events - gap - 1]
                is_longer = rest_s + again * once_s > around_s[plan]
                around_s[plan] = np.maximum(around_s[plan], rest_s + again * once_s)
                begins[plan, is_longer] = following, event
                gaps[plan, is_longer] = num_events - gap, gap
                times[plan, is_longer] = 1, again
        return _followed(self.back, begins, gaps, times)

    def after(self, begin: IntArray, gap: IntArray) -> Chains:
        """The chains from the end of stretches around to their beginning; ``begin``, ``gap``: (N, R)."""
        num_events = self.longest_s.shape[2]
        legs = ((begin + gap) % num_events, num_events - gap, np.ones_like(gap))
        return _followed(self.back, *(of_leg[..., None] for of_leg in legs))


def _longest_s(least_s: FloatArray) -> tuple[FloatArray, IntArray]:
    """(N, R, E, E) the longest chains from each event to each that follows it, and where their last stretch begins.

    That is counted in events from the chain's first one on: 0 where the chain is one stretch.
    """
    num_events = least_s.shape[2]
    # Row e + h of an iteration and the next one, gap - 1 - h: what leads on from h events after e.
    both = np.ascontiguousarray(np.concatenate([least_s, least_s], axis=2))
    strides = (*both.strides[:3], both.strides[2] - both.strides[3])
    longest_s = least_s.copy()
    back = np.zeros(least_s.shape, dtype=np.int64)
    for gap in range(2, num_events + 1):
        begin = both.strides[2] + (gap - 2) * both.strides[3]
        onward_s = np.ndarray((*least_s.shape[:3], gap - 1), both.dtype, both, begin, strides)
        through_s = longest_s[..., : gap - 1] + onward_s
        most_s = np.maximum(longest_s[..., gap - 1], through_s.max(axis=3))
        as_long_s = (1 - TIE_FRAC) * most_s
        last = (through_s >= as_long_s[..., None]).argmax(axis=3)
        back[..., gap - 1] = np.where(longest_s[..., gap - 1] >= as_long_s, 0, last + 1)
        longest_s[..., gap - 1] = most_s
    return longest_s, back


def _repeated(events: Events, plan: int, left_out: LeftOut) -> list[tuple[int, int]]:
    """Events of a micro-batch that repeats, each with its counterpart in the next one."""
    lanes, counts = events.lane[plan].tolist(), events.count[plan].tolist()
    places = {event: place for place, event in enumerate(zip(lanes, counts, strict=True))}
    found = []
    for (lane, count), place in places.items():
        following = places.get((lane, count + left_out.num_tasks[lane]), -1)
        if left_out.begins[lane] <= count <= left_out.begins[lane] + left_out.num_tasks[lane] and following > place:
            found.append((place, following))
    return found


def _followed(back: IntArray, begins: IntArray, gaps: IntArray, times: IntArray) -> Chains:
    """The stretches of chains; the last three: (N, R, legs)."""
    num_events = back.shape[2]
    plans, rows = np.arange(back.shape[0])[:, None, None], np.arange(back.shape[1])[:, None]
    found: list[tuple[IntArray, IntArray, IntArray]] = []
    while (gaps > 0).any():
        last = np.where(gaps > 0, back[plans, rows, begins, gaps - 1], 0)
        is_there = gaps > 0
        found.append(((begins + last) % num_events, np.where(is_there, gaps - last, 1), np.where(is_there, times, 0)))
        gaps = last
    nothing = (np.zeros((*begins.shape[:2], 0), dtype=np.int64),) * 3
    return Chains(*(np.concatenate(column, axis=2) for column in zip(nothing, *found, strict=True)))

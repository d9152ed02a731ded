"""Stretches that hold all micro-batches which were left out.

[Note: Spans]
A program of few micro-batches stands for one of many ([Note: Folded iterations] in ``sim/engine/folding.py``).  Put all
tasks in the order of the schedule, in which whatever a task waits for comes first.  Those that stand before everything
of the last micro-batch wait for the same tasks with all micro-batches.  Those behind everything of the first two are
the same with all micro-batches too, counted on by what was left out, and so is whatever they wait for among themselves.
So if a task of the former is guaranteed to start after an event, it is with all micro-batches: nothing but tasks before
it leads from one to the other.  And if a task of the latter is guaranteed to have ended by an event, its counterpart
has ended by the event's.  Everything that was left out lies between these two tasks.

A *span* is a stretch that holds it, with its work.  It is a sharper bound than one stretch for each micro-batch: tasks
that may run on either side of an event count for the span, and for neither of two stretches that meet there.  A lane
for which one of the two tasks is not known counts for nothing.  The cut, the place of what was left out, may lie in the
iteration in which a span begins or in the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from ..space.lane_programs import LanePrograms
from ..space.prices import FloatArray
from ..space.space import BoolArray, IntArray
from .longest_chains import TIE_FRAC
from .stretch_work import Stretches, Sums, least_s


@dataclass(frozen=True, eq=False)
class Span:
    """Some spans of N plans: (N, ...) each."""

    begin: IntArray
    """The event."""
    gap: IntArray
    """How many events later it ends."""
    is_next: IntArray
    """1 where the cut lies in the iteration behind the one in which the span begins, else 0."""

    def of_row(self, row: int) -> Span:
        """(N,) of (N, R)."""
        return Span(self.begin[:, row], self.gap[:, row], self.is_next[:, row])


@dataclass(frozen=True, eq=False)
class Cuts:
    """What was left out of N programs of L lanes or sequences; zeros where nothing was."""

    num_micro_batches: IntArray
    """(N,)"""
    early: IntArray
    """(N, L) tasks before everything of the last micro-batch."""
    late: IntArray
    """(N, L) tasks up to the last one of the first two micro-batches."""
    begin: IntArray
    """(N, L) where one begins that repeats."""
    num_tasks: IntArray
    """(N, L) of one micro-batch."""

    @classmethod
    def of(cls, programs: LanePrograms) -> Self:
        """What the programs say."""
        found = np.zeros((4, *programs.lengths.shape), dtype=np.int64)
        num_micro_batches = np.zeros(len(programs.lengths), dtype=np.int64)
        for plan, of_plan in enumerate(programs.left_out):
            if of_plan is not None:
                num_micro_batches[plan] = of_plan.num_micro_batches
                found[:, plan] = of_plan.early, of_plan.late, of_plan.begins, of_plan.num_tasks
        return cls(num_micro_batches, *found)

    def are_between(self, lane: int, first: IntArray, stop: IntArray) -> BoolArray:
        """(N, ...) whether all that was left out of a lane lies between the tasks ``first`` and ``stop`` - 1.

        Both are counted from the beginning of the iteration of the cut.
        """
        shape = (-1, *[1] * (first.ndim - 1))
        found: BoolArray = (first <= self.early[:, lane].reshape(shape)) & (stop > self.late[:, lane].reshape(shape))
        return found

    def left_out_s(self, lane: int, sums: Sums) -> FloatArray:
        """(N, K) seconds of a lane that were left out."""
        begin = self.begin[:, lane, None]
        once_s = sums.until_s(begin + self.num_tasks[:, lane, None]) - sums.until_s(begin)
        found: FloatArray = self.num_micro_batches[:, None] * once_s[..., 0]
        return found


class Spans:
    """The spans of N plans with K rows of compute.  Shapes: R of the rows, E events, L lanes, V vertices."""

    def __init__(self, stretches: Stretches, programs: LanePrograms, weights: FloatArray) -> None:
        """``weights``: (V, L)."""
        self._stretches = stretches
        self._programs = programs
        self._weights = weights
        self._cuts = Cuts.of(programs)

    def longest(self, rows: IntArray, rest_s: FloatArray) -> Span:
        """(N, R) the spans that make the longest chains, for some rows of compute, (N, R).

        ``rest_s``: (N, R, E, E) of the chains from the end of each around to its beginning.
        """
        num_events = rest_s.shape[2]
        is_next, begin, gap = np.indices((2, num_events, num_events))
        every = Span(begin[None], gap[None] + 1, is_next[None])
        compute_s = np.take_along_axis(self._programs.compute_s, rows[..., None], axis=1)
        of_spans_s = self._least_s(compute_s, every)
        around_s = np.where(of_spans_s > 0, of_spans_s + rest_s[:, :, None], 0.0).reshape(*rows.shape, -1)
        number = (around_s >= (1 - TIE_FRAC) * around_s.max(axis=2, keepdims=True)).argmax(axis=2)
        return Span(*(of.reshape(-1)[number] for of in (every.begin, every.gap, every.is_next)))

    def with_rest_s(self, span: Span, rest_s: FloatArray) -> FloatArray:
        """(N, K) of chains with a span, (N,), and of others that lead on around it; 0 where nothing was left out."""
        found_s = self._least_s(self._programs.compute_s, span)
        return np.where((found_s > 0) & (self._cuts.num_micro_batches > 0)[:, None], found_s + rest_s, 0.0)

    def _least_s(self, compute_s: FloatArray, span: Span) -> FloatArray:
        """(N, K, ...) the least time of spans."""
        seconds = self._programs.seconds
        work_s = [self._work_s(lane + 1, of_lane[:, None], span)[:, 0] for lane, of_lane in enumerate(seconds)]
        others = np.stack(work_s, axis=-1) @ self._weights[:, 1:].T
        return least_s(self._work_s(0, compute_s, span), others, self._weights[:, 0])

    def _work_s(self, lane: int, seconds: FloatArray, span: Span) -> FloatArray:
        """(N, K, ...) seconds of a lane's tasks in spans; ``seconds``: (N, K, T)."""
        ended, after, is_ended, is_after = self._stretches.bounds(lane)
        length = self._stretches.order.lengths[:, lane]
        sums = Sums(seconds, length)
        more = [1] * (span.begin.ndim - 1)
        plan, length = np.arange(len(ended)).reshape(-1, *more), length.reshape(-1, *more)
        wraps, end = np.divmod(span.begin + span.gap, ended.shape[1])
        first = after[plan, span.begin]
        stop = np.add(ended[plan, end], wraps * length, dtype=np.int64)
        is_span = is_ended[plan, end] & is_after[plan, span.begin] & (span.is_next <= wraps)
        is_span = is_span & self._cuts.are_between(lane, first - span.is_next * length, stop - span.is_next * length)
        left_out_s = self._cuts.left_out_s(lane, sums).reshape(*seconds.shape[:2], *more)
        work_s = sums.until_s(stop) - sums.until_s(first) + left_out_s
        found: FloatArray = np.maximum(work_s, 0.0) * is_span[:, None]
        return found

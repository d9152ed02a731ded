"""What the lanes of plans do, as arrays: what bounds and replays read, whatever tasks are for.

Many programs are stacked along one axis.  Tasks beyond the end of a shorter lane wait for nothing and take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...shared.drafts.lanes import NOTHING
from .prices import FloatArray
from .space import IntArray


@dataclass(frozen=True)
class LeftOut:
    """Micro-batches that a program stands for and does not have: each is like one of those that it has.

    From one that repeats the one before to the next, the tasks of every lane have the same waits, counted on.
    """

    num_micro_batches: int
    begins: tuple[int, ...]
    """By lane, the first task of one that repeats; its tasks and those of the next one lie within the iteration."""
    num_tasks: tuple[int, ...]
    """By lane, of one micro-batch."""
    early: tuple[int, ...]
    """By lane, how many tasks stand before everything of the last micro-batch."""
    late: tuple[int, ...]
    """By lane, how many stand up to the last task of the first two micro-batches."""


@dataclass(frozen=True, eq=False)
class LanePrograms:
    """What the lanes of N plans do; each plan has K rows of compute.

    A lane whose order is open consists of several sequences, each of which keeps its order; they are numbered like
    lanes.  Shapes: L lanes or sequences, compute first; T tasks of the longest program of a lane.
    """

    lengths: IntArray
    """(N, L) tasks of an iteration."""
    waits: dict[tuple[int, int], IntArray]
    """By lane and other lane, (N, T): how many of the other lane's tasks must have ended before each task starts,
    counted within the iteration; below 1 for tasks of the iterations before, ``NOTHING`` for no wait."""
    known: tuple[IntArray, ...]
    """By lane, (N, L, T): tasks of every lane that are guaranteed to have ended before each task starts, counted so."""
    compute_s: FloatArray
    """(N, K, T) seconds of compute, alone on the machine."""
    seconds: tuple[FloatArray, ...]
    """(N, T) of each of the other lanes."""
    left_out: tuple[LeftOut | None, ...]
    """(N,)"""
    lane_of: tuple[int, ...]
    """(L,) the lane of every sequence; of lanes themselves, their numbers."""

    @classmethod
    def stacked(cls, programs: Sequence[LanePrograms]) -> LanePrograms:
        """Several of them as one, which have the same sequences.

        Of fewer rows of compute than others have, the last one is repeated.
        """
        if len(programs) == 1:
            return programs[0]
        num_rows = max(one.compute_s.shape[1] for one in programs)
        compute = [
            np.pad(one.compute_s, ((0, 0), (0, num_rows - one.compute_s.shape[1]), (0, 0)), "edge") for one in programs
        ]
        pairs = sorted({pair for one in programs for pair in one.waits})
        num_tasks = np.concatenate([one.lengths for one in programs]).max(axis=0).tolist()
        return cls(
            lengths=np.concatenate([one.lengths for one in programs]),
            waits={
                pair: _joined([one.waits_of(pair) for one in programs], num_tasks[pair[0]], NOTHING) for pair in pairs
            },
            known=tuple(
                _joined([one.known[lane] for one in programs], num_tasks[lane], None) for lane in range(len(num_tasks))
            ),
            compute_s=_joined(compute, num_tasks[0], 0.0),
            seconds=tuple(
                _joined([one.seconds[lane] for one in programs], num_tasks[lane + 1], 0.0)
                for lane in range(len(num_tasks) - 1)
            ),
            left_out=tuple(of_plan for one in programs for of_plan in one.left_out),
            lane_of=programs[0].lane_of,
        )

    def waits_of(self, pair: tuple[int, int]) -> IntArray:
        """(N, T) of a lane for another one."""
        num_tasks = self.compute_s.shape[2] if pair[0] == 0 else self.seconds[pair[0] - 1].shape[1]
        found = self.waits.get(pair)
        return np.full((len(self.lengths), num_tasks), NOTHING) if found is None else found


def _joined(parts: Sequence[np.ndarray], num_tasks: int, fill: float | None) -> np.ndarray:
    """The parts after each other, each with so many tasks; without ``fill``, the last one is repeated."""
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:-1], num_tasks)
    joined = np.full(shape, 0 if fill is None else fill, dtype=parts[0].dtype)
    begin = 0
    for part in parts:
        joined[begin : begin + len(part), ..., : part.shape[-1]] = part
        if fill is None and part.shape[-1]:
            joined[begin : begin + len(part), ..., part.shape[-1] :] = part[..., -1:]
        begin += len(part)
    return joined

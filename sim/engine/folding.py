"""Iterations of many equal micro-batches, known from an iteration of few.

[Note: Folded iterations]
From the third micro-batch to the last but one, the programs of all lanes repeat: the tasks of a lane's next micro-batch
are those of its last one, with the same waits, counted on.  So once the lanes are where they were one micro-batch
before, relative to the clock, they go on like that for as many micro-batches as there are, and end alike.  An iteration
of m micro-batches is then simulated as one of k < m, the *kept* ones, and the m - k left out each add the same time.

The lanes are known to be where they were if, over the whole length of a micro-batch and for every task that then runs
or comes next, each end follows the end one micro-batch before by the same time: the set of running tasks, and so the
progress of each, was then the same throughout.  That is looked at in the last micro-batches before the last one,
in every iteration that is simulated.  Where it does not hold, nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

KEPT_MICRO_BATCHES: Final = 6
"""Micro-batches that are simulated of more."""
MORE_KEPT: Final = 4
"""Times as many micro-batches are simulated where the least that are kept do not settle."""
_TOLERANCE_FRAC: Final = 1e-10
"""How far, as a share of a micro-batch's period, ends may be from repeating."""

Ends = NDArray[np.float64]


def kept_micro_batches(micro_batches: int, micro_steps: int, prefetch_depth: int) -> int:
    """Micro-batches to simulate in place of so many: all of them where copies are issued more than one ahead.

    ``micro_steps``: steps of one micro-batch.
    """
    reaches_far = prefetch_depth + 1 > micro_steps
    return micro_batches if reaches_far else min(micro_batches, KEPT_MICRO_BATCHES)


@dataclass(frozen=True)
class Repeating:
    """Where the program of every lane repeats."""

    num_tasks: tuple[int, ...]
    """Of one micro-batch, by lane."""
    mark: int
    """The place in the first lane, compute, of the task by which micro-batches are told apart: of the third from
    last."""
    until: tuple[int, ...] | None = None
    """By lane, up to where tasks are those of one micro-batch before, counted on: the last micro-batch has tasks of its
    own between them.  None where nobody asks which tasks they are."""


@dataclass(frozen=True, eq=False)
class Folds:
    """Several iterations, each with a place where it may be continued."""

    cuts: tuple[int, ...]
    """By lane, the first task that comes after what is left out."""
    begins_s: tuple[float, ...]
    """By iteration, when the micro-batch begins that is left out so many times."""
    periods_s: tuple[float, ...]
    """By iteration, how long it takes."""

    def shifts_s(self, num_left_out: int, iteration: int, lengths: Sequence[int]) -> Ends:
        """How much later every task of an iteration runs, lane after lane, with so many micro-batches more."""
        before_s = num_left_out * sum(self.periods_s[:iteration])
        own_s = num_left_out * self.periods_s[iteration]
        return np.concatenate(
            [
                np.where(np.arange(length) < cut, before_s, before_s + own_s)
                for length, cut in zip(lengths, self.cuts, strict=True)
            ]
        )


def find_folds(ends_s: Sequence[Sequence[Ends]], repeating: Repeating) -> Folds | None:
    """Where iterations may be continued, None if one of them is not yet periodic; see [Note: Folded iterations].

    ``ends_s``: by iteration and lane, the ends of its tasks in their order, compute first.
    """
    marks, windows = [], []
    per_compute = repeating.num_tasks[0]
    for lanes in ends_s:
        begin_s = float(lanes[0][repeating.mark])
        end_s = float(lanes[0][repeating.mark + per_compute])
        marks.append((begin_s, end_s - begin_s))
        window = _repeats(lanes, repeating.num_tasks, begin_s, end_s) if end_s > begin_s else None
        if window is None:
            return None
        windows.append(window)
    # Tasks that take no time have ended when those before them have, and may be of the last micro-batch.
    of_lanes = zip(windows[-1], repeating.num_tasks, repeating.until or (), strict=repeating.until is not None)
    if any(length and cut + length > until for cut, length, until in of_lanes):
        return None
    # One cut for all iterations, so that their tasks have counterparts.
    cuts = windows[-1]
    for lanes, (begin_s, period_s) in zip(ends_s, marks, strict=True):
        for of_lane, cut in zip(lanes, cuts, strict=True):
            if cut > 0 and of_lane[cut - 1] > begin_s + period_s:
                return None
            if cut < len(of_lane) and of_lane[cut] <= begin_s - period_s:
                return None
    return Folds(cuts, tuple(begin_s for begin_s, _ in marks), tuple(period_s for _, period_s in marks))


def settled_period_s(ends_s: Sequence[Sequence[Ends]], repeating: Repeating, num_left_out: int) -> float | None:
    """The period of an iteration with so many micro-batches more, None if two iterations do not tell.

    Where the lanes are in the second iteration where they were in the first, relative to the clock, all that follows
    is alike: this is the period of every iteration from there on.  ``ends_s``: of the first iteration, and of the
    second as far as it is known, infinite from there on.
    """
    folds = find_folds(ends_s, repeating)
    if folds is None:
        return None
    begins_s, period_s = folds.begins_s, folds.periods_s[0]
    for lanes in zip(*ends_s, strict=True):
        one, other = (
            of_lane[np.searchsorted(of_lane, begin_s - period_s, side="right") :] - begin_s
            for of_lane, begin_s in zip(lanes, begins_s, strict=True)
        )
        stop = np.searchsorted(one, 0.0, side="right") + 1
        if len(one) != len(other) or not np.all(np.abs(one[:stop] - other[:stop]) <= _TOLERANCE_FRAC * period_s):
            return None
    return begins_s[1] - begins_s[0] + num_left_out * period_s


def _repeats(lanes: Sequence[Ends], num_tasks: Sequence[int], begin_s: float, end_s: float) -> tuple[int, ...] | None:
    """By lane, the tasks that have ended at ``begin_s``, if the time up to ``end_s`` repeats the time before."""
    period_s = end_s - begin_s
    cuts = []
    for of_lane, per_micro_batch in zip(lanes, num_tasks, strict=True):
        first, after, last = np.searchsorted(of_lane, (begin_s - period_s, begin_s, end_s), side="right").tolist()
        if per_micro_batch == 0:
            # Nothing of the lane may fall into what is repeated.
            if last > first:
                return None
        elif len(of_lane):
            stop = after + 1
            if first == 0 or stop + per_micro_batch > len(of_lane):
                return None
            shifts_s = of_lane[first + per_micro_batch : stop + per_micro_batch] - of_lane[first:stop]
            if not np.all(np.abs(shifts_s - period_s) <= _TOLERANCE_FRAC * period_s):
                return None
        cuts.append(after)
    return tuple(cuts)

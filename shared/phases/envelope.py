"""What phases that follow each other take at most, where their memory depends on values.

[Note: Envelope]
The phases of a block in one activation mode follow each other, with other blocks in between: forward and backward, or
forward, recomputation and backward.  Several runs of them differ by the values that the block was given.  Of each run
the levels are known relative to the level before the forward, without gradients, which have room of their own.  The
envelope is the chain of phases whose levels are, at the end of each phase and within it, the highest of all runs.  So
whatever one block does in one of these runs, the level of the envelope is not below it, and what is left when all have
ended is left in one of the runs: nothing adds up from block to block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from .phase import Phase

Curve = tuple[tuple[float, int], ...]


def envelope(runs: Sequence[Sequence[Phase]], *, least_after_first: int | None = None) -> list[Phase]:
    """The chain whose memory is the highest of ``runs`` ([Note: Envelope]); all else is the first run's.

    ``least_after_first``: bytes that the first phase leaves at least.
    """
    states_gradients = [all(chain[place].gradient_bytes is not None for chain in runs) for place in range(len(runs[0]))]
    after = [list(accumulate(_own_bytes(phase) for phase in chain)) for chain in runs]
    most_after = [max(levels) for levels in zip(*after, strict=True)]
    if least_after_first is not None:
        most_after[0] = max(most_after[0], least_after_first)
    found = []
    for place, phase in enumerate(runs[0]):
        start = most_after[place - 1] if place else 0
        more = [(levels[place - 1] if place else 0) - start for levels in after]
        phases = [chain[place] for chain in runs]
        gradient_bytes = max(one.stated_gradient_bytes for one in phases)
        found.append(
            Phase(
                operations=phase.operations,
                net_bytes=most_after[place] - start + gradient_bytes,
                gradient_bytes=gradient_bytes if states_gradients[place] else None,
                curve=_highest([_raised(one.curve, by) for one, by in zip(phases, more, strict=True)]),
                adding_curve=_highest([_raised(one.adding_curve, by) for one, by in zip(phases, more, strict=True)]),
                looked_up_bytes=phase.looked_up_bytes,
                measured_s=phase.measured_s,
            )
        )
    return found


def _own_bytes(phase: Phase) -> int:
    return phase.net_bytes - phase.stated_gradient_bytes


def _raised(curve: Curve, more_bytes: int) -> Curve:
    return tuple((end, level + more_bytes) for end, level in curve)


def _highest(curves: Sequence[Curve]) -> Curve:
    """The highest of ``curves`` at every moment.

    Moments are fractions of a phase's time, which differ between runs: only the highest level is sure to be met.
    """
    curves = [curve for curve in curves if curve]
    found: list[tuple[float, int]] = []
    for end in sorted({end for curve in curves for end, _ in curve}):
        level = max(next(level for until, level in curve if until >= end) for curve in curves)
        if found and found[-1][1] == level:
            found.pop()
        found.append((end, level))
    return tuple(found)

"""Where ranks met: their iterations on one clock, and how long each waited in a collective for the last to come.

[Note: Clocks of ranks]
Processes of one machine share its monotonic clock.  Clocks of two machines have nothing in common but what ranks did
together: a collective ends on all its ranks at about one time.  So the ends of all collectives of an iteration tell how
far two clocks are apart, as the median of their differences; over many iterations a straight line is laid through
these, since clocks run at slightly different rates.  The ends differ by what the collective library needs to tell its
last message, so that waits much shorter than a collective tell nothing between machines.

[Note: Typical iterations of ranks]
All ranks take their times from the same iterations: those that nobody metered on any rank, and of these the middle half
by their mean period.  A rank that waits for another one waits for what that one did in the same iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Final

import numpy as np
import numpy.typing as npt

from ...shared.basics.errors import ProtwinError
from ...shared.schema.schedule import Lane, RankAxis, Schedule
from .iteration_memory import Floats, Ints

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_LEAST_FOR_RATES: Final = 8
"""Iterations from which on the rates of clocks are told apart; below, clocks are a constant apart."""


@dataclass(frozen=True, eq=False)
class RankStamps:
    """When one rank began its timed iterations, and did each of the C collectives of the schedule in them."""

    clock: str
    """Names the clock of all stamps: one of the machine."""
    iterations: Ints
    """(I,), ascending: their numbers."""
    begins_s: Floats
    """(I,)."""
    periods_s: Floats
    """(I,): from each begin to that of the next iteration."""
    starts_s: Floats
    """(I, C): when this rank came to a collective."""
    ends_s: Floats
    """(I, C)."""

    def of(self, iterations: Ints) -> RankStamps:
        """Those of some of the iterations."""
        rows = np.searchsorted(self.iterations, iterations)
        return RankStamps(
            self.clock,
            iterations,
            self.begins_s[rows],
            self.periods_s[rows],
            self.starts_s[rows],
            self.ends_s[rows],
        )


@dataclass(frozen=True, eq=False)
class Meetings:
    """The iterations that a record of all ranks takes its times from; R ranks, T typical iterations, C collectives."""

    iterations: Ints
    """(I,): those that count on all ranks."""
    typical: Ints
    """(T,): of these, by number."""
    begins_s: Floats
    """(R, T): when each rank began them, on the clock of rank 0."""
    came_s: Floats
    """(R, T, C): when the last of its ranks came to a collective, on each rank's own clock; never after its end."""
    waited_s: Floats
    """(R, C): mean seconds that each rank waited until then."""

    @property
    def slowest(self) -> int:
        """The rank that waits least for the others; the first of several."""
        return int(np.argmin(self.waited_s.sum(axis=1)))


def clock_name() -> str:
    """The machine whose clock ``time.perf_counter`` reads here: processes of equal names share it."""
    return _BOOT.read_text().strip() if _BOOT.exists() else gethostname()


def groups_of(schedule: Schedule) -> npt.NDArray[np.int64]:
    """(R, C): the number of the group in which each rank does each collective of the schedule, by its axis."""
    num_ranks = schedule.num_ranks
    ranks, shard_ranks = np.arange(num_ranks), schedule.shard_ranks or num_ranks
    numbers = {
        RankAxis.WORLD: 0 * ranks,
        RankAxis.SHARD: ranks // shard_ranks,
        RankAxis.REPLICA: ranks % shard_ranks,
        RankAxis.SEQUENCE: ranks // schedule.sequence_ranks,
    }
    columns = [numbers[schedule.tasks[task].axis] for task in schedule.lanes[Lane.COLLECTIVE]]
    return np.stack(columns, axis=1) if columns else np.zeros((num_ranks, 0), dtype=np.int64)


def meetings_of(stamps: Sequence[RankStamps], groups: npt.NDArray[np.int64]) -> Meetings:
    """Lay the stamps of all ranks over each other; see the notes above.

    ``groups`` (R, C): ranks of equal numbers meet in a collective.  Raises ProtwinError if no iteration counts on all
    ranks.
    """
    common = stamps[0].iterations
    for one in stamps[1:]:
        common = np.intersect1d(common, one.iterations)
    if not len(common):
        raise ProtwinError(
            "no iteration counts on all ranks: each was metered, or followed a pause, on one of them. Train on, and "
            "pass the same meter_every on all ranks."
        )
    known = [one.of(common) for one in stamps]
    offsets_s = _offsets_s(known, groups)
    starts_s = np.stack([one.starts_s for one in known]) + offsets_s[:, :, None]
    last_s = _last_to_come(starts_s, groups)
    ends_s = np.stack([one.ends_s for one in known]) + offsets_s[:, :, None]
    # A rank that had nothing to wait for has ended before others came: parts without elements are not exchanged.
    came_s = np.maximum(np.minimum(last_s, ends_s), starts_s)
    rows = _middle_half(np.mean([one.periods_s for one in known], axis=0))
    begins_s = np.stack([one.begins_s for one in known]) + offsets_s
    return Meetings(
        iterations=common,
        typical=common[rows],
        begins_s=begins_s[:, rows],
        came_s=(came_s - offsets_s[:, :, None])[:, rows],
        waited_s=(came_s - starts_s)[:, rows].mean(axis=1),
    )


def _last_to_come(starts_s: Floats, groups: npt.NDArray[np.int64]) -> Floats:
    """(R, I, C): the latest start of all ranks that meet."""
    last_s = np.empty_like(starts_s)
    for column in range(groups.shape[1]):
        for group in np.unique(groups[:, column]):
            members = groups[:, column] == group
            last_s[members, :, column] = starts_s[members, :, column].max(axis=0)
    return last_s


def _offsets_s(stamps: Sequence[RankStamps], groups: npt.NDArray[np.int64]) -> Floats:
    """(R, I): what to add to a rank's stamps for the clock of rank 0; see [Note: Clocks of ranks]."""
    clocks = [one.clock for one in stamps]
    ends_s = np.stack([one.ends_s for one in stamps])
    offsets_s = np.zeros(ends_s.shape[:2])
    known = {clocks[0]}
    while unknown := [clock for clock in dict.fromkeys(clocks) if clock not in known]:
        is_known = np.array([clock in known for clock in clocks])
        found = {clock: _apart_s(ends_s, offsets_s, is_known, np.array(clocks) == clock, groups) for clock in unknown}
        met = {clock: apart_s for clock, apart_s in found.items() if apart_s is not None}
        if not met:
            raise ProtwinError(
                "the clocks of some machines cannot be compared: none of their ranks meets one of the others in a "
                "collective. Record a plan whose ranks exchange gradients."
            )
        for clock, apart_s in met.items():
            line = _straight(stamps[0].begins_s, apart_s)
            offsets_s[np.array(clocks) == clock] = line
            known.add(clock)
    return offsets_s


def _apart_s(
    ends_s: Floats,
    offsets_s: Floats,
    is_known: npt.NDArray[np.bool_],
    is_asked: npt.NDArray[np.bool_],
    groups: npt.NDArray[np.int64],
) -> Floats | None:
    """(I,): how much earlier one clock is than rank 0's; None where its ranks meet none whose clock is known."""
    differences_s = []
    for column in range(groups.shape[1]):
        for group in np.unique(groups[is_asked, column]):
            members = groups[:, column] == group
            if not (members & is_known).any():
                continue
            reference_s = (ends_s[:, :, column] + offsets_s)[members & is_known].mean(axis=0)
            differences_s.append(reference_s - ends_s[members & is_asked, :, column])
    return np.median(np.concatenate(differences_s), axis=0) if differences_s else None


def _straight(times_s: Floats, values_s: Floats) -> Floats:
    """(I,): the line through ``values_s`` at ``times_s``; their median where they are few."""
    if len(values_s) < _LEAST_FOR_RATES:
        return np.full_like(values_s, np.median(values_s))
    middle_s = times_s.mean()
    slope, constant_s = np.polyfit(times_s - middle_s, values_s, 1)
    line: Floats = constant_s + slope * (times_s - middle_s)
    return line


def _middle_half(periods_s: Floats) -> Ints:
    """Rows of the iterations without the fastest quarter and the slowest, in their order; never none."""
    order = np.argsort(periods_s, kind="stable")
    cut = len(order) // 4
    return np.sort(order[cut : len(order) - cut])

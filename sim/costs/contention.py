"""How much lanes slow each other down while they run side by side.

[Note: Sets of lanes]
A slowdown belongs to a lane within a set of active lanes.  Sets come from three sources, the better first:

1. Measured: the calibration names the set.
2. Composed: the other lanes of the set are split into groups, each of which was measured together with the lane, and
   the slowdowns multiply.  Of all such splits the one with the fewest groups counts (it leaves the least to the
   assumption that groups slow the lane independently), and of several the slowest.
3. The resource model, for pairs that nobody measured; it stands in for a measurement of that pair.  On a machine
   that nobody measured at all it gives every set.  Where the machine's collectives were measured beside compute, the
   model's slowdowns of both lanes, in every set that has them, are multiplied by what was measured over what the model
   gives for the two alone.

Measured sets have AdamW on the lane of CPU Adam.  Under another optimizer each slowdown is multiplied by what the
resource model gives for that optimizer over what it gives for AdamW, and is at least 1.

Whatever the source, a lane in more company is never faster: measured sets are raised to their measured subsets where
noise has put them below, and the others are kept between their subsets and the measured sets that contain them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from math import prod
from types import MappingProxyType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
from ...shared.schema.schedule import Lane, lanes_of
from .fabrics import collectives_beside_compute
from .fair_share import fair_shares
from .lane_demands import Resource, lane_demands

LaneSet = frozenset[Lane]
Slowdowns = Mapping[Lane, float]


@lru_cache(maxsize=8)
def _sets_of(lanes: tuple[Lane, ...]) -> tuple[LaneSet, ...]:
    """Every set of ``lanes``; smaller sets first."""
    return tuple(frozenset(chosen) for size in range(1, len(lanes) + 1) for chosen in combinations(lanes, size))


_WHOLE: Final = dict.fromkeys(Resource, 1.0)
"""Demands are shares of a resource, by definition."""


@dataclass(frozen=True)
class ContentionModel:
    """The slowdown of every lane in every set of lanes: of one rank alone, or of one of several."""

    slowdowns: Mapping[LaneSet, Slowdowns]

    @classmethod
    def of(
        cls,
        hardware: Hardware,
        calibration: Calibration | None = None,
        *,
        num_ranks: int = 1,
        optimizer: Optimizer = Optimizer.ADAMW,
        has_disk: bool = False,
    ) -> Self:
        """What is measured of a machine, completed by what its data sheet implies, with this optimizer on the host.

        ``has_disk``: with the lane of a disk that chunks lie on.  Raises HardwareError if the machine does not have the
        ranks, or the disk.
        """
        modelled = _probed(_from_resources(hardware, num_ranks, optimizer, has_disk), hardware, num_ranks)
        if calibration is None:
            return cls(_freeze(modelled))
        usual = (
            modelled
            if optimizer is Optimizer.ADAMW
            else _from_resources(hardware, num_ranks, Optimizer.ADAMW, has_disk)
        )
        ratios = {
            lanes: {lane: slowdown / usual[lanes][lane] for lane, slowdown in slowdowns.items()}
            for lanes, slowdowns in modelled.items()
        }
        measured = _measured(calibration, ratios)
        return cls(_freeze(_complete(measured, modelled) if measured else modelled))

    @classmethod
    def for_plan(
        cls, plan: Plan, hardware: Hardware, calibration: Calibration | None = None, *, num_stages: int = 1
    ) -> Self:
        """``of`` for the ranks, the optimizer and the disk that ``plan`` has, one stage of so many."""
        num_ranks, has_disk = plan.num_ranks * num_stages, plan.n_disk_state > 0
        return cls.of(hardware, calibration, num_ranks=num_ranks, optimizer=plan.optimizer, has_disk=has_disk)

    @classmethod
    def none(cls, *, num_ranks: int = 1, has_disk: bool = False) -> Self:
        """Lanes that do not disturb each other."""
        among = lanes_of(num_ranks, has_disk=has_disk)
        return cls(_freeze({lanes: dict.fromkeys(lanes, 1.0) for lanes in _sets_of(among)}))

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All of them, in their order."""
        among = max(self.slowdowns, key=len)
        return tuple(lane for lane in Lane if lane in among)

    def exceeding(self, times: float) -> Self:
        """The same with so many times the excess over 1 of every slowdown."""
        if times == 1:
            return self
        return type(self)(
            _freeze(
                {
                    lanes: {lane: 1 + times * (slowdown - 1) for lane, slowdown in slowdowns.items()}
                    for lanes, slowdowns in self.slowdowns.items()
                }
            )
        )

    def table(self) -> NDArray[np.float64]:
        """(2**L, L) the slowdown of every lane for every set of running lanes, as bits; 1 for lanes outside the set."""
        among = self.lanes
        table = np.ones((1 << len(among), len(among)))
        for mask in range(len(table)):
            lanes = [lane for lane in range(len(among)) if mask >> lane & 1]
            rates = self.rates(frozenset(among[lane] for lane in lanes))
            for lane in lanes:
                table[mask, lane] = 1 / rates[among[lane]]
        return table

    def rates(self, active: LaneSet) -> Slowdowns:
        """Progress per second of each active lane, in (0, 1]."""
        return self._rates[active]

    @cached_property
    def _rates(self) -> dict[LaneSet, Slowdowns]:
        rates = {
            lanes: MappingProxyType({lane: 1 / slowdown for lane, slowdown in slowdowns.items()})
            for lanes, slowdowns in self.slowdowns.items()
        }
        return {frozenset(): MappingProxyType({}), **rates}


def _freeze(slowdowns: Mapping[LaneSet, dict[Lane, float]]) -> Mapping[LaneSet, Slowdowns]:
    return MappingProxyType(
        {lanes: MappingProxyType({lane: values[lane] for lane in sorted(lanes)}) for lanes, values in slowdowns.items()}
    )


# -- from the data sheet ---------------------------------------------------------------------------------------------


def _from_resources(
    hardware: Hardware, num_ranks: int, optimizer: Optimizer, has_disk: bool
) -> dict[LaneSet, dict[Lane, float]]:
    """The slowdowns that follow from what lanes draw on, shared fairly (``lane_demands.py``, ``fair_share.py``).

    Processors are not shared: compute has what collectives leave of them ([Note: Compute beside collectives]).

    Fair sharing can let a lane gain beside other lanes: a third lane may hold up the one that it shares with.  The
    search's bounds do not need it, but measured sets never show it beyond their noise, so slowdowns are raised to
    those of smaller sets here as well.
    """
    demands = lane_demands(hardware, num_ranks, optimizer, has_disk=has_disk)
    collective = demands.get(Lane.COLLECTIVE, {})
    left = (1 - collective.pop(Resource.PROCESSORS, 0.0)) / (1 + collective.get(Resource.DEVICE_MEMORY, 0.0))
    slowdowns: dict[LaneSet, dict[Lane, float]] = {}
    for lanes in _sets_of(lanes_of(num_ranks, has_disk=has_disk)):
        ordered = sorted(lanes)
        capacities = _WHOLE | {Resource.PROCESSORS: left} if Lane.COLLECTIVE in lanes else _WHOLE
        shares = fair_shares([demands[lane] for lane in ordered], capacities)
        slowdowns[lanes] = {
            lane: max([1 / share, *(slowdowns[lanes - {other}][lane] for other in ordered if other is not lane)])
            for lane, share in zip(ordered, shares, strict=True)
        }
    return slowdowns


def _probed(
    modelled: dict[LaneSet, dict[Lane, float]], hardware: Hardware, num_ranks: int
) -> dict[LaneSet, dict[Lane, float]]:
    """``modelled`` with what the machine's collectives and compute did side by side when they were measured."""
    beside = collectives_beside_compute(hardware, num_ranks)
    if beside is None:
        return modelled
    pair = frozenset({Lane.COMPUTE, Lane.COLLECTIVE})
    ratios = {lane: beside[lane] / modelled[pair][lane] for lane in pair}
    found: dict[LaneSet, dict[Lane, float]] = {}
    for lanes, slowdowns in modelled.items():
        scaled = {
            lane: slowdown * (ratios.get(lane, 1.0) if pair <= lanes else 1.0) for lane, slowdown in slowdowns.items()
        }
        found[lanes] = {
            lane: max([1.0, slowdown, *(found[lanes - {other}][lane] for other in lanes if other is not lane)])
            for lane, slowdown in scaled.items()
        }
    return found


# -- from measurements -----------------------------------------------------------------------------------------------


def _measured(
    calibration: Calibration, ratios: Mapping[LaneSet, Mapping[Lane, float]]
) -> dict[LaneSet, dict[Lane, float]]:
    """The measured sets of lanes, each raised to its measured subsets where it lies below them.

    ``ratios``: what slowdowns of a set are multiplied by; sets that it does not name have lanes that are not there.
    """
    found = {
        lanes: {
            lane: max(1.0, slowdown * ratios[lanes][lane])
            for lane, slowdown in zip(entry.lanes, entry.slowdowns, strict=True)
        }
        for entry in calibration.contention
        if (lanes := frozenset(entry.lanes)) in ratios
    }
    return {
        lanes: {lane: max(found[subset][lane] for subset in found if lane in subset <= lanes) for lane in lanes}
        for lanes in found
    }


def _complete(
    measured: dict[LaneSet, dict[Lane, float]], modelled: dict[LaneSet, dict[Lane, float]]
) -> dict[LaneSet, dict[Lane, float]]:
    """All sets from the measured ones, by the rules of [Note: Sets of lanes]."""
    known = dict(measured)
    for lanes in modelled:
        if len(lanes) == 2 and lanes not in known:
            known[lanes] = modelled[lanes]
    complete: dict[LaneSet, dict[Lane, float]] = {}
    for lanes in modelled:
        complete[lanes] = {}
        for lane in lanes:
            if lanes in measured:
                complete[lanes][lane] = measured[lanes][lane]
                continue
            slowdown = _composed(lane, lanes, known)
            above = [values[lane] for superset, values in measured.items() if lanes < superset]
            below = [values[lane] for subset, values in complete.items() if lane in subset < lanes]
            complete[lanes][lane] = max(1.0, *below, min(slowdown, *above)) if above else max(1.0, *below, slowdown)
    return complete


def _composed(lane: Lane, lanes: LaneSet, known: Mapping[LaneSet, Slowdowns]) -> float:
    """The product over the fewest groups that make up the lane's company, each known together with the lane."""
    splits = [
        (len(groups), -prod(known[group | {lane}][lane] for group in groups))
        for groups in _partitions(sorted(lanes - {lane}))
        if all(group | {lane} in known for group in groups)
    ]
    return -min(splits)[1]


def _partitions(lanes: list[Lane]) -> Iterator[tuple[LaneSet, ...]]:
    """All ways to split ``lanes`` into groups; one empty split of nothing."""
    if not lanes:
        yield ()
        return
    first, others = lanes[0], lanes[1:]
    for size in range(len(others) + 1):
        for companions in combinations(others, size):
            group = frozenset((first, *companions))
            for groups in _partitions([lane for lane in others if lane not in group]):
                yield (group, *groups)

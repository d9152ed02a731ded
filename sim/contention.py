"""How much lanes slow each other down while they run side by side.

[Note: Sets of lanes]
A slowdown belongs to a lane within a set of active lanes.  Sets come from three sources, the better first:

1. Measured: the calibration names the set.
2. Composed: the other lanes of the set are split into groups, each of which was measured together with the lane, and
   the slowdowns multiply.  Of all such splits the one with the fewest groups counts (it leaves the least to the
   assumption that groups slow the lane independently), and of several the slowest.
3. The resource model, for pairs that nobody measured; it stands in for a measurement of that pair.

Whatever the source, a lane in more company is never faster: measured sets are raised to their measured subsets where
noise has put them below, and the others are kept between their subsets and the measured sets that contain them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import prod
from types import MappingProxyType
from typing import Final, Self

from ..shared.calibration import Calibration
from ..shared.hardware import DeviceKind, Hardware
from ..shared.schedule import Lane
from .costs import host_adam_bytes_per_s

LaneSet = frozenset[Lane]
Slowdowns = Mapping[Lane, float]

_SETS: Final[tuple[LaneSet, ...]] = tuple(
    frozenset(lanes) for size in range(1, len(Lane) + 1) for lanes in combinations(Lane, size)
)
"""Every set of lanes, smaller ones first."""
_CPU_COMPUTE_FRAC: Final = 0.23
"""Share of the host's memory bandwidth that compute draws when the CPU is the device.

Its products work from the cache.  Measured on a two-core machine: compute slows 1.13 times beside a copy or beside CPU
Adam, which slow each other 1.8 times; if they draw 0.9 each, compute draws 1.13 - 0.9.  All three together then slow
2.03 times, where 1.6 to 2.5 was measured.
"""


@dataclass(frozen=True)
class ContentionModel:
    """The slowdown of every lane in every set of lanes."""

    slowdowns: Mapping[LaneSet, Slowdowns]

    @classmethod
    def of(cls, hardware: Hardware, calibration: Calibration | None = None) -> Self:
        """What is measured of a machine, completed by what its data sheet implies."""
        measured = {} if calibration is None else _measured(calibration)
        return cls(_freeze(_complete(measured, hardware) if measured else _from_resources(hardware)))

    @classmethod
    def none(cls) -> Self:
        """Lanes that do not disturb each other."""
        return cls(_freeze({lanes: dict.fromkeys(lanes, 1.0) for lanes in _SETS}))

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


def _from_resources(hardware: Hardware) -> dict[LaneSet, dict[Lane, float]]:
    """Each resource that a set of lanes overdraws slows its users by demand over capacity; the worst one counts.

    Resources are the host's memory bandwidth and, where copies of both directions share it, the link.  The device's
    own memory is none: a link takes a few percent of its bandwidth.  More lanes demand more, so slowdowns never fall.
    """
    resources = [_host_memory_fracs(hardware)]
    if not hardware.full_duplex:
        resources.append({Lane.H2D: 1.0, Lane.D2H: 1.0})
    return {lanes: {lane: _overdraft(lane, lanes, resources) for lane in lanes} for lanes in _SETS}


def _overdraft(lane: Lane, lanes: LaneSet, resources: Iterable[Mapping[Lane, float]]) -> float:
    """The largest demand over capacity, at least 1, among the resources that ``lane`` uses beside ``lanes``."""
    demands = [
        sum(demand.get(other, 0.0) for other in sorted(lanes)) for demand in resources if demand.get(lane, 0.0) > 0
    ]
    return max(1.0, *demands) if demands else 1.0


def _host_memory_fracs(hardware: Hardware) -> dict[Lane, float]:
    """The share of the host's memory bandwidth that each lane draws when it runs alone.

    A copy to or from a device passes the host's memory once; where the CPU is the device it reads there and writes
    there.
    """
    total = hardware.host.memory_bandwidth_bytes_per_s
    on_cpu = hardware.device.kind is DeviceKind.CPU
    passes = 2 if on_cpu else 1
    fracs = {
        Lane.H2D: passes * hardware.host_to_device.bandwidth_bytes_per_s / total,
        Lane.D2H: passes * hardware.device_to_host.bandwidth_bytes_per_s / total,
        Lane.CPU_OPTIM: host_adam_bytes_per_s(hardware.host) / total,
    }
    if on_cpu:
        fracs[Lane.COMPUTE] = _CPU_COMPUTE_FRAC
    return {lane: min(1.0, frac) for lane, frac in fracs.items()}


# -- from measurements -----------------------------------------------------------------------------------------------


def _measured(calibration: Calibration) -> dict[LaneSet, dict[Lane, float]]:
    """The measured sets, each raised to its measured subsets where it lies below them."""
    found = {
        frozenset(entry.lanes): dict(zip(entry.lanes, entry.slowdowns, strict=True)) for entry in calibration.contention
    }
    return {
        lanes: {lane: max(found[subset][lane] for subset in found if lane in subset <= lanes) for lane in lanes}
        for lanes in found
    }


def _complete(measured: dict[LaneSet, dict[Lane, float]], hardware: Hardware) -> dict[LaneSet, dict[Lane, float]]:
    """All sets from the measured ones, by the rules of [Note: Sets of lanes]."""
    modelled = _from_resources(hardware)
    known = dict(measured)
    for lanes in _SETS:
        if len(lanes) == 2 and lanes not in known:
            known[lanes] = modelled[lanes]
    complete: dict[LaneSet, dict[Lane, float]] = {}
    for lanes in _SETS:
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

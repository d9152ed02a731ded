"""Measuring what ranks do together: every collective of schedules, from latency to bandwidth, alone and beside compute.

What is measured is what tasks do (``collectives.py``), on the thread that does it in training: an all-gather; a
reduce-scatter and an all-reduce with the exchange of who has which gradient before them; an all-to-all of equal parts,
as of sequences that ranks share.

[Note: Calls in step]
Ranks have to make the same calls equally often.  After a few calls of each size all ranks tell how long these took, and
all make as many more as the slowest of them has time for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from ...shared.schema.hardware import PROBED, Collective, LinkPoint, MeasuredCollective
from ...shared.schema.schedule import Lane
from ..devices.device import TrainingDevice
from ..devices.lanes import Mark, WorkerLane
from ..devices.machine import host_memory_bytes
from ..devices.probe import ascending, compute_work
from ..devices.repeated_timing import undisturbed_s
from .collectives import Collectives
from .world import World, exchanged

SCHEDULED: Final = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE, Collective.ALL_TO_ALL)
"""What tasks of schedules do together."""
_SIZES: Final = tuple(4**power for power in range(6, 16))
"""From 4 KiB to 1 GiB."""
_COPIES: Final = 4
"""Of a buffer that a rank holds at once: the buffer, its part, and what the collective's library works in."""
_MEMORY_FRAC: Final = 0.25
"""Of a rank's memory, for its buffers: an equal part of the machine's where the CPU is the device."""
_FIRST_CALLS: Final = 3
_FEWEST_CALLS: Final = 5
_MOST_CALLS: Final = 2000
_ENOUGH_BYTES: Final = 2**20
"""Sizes up to this one are measured however long they take: below it, latency is most of a call."""
_LARGE_BYTES: Final = 2**18
"""Compute beside smaller collectives is beside their waits."""


def scheduled_work(
    collectives: Collectives, collective: Collective, size_bytes: int, target: torch.device
) -> Callable[[], None]:
    """What a task of this kind does with a buffer of ``size_bytes`` over all ranks; float32 scalars, whole parts.

    The buffer is on ``target``, each rank's own.
    """
    num_scalars = max(1, size_bytes // 4 // collectives.num_ranks)
    whole = torch.zeros(num_scalars * collectives.num_ranks, device=target)
    part = whole[collectives.rank * num_scalars :][:num_scalars]
    own = torch.zeros(num_scalars, device=target)

    def scatter() -> None:
        collectives.who_has([True], [True])
        collectives.scatter(own, whole)

    def add_up() -> None:
        collectives.who_has([True], [True])
        collectives.add_up([whole])

    match collective:
        case Collective.ALL_GATHER:
            return partial(collectives.gather, whole, part)
        case Collective.REDUCE_SCATTER:
            return scatter
        case Collective.ALL_REDUCE:
            return add_up
        case Collective.ALL_TO_ALL:
            received = torch.zeros(whole.numel(), device=target).view(torch.uint8)
            parts = [4 * num_scalars] * collectives.num_ranks
            return partial(collectives.exchange, received, whole.view(torch.uint8), parts, parts)


@dataclass
class _Seconds:
    """What one rank measured of one collective."""

    sizes: list[int] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    """Of pieces of compute beside large buffers."""


def measure_collectives(
    world: World,
    device: TrainingDevice,
    *,
    seconds: float,
    sizes: Sequence[int] = _SIZES,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[MeasuredCollective, ...]:
    """The collectives of schedules over all ranks, for about ``seconds``; to be called on all, gives the same on all.

    The lane of ``world`` is open.  Sizes end where a rank's buffers would take more than a quarter of its memory.  From
    1 MiB on they also end where a few calls take more than their part of the time.  The slowest rank's seconds count.
    """
    most_bytes = int(_MEMORY_FRAC * _rank_memory_bytes(world, device)) // _COPIES
    sizes = [size for size in sizes if size <= most_bytes] or [min(sizes)]
    steps = len(SCHEDULED) * len(sizes)
    bench = _Bench(world, device, share_s=seconds / (2 * steps))
    found = []
    try:
        alone_s = bench.compute_alone_s()
        for place, collective in enumerate(SCHEDULED):
            measured = _Seconds()
            for number, size_bytes in enumerate(sizes):
                goes_on = bench.measure(collective, size_bytes, measured)
                if on_progress is not None:
                    on_progress(place * len(sizes) + number + 1, steps)
                if not goes_on:
                    break
            of_ranks = exchanged(world, (measured, alone_s))
            source = "; ".join([PROBED, *device.emulated])
            found.append(_together(collective, of_ranks, source))
    finally:
        bench.close()
    return tuple(found)


def _rank_memory_bytes(world: World, device: TrainingDevice) -> int:
    if device.torch_device.type == "cuda":
        return int(torch.cuda.get_device_properties(device.torch_device).total_memory)
    return host_memory_bytes() // world.num_ranks


class _Bench:
    """The collective lane of one rank, its compute, and the time for one measurement."""

    def __init__(self, world: World, device: TrainingDevice, *, share_s: float) -> None:
        self._world = world
        self._device = device
        self._share_s = share_s
        self._compute = compute_work(device.torch_device)
        self._collectives = Collectives(world, world.lane_group, device.pace_collective)
        self._lane = WorkerLane(Lane.COLLECTIVE, device)

    def close(self) -> None:
        """End the lane, and let go of the group."""
        self._lane.close()
        self._collectives.close()

    def compute_alone_s(self) -> float:
        """Seconds of a piece of compute while every rank computes and nothing else."""
        exchanged(self._world, None)
        self._compute()
        times: list[float] = []
        end = time.perf_counter() + 4 * self._share_s
        while len(times) < _FEWEST_CALLS or time.perf_counter() < end:
            times.append(self._piece_s())
        return statistics.median(times)

    def measure(self, collective: Collective, size_bytes: int, measured: _Seconds) -> bool:
        """Note the seconds of one size; whether there is time for larger ones."""
        work = scheduled_work(self._collectives, collective, size_bytes, self._device.torch_device)
        first, _ = self._calls(work, _FIRST_CALLS, beside=False)
        slowest_s = max(exchanged(self._world, statistics.median(first)))
        count = max(_FEWEST_CALLS, min(_MOST_CALLS, int(self._share_s / slowest_s)))
        alone, _ = self._calls(work, count, beside=False)
        beside, pieces = self._calls(work, count, beside=True)
        measured.sizes.append(size_bytes)
        measured.alone.append(undisturbed_s(alone))
        measured.beside.append(statistics.median(beside))
        if size_bytes >= _LARGE_BYTES:
            measured.compute += pieces
        return size_bytes < _ENOUGH_BYTES or slowest_s * _FEWEST_CALLS < 2 * self._share_s

    def _calls(self, work: Callable[[], None], count: int, *, beside: bool) -> tuple[list[float], list[float]]:
        """Seconds of ``count`` calls on the lane, and of the pieces of compute meanwhile, if there is to be any."""
        device = self._device
        spans = []

        def repeat() -> None:
            for _ in range(count):
                start = device.stamp()
                work()
                spans.append((start, device.stamp()))
                device.synchronize_event(device.record_event())

        # Ranks begin together: the first one's wait for the last is none of the collective's time.
        exchanged(self._world, None)
        mark = Mark()
        self._lane.submit(repeat, (), mark)
        pieces = []
        while beside and not mark.is_set:
            pieces.append(self._piece_s())
        mark.wait()
        return [device.seconds(end) - device.seconds(start) for start, end in spans], pieces[:-1] or pieces

    def _piece_s(self) -> float:
        start = self._device.stamp()
        self._compute()
        end = self._device.stamp()
        return self._device.seconds(end) - self._device.seconds(start)


def _together(collective: Collective, of_ranks: Sequence[tuple[_Seconds, float]], source: str) -> MeasuredCollective:
    """One table of what every rank measured, with its seconds of compute alone."""
    sizes = of_ranks[0][0].sizes
    alone = [max(measured.alone[place] for measured, _ in of_ranks) for place in range(len(sizes))]
    beside = [max(measured.beside[place] for measured, _ in of_ranks) for place in range(len(sizes))]
    slowdowns = [statistics.fmean(measured.compute) / alone_s for measured, alone_s in of_ranks if measured.compute]
    points = [LinkPoint(size_bytes=size, seconds=one_s) for size, one_s in zip(sizes, alone, strict=True)]
    table = ascending(points)
    others = [
        LinkPoint(size_bytes=point.size_bytes, seconds=max(point.seconds, beside_s))
        for point, beside_s in zip(table, beside, strict=True)
    ]
    return MeasuredCollective(
        collective=collective,
        num_ranks=len(of_ranks),
        table=table,
        beside_compute=ascending(others),
        compute_slowdown=max(1.0, statistics.fmean(slowdowns)) if slowdowns else 1.0,
        source=source,
    )

"""How lanes of one machine slow each other down, measured: every set of lanes runs side by side for a while.

Each lane repeats a piece of its own kind of work on the thread (and stream) that training uses; its slowdown in a set
is its mean seconds per piece there over its median ones alone.  Sets are measured in turn, over several rounds, so that
a slow moment of a shared machine hits all of them alike.

[Note: Sets with a disk]
The lane of a disk would double the number of sets.  It draws on nothing that the others fill but host memory and cores,
and leaves these alone for as long as the disk itself is at work; so its slowdowns beside several lanes are close to the
product of those beside each, which is how absent sets are composed (``sim/costs/contention.py``).  Measured are the
disk beside every single lane, and all lanes together, which no composed set exceeds: six sets more instead of sixteen.

[Note: Sets of several ranks]
Every rank runs the same set at the same time, for ranks share a machine: what a lane is slowed by is all that its rank
and the others do, and alone it has the other ranks' lanes of its kind beside it.  The lane of collectives ends a piece
on all ranks or on none, so that after each piece its ranks tell each other whether there is time for another.
Slowdowns are means over ranks.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Final

import torch

from ...runtime.devices.chunk_file import ChunkFile
from ...runtime.devices.device import TrainingDevice
from ...runtime.devices.lanes import Mark, WorkerLane
from ...runtime.devices.probe import adam_work, compute_work, copy_work
from ...runtime.ranks.collective_probe import scheduled_work
from ...runtime.ranks.collectives import Collectives
from ...runtime.ranks.world import World, exchanged
from ...shared.schema.calibration import Contention
from ...shared.schema.hardware import Collective
from ...shared.schema.schedule import LANES_ALONE, Lane, lanes_of

_COPY_BYTES: Final = 2**22
_ADAM_SCALARS: Final = 2**20
_CUDA_COPY_BYTES: Final = 2**26
_CUDA_ADAM_SCALARS: Final = 2**22
"""On an accelerator every piece must take milliseconds: threads that launch short ones wait for each other, which is
no slowdown of the device."""
_LEAST_SHARE: Final = 8
"""Parts of a device's memory, of which what is copied takes one at most."""
_LEAST_DISK_BYTES: Final = 2**16
_MOST_DISK_BYTES: Final = 2**26
_DISK_PIECES: Final = 4
"""In the time of one set: more would be so short that waking up after them is what is measured."""


def sets_of_lanes(*, has_disk: bool = False, num_ranks: int = 1) -> tuple[frozenset[Lane], ...]:
    """The sets that are measured, the lanes alone among them; smaller ones first, by [Note: Sets with a disk].

    Of several ranks, every set of their lanes.
    """
    among = lanes_of(num_ranks)
    sets = [frozenset(lanes) for size in range(1, len(among) + 1) for lanes in combinations(among, size)]
    if has_disk:
        beside = [frozenset({Lane.DISK}), *(frozenset({lane, Lane.DISK}) for lane in LANES_ALONE)]
        sets += [*beside, frozenset(lanes_of(1, has_disk=True))]
    return tuple(sorted(sets, key=len))


def measure_slowdowns(
    device: TrainingDevice,
    *,
    seconds: float = 10.0,
    rounds: int = 3,
    compute: Callable[[], None] | None = None,
    disk_folder: str | Path | None = None,
    world: World | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Contention, ...]:
    """The slowdown of every lane in every measured set of two lanes or more.

    With a ``world`` of several ranks, to be called on all of them; gives the same on all ([Note: Sets of several
    ranks]), and takes twice as long.  ``seconds`` are for the sets of one rank without a disk.  With a ``disk_folder``
    there are sets with the lane of its disk too, which take as long each ([Note: Sets with a disk]): 1.4 times the
    seconds in all.  ``compute`` is one piece of compute work; by default forward and backward of a small multilayer
    perceptron.  Raises FileError if the folder cannot be used.
    """
    is_cuda = device.torch_device.type == "cuda"
    copy_bytes = min(_CUDA_COPY_BYTES if is_cuda else _COPY_BYTES, (device.limit_bytes or sys.maxsize) // _LEAST_SHARE)
    work = {
        Lane.COMPUTE: compute or compute_work(device.torch_device),
        Lane.H2D: copy_work(device, copy_bytes, to_device=True),
        Lane.D2H: copy_work(device, copy_bytes, to_device=False),
        Lane.CPU_OPTIM: adam_work(_CUDA_ADAM_SCALARS if is_cuda else _ADAM_SCALARS),
    }
    share_s = seconds / (rounds * len(sets_of_lanes()))
    sets = sets_of_lanes(has_disk=disk_folder is not None, num_ranks=1 if world is None else world.num_ranks)
    times: dict[frozenset[Lane], dict[Lane, list[float]]] = {s: {lane: [] for lane in s} for s in sets}
    with ExitStack() as undo:
        if disk_folder is not None:
            file = ChunkFile(disk_folder, 2 * _MOST_DISK_BYTES, device)
            undo.callback(file.close)
            work[Lane.DISK] = disk_work(device, file, share_s / _DISK_PIECES)
        together = None
        if world is not None:
            together = Collectives(world, world.lane_group, device.pace_collective)
            undo.callback(together.close)
            work[Lane.COLLECTIVE] = collective_work(together, copy_bytes, device.torch_device)
        workers: dict[Lane, WorkerLane] = {}
        for lane in work:
            if lane is not Lane.COMPUTE:
                workers[lane] = WorkerLane(lane, device)
                undo.callback(workers[lane].close)
        for turn in range(rounds):
            for place, lanes in enumerate(sets):
                if world is not None:
                    exchanged(world, None)
                found = _run_together(device, workers, work, lanes, share_s, together)
                for lane, seconds_each in found.items():
                    times[lanes][lane] += seconds_each
                if on_progress is not None:
                    on_progress(turn * len(sets) + place + 1, rounds * len(sets))
    return _contention(times) if world is None else _of_ranks(exchanged(world, _contention(times)))


def collective_work(collectives: Collectives, size_bytes: int, target: torch.device) -> Callable[[], None]:
    """Gather a buffer of ``size_bytes`` from all ranks, and scatter the sum of their gradients: a chunk's way there."""
    gather = scheduled_work(collectives, Collective.ALL_GATHER, size_bytes, target)
    scatter = scheduled_work(collectives, Collective.REDUCE_SCATTER, size_bytes, target)

    def work() -> None:
        gather()
        scatter()

    return work


def _of_ranks(of_ranks: Sequence[Sequence[Contention]]) -> tuple[Contention, ...]:
    """The means over ranks."""
    return tuple(
        Contention(
            lanes=same[0].lanes,
            slowdowns=tuple(map(statistics.fmean, zip(*(entry.slowdowns for entry in same), strict=True))),
        )
        for same in zip(*of_ranks, strict=True)
    )


def _run_together(
    device: TrainingDevice,
    workers: Mapping[Lane, WorkerLane],
    work: Mapping[Lane, Callable[[], None]],
    lanes: frozenset[Lane],
    duration_s: float,
    together: Collectives | None = None,
) -> dict[Lane, list[float]]:
    """Repeat each lane's work side by side for ``duration_s``; seconds of every piece after each lane's first."""
    stop = threading.Event()
    times: dict[Lane, list[float]] = {lane: [] for lane in lanes}

    def repeat(lane: Lane) -> Callable[[], None]:
        is_host_work = lane in (Lane.CPU_OPTIM, Lane.DISK)

        def run() -> None:
            while True:
                start = time.perf_counter() if is_host_work else device.stamp()
                work[lane]()
                end = time.perf_counter() if is_host_work else device.stamp()
                # A piece that ends after the others was partly alone; but every lane has one, however late it began.
                is_last = stop.is_set()
                if lane is Lane.COLLECTIVE:
                    assert together is not None
                    (is_last,), _ = together.who_has([is_last], [True])
                if not (is_last and times[lane]):
                    times[lane].append(device.seconds(end) - device.seconds(start))
                if is_last:
                    return

        return run

    marks = [Mark() for lane in lanes if lane is not Lane.COMPUTE]
    others = [lane for lane in Lane if lane in lanes and lane is not Lane.COMPUTE]
    for lane, mark in zip(others, marks, strict=True):
        workers[lane].submit(repeat(lane), (), mark)
    timer = threading.Timer(duration_s, stop.set)
    timer.start()
    try:
        if Lane.COMPUTE in lanes:
            repeat(Lane.COMPUTE)()
        for mark in marks:
            mark.wait()
    finally:
        stop.set()
        timer.cancel()
    return {lane: found[1:] or found for lane, found in times.items()}


def _contention(times: Mapping[frozenset[Lane], Mapping[Lane, list[float]]]) -> tuple[Contention, ...]:
    alone = {
        lane: statistics.median(seconds[lane]) for lanes, seconds in times.items() if len(lanes) == 1 for lane in lanes
    }
    found = []
    for lanes in times:
        if len(lanes) < 2:
            continue
        order = tuple(lane for lane in Lane if lane in lanes)
        # The mean, not the median: a piece that waits for a core now and then is slower by what it waits.
        slowdowns = tuple(max(1.0, _trimmed_mean(times[lanes][lane]) / alone[lane]) for lane in order)
        found.append(Contention(lanes=order, slowdowns=slowdowns))
    return tuple(found)


def _trimmed_mean(values: list[float]) -> float:
    """The mean without the slowest and fastest twentieth: a pause of the whole machine is no slowdown by a lane."""
    ordered = sorted(values)
    cut = len(ordered) // 20
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def disk_work(device: TrainingDevice, file: ChunkFile, most_s: float) -> Callable[[], None]:
    """Read into one host buffer, and write another behind it, as chunks that are stepped do.

    As much as takes ``most_s``: half of the file each at most.
    """
    most_bytes = file.size_bytes // 2
    size_bytes = min(_LEAST_DISK_BYTES, most_bytes)

    def made(size_bytes: int) -> Callable[[], None]:
        source, destination = (device.host_buffer(size_bytes).zero_() for _ in range(2))
        # What was never written is not read from the disk.
        file.write((source, 0))

        def move() -> None:
            file.read(destination, 0)
            file.write((source, most_bytes))

        return move

    while True:
        move = made(size_bytes)
        move()
        start_s = time.perf_counter()
        move()
        # Twice as much would take twice as long.
        if 2 * (time.perf_counter() - start_s) > most_s or 2 * size_bytes > most_bytes:
            return move
        size_bytes *= 2

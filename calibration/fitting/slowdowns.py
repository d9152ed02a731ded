"""How lanes of one machine slow each other down, measured: every set of lanes runs side by side for a while.

Each lane repeats a piece of its own kind of work on the thread (and stream) that training uses; its slowdown in a set
is its median seconds per piece there over those alone.  Sets are measured in turn, over several rounds, so that a slow
moment of a shared machine hits all of them alike.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Final

import torch

from ...runtime.devices.device import TrainingDevice
from ...runtime.devices.lanes import Mark, WorkerLane
from ...runtime.devices.probe import adam_work, copy_work
from ...shared.schema.calibration import Contention
from ...shared.schema.schedule import LANES_ALONE, Lane

_COPY_BYTES: Final = 2**22
_ADAM_SCALARS: Final = 2**20
_ROWS: Final = 512
_WIDTH: Final = 384
_CUDA_COPY_BYTES: Final = 2**26
_CUDA_ADAM_SCALARS: Final = 2**22
_CUDA_ROWS: Final = 4096
_CUDA_WIDTH: Final = 2048
"""On an accelerator every piece must take milliseconds: threads that launch short ones wait for each other, which is
no slowdown of the device."""
_SETS: Final = tuple(
    frozenset(lanes) for size in range(1, len(LANES_ALONE) + 1) for lanes in combinations(LANES_ALONE, size)
)


def measure_slowdowns(
    device: TrainingDevice,
    *,
    seconds: float = 10.0,
    rounds: int = 3,
    compute: Callable[[], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Contention, ...]:
    """The slowdown of every lane in every set of two lanes or more.

    ``compute`` is one piece of compute work; by default forward and backward of a small multilayer perceptron, whose
    mix of products and element-wise operations is a transformer block's.
    """
    is_cuda = device.torch_device.type == "cuda"
    copy_bytes = _CUDA_COPY_BYTES if is_cuda else _COPY_BYTES
    work = {
        Lane.COMPUTE: compute or _perceptron_work(device.torch_device),
        Lane.H2D: copy_work(device, copy_bytes, to_device=True),
        Lane.D2H: copy_work(device, copy_bytes, to_device=False),
        Lane.CPU_OPTIM: adam_work(_CUDA_ADAM_SCALARS if is_cuda else _ADAM_SCALARS),
    }
    share_s = seconds / (rounds * len(_SETS))
    times: dict[frozenset[Lane], dict[Lane, list[float]]] = {s: {lane: [] for lane in s} for s in _SETS}
    workers: dict[Lane, WorkerLane] = {
        lane: WorkerLane(lane, device) for lane in LANES_ALONE if lane is not Lane.COMPUTE
    }
    try:
        for turn in range(rounds):
            for place, lanes in enumerate(_SETS):
                for lane, seconds_each in _run_together(device, workers, work, lanes, share_s).items():
                    times[lanes][lane] += seconds_each
                if on_progress is not None:
                    on_progress(turn * len(_SETS) + place + 1, rounds * len(_SETS))
    finally:
        for made in workers.values():
            made.close()
    return _contention(times)


def _run_together(
    device: TrainingDevice,
    workers: Mapping[Lane, WorkerLane],
    work: Mapping[Lane, Callable[[], None]],
    lanes: frozenset[Lane],
    duration_s: float,
) -> dict[Lane, list[float]]:
    """Repeat each lane's work side by side for ``duration_s``; seconds of every piece after each lane's first."""
    stop = threading.Event()
    times: dict[Lane, list[float]] = {lane: [] for lane in lanes}

    def repeat(lane: Lane) -> Callable[[], None]:
        def run() -> None:
            while not stop.is_set():
                start = device.stamp() if lane is not Lane.CPU_OPTIM else time.perf_counter()
                work[lane]()
                end = device.stamp() if lane is not Lane.CPU_OPTIM else time.perf_counter()
                times[lane].append(device.seconds(end) - device.seconds(start))

        return run

    marks = [Mark() for lane in lanes if lane is not Lane.COMPUTE]
    others = [lane for lane in LANES_ALONE if lane in lanes and lane is not Lane.COMPUTE]
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
    alone = {lane: statistics.median(times[frozenset((lane,))][lane]) for lane in LANES_ALONE}
    found = []
    for lanes in _SETS:
        if len(lanes) < 2:
            continue
        order = tuple(lane for lane in LANES_ALONE if lane in lanes)
        # The mean, not the median: a piece that waits for a core now and then is slower by what it waits.
        slowdowns = tuple(max(1.0, _trimmed_mean(times[lanes][lane]) / alone[lane]) for lane in order)
        found.append(Contention(lanes=order, slowdowns=slowdowns))
    return tuple(found)


def _trimmed_mean(values: list[float]) -> float:
    """The mean without the slowest and fastest twentieth: a pause of the whole machine is no slowdown by a lane."""
    ordered = sorted(values)
    cut = len(ordered) // 20
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _perceptron_work(target: torch.device) -> Callable[[], None]:
    num_rows, width = (_CUDA_ROWS, _CUDA_WIDTH) if target.type == "cuda" else (_ROWS, _WIDTH)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width),
        torch.nn.GELU(),
        torch.nn.Linear(4 * width, width),
        torch.nn.LayerNorm(width),
    ).to(target)
    rows = torch.randn(num_rows, width, device=target)

    def work() -> None:
        model(rows).square().sum().backward()
        model.zero_grad()

    return work

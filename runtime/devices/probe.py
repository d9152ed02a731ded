"""Measuring the machine at hand: arithmetic, memory, links and CPU Adam, the way that training uses them.

[Note: Copies of what no cache holds]
A training copies a chunk, then others, and comes back to the first after all the rest of an iteration.  The same 4 MiB
copied over and over come from the cache: ten times faster than chunks are.  So copies take turns among many places.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Final

import torch

from ...shared.basics.arguments import as_number
from ...shared.basics.errors import HardwareError
from ...shared.schema.hardware import PROBED, Device, DeviceKind, Disk, Hardware, Host, Link, LinkPoint
from ...shared.schema.schedule import Lane
from ...shared.schema.workload import DType
from ..model.snapshot import random_states_kept
from .chunk_file import measured_disk_rates
from .cpu_device import CpuDevice
from .cuda_device import CudaDevice
from .device import TrainingDevice
from .lanes import Mark, WorkerLane
from .machine import host_memory_bytes, machine_name, num_cores
from .node_probe import told_by_driver
from .process_settings import leave_a_core_for_lanes
from .repeated_timing import repeated_s

_MATRIX: Final = 1024
_LEAST_MATRIX: Final = 128
_COPY_SIZES: Final = (2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
_COPIED_BYTES: Final = 2**28
"""Of all places that copies take turns with: more than any cache holds."""
_ADAM_SCALARS: Final = 2**23
_PROJECTION: Final = (1024, 768, 256)
"""Rows, and columns of the frozen and of the trained matrix, of the projection that tells what the host multiplies."""
ADAM_BYTES_PER_SCALAR: Final = 28
"""Float32 Adam reads weight, gradient and two moments and writes all but the gradient."""
_STREAM_BYTES: Final = 2**27
_DEVICE_STREAM_BYTES: Final = 2**30
"""On an accelerator, whose cache holds up to 50 MiB and whose memory is fast."""
_ROWS: Final = 512
_WIDTH: Final = 384
_CUDA_ROWS: Final = 4096
_CUDA_WIDTH: Final = 2048
"""On an accelerator every piece must take milliseconds: threads that launch short ones wait for each other, which is
no slowdown of the device."""
_WARM_UP_S: Final = 0.05
_ROW_S: Final = 0.005
"""How long an accelerator is kept busy for one measurement."""
_DISK_BYTES: Final = 256 * 2**20
"""Of a file that is written and read: more than a disk's own memory hides."""


@random_states_kept()
def probe_hardware(
    *,
    seconds: float = 6.0,
    device: TrainingDevice | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    leaves_a_core: bool = False,
    disk_folder: str | Path | None = None,
) -> Hardware:
    """Measure this machine for about ``seconds``; what others do on it meanwhile counts little.

    The states of the random generators are afterwards what they were.

    ``leaves_a_core``: where the CPU is the device, measure with all cores but one, as commands that train do, and keep
    this process at that; for programs that own their process.
    ``device`` is what is measured: the first CUDA device where there is one, else the CPU as a device.  Links are
    measured with the copies that gathers and gradient offloads make: into freshly allocated device memory.
    ``disk_folder``: the machine has a disk then, measured there and with the room that it has left.  Raises FileError
    if it cannot be written, HardwareError unless ``seconds`` is a number above 0.
    """
    if not 0 < as_number("seconds", seconds) < math.inf:
        raise HardwareError(f"seconds is {seconds}; it must be finite and above 0.")
    chosen = device or (CudaDevice() if torch.cuda.is_available() else CpuDevice())
    if leaves_a_core and isinstance(chosen, CpuDevice):
        leave_a_core_for_lanes()
    num_parts = 8 + 2 * len(_COPY_SIZES)
    done = count(1)

    def advance() -> None:
        if on_progress is not None:
            on_progress(next(done), num_parts)

    share_s = seconds / num_parts
    measured = _device(chosen, share_s, advance)
    to_device = _link(chosen, Lane.H2D, share_s, advance)
    to_host = _link(chosen, Lane.D2H, share_s, advance)
    found = Hardware(
        name=machine_name() if isinstance(chosen, CpuDevice) else chosen.description,
        device=measured,
        host=_host(chosen, measured, share_s, advance),
        host_to_device=to_device,
        device_to_host=to_host,
        disk=None if disk_folder is None else _disk(disk_folder, chosen),
    )
    return found if isinstance(chosen, CpuDevice) else told_by_driver(found, chosen.torch_device)


def _device(chosen: TrainingDevice, share_s: float, advance: Callable[[], None]) -> Device:
    """The device's arithmetic and memory: six measurements of ``share_s`` each."""
    is_cpu = isinstance(chosen, CpuDevice)
    target = chosen.torch_device
    peaks: dict[DType, float] = {}
    for dtype in (DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16):
        peaks[dtype] = _matmul_flop_per_s(target, getattr(torch, dtype), share_s)
        advance()
    vector = _vector_flop_per_s(target, share_s)
    advance()
    bandwidth = _stream_bytes_per_s(target, share_s)
    advance()
    overhead_s = _launch_s(target, share_s)
    advance()
    memory_bytes = host_memory_bytes() if is_cpu else torch.cuda.get_device_properties(target).total_memory
    if isinstance(chosen, (CpuDevice, CudaDevice)) and chosen.budget_bytes is not None:
        memory_bytes = chosen.budget_bytes
    return Device(
        name="CPU as a device" if is_cpu else torch.cuda.get_device_name(target),
        kind=DeviceKind.CPU if is_cpu else DeviceKind.CUDA,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=bandwidth,
        peak_flop_per_s=peaks,
        vector_flop_per_s=vector,
        launch_overhead_s=overhead_s,
        source=PROBED,
    )


def _host(chosen: TrainingDevice, device: Device, share_s: float, advance: Callable[[], None]) -> Host:
    """The host's CPU Adam, its products, and its memory, which is the device's where the CPU is the device."""
    adam = _adam_bytes_per_s(chosen, share_s)
    advance()
    products = _host_matrix_flop_per_s(chosen, share_s)
    advance()
    is_cpu = isinstance(chosen, CpuDevice)
    bandwidth = device.memory_bandwidth_bytes_per_s if is_cpu else _stream_bytes_per_s(torch.device("cpu"), share_s)
    return Host(
        name=machine_name(),
        num_cores=num_cores(),
        memory_bytes=host_memory_bytes(),
        memory_bandwidth_bytes_per_s=bandwidth,
        adam_bytes_per_s=adam,
        matrix_flop_per_s=products,
        source=PROBED,
    )


def _disk(folder: str | Path, device: TrainingDevice) -> Disk:
    """A file as large as a few chunks, written and read as chunks are."""
    read_bytes_per_s, write_bytes_per_s = measured_disk_rates(folder, _DISK_BYTES, device)
    place = os.statvfs(folder)
    return Disk(
        name=f"disk of {folder}",
        capacity_bytes=max(1, place.f_bavail * place.f_frsize),
        read_bytes_per_s=read_bytes_per_s,
        write_bytes_per_s=write_bytes_per_s,
        source="; ".join([PROBED, *device.emulated, "capacity_bytes: what is free"]),
    )


def seconds_on(work: Callable[[], object], target: torch.device, budget_s: float) -> float:
    """Seconds of one call, over as many as fit the budget, after a warm-up."""
    if target.type != "cuda":
        return repeated_s(_host_timer(work), budget_s)
    once = _event_timer(work, target)
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 1000):
        times.append(once())
    return statistics.median(times)


def _host_timer(work: Callable[[], object]) -> Callable[[], float]:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return once


def _event_timer(work: Callable[[], object], target: torch.device) -> Callable[[], float]:
    """Times calls between two events, as many in a row that neither launching the first nor waiting counts."""
    stream = torch.cuda.current_stream(target)

    def row(calls: int) -> float:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record(stream)
        for _ in range(calls):
            work()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / calls

    # What is called for the first time loads its kernels, and a device at rest runs at a lower clock.
    end = time.perf_counter() + _WARM_UP_S
    row(1)
    while time.perf_counter() < end:
        row(3)
    calls = max(1, min(100, round(_ROW_S / row(3))))
    return partial(row, calls)


def _matmul_flop_per_s(target: torch.device, dtype: torch.dtype, budget_s: float) -> float:
    if target.type == "cpu":
        size = _affordable_matrix(dtype, budget_s)
    else:
        # Consumer boards take seconds for a large product of float64.
        size = (2 if dtype is torch.float64 else 8) * _MATRIX
    return 2.0 * size**3 / seconds_on(_product(size, target, dtype), target, budget_s)


def _product(size: int, target: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    a = torch.randn(size, size, dtype=torch.float32, device=target).to(dtype)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)


def _affordable_matrix(dtype: torch.dtype, budget_s: float) -> int:
    """The largest side up to ``_MATRIX`` with which a product fits the time, as a small one tells.

    A processor without instructions for an element type takes seconds for a product that is otherwise one of
    milliseconds.
    """
    once = _host_timer(_product(_LEAST_MATRIX, torch.device("cpu"), dtype))
    small_s, size = min(once() for _ in range(5)), _MATRIX
    while size > _LEAST_MATRIX and small_s * (size / _LEAST_MATRIX) ** 3 > budget_s:
        size //= 2
    return size


def _vector_flop_per_s(target: torch.device, budget_s: float) -> float:
    """Multiply-adds on data that stays in cache (on a device with many cores: in its largest cache)."""
    a = torch.ones(2**16 if target.type == "cpu" else 2**22, device=target)
    out = torch.empty_like(a)
    return 2.0 * a.numel() / seconds_on(lambda: torch.addcmul(a, a, a, out=out), target, budget_s)


def _stream_bytes_per_s(target: torch.device, budget_s: float) -> float:
    size_bytes = _STREAM_BYTES if target.type == "cpu" else _DEVICE_STREAM_BYTES
    source = torch.ones(size_bytes // 4, device=target)
    destination = torch.empty_like(source)
    return 2.0 * size_bytes / seconds_on(lambda: destination.copy_(source), target, budget_s)


def _launch_s(target: torch.device, budget_s: float) -> float:
    a = torch.ones(1, device=target)
    calls = 200

    def launch() -> None:
        for _ in range(calls):
            a.add_(1)

    return seconds_on(launch, target, budget_s) / calls


def _link(device: TrainingDevice, lane: Lane, budget_s: float, advance: Callable[[], None]) -> Link:
    points: list[LinkPoint] = []
    to_device = lane is Lane.H2D
    places = CopyPlaces.of(device, max(_COPY_SIZES), to_device=to_device)
    with worker(lane, device) as timed:
        for size_bytes in _COPY_SIZES:
            copy = copy_work(device, size_bytes, to_device=to_device, places=places)
            points.append(LinkPoint(size_bytes=size_bytes, seconds=timed(copy, budget_s)))
            advance()
    largest = points[-1]
    rate = largest.size_bytes / largest.seconds
    latency_s = max(0.0, points[0].seconds - points[0].size_bytes / rate)
    direction = "host to device" if lane is Lane.H2D else "device to host"
    source = "; ".join([PROBED, *device.emulated])
    return Link(name=direction, latency_s=latency_s, bandwidth_bytes_per_s=rate, table=ascending(points), source=source)


def ascending(points: Sequence[LinkPoint]) -> tuple[LinkPoint, ...]:
    """Points whose seconds never fall: what is larger cannot take less time, the smaller one was disturbed."""
    kept: list[LinkPoint] = []
    for point in reversed(points):
        seconds = min(point.seconds, kept[-1].seconds) if kept else point.seconds
        kept.append(LinkPoint(size_bytes=point.size_bytes, seconds=seconds))
    return tuple(reversed(kept))


@dataclass(frozen=True)
class CopyPlaces:
    """Memory whose places copies take turns among ([Note: Copies of what no cache holds])."""

    host: torch.Tensor
    device: torch.Tensor | None
    """Of copies to the host; a gather goes into memory that was just allocated."""

    @classmethod
    def of(cls, device: TrainingDevice, size_bytes: int, *, to_device: bool) -> CopyPlaces:
        """For copies of ``size_bytes``, or of less: filling it takes longer than the copies, so that sizes share it."""
        total_bytes = max(2, _COPIED_BYTES // size_bytes) * size_bytes
        host = device.host_buffer(total_bytes).zero_()
        if to_device:
            return cls(host, None)
        return cls(host, torch.zeros(total_bytes, dtype=torch.uint8, device=device.torch_device))


def copy_work(
    device: TrainingDevice, size_bytes: int, *, to_device: bool, places: CopyPlaces | None = None
) -> Callable[[], None]:
    """One copy as training makes it: a gather into memory that was just allocated, or gradients to a host buffer.

    Every call has the next of many places on both sides, those of ``places`` or memory of its own.
    """
    places = places or CopyPlaces.of(device, size_bytes, to_device=to_device)
    whole_bytes = len(places.host) // size_bytes * size_bytes
    hosts = torch.split(places.host[:whole_bytes], size_bytes)
    if places.device is None:
        flat = torch.zeros(size_bytes, dtype=torch.uint8, device=device.torch_device)
        sources = cycle(hosts)

        def gather() -> None:
            device.resize(flat, 0, "a chunk")
            device.resize(flat, size_bytes, "a chunk")
            device.copy(flat, next(sources), to_device=True)

        return gather
    pairs = cycle(zip(hosts, torch.split(places.device[:whole_bytes], size_bytes), strict=True))

    def offload() -> None:
        host, flat = next(pairs)
        device.copy(host, flat, to_device=False)

    return offload


def compute_work(target: torch.device) -> Callable[[], None]:
    """Forward and backward of a small multilayer perceptron.

    Its mix of products and element-wise operations is a transformer block's.
    """
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


def adam_work(num_scalars: int) -> Callable[[], None]:
    """One fused Adam step on the host."""
    weight = torch.zeros(num_scalars, requires_grad=True)
    weight.grad = torch.ones(num_scalars)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return lambda: optimizer.step()


def _adam_bytes_per_s(device: TrainingDevice, budget_s: float) -> float:
    with worker(Lane.CPU_OPTIM, device) as timed:
        return _ADAM_SCALARS * ADAM_BYTES_PER_SCALAR / timed(adam_work(_ADAM_SCALARS), budget_s)


def projection_work() -> tuple[Callable[[], None], int]:
    """A projection as the host does it between gradients' arrival and their step, and its FLOPs: two thin products."""
    num_rows, num_frozen, num_trained = _PROJECTION
    frozen, trained = torch.randn(num_rows, num_frozen), torch.randn(num_rows, num_trained)
    projected = torch.empty_like(trained)

    def work() -> None:
        torch.addmm(trained, frozen, frozen.t() @ trained, alpha=-1, out=projected)

    return work, 4 * num_rows * num_frozen * num_trained


def _host_matrix_flop_per_s(device: TrainingDevice, budget_s: float) -> float:
    work, flops = projection_work()
    with worker(Lane.CPU_OPTIM, device) as timed:
        return flops / timed(work, budget_s)


@contextmanager
def worker(lane: Lane, device: TrainingDevice) -> Iterator[Callable[[Callable[[], None], float], float]]:
    """A lane of its own; gives a function that measures the seconds of a call on it."""
    made = WorkerLane(lane, device)

    def once(work: Callable[[], None]) -> float:
        mark = Mark()
        span = made.submit(work, (), mark)
        device.synchronize_event(mark.wait())
        return device.seconds(span.end) - device.seconds(span.start)

    def timed(work: Callable[[], None], budget_s: float) -> float:
        return repeated_s(partial(once, work), budget_s)

    try:
        yield timed
    finally:
        made.close()

"""What a training that goes on and on holds: whether it grows.

What can be counted (threads, open files, tensors, bytes in the ledger) must not grow at all.  The memory of the process
is the system's affair too: allocators take pages in jumps and give few back.  Something that leaks grows in every
stretch of the run, though.  So the growth from the first tenth to the last may be at most ``JUMPS`` times the largest
change from one tenth to the next, or ``FLOOR_BYTES`` where nothing changes: a steady leak makes nine of these changes.
"""

from __future__ import annotations

import gc
import os
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import psutil
import torch

from protwin.runtime import CpuDevice

STRETCHES = 10
JUMPS = 5.0
FLOOR_BYTES = 2**18


@dataclass(frozen=True)
class Held:
    """What there is at one moment, garbage aside."""

    ledger_bytes: int
    num_threads: int
    num_descriptors: int
    num_tensors: int
    tensor_bytes: int


def held(device: CpuDevice) -> Held:
    """Collects garbage first."""
    gc.collect()
    # Not isinstance, which asks some objects for their class, and they warn.
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return Held(
        ledger_bytes=device.ledger.named_bytes + device.ledger.watched_bytes,
        num_threads=threading.active_count(),
        num_descriptors=len(os.listdir("/proc/self/fd")),
        num_tensors=len(tensors),
        tensor_bytes=sum(t.numel() * t.element_size() for t in tensors if t.layout is torch.strided),
    )


@dataclass(frozen=True)
class Growth:
    """What became of it over a run."""

    steps: int
    before: Held
    after: Held
    rss_bytes: list[int] = field(default_factory=list)
    """Resident memory of the process, the median of each tenth of the run."""

    @property
    def grown(self) -> list[str]:
        """What can be counted and has grown."""
        before, after = asdict(self.before), asdict(self.after)
        return [f"{name} from {before[name]} to {after[name]}" for name in before if after[name] > before[name]]

    @property
    def rss_growth_bytes(self) -> int:
        """From the first tenth to the last."""
        return self.rss_bytes[-1] - self.rss_bytes[0]

    @property
    def rss_bound_bytes(self) -> int:
        """What it may have grown."""
        changes = [abs(b - a) for a, b in pairwise(self.rss_bytes)]
        return int(max(FLOOR_BYTES, JUMPS * max(changes, default=0)))


def growth_over(steps: int, do_step: Callable[[], object], device: CpuDevice, *, warm_up: int) -> Growth:
    """Do ``warm_up`` steps, so that whatever is kept of the latest ones is full, then ``steps`` that count."""
    for _ in range(warm_up):
        do_step()
    before = held(device)
    rss_bytes = []
    process = psutil.Process()
    for _ in range(steps):
        do_step()
        rss_bytes.append(process.memory_info().rss)
    return Growth(steps, before, held(device), tenths(rss_bytes))


def tenths(values: Sequence[int]) -> list[int]:
    """The median of each tenth."""
    edges = [len(values) * place // STRETCHES for place in range(STRETCHES + 1)]
    return [int(statistics.median(values[a:b])) for a, b in pairwise(edges) if b > a]

"""The machine that this process runs on: what measurements on it are filed under.  Needs no torch."""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def machine_name() -> str:
    """Processor, usable cores and memory of this machine: ``"Intel Xeon ..., 2 cores, 24 GiB"``."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return f"{processor}, {num_cores()} cores, {host_memory_bytes() / 2**30:.0f} GiB"


def name_of_ranks(num_ranks: int) -> str:
    """What measurements of so many processes are filed under, each of which has its part of this machine."""
    return machine_name() if num_ranks == 1 else f"{machine_name()}, shared by {num_ranks} ranks"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def host_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

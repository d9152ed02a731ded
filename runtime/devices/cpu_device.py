"""The CPU as a first-class device.

Host memory stands in for device memory, an enforced budget for its size, copies may be throttled to the speed of a
link, and reads and writes of chunks to the speed of a disk.  What is emulated says so in ``emulated``.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...shared.basics.errors import HardwareError
from ...shared.basics.units import as_bytes, format_bytes, format_rate
from .device import TrainingDevice, device_description
from .ledger import MemoryLedger


class _Patience(threading.local):
    """What ends a thread's waits for what is throttled; never set unless the thread names another one."""

    def __init__(self) -> None:
        self.cut_short = threading.Event()


class CpuDevice(TrainingDevice):
    """The CPU as a device.

    ``budget_bytes``, a number or text such as ``"50MiB"``, is enforced: beyond it, ``CpuOutOfMemoryError`` is raised.
    The link rates throttle copies, in bytes per second; None leaves them at the speed of memory.  The disk rates do
    the same with what passes between chunk files and the host; None leaves it at the speed of the folder's disk.
    ``collective_bytes_per_s`` is what a rank sends to others at most; None leaves it at what their processes reach.
    """

    runs_behind = False

    def __init__(
        self,
        budget_bytes: int | str | None = None,
        *,
        host_to_device_bytes_per_s: float | None = None,
        device_to_host_bytes_per_s: float | None = None,
        disk_read_bytes_per_s: float | None = None,
        disk_write_bytes_per_s: float | None = None,
        collective_bytes_per_s: float | None = None,
    ) -> None:
        if budget_bytes is not None:
            budget_bytes = as_bytes(budget_bytes)
        if budget_bytes is not None and not 0 < budget_bytes < math.inf:
            raise HardwareError(f"budget_bytes is {budget_bytes}; it must be positive.")
        for name, rate in (
            ("host_to_device", host_to_device_bytes_per_s),
            ("device_to_host", device_to_host_bytes_per_s),
            ("disk_read", disk_read_bytes_per_s),
            ("disk_write", disk_write_bytes_per_s),
            ("collective", collective_bytes_per_s),
        ):
            if rate is not None and not 0 < rate < math.inf:
                raise HardwareError(f"{name}_bytes_per_s is {rate}; it must be positive and finite.")
        self.torch_device = torch.device("cpu")
        self.ledger: MemoryLedger = MemoryLedger(budget_bytes)
        self._rates = {True: host_to_device_bytes_per_s, False: device_to_host_bytes_per_s}
        self._disk_rates = {False: disk_read_bytes_per_s, True: disk_write_bytes_per_s}
        self._collective_rate = collective_bytes_per_s
        self._patience = _Patience()

    @property
    def budget_bytes(self) -> int | None:
        """The enforced budget."""
        return self.ledger.budget_bytes

    def without_budget(self) -> CpuDevice:
        """The same throttles, and as much memory as the host has."""
        return CpuDevice(
            host_to_device_bytes_per_s=self._rates[True],
            device_to_host_bytes_per_s=self._rates[False],
            disk_read_bytes_per_s=self._disk_rates[False],
            disk_write_bytes_per_s=self._disk_rates[True],
            collective_bytes_per_s=self._collective_rate,
        )

    @property
    def description(self) -> str:
        """The machine that stands in for a device."""
        return device_description(self.torch_device)

    @property
    def kind(self) -> str:
        """Which kernels torch runs on it: others round differently."""
        return f"a CPU with kernels for {torch.backends.cpu.get_cpu_capability()}"

    @property
    def limit_bytes(self) -> int | None:
        """The budget; without one the host's memory stands in for the device's, which has none of its own."""
        return self.budget_bytes

    def free_bytes(self) -> int | None:
        """By the ledger."""
        return None if self.budget_bytes is None else max(0, self.budget_bytes - self.ledger.level_bytes)

    @property
    def emulated(self) -> tuple[str, ...]:
        """Device memory always; budget, links and disk where they are set."""
        found = ["device memory is host memory"]
        if self.budget_bytes is not None:
            found.append(f"device budget of {format_bytes(self.budget_bytes)}")
        for to_device, name in ((True, "host to device"), (False, "device to host")):
            rate = self._rates[to_device]
            if rate is not None:
                found.append(f"link {name} throttled to {format_rate(rate)}")
        for is_write, name in ((False, "reads"), (True, "writes")):
            rate = self._disk_rates[is_write]
            if rate is not None:
                found.append(f"disk {name} throttled to {format_rate(rate)}")
        if self._collective_rate is not None:
            found.append(f"collectives throttled to {format_rate(self._collective_rate)}")
        return tuple(found)

    def host_buffer(self, size_bytes: int) -> torch.Tensor:
        """Ordinary host memory."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def make_stream(self) -> Any:
        """None: lanes are threads alone."""
        return None

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Nothing to do."""
        return nullcontext()

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, to_device: bool) -> None:
        """Copy now; a throttled link then waits for the time that it would have taken."""
        start_s = time.perf_counter()
        destination.copy_(source)
        self._pace(start_s, source.numel() * source.element_size(), self._rates[to_device])

    def copy_all(
        self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, to_device: bool
    ) -> None:
        """Copy now; a throttled link then waits for the time that all of it would have taken."""
        if not sources:
            return
        start_s = time.perf_counter()
        torch._foreach_copy_(list(destinations), list(sources))
        self._pace(start_s, sum(one.numel() * one.element_size() for one in sources), self._rates[to_device])

    def pace_disk(self, since_s: float, size_bytes: int, *, is_write: bool) -> None:
        """A throttled disk waits for the time that it would have taken."""
        self._pace(since_s, size_bytes, self._disk_rates[is_write])

    def pace_collective(self, since_s: float, sent_bytes: int) -> None:
        """Throttled collectives wait for the time that they would have taken."""
        self._pace(since_s, sent_bytes, self._collective_rate)

    def _pace(self, since_s: float, size_bytes: int, rate: float | None) -> None:
        if rate is not None and (remaining_s := since_s + size_bytes / rate - time.perf_counter()) > 0:
            self._patience.cut_short.wait(remaining_s)

    def cut_waits_short(self, when: threading.Event) -> None:
        """A slow link or disk would keep a thread for hours after training was given up."""
        self._patience.cut_short = when

    def record_event(self) -> Any:
        """None: work is done when its call returns."""
        return None

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""
        return None

    def synchronize_event(self, event: Any) -> None:
        """Nothing to wait for."""
        return None

    def synchronize(self) -> None:
        """Nothing to wait for."""
        return None

    def stamp(self) -> Any:
        """Now."""
        return time.perf_counter()

    def seconds(self, stamp: Any) -> float:
        """The stamp itself."""
        return float(stamp)

    def worker_threads(self, *, is_optimizer: bool) -> int:
        """One each."""
        # Compute uses every core already; a second team of threads would only make both wait at their barriers.
        return 1

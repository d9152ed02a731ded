"""The devices that a schedule can run on: a CUDA device, or the CPU with a budget and links of its own.

The CPU is a first-class device: host memory stands in for device memory, an enforced budget for its size, and copies
may be throttled to the speed of a link.  What is emulated says so in ``emulated``.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...shared.basics.errors import DeviceOutOfMemoryError, HardwareError, ScheduleError
from ...shared.basics.units import format_bytes, format_rate
from ..model.identity import device_description
from .ledger import MemoryLedger
from .pinned_memory import PinnedMemory
from .stream_clock import Stamp, StreamClock


class TrainingDevice(ABC):
    """Where tensors live and how work is put on a lane."""

    torch_device: torch.device
    ledger: MemoryLedger | None
    """Counts the device's memory where no allocator does; None where the allocator itself is asked."""
    runs_behind: bool
    """Whether work is only queued by the call that asks for it ([Note: Memory on one stream] in ``memory_events``)."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The machine, in words."""

    @property
    def emulated(self) -> tuple[str, ...]:
        """What is emulated, in words."""
        return ()

    def begin_training(self) -> None:
        """A training begins on the thread and stream that call; one at a time if the device has a budget."""
        return None

    def end_training(self) -> None:
        """The training has ended and let go of its memory."""
        return None

    def check_stream(self) -> None:
        """Raise ScheduleError unless the current stream is the one that the training began on."""
        return None

    @abstractmethod
    def host_buffer(self, size_bytes: int) -> torch.Tensor:
        """An uninitialised host buffer (uint8) that copies to and from the device can use at full speed."""

    def empty(self, size_bytes: int, name: str) -> torch.Tensor:
        """An uninitialised buffer (uint8) on the device.  Raises as ``resize`` does."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.torch_device)

    def resize(self, flat: torch.Tensor, size_bytes: int, name: str) -> None:
        """Give a flat buffer's storage ``size_bytes``: 0 lets go of its memory.

        Raises the device's out-of-memory error, which says that ``name`` needs them.
        """
        flat.untyped_storage().resize_(size_bytes)

    @abstractmethod
    def make_stream(self) -> Any:
        """A stream for one lane; None where lanes are threads alone."""

    @abstractmethod
    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Put the work of the block on ``stream``."""

    @abstractmethod
    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, to_device: bool) -> None:
        """Copy between host and device in the order of the current stream."""

    @abstractmethod
    def record_event(self) -> Any:
        """A point of the current stream that others can wait for; None where work is done when its call returns."""

    @abstractmethod
    def wait_event(self, event: Any) -> None:
        """Let the current stream wait for ``event``."""

    @abstractmethod
    def synchronize_event(self, event: Any) -> None:
        """Let the calling thread wait for ``event``."""

    @abstractmethod
    def synchronize(self) -> None:
        """Let the calling thread wait for all streams."""

    @abstractmethod
    def cut_waits_short(self, when: threading.Event) -> None:
        """Let waits of the calling thread that only emulate something end early, once ``when`` is set."""

    @abstractmethod
    def stamp(self) -> Any:
        """A point in time of the current stream."""

    @abstractmethod
    def seconds(self, stamp: Any) -> float:
        """A stamp in seconds of ``time.perf_counter``; waits for the work before it."""

    def settled(self, stamp: Any) -> Any:
        """The stamp in seconds if that takes no waiting, else the stamp itself: it may hold on to something."""
        return stamp

    @abstractmethod
    def worker_threads(self, *, is_optimizer: bool) -> int:
        """Threads that one operation of a worker lane may use."""


class _Patience(threading.local):
    """What ends a thread's waits for a throttled link; never set unless the thread names another one."""

    def __init__(self) -> None:
        self.cut_short = threading.Event()


class CpuDevice(TrainingDevice):
    """The CPU as a device.

    ``budget_bytes`` is enforced: beyond it, ``CpuOutOfMemoryError`` is raised.  The link rates throttle copies, in
    bytes per second; None leaves them at the speed of memory.
    """

    runs_behind = False

    def __init__(
        self,
        budget_bytes: int | None = None,
        *,
        host_to_device_bytes_per_s: float | None = None,
        device_to_host_bytes_per_s: float | None = None,
    ) -> None:
        if budget_bytes is not None and not 0 < budget_bytes < math.inf:
            raise HardwareError(f"budget_bytes is {budget_bytes}; it must be positive.")
        for name, rate in (
            ("host_to_device", host_to_device_bytes_per_s),
            ("device_to_host", device_to_host_bytes_per_s),
        ):
            if rate is not None and not 0 < rate < math.inf:
                raise HardwareError(f"{name}_bytes_per_s is {rate}; it must be positive and finite.")
        self.torch_device = torch.device("cpu")
        self.ledger: MemoryLedger = MemoryLedger(budget_bytes)
        self._rates = {True: host_to_device_bytes_per_s, False: device_to_host_bytes_per_s}
        self._patience = _Patience()

    @property
    def budget_bytes(self) -> int | None:
        """The enforced budget."""
        return self.ledger.budget_bytes

    @property
    def description(self) -> str:
        """The machine that stands in for a device."""
        return device_description(self.torch_device)

    @property
    def emulated(self) -> tuple[str, ...]:
        """Device memory always; budget and links where they are set."""
        found = ["device memory is host memory"]
        if self.budget_bytes is not None:
            found.append(f"device budget of {format_bytes(self.budget_bytes)}")
        for to_device, name in ((True, "host to device"), (False, "device to host")):
            rate = self._rates[to_device]
            if rate is not None:
                found.append(f"link {name} throttled to {format_rate(rate)}")
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
        start = time.perf_counter()
        destination.copy_(source)
        rate = self._rates[to_device]
        if rate is not None:
            size_bytes = source.numel() * source.element_size()
            remaining_s = start + size_bytes / rate - time.perf_counter()
            if remaining_s > 0:
                self._patience.cut_short.wait(remaining_s)

    def cut_waits_short(self, when: threading.Event) -> None:
        """A slow link would keep a thread for hours after training was given up."""
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


class CudaOutOfMemoryError(DeviceOutOfMemoryError, torch.OutOfMemoryError):
    """A CUDA device has no room for what a schedule puts there; also torch's own out-of-memory error."""


class CudaDevice(TrainingDevice):
    """One CUDA device; lanes are streams, submitted to by worker threads.

    ``budget_bytes`` is enforced while a training runs, by torch's allocator: it limits what the allocator holds, with
    its rounding and fragmentation, but not the memory of CUDA itself.
    """

    runs_behind = True

    def __init__(self, index: int = 0, *, budget_bytes: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise HardwareError(
                "this installation of torch has no CUDA device. Use CpuDevice, or install a CUDA build."
            )
        if not 0 <= index < torch.cuda.device_count():
            raise HardwareError(f"there is no cuda:{index}; this machine has {torch.cuda.device_count()} CUDA devices.")
        self.torch_device = torch.device("cuda", index)
        self.ledger = None
        self.pinned = PinnedMemory()
        """The pinned host memory of its trainings."""
        self._index = index
        self._total_bytes = int(torch.cuda.get_device_properties(index).total_memory)
        if budget_bytes is not None and not 0 < budget_bytes <= self._total_bytes:
            raise HardwareError(
                f"a budget of {format_bytes(budget_bytes)} is outside cuda:{index}'s {format_bytes(self._total_bytes)}."
            )
        self.budget_bytes = budget_bytes
        """The enforced budget."""
        self._fraction_before: float | None = None
        self._compute_stream: Any = None
        self._clock = StreamClock(self.torch_device)

    @property
    def description(self) -> str:
        """The GPU and the machine that it sits in."""
        return device_description(self.torch_device)

    def begin_training(self) -> None:
        """Let the budget hold, and remember the stream that compute is queued on.

        Memory that the allocator keeps for later would count, so it is given back.  Raises HardwareError if a training
        with this device's budget is under way.
        """
        self._compute_stream = torch.cuda.current_stream(self._index)
        if self.budget_bytes is None:
            return
        if self._fraction_before is not None:
            raise HardwareError(
                "two trainings at once on one device with a budget. Close the first, or give neither a budget."
            )
        self._fraction_before = torch.cuda.get_per_process_memory_fraction(self._index)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(self.budget_bytes / self._total_bytes, self._index)

    def end_training(self) -> None:
        """Let the limit be what it was.  Idempotent."""
        if self._fraction_before is not None:
            torch.cuda.set_per_process_memory_fraction(self._fraction_before, self._index)
            self._fraction_before = None

    def check_stream(self) -> None:
        """Memory is freed in the order of the compute stream, so there can be only one."""
        current = torch.cuda.current_stream(self._index)
        if self._compute_stream is not None and current.cuda_stream != self._compute_stream.cuda_stream:
            raise ScheduleError(
                "forward runs on another CUDA stream than carry_out() was called on, where memory comes and goes. Call "
                "both within the same torch.cuda.stream(...)."
            )

    def host_buffer(self, size_bytes: int) -> torch.Tensor:
        """Page-locked memory of exactly this size."""
        return self.pinned.buffer(size_bytes)

    def empty(self, size_bytes: int, name: str) -> torch.Tensor:
        """By way of torch's allocator, in the order of the current stream."""
        try:
            return super().empty(size_bytes, name)
        except torch.OutOfMemoryError as error:
            raise self.out_of_memory(name, size_bytes) from error

    def resize(self, flat: torch.Tensor, size_bytes: int, name: str) -> None:
        """By way of torch's allocator, in the order of the current stream."""
        try:
            flat.untyped_storage().resize_(size_bytes)
        except torch.OutOfMemoryError as error:
            raise self.out_of_memory(name, size_bytes) from error

    def out_of_memory(self, name: str, size_bytes: int) -> CudaOutOfMemoryError:
        """The error that says who needed how much, and what was there."""
        allocated_bytes = torch.cuda.memory_allocated(self._index)
        reserved_bytes = torch.cuda.memory_reserved(self._index)
        limit_bytes = self.budget_bytes or self._total_bytes
        limit = f"budget of {format_bytes(limit_bytes)}" if self.budget_bytes else format_bytes(limit_bytes)
        return CudaOutOfMemoryError(
            f"out of memory on cuda:{self._index}: {name} needs {format_bytes(size_bytes)}; of the {limit}, "
            f"{format_bytes(allocated_bytes)} are allocated and {format_bytes(reserved_bytes - allocated_bytes)} more "
            f"are held by the allocator in pieces. Search a plan for a smaller budget, raise it to at least "
            f"{format_bytes(reserved_bytes + size_bytes)}, or let the allocator join its pieces (set "
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch starts)."
        )

    def make_stream(self) -> Any:
        """A stream of the device."""
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` the current one; None keeps the one that is."""
        return torch.cuda.stream(stream) if stream is not None else nullcontext()

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, to_device: bool) -> None:
        """Queue a copy on the current stream."""
        destination.copy_(source, non_blocking=True)

    def record_event(self) -> Any:
        """An event at the end of the current stream.  Threads that wait for it sleep: cores are for CPU Adam."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def wait_event(self, event: Any) -> None:
        """Let the current stream wait for ``event``."""
        if event is not None:
            torch.cuda.current_stream(self.torch_device).wait_event(event)

    def synchronize_event(self, event: Any) -> None:
        """Let this thread wait for ``event``."""
        if event is not None:
            event.synchronize()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.torch_device)

    def cut_waits_short(self, when: threading.Event) -> None:
        """Nothing is emulated."""

    def stamp(self) -> Any:
        """A timing event at the end of the current stream."""
        return self._clock.stamp()

    def seconds(self, stamp: Any) -> float:
        """By the host's clock; what the host itself did has its time already."""
        return self._clock.seconds(stamp) if isinstance(stamp, Stamp) else float(stamp)

    def settled(self, stamp: Any) -> Any:
        """Seconds, once the stream has come so far: events are not kept longer than they are needed."""
        return self._clock.seconds(stamp) if isinstance(stamp, Stamp) and stamp.has_passed else stamp

    def worker_threads(self, *, is_optimizer: bool) -> int:
        """For CPU Adam all but one, which launches what runs on the device; one for lanes that only queue copies."""
        return max(1, torch.get_num_threads() - 1) if is_optimizer else 1

"""One CUDA device: lanes are streams, and torch's allocator holds the budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ...shared.basics.errors import DeviceOutOfMemoryError, HardwareError, ScheduleError
from ...shared.basics.units import as_bytes, format_bytes
from .device import TrainingDevice, device_description
from .pinned_memory import PinnedMemory
from .stream_clock import Stamp, StreamClock


class CudaOutOfMemoryError(DeviceOutOfMemoryError, torch.OutOfMemoryError):
    """A CUDA device has no room for what a schedule puts there; also torch's own out-of-memory error."""


class CudaDevice(TrainingDevice):
    """One CUDA device; lanes are streams, submitted to by worker threads.

    ``budget_bytes``, a number or text such as ``"10GiB"``, is enforced while a training runs, by torch's allocator: it
    limits what the allocator holds, with its rounding and fragmentation, but not the memory of CUDA itself.
    """

    runs_behind = True

    def __init__(self, index: int = 0, *, budget_bytes: int | str | None = None) -> None:
        if not torch.cuda.is_available():
            raise HardwareError(
                "this installation of torch has no CUDA device. Use CpuDevice (device='cpu'), or install a CUDA build."
            )
        if not 0 <= index < torch.cuda.device_count():
            raise HardwareError(f"there is no cuda:{index}; this machine has {torch.cuda.device_count()} CUDA devices.")
        self.torch_device = torch.device("cuda", index)
        self.ledger = None
        self.pinned = PinnedMemory()
        """The pinned host memory of its trainings."""
        self._index = index
        self._total_bytes = int(torch.cuda.get_device_properties(index).total_memory)
        if budget_bytes is not None:
            budget_bytes = as_bytes(budget_bytes)
        if budget_bytes is not None and not 0 < budget_bytes <= self._total_bytes:
            raise HardwareError(
                f"a budget of {format_bytes(budget_bytes)} is outside cuda:{index}'s {format_bytes(self._total_bytes)}."
            )
        self._budget_bytes = budget_bytes
        self._fraction_before: float | None = None
        self._compute_stream: Any = None
        self._clock = StreamClock(self.torch_device)

    @property
    def budget_bytes(self) -> int | None:
        """The enforced budget."""
        return self._budget_bytes

    def without_budget(self) -> CudaDevice:
        """The same GPU, all of it."""
        return CudaDevice(self._index)

    @property
    def description(self) -> str:
        """The GPU and the machine that it sits in."""
        return device_description(self.torch_device)

    @property
    def kind(self) -> str:
        """The GPU's name."""
        return str(torch.cuda.get_device_name(self._index))

    @property
    def identity(self) -> str:
        """The GPU's name and UUID."""
        return f"{self.kind}, UUID {torch.cuda.get_device_properties(self._index).uuid}"

    @property
    def limit_bytes(self) -> int:
        """The budget, else all memory of the device."""
        return self.budget_bytes if self.budget_bytes is not None else self._total_bytes

    def free_bytes(self) -> int:
        """By torch's allocator, which may have some of it in pieces, and by the driver: others may have memory too."""
        unused_bytes = torch.cuda.memory_reserved(self._index) - torch.cuda.memory_allocated(self._index)
        of_driver_bytes = int(torch.cuda.mem_get_info(self._index)[0]) + unused_bytes
        return max(0, min(self.limit_bytes - torch.cuda.memory_allocated(self._index), of_driver_bytes))

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

    @contextmanager
    def in_compute_order(self) -> Iterator[None]:
        """Take memory on the compute stream, and let the current one wait for whatever that has still to do with it."""
        with torch.cuda.stream(self._compute_stream):
            yield
            event = self.record_event()
        self.wait_event(event)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, to_device: bool) -> None:
        """Queue a copy on the current stream."""
        destination.copy_(source, non_blocking=True)

    def copy_all(
        self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, to_device: bool
    ) -> None:
        """Queue copies on the current stream."""
        if sources:
            torch._foreach_copy_(list(destinations), list(sources), non_blocking=True)

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

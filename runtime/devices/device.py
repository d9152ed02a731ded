"""What a schedule asks of the device that it runs on."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .ledger import MemoryLedger
from .machine import machine_name


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
    @abstractmethod
    def kind(self) -> str:
        """What ranks that train together have to have in common of their devices, in words."""

    @property
    def identity(self) -> str | None:
        """Which device it is among all of the world; None where processes share it."""
        return None

    @property
    @abstractmethod
    def budget_bytes(self) -> int | None:
        """The enforced budget; None without one."""

    @abstractmethod
    def without_budget(self) -> TrainingDevice:
        """The same device, its links and disk as slow as they are, for work that no budget holds for."""

    @property
    @abstractmethod
    def limit_bytes(self) -> int | None:
        """What a training may take at most: the budget, else all memory of the device; None: no limit is known."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """What is left of ``limit_bytes`` at this moment; None: no limit is known."""

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

    def in_compute_order(self) -> AbstractContextManager[Any]:
        """Within the block, on a lane, memory is taken in the order of the compute stream, where it will be freed.

        What the block queues is done before whatever the lane queues afterwards
        ([Note: Memory on one stream] in ``memory_events``).
        """
        return nullcontext()

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
    def copy_all(
        self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, to_device: bool
    ) -> None:
        """``copy`` of every pair, one after another, in one call.

        Between the copies no lane holds Python's lock, which the thread that computes needs for every operation.
        """

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

    def pace_disk(self, since_s: float, size_bytes: int, *, is_write: bool) -> None:
        """Let the calling thread wait if a disk is emulated: what it moved since ``since_s`` would have taken longer.

        ``since_s``: of ``time.perf_counter``.  Devices beside a real disk do nothing.
        """
        return None

    def pace_collective(self, since_s: float, sent_bytes: int) -> None:
        """Let the calling thread wait if links between ranks are emulated, for what it has sent since ``since_s``."""
        return None

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


def device_description(device: torch.device) -> str:
    """What measurements on ``device`` are filed under: the machine, and the accelerator in it."""
    return machine_name() if device.type == "cpu" else f"{torch.cuda.get_device_name(device)} in {machine_name()}"

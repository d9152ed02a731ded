"""The memory ledger: which storages are alive on the device, counted as they come and go.

On the CPU the host's memory stands in for the device's, and no allocator keeps the two apart.  The ledger does: it
counts what the compute thread's operations produce (a dispatch mode sees every one of them, in forward, backward and
recomputation) and what the runtime allocates by name, and raises the device's out-of-memory error beyond the budget.
Host-side tensors are made on other threads or outside the metered stretch and do not count.

[Note: Budget between metered iterations]
Watching every operation costs a few percent of an iteration, so it would disturb timings.  Shapes repeat, and equal
shapes allocate equally: the level that each compute task reached in a metered iteration, beyond what is allocated by
name, is kept as the task's claim.  In iterations that are not metered the claim of the running task stands for its
operations, and the budget is enforced against claim plus named allocations.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..shared.errors import DeviceOutOfMemoryError
from ..shared.units import format_bytes
from .tensors import tensors_in


class CpuOutOfMemoryError(DeviceOutOfMemoryError, torch.OutOfMemoryError):
    """The enforced budget of the CPU device is exceeded; also torch's own out-of-memory error."""


class MemoryLedger:
    """Bytes alive on one device.  Thread-safe; sizes in bytes, times in seconds of ``time.perf_counter``."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.named_bytes = 0
        """Bytes allocated by name (``allocate``)."""
        self.watched_bytes = 0
        """Bytes of storages seen by the dispatch mode or adopted."""
        self.claim_bytes = 0
        """What the running task may hold beyond named allocations while nobody watches."""
        self.peak_bytes = 0
        self.samples: list[tuple[float, int]] | None = None
        """(time, level) at every change while a curve is being recorded."""
        self.on_operation: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None] | None = None
        """Called after each watched operation with (operator, args, kwargs, result)."""
        self.doing = "setting up"
        """What the compute thread is doing, for messages."""
        self._lock = threading.RLock()
        self._watched: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._mode: _WatchingMode | None = None

    # -- levels ------------------------------------------------------------------------------------------------------

    @property
    def is_metering(self) -> bool:
        """Whether operations are being watched."""
        return self._mode is not None

    @property
    def level_bytes(self) -> int:
        """Bytes alive now; while nobody watches, with the running task's claim in place of its operations."""
        return self.named_bytes + (self.watched_bytes if self.is_metering else self.claim_bytes)

    def reset_peak(self) -> None:
        """Forget the peak; it becomes the present level."""
        with self._lock:
            self.peak_bytes = self.level_bytes

    def claim(self, size_bytes: int) -> None:
        """Set what the running task may hold.  Raises CpuOutOfMemoryError beyond the budget."""
        with self._lock:
            self.claim_bytes = size_bytes
            self._changed(0)

    # -- named allocations -------------------------------------------------------------------------------------------

    def allocate(self, size_bytes: int, name: str) -> None:
        """Count an allocation by the runtime itself.  Raises CpuOutOfMemoryError beyond the budget."""
        with self._lock:
            self.named_bytes += size_bytes
            try:
                self._changed(size_bytes, name)
            except CpuOutOfMemoryError:
                self.named_bytes -= size_bytes
                raise

    def free(self, size_bytes: int) -> None:
        """Count the end of a named allocation."""
        with self._lock:
            self.named_bytes -= size_bytes
            self._changed(-size_bytes)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> int:
        """Count tensors that exist already (parameters, buffers, optimizer state, the batch).  Returns new bytes."""
        with self._lock:
            return sum(self._register(tensor.untyped_storage(), _own_bytes(tensor)) for tensor in tensors)

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Know these tensors' storages without counting them: named allocations, host memory."""
        with self._lock:
            for tensor in tensors:
                self._register(tensor.untyped_storage(), 0)

    # -- watching ----------------------------------------------------------------------------------------------------

    def start_metering(self) -> None:
        """Watch every operation of this thread until ``stop_metering``."""
        assert self._mode is None, "metering twice"
        self._mode = _WatchingMode(self)
        self._mode.__enter__()

    def stop_metering(self) -> None:
        """Stop watching; does nothing if nobody watches."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)

    @contextmanager
    def metering(self) -> Iterator[MemoryLedger]:
        """Watch every operation within the block."""
        self.start_metering()
        try:
            yield self
        finally:
            self.stop_metering()

    # -- inside ------------------------------------------------------------------------------------------------------

    def watch_result(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count the storages that an operation made."""
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata in self._watched:
                continue
            # A view of something nobody told us about (a batch, a mask) is no new memory.
            is_view = any(source.untyped_storage()._cdata == storage._cdata for source in tensors_in((args, kwargs)))
            with self._lock:
                self._register(storage, 0 if is_view else storage.nbytes(), operator)
        if self.on_operation is not None:
            self.on_operation(operator, args, kwargs, result)

    def _register(self, storage: torch.UntypedStorage, size_bytes: int, operator: Hashable = None) -> int:
        key = storage._cdata
        if key in self._watched:
            return 0
        self._watched[key] = (size_bytes, weakref.ref(storage, lambda _: self._forget(key)))
        self.watched_bytes += size_bytes
        self._changed(size_bytes, str(operator) if operator is not None else "a tensor")
        return size_bytes

    def _forget(self, key: int) -> None:
        with self._lock:
            entry = self._watched.pop(key, None)
            if entry is not None:
                self.watched_bytes -= entry[0]
                self._changed(-entry[0])

    def _changed(self, size_bytes: int, name: str = "") -> None:
        level = self.level_bytes
        self.peak_bytes = max(self.peak_bytes, level)
        if self.samples is not None:
            self.samples.append((time.perf_counter(), level))
        if self.budget_bytes is not None and level > self.budget_bytes and size_bytes >= 0:
            free = self.budget_bytes - (level - size_bytes)
            asked = f"{name} needs {format_bytes(size_bytes)}" if size_bytes else "the running task needs more"
            raise CpuOutOfMemoryError(
                f"out of memory on the CPU device: {asked} but {format_bytes(max(0, free))} of the budget of "
                f"{format_bytes(self.budget_bytes)} is free, while {self.doing}. Search a plan for this budget, or "
                f"raise it to at least {format_bytes(level)}."
            )


class _WatchingMode(TorchDispatchMode):
    """Shows the ledger every operation of one thread."""

    def __init__(self, ledger: MemoryLedger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._ledger.watch_result(func, args, kwargs, result)
        return result


def _own_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor itself, not of a larger storage that it is a slice of."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


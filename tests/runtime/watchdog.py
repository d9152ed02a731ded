"""A hang is a failure, not a test run that never ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from protwin.runtime import CpuDevice

PATIENCE_S = 60.0


def lanes_alive() -> list[str]:
    """Names of the runtime's threads that run now."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("protwin-"))


@contextmanager
def ends_in_time() -> Iterator[None]:
    """Interrupt the main thread if the block takes too long; afterwards no thread of the runtime is left."""
    timer = threading.Timer(PATIENCE_S, _interrupt, args=(threading.main_thread().ident,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    assert lanes_alive() == []


def _interrupt(thread_id: int) -> None:
    import ctypes

    class StillRunning(BaseException):
        """The block did not end in time."""

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(StillRunning))


class FaultyDevice(CpuDevice):
    """Calls ``fault`` before the n-th copy in one direction."""

    def __init__(self, fault: Callable[[], None], *, to_device: bool, copy_number: int) -> None:
        super().__init__()
        self._fault = fault
        self._to_device = to_device
        self._remaining = copy_number

    def copy(self, destination: object, source: object, *, to_device: bool) -> None:
        self._count(to_device)
        super().copy(destination, source, to_device=to_device)  # type: ignore[arg-type]

    def copy_all(self, destinations: object, sources: Sequence[object], *, to_device: bool) -> None:
        for _ in sources:
            self._count(to_device)
        super().copy_all(destinations, sources, to_device=to_device)  # type: ignore[arg-type]

    def _count(self, to_device: bool) -> None:
        if to_device == self._to_device:
            self._remaining -= 1
            if self._remaining == 0:
                self._fault()

"""Lanes: workers that run their tasks in order, side by side with the compute thread.

A lane is a thread with a queue; on CUDA it also has a stream.  A *mark* is the end of a task: the thread part is done
when the task's call has returned, the stream part when the recorded event has passed.  Waiting for a mark from a
stream never blocks the thread beyond the first part.

A lane stops at its first failure: every later task of it fails with the same error, so that nothing runs out of order
on half-made data, and nobody waits for ever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...shared.schema.schedule import Lane
from .device import TrainingDevice


class Cancelled(Exception):
    """The task was given up, because training stopped."""


class Mark:
    """The end of one task."""

    __slots__ = ("_done", "error", "event")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.event: Any = None
        self.error: BaseException | None = None

    def set(self, event: Any = None) -> None:
        """The task has ended (on its stream: will have ended when ``event`` has passed)."""
        self.event = event
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """The task will never end, because of ``error``.  Nothing happens if it has ended."""
        if not self._done.is_set():
            self.error = error
            self._done.set()

    @property
    def is_set(self) -> bool:
        """Whether the task's call has returned or failed."""
        return self._done.is_set()

    def wait_for_end(self) -> None:
        """Block until the task's call has returned or failed."""
        self._done.wait()

    def wait(self) -> Any:
        """Block until the task's call has returned; gives its event.  Raises what the task raised."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self.event


class Span:
    """When a task ran, as stamps of its device."""

    __slots__ = ("end", "start")

    def __init__(self, start: Any = None) -> None:
        self.start = start
        self.end: Any = None


class WorkerLane:
    """One lane besides compute."""

    def __init__(self, lane: Lane, device: TrainingDevice) -> None:
        self.lane = lane
        self.failure: BaseException | None = None
        """What stopped the lane."""
        self._device = device
        self._is_host_work = lane in (Lane.CPU_OPTIM, Lane.DISK)
        self._stream = None if self._is_host_work else device.make_stream()
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Sequence[Mark], Mark, Span] | None]
        self._queue = queue.SimpleQueue()
        self._is_ready = threading.Event()
        self._is_cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"protwin-{lane}", daemon=True)
        num_threads = torch.get_num_threads()
        self._thread.start()
        self._is_ready.wait()
        # The lane has set its own number; torch would hand that on to every thread that starts from now on.
        torch.set_num_threads(num_threads)

    def submit(self, work: Callable[[], None], waits: Sequence[Mark], mark: Mark) -> Span:
        """Queue ``work``, to start when all ``waits`` have ended; ``mark`` tells its end.  Gives its span of time."""
        span = Span()
        self._queue.put((work, waits, mark, span))
        return span

    def cancel(self) -> None:
        """Let no further task start; those that wait for failed marks end too.  Idempotent."""
        self._is_cancelled.set()
        if self.failure is None:
            self.failure = Cancelled(f"lane {self.lane} was stopped")

    def close(self) -> None:
        """End the thread after the queue has drained.  Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def let_end(self) -> None:
        """As ``close``, without waiting."""
        self._queue.put(None)

    def _run(self) -> None:
        torch.set_num_threads(self._device.worker_threads(is_optimizer=self.lane is Lane.CPU_OPTIM))
        self._device.cut_waits_short(self._is_cancelled)
        self._is_ready.set()
        with torch.no_grad(), self._device.on_stream(self._stream):
            while (item := self._queue.get()) is not None:
                work, waits, mark, span = item
                try:
                    self._wait(waits)
                    if self.failure is not None:
                        raise self.failure
                    span.start = self._stamp()
                    work()
                    span.end = self._stamp()
                    mark.set(None if self._is_host_work else self._device.record_event())
                except BaseException as error:
                    # Every failure travels to whoever waits for the mark, in the end to the compute thread.
                    self.failure = self.failure or error
                    mark.fail(error)
                # Let go of the task's tensors now, not when the next task arrives.
                del work, waits, mark, span, item

    def _wait(self, waits: Sequence[Mark]) -> None:
        for wait in waits:
            event = wait.wait()
            if self._is_host_work:
                self._device.synchronize_event(event)
            else:
                self._device.wait_event(event)

    def _stamp(self) -> Any:
        return time.perf_counter() if self._is_host_work else self._device.stamp()

"""Metering of a device whose own allocator counts: its peak in every iteration, a curve over the tasks in some.

Asking for the peak of an iteration costs nothing.  A curve asks the allocator at both ends of every compute task, which
takes tens of microseconds each time, so it is drawn in the iterations that the ledger would watch on the CPU.  The
allocator counts what the compute thread has asked for so far, whether or not the device has come to use it; that order
is the compute stream's ([Note: Memory on one stream] in ``stream_memory``).  It counts all of the process: the
workspaces of cuBLAS, and tensors that have nothing to do with training.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ...shared.schema.schedule import Task
from ..devices.device import TrainingDevice
from .metering import METERED_ITERATIONS, Leaving, ListGradients, Metering, shapes_of
from .recorder import MeteredMemory


class AllocatorMetering(Metering):
    """Asks torch's CUDA allocator."""

    def __init__(self, device: TrainingDevice, meter_every: int | None) -> None:
        self._device = device
        self._meter_every = meter_every
        self._num_watched: dict[Hashable, int] = {}
        self._is_watching = False
        self._shapes: Hashable = None
        self._curve: list[tuple[Any, int]] = []
        self._peak_at = ""
        self._iteration_peak_bytes = 0
        self._started: Any = None

    def begin_iteration(self, iteration: int, inputs: Sequence[torch.Tensor]) -> bool:
        """Forget the last iteration's peak; draw a curve if the shapes are new, or it is time."""
        torch.cuda.reset_peak_memory_stats(self._device.torch_device)
        shapes = self._shapes = shapes_of(inputs)
        seen = self._num_watched.get(shapes, 0)
        is_due = self._meter_every is not None and iteration % self._meter_every == 0
        self._is_watching = seen < METERED_ITERATIONS or is_due
        if self._is_watching:
            self._num_watched[shapes] = seen + 1
            self._curve = []
            self._peak_at, self._iteration_peak_bytes = "", 0
        return self._is_watching

    def begin_micro_batch(self, inputs: Sequence[torch.Tensor]) -> None:
        """Nothing to do: the allocator counts whatever it is asked for."""

    def begin_task(self, task: Task) -> None:
        """A curve's stretch begins; room that was made for copies since the last one counts with it."""
        if self._is_watching:
            self._started = self._device.stamp()
            peak_bytes = torch.cuda.max_memory_allocated(self._device.torch_device)
            self._note_peak(task, peak_bytes)
            self._curve.append((self._started, peak_bytes))
            torch.cuda.reset_peak_memory_stats(self._device.torch_device)

    def end_task(self, task: Task, leaving: Leaving, staying: ListGradients) -> None:
        """A curve's stretch ends: its highest level holds for all of it."""
        if self._is_watching:
            peak_bytes = torch.cuda.max_memory_allocated(self._device.torch_device)
            self._note_peak(task, peak_bytes)
            self._curve.append((self._started, peak_bytes))
            self._curve.append((self._device.stamp(), torch.cuda.memory_allocated(self._device.torch_device)))
            torch.cuda.reset_peak_memory_stats(self._device.torch_device)

    def end_iteration(self) -> MeteredMemory | None:
        """The peak since the iteration began; its curve, if there is one."""
        peak_bytes = torch.cuda.max_memory_allocated(self._device.torch_device)
        if not self._is_watching:
            self.peak_bytes = max(self.peak_bytes, peak_bytes)
            return None
        self.stop()
        self.peak_bytes = max(self.peak_bytes, self._iteration_peak_bytes)
        return MeteredMemory(self._curve, self._iteration_peak_bytes, self._peak_at, ())

    def give_up_iteration(self) -> None:
        """It is watched again if it was."""
        if self._is_watching:
            self._num_watched[self._shapes] -= 1
            self.stop()

    def stop(self) -> None:
        """Draw no curve any more."""
        self._is_watching = False

    def _note_peak(self, task: Task, peak_bytes: int) -> None:
        if peak_bytes > self._iteration_peak_bytes:
            self._iteration_peak_bytes, self._peak_at = peak_bytes, task.name

"""Metering of a device whose own allocator counts: its peak in every iteration, a curve over the tasks in some.

Asking for the peak of an iteration costs nothing.  A curve asks the allocator at the end of every compute task, which
takes tens of microseconds each time, so it is drawn in the iterations that the ledger would watch on the CPU.  The
allocator counts what the compute thread has asked for so far, whether or not the device has come to use it; that order
is the compute stream's ([Note: Memory on one stream] in ``memory_events``).  It counts all of the process: the
workspaces of cuBLAS, and tensors that have nothing to do with training.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from ...shared.schema.schedule import Task
from ..devices.device import TrainingDevice
from .iteration_memory import AllocatedMemory, AllocatedStretch, IterationMemory
from .metering import METERED_ITERATIONS, Leaving, ListGradients, Metering, shapes_of


class AllocatorMetering(Metering):
    """Asks torch's CUDA allocator."""

    def __init__(self, device: TrainingDevice, meter_every: int | None) -> None:
        self._device = device
        self._meter_every = meter_every
        self._num_watched: dict[Hashable, int] = {}
        self._is_watching = False
        self._shapes: Hashable = None
        self._curve: list[AllocatedStretch] = []
        """Of the running iteration, if it is drawn."""
        self._curves: dict[Hashable, Sequence[AllocatedStretch]] = {}
        """The latest of every shape of the inputs."""
        self._iteration_peak_bytes = 0
        self._peak_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """Highest level of all iterations so far."""
        return self._peak_bytes

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
            self._iteration_peak_bytes = 0
        return self._is_watching

    def begin_micro_batch(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Nothing changes: the allocator counts whatever it is asked for."""
        return self._is_watching

    def begin_task(self, task: Task) -> None:
        """Nothing to do: room that was made for copies since the last task counts with this one."""

    def end_task(self, task: Task, leaving: Leaving, staying: ListGradients) -> None:
        """Drawn: the highest level since the last task ended holds for all of this one."""
        if self._is_watching:
            device = self._device.torch_device
            most_bytes = torch.cuda.max_memory_allocated(device)
            self._iteration_peak_bytes = max(self._iteration_peak_bytes, most_bytes)
            self._curve.append(AllocatedStretch(task.id, task.name, most_bytes, torch.cuda.memory_allocated(device)))
            torch.cuda.reset_peak_memory_stats(device)

    def end_iteration(self) -> IterationMemory | None:
        """The peak since the iteration began, and the latest curve of equal shapes."""
        peak_bytes = torch.cuda.max_memory_allocated(self._device.torch_device)
        if self._is_watching:
            peak_bytes = max(peak_bytes, self._iteration_peak_bytes)
            self._curves[self._shapes] = self._curve
            self.stop()
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        return AllocatedMemory(peak_bytes, self._curves[self._shapes])

    def give_up_iteration(self) -> None:
        """It is watched again if it was."""
        if self._is_watching:
            self._num_watched[self._shapes] -= 1
            self.stop()

    def stop(self) -> None:
        """Draw no curve any more."""
        self._is_watching = False

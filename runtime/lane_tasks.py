"""The tasks of every lane besides compute: gathers, gradient offloads and CPU Adam, queued ahead with their marks.

Lanes are queued up to the end of the next iteration, so that its first gathers run while this one still computes; a
task starts when what it waits for has ended, exactly as in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..shared.schedule import Content, Lane, Schedule, Task, TaskId, TaskKind
from .chunks import DeviceChunk
from .devices import TrainingDevice
from .lanes import Cancelled, Mark, Span, WorkerLane
from .placed_model import PlacedModel
from .tensors import storage_bytes


class LaneTasks:
    """Runs a schedule's transfers and CPU Adam, iteration after iteration, and counts what they move."""

    def __init__(self, schedule: Schedule, placed: PlacedModel, device: TrainingDevice) -> None:
        self.bytes_host_to_device = 0
        self.bytes_device_to_host = 0
        self.num_gathers = 0
        self.num_cpu_adam_steps = 0
        self._tasks = schedule.tasks
        self._placed = placed
        self._device = device
        self._marks: dict[tuple[int, TaskId], Mark] = {}
        self._outgoing: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        """Gradients on their way, by iteration and chunk."""
        self._present: dict[tuple[int, int], list[bool]] = {}
        """For which parameters of a chunk there was a gradient."""
        self._lanes: dict[Lane, WorkerLane] = {}
        try:
            for lane in Lane:
                if lane is not Lane.COMPUTE:
                    self._lanes[lane] = WorkerLane(lane, device)
        except BaseException:
            self.close()
            raise

    # -- marks -------------------------------------------------------------------------------------------------------

    def mark(self, iteration: int, task: TaskId) -> Mark:
        """The mark of a task's end."""
        key = (iteration, task)
        found = self._marks.get(key)
        if found is None:
            found = self._marks[key] = Mark()
        return found

    def marks_before(self, task: Task, iteration: int) -> list[Mark]:
        """The marks that a task waits for; the first iteration has none before it."""
        marks = [self.mark(iteration, earlier) for earlier in task.after]
        if iteration > 0:
            marks += [self.mark(iteration - 1, earlier) for earlier in task.after_previous]
        return marks

    def forget(self, iteration: int) -> None:
        """Drop the marks of an iteration that nobody waits for any more; those still to come are kept."""
        for task in self._tasks:
            mark = self._marks.get((iteration, task.id))
            if mark is not None and mark.is_set:
                del self._marks[iteration, task.id]

    def drain(self, before: int) -> None:
        """Wait until every task of the iterations before ``before`` has ended.  Raises what one of them raised."""
        for (iteration, _), mark in list(self._marks.items()):
            if iteration < before:
                self._device.synchronize_event(mark.wait())

    def check(self) -> None:
        """Raise what stopped a lane, if one has."""
        for lane in self._lanes.values():
            if lane.failure is not None:
                raise lane.failure

    # -- tasks -------------------------------------------------------------------------------------------------------

    def submit(self, iteration: int) -> dict[TaskId, Span]:
        """Queue every task of an iteration that is not the compute thread's; gives their spans of time."""
        spans = {}
        for task in self._tasks:
            if task.lane is not Lane.COMPUTE:
                waits = self.marks_before(task, iteration)
                spans[task.id] = self._lanes[task.lane].submit(
                    self._work(task, iteration), waits, self.mark(iteration, task.id)
                )
        return spans

    def send_gradients(self, chunk: DeviceChunk, iteration: int) -> list[torch.Tensor]:
        """Take a chunk's gradients off its parameters, before its offload may start; gives those that leave."""
        gradients = self._outgoing[iteration, chunk.chunk.id] = chunk.detach_gradients()
        return [gradient for gradient in gradients if gradient is not None]

    def _work(self, task: Task, iteration: int) -> Callable[[], None]:
        assert task.chunk is not None
        chunk = self._placed.chunks[task.chunk]
        if task.kind is TaskKind.GATHER:
            return partial(self._gather, chunk)
        if task.kind is TaskKind.GRADIENT_OFFLOAD:
            return partial(self._offload, chunk, iteration)
        assert task.kind is TaskKind.CPU_ADAM
        return partial(self._cpu_adam, chunk, iteration)

    def _gather(self, chunk: DeviceChunk) -> None:
        with torch.profiler.record_function(f"protwin::gather chunk {chunk.chunk.id}"):
            chunk.gather()
        self.bytes_host_to_device += chunk.chunk.size_bytes
        self.num_gathers += 1

    def _offload(self, chunk: DeviceChunk, iteration: int) -> None:
        key = (iteration, chunk.chunk.id)
        with torch.profiler.record_function(f"protwin::gradient_offload chunk {chunk.chunk.id}"):
            gradients = self._outgoing.pop(key)
            size_bytes = storage_bytes(gradients)
            try:
                present = chunk.stage_gradients(gradients)
            finally:
                gradients.clear()
                self._free(size_bytes)
        self._present[key] = present
        self.bytes_device_to_host += chunk.moved_gradient_bytes(present)

    def _cpu_adam(self, chunk: DeviceChunk, iteration: int) -> None:
        present = self._present.pop((iteration, chunk.chunk.id))
        with torch.profiler.record_function(f"protwin::cpu_adam chunk {chunk.chunk.id}"):
            self._placed.step_on_host(chunk, present)
        self.num_cpu_adam_steps += 1

    # -- ending ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let the running tasks end, give up the others, and end the threads.  Idempotent."""
        for lane in self._lanes.values():
            lane.cancel()
        for mark in list(self._marks.values()):
            mark.fail(Cancelled("training has stopped"))
        for lane in self._lanes.values():
            lane.close()
        for gradients in self._outgoing.values():
            self._free(storage_bytes(gradients))
        self._marks.clear()
        self._outgoing.clear()
        self._present.clear()

    def _free(self, size_bytes: int) -> None:
        if self._device.ledger is not None:
            self._device.ledger.free(size_bytes, Content.GRADIENTS)

"""The tasks of every lane besides compute: gathers, gradient offloads and CPU Adam, queued ahead with their marks.

Lanes are queued up to the end of the next iteration, so that its first gathers run while this one still computes; a
task starts when what it waits for has ended, exactly as in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ...shared.schema.schedule import LANES_ALONE, AllocationId, Content, Lane, Schedule, Task, TaskId, TaskKind
from ...shared.verify.memory_events import memory_events
from ..chunks.chunk import DeviceChunk
from ..chunks.gradient_stand_ins import Norms
from ..chunks.placed_model import PlacedModel
from ..chunks.row_lookups import LookedUpChunk, RowGradients
from ..devices.device import TrainingDevice
from ..devices.lanes import Cancelled, Mark, Span, WorkerLane
from ..hooks.swapping import SwappedBlock
from ..model.nested_tensors import storage_bytes
from ..optimizers.gradient_norms import ClippedNorm
from ..ranks.collectives import Collectives
from .rank_work import RankWork, ahead_of, is_of_norm


class TransferLanes:
    """Runs a schedule's transfers and CPU Adam, iteration after iteration, and counts what they move."""

    def __init__(
        self,
        schedule: Schedule,
        placed: PlacedModel,
        device: TrainingDevice,
        swapping: Mapping[int, SwappedBlock],
        collectives: Collectives | None = None,
    ) -> None:
        """Start the lanes; ``collectives``: of several ranks."""
        self.bytes_host_to_device = 0
        self.bytes_device_to_host = 0
        self.num_gathers = 0
        self.num_cpu_adam_steps = 0
        self.bytes_read_from_disk = 0
        self.bytes_written_to_disk = 0
        self._schedule = schedule
        self._tasks = schedule.tasks
        self._placed = placed
        self._device = device
        self._swapping = swapping
        norms = [t.id for t in schedule.tasks if t.kind is TaskKind.GRADIENT_NORM or is_of_norm(t)]
        self._norm_task = norms[-1] if norms else None
        """The task after which the norm is known."""
        self._memory = memory_events(schedule) if device.runs_behind else None
        # Keys name an iteration, since lanes are queued up to the end of the next one, and a micro-batch, since the
        # copy of one micro-batch's gradients may still be queued when the next one's are sent.  Each dict has one
        # writer and one taker per key, ordered by the schedule's waits; single operations on a dict need no lock.
        self._marks: dict[tuple[int, TaskId], Mark] = {}
        """Made by ``mark`` for whoever asks first, the waiting or the ending task; dropped by ``forget`` one iteration
        later, when the last that could wait for them has begun.  By the compute thread alone."""
        self._outgoing: dict[tuple[int, int, int], list[torch.Tensor | None]] = {}
        """Gradients on their way, by iteration, micro-batch and chunk: from ``send`` (compute thread) to ``_offload``
        (d2h).  They are off their parameters before the copy begins: otherwise autograd would add the next
        micro-batch's to what is being copied."""
        self._present: dict[tuple[int, int], list[bool]] = {}
        """For which parameters of a chunk there is a staged gradient, by iteration and chunk: from the first
        micro-batch's ``_offload`` (d2h) by way of ``_accumulate`` and ``_norm`` to ``_cpu_adam`` (cpu_optim).  Beside
        the tensors, since staging is one buffer for all iterations: where a parameter had no gradient it still holds
        an older one, which must not be stepped."""
        self._arrived: dict[tuple[int, int, int], list[bool]] = {}
        """The same of gradients that are added, of a later micro-batch or to be widened, by iteration, micro-batch and
        chunk: from their ``_offload`` (d2h) to their ``_accumulate`` (cpu_optim)."""
        self.rows = placed.rows
        """Embeddings whose rows are looked up on the host."""
        self._outgoing_rows: dict[tuple[int, int, int], list[RowGradients]] = {}
        """Gradients of rows on their way, as ``_outgoing``: from ``send`` to ``_offload_rows`` (d2h)."""
        self._arrived_rows: dict[tuple[int, int, int], list[RowGradients]] = {}
        """The same on the host: from ``_offload_rows`` (d2h) to ``_add_rows`` (cpu_optim)."""
        self._clipped: dict[int, ClippedNorm] = {}
        """The norms of the gradients of an iteration, and what these are multiplied by: from ``_norm`` (cpu_optim) to
        ``forget``, since the step on the device and CPU Adam both read it."""
        self._held: dict[tuple[int, TaskId], list[torch.Tensor | None]] = {}
        """Gradients that queued copies still read, by iteration and offload: from ``_offload`` (d2h) to ``let_go``
        (compute thread).  On CUDA alone, where ``_offload`` returns before its copy has begun: dropped there, their
        memory would go to the compute stream's next operation, which writes while the copy reads
        ([Note: Memory on one stream] in ``memory_events``; ``test_cuda_ordering`` shows it)."""
        self._ranks = None
        """What the ranks do together; None: there is one."""
        if collectives is not None:
            shared = next((task.id for task in schedule.tasks if is_of_norm(task)), None)
            self._ranks = RankWork(placed, device, collectives, self._outgoing, self._clipped, norm_task=shared)
        self._meeting = Mark()
        """Set when all ranks have begun: a lane that waited for a rank that never came could not be stopped."""
        self._is_separate = False
        """Whether the ranks have parted."""
        self._lanes: dict[Lane, WorkerLane] = {}
        self._first = 0
        """The iteration that begins with idle lanes and every chunk away: marks of the one before were never made, and
        waiting for them would never end."""
        self.start(0)

    def start(self, iteration: int) -> None:
        """Start the lanes, for ``iteration`` and those after it; it waits for nothing that was before.

        Every chunk is away.  Raises the device's out-of-memory error if there is no room for the first copies.
        """
        self._first = iteration
        for copying in self._memory.room_at_start if self._memory is not None else ():
            self._make_room(self._tasks[copying.task])
        # The first copies wait for nothing that was queued so far: neither for who had their memory before, nor for
        # what the model was prepared with.
        self._device.synchronize()
        try:
            for lane in Lane:
                if lane is not Lane.COMPUTE and (lane in LANES_ALONE or self._schedule.lanes[lane]):
                    self._lanes[lane] = WorkerLane(lane, self._device)
        except BaseException:
            self.close()
            raise

    def meet(self) -> None:
        """All ranks have begun: they may do things together."""
        self._meeting.set()

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
        # A gather ahead of the next forward waits for the step that writes what it reads (``test_freshness``).
        if self.has_previous(iteration):
            marks += [self.mark(iteration - 1, earlier) for earlier in task.after_previous]
        return marks

    def has_previous(self, iteration: int) -> bool:
        """Whether the iteration before ``iteration`` is one that it waits for."""
        return iteration > self._first

    def forget(self, iteration: int) -> None:
        """Drop the marks of an iteration that nobody waits for any more; those still to come are kept."""
        for task in self._tasks:
            mark = self._marks.get((iteration, task.id))
            if mark is not None and mark.is_set:
                del self._marks[iteration, task.id]
        self._clipped.pop(iteration, None)

    def drain(self, before: int) -> None:
        """Wait until every task of the iterations before ``before`` has ended.  Raises what one of them raised."""
        for (iteration, _), mark in list(self._marks.items()):
            if iteration < before:
                self._device.synchronize_event(mark.wait())
        # No lane waits for the step on the device.
        self._device.synchronize()

    def settle(self, iteration: int) -> None:
        """Wait until ranks have done together what they do ahead of ``iteration``, which has not begun.

        All ranks do the same tasks ahead.  One that stopped its lanes before some of these would leave the others
        waiting in them.  Raises what a task raised.
        """
        if self._ranks is None:
            return
        for at, task in ahead_of(self._schedule, iteration):
            if self._tasks[task].lane is Lane.COLLECTIVE:
                self.mark(at, task).wait()

    def separate(self, error: BaseException) -> None:
        """``error`` has ended training on this rank: let no other one wait for it.  Idempotent."""
        if self._ranks is None or self._is_separate:
            return
        self._is_separate = True
        lane = self._lanes.get(Lane.COLLECTIVE)
        if lane is not None:
            lane.cancel()
        stopped = Cancelled("training has stopped")
        self._meeting.fail(stopped)
        for (_, task), mark in list(self._marks.items()):
            # Lanes would wait for them for ever; what only lanes have to do goes on.
            if self._tasks[task].lane is Lane.COMPUTE:
                mark.fail(stopped)
        self._ranks.separate(error, lane)

    def wait_for_steps(self, iteration: int) -> None:
        """Wait until CPU Adam of ``iteration`` has run, and what it has stepped is written, as far as it can.

        Raises nothing.
        """
        for task in self._tasks:
            is_step = task.kind in (TaskKind.CPU_ADAM, TaskKind.DISK_WRITE)
            mark = self._marks.get((iteration, task.id)) if is_step else None
            if mark is not None:
                mark.wait_for_end()

    def check(self) -> None:
        """Raise what stopped a lane, if one has."""
        failure = self.failure
        if failure is not None:
            raise failure

    @property
    def failure(self) -> BaseException | None:
        """What stopped a lane, if one has."""
        return next((lane.failure for lane in self._lanes.values() if lane.failure is not None), None)

    # -- memory ([Note: Memory on one stream] in ``memory_events``) ----------------------------------------------------

    def make_room(self, ended: Task) -> None:
        """The compute task ``ended`` is at its end: make room for the copies to the device that wait for it last.

        Raises the device's out-of-memory error if there is none.
        """
        if self._memory is not None:
            for copying in self._memory.room_at_end.get(ended.id, ()):
                self._make_room(self._tasks[copying.task])

    def _make_room(self, task: Task) -> None:
        if task.kind is TaskKind.ACTIVATION_FETCH:
            self._swapped(task).make_room()
        else:
            assert task.chunk is not None
            self._placed.chunks[task.chunk].make_room()

    def let_go(self, begins: Task, iteration: int) -> None:
        """The compute stream waits for what ``begins`` waits for: let go of what finished copies have read."""
        if self._memory is None:
            return
        for copying in self._memory.gone_at_begin.get(begins.id, ()):
            task = self._tasks[copying.task]
            if task.kind is TaskKind.GRADIENT_OFFLOAD:
                self._held.pop((iteration + copying.iterations_later, task.id), None)
            elif iteration + copying.iterations_later >= self._first:
                self._swapped(task).let_go()

    # -- tasks -------------------------------------------------------------------------------------------------------

    def submit(self, iteration: int) -> dict[TaskId, Span]:
        """Queue every task of an iteration that is not the compute thread's; gives their spans of time."""
        spans = {}
        for task in self._tasks:
            if task.lane is not Lane.COMPUTE:
                waits = self.marks_before(task, iteration)
                if task.lane is Lane.COLLECTIVE and not self._meeting.is_set:
                    waits.append(self._meeting)
                spans[task.id] = self._lanes[task.lane].submit(
                    self._work(task, iteration), waits, self.mark(iteration, task.id)
                )
        return spans

    def send(self, offload: Task, iteration: int) -> list[torch.Tensor]:
        """What an offload will copy leaves its owner, before the offload may start; gives those tensors.

        Gradients are taken off their parameters, saved activations off their block.
        """
        if offload.kind is TaskKind.ACTIVATION_OFFLOAD:
            return self._swapped(offload).leave()
        assert offload.chunk is not None
        if offload.section is not None:
            rows = self.rows.chunks[offload.chunk].take()
            self._outgoing_rows[iteration, offload.micro_batch, offload.chunk] = rows
            return [one.values for one in rows]
        gradients = self._placed.chunks[offload.chunk].detach_gradients()
        self._outgoing[iteration, offload.micro_batch, offload.chunk] = gradients
        return [gradient for gradient in gradients if gradient is not None]

    def lend(self, reduction: Task, iteration: int) -> None:
        """The gradients that ``reduction`` adds up over ranks where they stay are complete."""
        assert self._ranks is not None
        self._ranks.lend(reduction, iteration)

    def scale_of(self, iteration: int) -> torch.Tensor | None:
        """What the gradients of an iteration are multiplied by before they are consumed; None if by nothing."""
        clipped = self._clipped.get(iteration)
        return None if clipped is None else clipped.factor

    def norms(self, iteration: int) -> Callable[[], Norms] | None:
        """What waits for the norms of an iteration's gradients, and raises what their task raised; None without."""
        task = self._norm_task
        if task is None:
            return None

        def wait() -> Norms:
            self._device.synchronize_event(self.mark(iteration, task).wait())
            return self._clipped[iteration].norms

        return wait

    def _swapped(self, task: Task) -> SwappedBlock:
        assert isinstance(task.section, int)
        return self._swapping[task.section]

    def _work(self, task: Task, iteration: int) -> Callable[[], None]:
        work: Callable[[], None]
        if task.lane is Lane.COLLECTIVE:
            assert self._ranks is not None
            return partial(_labelled, f"protwin::{task.name}", self._ranks.work(task, iteration))
        match task.kind:
            case TaskKind.GRADIENT_NORM:
                work = partial(self._norm, iteration)
            case TaskKind.ACTIVATION_OFFLOAD:
                work = partial(self._offload_activations, self._swapped(task))
            case TaskKind.ACTIVATION_FETCH:
                work = partial(self._fetch_activations, self._swapped(task))
            case _:
                assert task.chunk is not None
                chunk = self._placed.chunks[task.chunk]
                match task.kind:
                    case TaskKind.GRADIENT_OFFLOAD if task.section is not None:
                        work = partial(self._offload_rows, self.rows.chunks[task.chunk], iteration, task)
                    case TaskKind.GRADIENT_ACCUMULATE if task.section is not None:
                        work = partial(self._add_rows, self.rows.chunks[task.chunk], iteration, task)
                    case TaskKind.GATHER:
                        work = partial(self._gather, chunk, self._slot_of(task.frees))
                    case TaskKind.DISK_READ:
                        work = partial(self._read, chunk, task)
                    case TaskKind.DISK_WRITE:
                        work = partial(self._write, chunk, task)
                    case TaskKind.GRADIENT_OFFLOAD:
                        work = partial(self._offload, chunk, iteration, task)
                    case TaskKind.GRADIENT_ACCUMULATE:
                        work = partial(self._accumulate, chunk, iteration, task.micro_batch)
                    case _:
                        assert task.kind is TaskKind.CPU_ADAM
                        work = partial(self._cpu_adam, chunk, iteration)
        return partial(_labelled, f"protwin::{task.name}", work)

    def _slot_of(self, buffers: Sequence[AllocationId]) -> int | None:
        """The place of the host that the first of ``buffers`` takes; None without any."""
        return self._schedule.buffers[buffers[0]].slot if buffers else None

    def _read(self, chunk: DeviceChunk, task: Task) -> None:
        assert chunk.disk is not None
        if any(self._schedule.buffers[home].content is Content.OPTIMIZER_STATE for home in task.reads):
            chunk.disk.read_to_step()
        else:
            chunk.disk.read_for_gather(self._slot_of(task.allocates))
        self.bytes_read_from_disk += task.moved_bytes

    def _write(self, chunk: DeviceChunk, task: Task) -> None:
        assert chunk.disk is not None
        chunk.disk.write_stepped()
        self.bytes_written_to_disk += task.moved_bytes

    def _gather(self, chunk: DeviceChunk, slot: int | None) -> None:
        if chunk.disk is not None and chunk.is_on_disk:
            chunk.gather(chunk.disk.on_its_way(slot))
        else:
            chunk.gather()
        self.bytes_host_to_device += chunk.copied_bytes
        self.num_gathers += 1

    def _offload(self, chunk: DeviceChunk, iteration: int, task: Task) -> None:
        micro_batch = task.micro_batch
        gradients = self._outgoing.pop((iteration, micro_batch, chunk.chunk.id))
        size_bytes = chunk.leaving_bytes(gradients)
        if self._memory is not None:
            # Before the copies are queued: afterwards it would be too late for the first of them.
            self._held[iteration, task.id] = list(gradients)
        try:
            present = chunk.stage_gradients(gradients, is_first=micro_batch == 0)
        finally:
            gradients.clear()
            self._free(size_bytes, chunk.leaving_content)
            if self._ranks is not None:
                self._ranks.scattered.discard((iteration, micro_batch, chunk.chunk.id))
        if micro_batch == 0 and not chunk.widens:
            self._present[iteration, chunk.chunk.id] = present
        else:
            self._arrived[iteration, micro_batch, chunk.chunk.id] = present
        self.bytes_device_to_host += chunk.moved_gradient_bytes(present)

    def _accumulate(self, chunk: DeviceChunk, iteration: int, micro_batch: int) -> None:
        key = (iteration, chunk.chunk.id)
        arrived = self._arrived.pop((iteration, micro_batch, chunk.chunk.id))
        # Sums begin with the first micro-batch whose gradients are widened.
        staged = self._present[key] if micro_batch > 0 else [False] * len(arrived)
        self._present[key] = chunk.accumulate(staged, arrived)

    def _offload_rows(self, chunk: LookedUpChunk, iteration: int, task: Task) -> None:
        key = (iteration, task.micro_batch, chunk.device_chunk.chunk.id)
        gradients = self._outgoing_rows.pop(key)
        size_bytes = storage_bytes(rows.values for rows in gradients)
        if self._memory is not None:
            self._held[iteration, task.id] = [rows.values for rows in gradients]
        try:
            self._arrived_rows[key] = chunk.arrive(gradients)
        finally:
            gradients.clear()
            self._free(size_bytes)
        self.bytes_device_to_host += size_bytes

    def _add_rows(self, chunk: LookedUpChunk, iteration: int, task: Task) -> None:
        number, micro_batch = chunk.device_chunk.chunk.id, task.micro_batch
        rows = self._arrived_rows.pop((iteration, micro_batch, number))
        nothing = [False] * len(chunk.device_chunk.trainable)
        staged = self._present.get((iteration, number), nothing)
        arrived = self._arrived.pop((iteration, micro_batch, number), nothing) if micro_batch else None
        self._present[iteration, number] = chunk.add(rows, staged, arrived)

    def _norm(self, iteration: int) -> None:
        # All offloads of this iteration have ended, and none of the next can begin before the step on the device, which
        # waits for this task: nobody changes the dict while it is read.
        present = {chunk: there for (of, chunk), there in self._present.items() if of == iteration}
        if self._ranks is not None and self._ranks.norm_task is not None:
            self._ranks.squares[iteration] = self._placed.own_squares(present)
        else:
            self._clipped[iteration] = self._placed.clip(present)

    def _cpu_adam(self, chunk: DeviceChunk, iteration: int) -> None:
        present = self._present.pop((iteration, chunk.chunk.id))
        self._placed.step_on_host(chunk, present, scale=self.scale_of(iteration))
        self.num_cpu_adam_steps += 1

    def _offload_activations(self, block: SwappedBlock) -> None:
        self.bytes_device_to_host += block.offload()

    def _fetch_activations(self, block: SwappedBlock) -> None:
        self.bytes_host_to_device += block.fetch()

    # -- ending ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """``stop``, and let go of the memory on the host too.  Idempotent."""
        try:
            self.stop()
        finally:
            for block in self._swapping.values():
                block.close()

    def let_end(self) -> None:
        """Let the threads end by themselves, without waiting: for whoever cannot know which thread it is on."""
        for lane in self._lanes.values():
            lane.cancel()
        for mark in (self._meeting, *self._marks.values()):
            mark.fail(Cancelled("training was dropped"))
        for lane in self._lanes.values():
            lane.let_end()

    def stop(self) -> None:
        """Let the running tasks end, give up the others, end the threads, and forget every iteration.  Idempotent."""
        for lane in self._lanes.values():
            lane.cancel()
        for mark in (self._meeting, *self._marks.values()):
            mark.fail(Cancelled("training has stopped"))
        for lane in self._lanes.values():
            lane.close()
            # An error holds the frames that it passed through, and these the lane: nothing would go before the
            # collector of cycles comes.
            lane.failure = None
        self._lanes.clear()
        try:
            # Copies that were queued may still run, and what they read and write is about to go.
            self._device.synchronize()
        finally:
            self._forget_all()

    def _forget_all(self) -> None:
        for key, gradients in self._outgoing.items():
            if self._ranks is None or key not in self._ranks.scattered:
                self._free(storage_bytes(gradients))
            else:
                chunk = self._placed.chunks[key[2]]
                self._free(chunk.leaving_bytes(gradients), chunk.leaving_content)
        for rows in self._outgoing_rows.values():
            self._free(storage_bytes(one.values for one in rows))
        for block in self._swapping.values():
            block.forget()
        for mark in self._marks.values():
            mark.error = None
        self._marks.clear()
        self._outgoing.clear()
        if self._ranks is not None:
            self._ranks.forget()
        self._outgoing_rows.clear()
        self._arrived_rows.clear()
        self._held.clear()
        self._arrived.clear()
        self._present.clear()
        self._clipped.clear()

    def _free(self, size_bytes: int, content: Content = Content.GRADIENTS) -> None:
        if self._device.ledger is not None:
            self._device.ledger.free(size_bytes, content)


def _labelled(name: str, work: Callable[[], None]) -> None:
    """Do the work under a name that PyTorch's profiler shows."""
    with torch.profiler.record_function(name):
        work()

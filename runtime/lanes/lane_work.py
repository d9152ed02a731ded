"""What transfers and CPU Adam do, task by task, with the tables in which one task leaves to another what it needs.

``transfer_lanes`` says when: each runs on the thread of its lane, when the tasks that it waits for have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

import torch

from ...shared.schema.schedule import AllocationId, Content, Lane, Memory, Schedule, Task, TaskId, TaskKind
from ..chunks.chunk import DeviceChunk
from ..chunks.clipping import Limited
from ..chunks.placed_model import PlacedModel
from ..chunks.row_lookups import LookedUpChunk, RowGradients
from ..devices.device import TrainingDevice
from ..devices.lanes import WorkerLane
from ..hooks.swapping import SwappedBlock
from ..model.nested_tensors import storage_bytes
from ..optimizers.gradient_norms import ClippedNorm
from ..ranks.collectives import Collectives
from ..recording.counts import Counts
from .rank_work import RankWork, is_of_norm
from .stage_work import STAGE_KINDS, StageWork


class LaneWork:
    """Does the tasks of every lane besides compute, and counts what they move."""

    def __init__(
        self,
        schedule: Schedule,
        placed: PlacedModel,
        device: TrainingDevice,
        swapping: Mapping[int, SwappedBlock],
        collectives: Collectives | None,
        stage: StageWork | None,
    ) -> None:
        self.bytes_host_to_device = 0
        self.bytes_device_to_host = 0
        self.num_gathers = 0
        self.num_cpu_adam_steps = 0
        self.bytes_read_from_disk = 0
        self.bytes_written_to_disk = 0
        self._schedule = schedule
        self._placed = placed
        self._device = device
        self._swapping = swapping
        # Keys name an iteration, since lanes are queued up to the end of the next one, and a micro-batch, since the
        # copy of one micro-batch's gradients may still be queued when the next one's are sent.  Each dict has one
        # writer and one taker per key, ordered by the schedule's waits; single operations on a dict need no lock.
        self._outgoing: dict[tuple[int, int, int], list[torch.Tensor | None]] = {}
        """Gradients on their way, by iteration, micro-batch and chunk: from ``send`` (compute thread) to ``_offload``
        (d2h).  They are off their parameters before the copy begins: otherwise autograd would add the next
        micro-batch's to what is being copied."""
        self._present: dict[tuple[int, int], list[bool]] = {}
        """For which parameters of a chunk there is a staged gradient, by iteration and chunk: from the first
        ``_offload`` (d2h) by way of ``_accumulate`` and ``_norm`` to ``_cpu_adam`` (cpu_optim).  Beside
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
        self.limited = [task.section for task in schedule.tasks if task.kind is TaskKind.GRADIENT_NORM]
        """Whose gradients' norms are taken: None for all together, or student blocks."""
        self.clipped: dict[tuple[int, Limited], ClippedNorm] = {}
        """The norms of the gradients of an iteration, and what these are multiplied by, by whose they are: from
        ``_norm`` (cpu_optim) to ``forget_norms``, since the step on the device and CPU Adam both read it."""
        self._stepped_with = self._chunks_by_norm()
        """The chunks that the host steps, by whose norm limits them."""
        self._held: dict[tuple[int, TaskId], list[torch.Tensor | None]] = {}
        """Gradients that queued copies still read, by iteration and offload: from ``_offload`` (d2h) to ``let_go``
        (compute thread).  On CUDA alone, where ``_offload`` returns before its copy has begun: dropped there, their
        memory would go to the compute stream's next operation, which writes while the copy reads
        ([Note: Memory on one stream] in ``memory_events``; ``test_cuda_ordering`` shows it)."""
        self.ranks: RankWork | None = None
        """What the ranks do together; None: there is one."""
        self.stage = stage
        """What a stage receives and sends; None: there is one stage."""
        if collectives is not None:
            shared = next((task.id for task in schedule.tasks if is_of_norm(task)), None)
            self.ranks = RankWork(placed, device, collectives, self._outgoing, self.clipped, norm_task=shared)

    def counts(self, num_iterations: int) -> Counts:
        """What was moved and stepped so far, in so many iterations."""
        return Counts(
            num_iterations=num_iterations,
            num_gathers=self.num_gathers,
            num_cpu_adam_steps=self.num_cpu_adam_steps,
            bytes_host_to_device=self.bytes_host_to_device + self.rows.moved_bytes,
            bytes_device_to_host=self.bytes_device_to_host,
            bytes_read_from_disk=self.bytes_read_from_disk,
            bytes_written_to_disk=self.bytes_written_to_disk,
        )

    def _chunks_by_norm(self) -> dict[Limited, list[int]]:
        found: dict[Limited, list[int]] = {section: [] for section in self.limited}
        for task in self._schedule.tasks:
            if task.kind is TaskKind.CPU_ADAM and task.chunk is not None and self.limited:
                of_chunk = self._placed.clipping.section_of(self._placed.chunks[task.chunk])
                found[of_chunk].append(task.chunk)
        return found

    @cached_property
    def _first_leaving(self) -> dict[int, int]:
        """By chunk, the first micro-batch in which gradients of it leave the device, those of rows aside.

        The last one, where they are added up before.
        """
        found: dict[int, int] = {}
        for task in self._schedule.tasks:
            if task.kind is TaskKind.GRADIENT_OFFLOAD and task.section is None and task.chunk is not None:
                found.setdefault(task.chunk, task.micro_batch)
        return found

    # -- what the compute thread hands over --------------------------------------------------------------------------

    def send(self, offload: Task, iteration: int) -> list[torch.Tensor]:
        """What an offload will copy leaves its owner, before the offload may start; gives those tensors.

        Gradients are taken off their parameters, saved activations off their block.
        """
        if offload.kind is TaskKind.ACTIVATION_OFFLOAD:
            return self.swapped(offload).leave()
        assert offload.chunk is not None
        if offload.section is not None:
            rows = self.rows.chunks[offload.chunk].take()
            self._outgoing_rows[iteration, offload.micro_batch, offload.chunk] = rows
            return [one.values for one in rows]
        gradients = self._placed.chunks[offload.chunk].detach_gradients()
        self._outgoing[iteration, offload.micro_batch, offload.chunk] = gradients
        return [gradient for gradient in gradients if gradient is not None]

    def project_leaving(self, projection: Task, iteration: int) -> None:
        """Project gradients that have left their parameters, on the compute thread, before their offload begins."""
        assert projection.chunk is not None
        gradients = self._outgoing[iteration, projection.micro_batch, projection.chunk]
        self._placed.projections.project_leaving_gradients(projection.chunk, gradients)

    def lend(self, reduction: Task, iteration: int) -> None:
        """The gradients that ``reduction`` adds up over ranks where they stay are complete."""
        assert self.ranks is not None
        self.ranks.lend(reduction, iteration)

    def clipped_in(self, iteration: int) -> dict[Limited, ClippedNorm]:
        """The limited norms of an iteration, when all of them have been taken."""
        return {section: self.clipped[iteration, section] for section in self.limited}

    def forget_norms(self, iteration: int) -> None:
        """Nobody reads the norms of an iteration any more."""
        for section in self.limited:
            self.clipped.pop((iteration, section), None)

    def let_go(self, task: TaskId, iteration: int) -> None:
        """The copy of gradients that ``task`` has queued is done: drop what it has read."""
        self._held.pop((iteration, task), None)

    def swapped(self, task: Task) -> SwappedBlock:
        """The block whose saved activations ``task`` copies."""
        assert isinstance(task.section, int)
        return self._swapping[task.section]

    # -- tasks -------------------------------------------------------------------------------------------------------

    def of(self, task: Task, iteration: int) -> Callable[[], None]:
        """What the lane of ``task`` does for it."""
        work: Callable[[], None]
        if task.kind in STAGE_KINDS:
            assert self.stage is not None
            return partial(_labelled, f"protwin::{task.name}", self.stage.work(task, iteration))
        if task.lane is Lane.COLLECTIVE:
            assert self.ranks is not None
            return partial(_labelled, f"protwin::{task.name}", self.ranks.work(task, iteration))
        match task.kind:
            case TaskKind.GRADIENT_NORM:
                work = partial(self._norm, iteration, task.section)
            case TaskKind.ACTIVATION_OFFLOAD:
                work = partial(self._offload_activations, self.swapped(task))
            case TaskKind.ACTIVATION_FETCH:
                work = partial(self._fetch_activations, self.swapped(task))
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
                    case TaskKind.HOST_GRADIENT_PROJECTION:
                        work = partial(self._project_gradients, chunk, iteration)
                    case TaskKind.HOST_PARAMETER_PROJECTION:
                        work = partial(self._placed.projections.project_masters, chunk.chunk.id)
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
        elif self._schedule.buffers[task.allocates[0]].memory is Memory.HOST:
            chunk.disk.read_to_project()
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
        is_first = micro_batch == self._first_leaving[chunk.chunk.id]
        gradients = self._outgoing.pop((iteration, micro_batch, chunk.chunk.id))
        size_bytes = chunk.leaving_bytes(self._alone(gradients))
        if self._device.runs_behind:
            # Before the copies are queued: afterwards it would be too late for the first of them.
            self._held[iteration, task.id] = list(gradients)
        try:
            present = chunk.stage_gradients(gradients, is_first=is_first)
        finally:
            gradients.clear()
            self._free(size_bytes, chunk.leaving_content)
            if self.ranks is not None:
                self.ranks.scattered.discard((iteration, micro_batch, chunk.chunk.id))
        if is_first and not chunk.widens:
            self._present[iteration, chunk.chunk.id] = present
        else:
            self._arrived[iteration, micro_batch, chunk.chunk.id] = present
        self.bytes_device_to_host += chunk.moved_gradient_bytes(present)

    def _alone(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Those whose storages go with them.

        Of several that share one, as of parameters that ``torch.cat`` put together, the last one takes it along.
        """
        if all(one is None or one.untyped_storage().nbytes() == one.nbytes for one in gradients):
            return gradients
        others = {
            one.untyped_storage()._cdata
            for leaving in list(self._outgoing.values())
            for one in leaving
            if one is not None
        }
        return [None if one is None or one.untyped_storage()._cdata in others else one for one in gradients]

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
        if self._device.runs_behind:
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

    def _norm(self, iteration: int, section: Limited) -> None:
        if section is not None:
            # Other blocks' gradients may arrive meanwhile: single entries are read, the dict is not gone through.
            present = {chunk: self._present[iteration, chunk] for chunk in self._stepped_with[section]}
            self.clipped[iteration, section] = self._placed.clip(present, section)
            return
        # All offloads of this iteration have ended, and none of the next can begin before the step on the device, which
        # waits for this task: nobody changes the dict while it is read.
        present = {chunk: there for (of, chunk), there in self._present.items() if of == iteration}
        if self.ranks is not None and self.ranks.norm_task is not None:
            self.ranks.squares[iteration] = self._placed.own_squares(present)
        else:
            self.clipped[iteration, None] = self._placed.clip(present)

    def _project_gradients(self, chunk: DeviceChunk, iteration: int) -> None:
        self._placed.projections.project_staged_gradients(chunk.chunk.id, self._present[iteration, chunk.chunk.id])

    def _cpu_adam(self, chunk: DeviceChunk, iteration: int) -> None:
        present = self._present.pop((iteration, chunk.chunk.id))
        clipped = self.clipped.get((iteration, self._placed.clipping.section_of(chunk)))
        self._placed.step_on_host(chunk, present, clipped=clipped)
        self.num_cpu_adam_steps += 1

    def _offload_activations(self, block: SwappedBlock) -> None:
        self.bytes_device_to_host += block.offload()

    def _fetch_activations(self, block: SwappedBlock) -> None:
        self.bytes_host_to_device += block.fetch()

    # -- ending ------------------------------------------------------------------------------------------------------

    @property
    def others(self) -> list[RankWork | StageWork]:
        """What is done with other ranks."""
        return [others for others in (self.stage, self.ranks) if others is not None]

    def separate(self, error: BaseException, lane: WorkerLane | None) -> None:
        """``error`` has ended training here: no other rank is to wait for this one's ``lane``, which was cancelled."""
        for others in self.others:
            others.separate(error, lane)

    def forget(self) -> None:
        """Drop everything that was on its way; no lane runs any more."""
        whole: list[torch.Tensor | None] = []
        for key, gradients in self._outgoing.items():
            if self.ranks is None or key not in self.ranks.scattered:
                whole += gradients
            else:
                chunk = self._placed.chunks[key[2]]
                self._free(chunk.leaving_bytes(gradients), chunk.leaving_content)
        self._free(storage_bytes(whole))
        for rows in self._outgoing_rows.values():
            self._free(storage_bytes(one.values for one in rows))
        for block in self._swapping.values():
            block.forget()
        self._outgoing.clear()
        for others in self.others:
            others.forget()
        self._outgoing_rows.clear()
        self._arrived_rows.clear()
        self._held.clear()
        self._arrived.clear()
        self._present.clear()
        self.clipped.clear()

    def _free(self, size_bytes: int, content: Content = Content.GRADIENTS) -> None:
        if self._device.ledger is not None:
            self._device.ledger.free(size_bytes, content)


def _labelled(name: str, work: Callable[[], None]) -> None:
    """Do the work under a name that PyTorch's profiler shows."""
    with torch.profiler.record_function(name):
        work()

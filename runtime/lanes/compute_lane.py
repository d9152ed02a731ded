"""The compute lane: the thread that runs the model, led through the schedule by the section walker.

Its tasks are the model's own forward and backward and the step on the device.  Every wait happens when a task begins;
when it ends, its chunks are released, its gradients leave, and whoever waits for it may go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Final

import torch

from ...shared.basics.errors import DeviceOutOfMemoryError, ScheduleError
from ...shared.basics.units import format_bytes
from ...shared.layout.residencies import ChunkResidency
from ...shared.schema.schedule import Content, Lane, Memory, OuterSection, Schedule, Section, Task, TaskId, TaskKind
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ..chunks.chunk import DeviceChunk
from ..chunks.placed_model import PlacedModel
from ..devices.device import TrainingDevice
from ..devices.lanes import Span
from ..hooks.swapping import SwappedBlock
from ..ranks.sequence_peers import SequencePeers
from ..recording.metering import Metering
from ..recording.recorder import IterationLog
from .progress import Call, Progress, TrainingPhase
from .stage_work import STAGE_KINDS
from .transfer_lanes import TransferLanes
from .waits import is_within_compute


class ComputeLane:
    """The place of the running iteration in its program.  Listens to the section walker."""

    def __init__(
        self,
        schedule: Schedule,
        placed: PlacedModel,
        lanes: TransferLanes,
        metering: Metering,
        device: TrainingDevice,
        swapping: Mapping[int, SwappedBlock],
        progress: Progress,
    ) -> None:
        self._progress = progress
        self._schedule = schedule
        self._program = schedule.lanes[Lane.COMPUTE]
        self._place = 0
        """Where in its program the lane is: the task that runs, or the one that comes next."""
        self._running: Task | None = None
        self._placed = placed
        self._lanes = lanes
        self._metering = metering
        self._swapping = swapping
        self._device = device
        self._leaving = self._offloads_by_source()
        self._shared = self._reductions_by_source()
        self._releasing = self._chunks_by_release()
        self._reading = self._chunks_by_reader()
        self._waits = {task: self._from_other_lanes(schedule.tasks[task]) for task in self._program}
        self._awaited = self._awaited_elsewhere()
        self._exchanged = self._exchanges_of_sequences()
        self.peers: SequencePeers | None = None
        """The ranks that share sequences with this one."""
        self._exchanges = {(t.kind, t.micro_batch): t.moved_bytes for t in schedule.tasks if t.kind in STAGE_KINDS}
        """Bytes of the activations that a stage receives and sends."""
        # Norms, where they are taken, tell as well.
        has_norm = any(task.kind is TaskKind.GRADIENT_NORM for task in schedule.tasks)
        self._looked_at = -1 if has_norm else schedule.micro_batches - 1
        """The micro-batch whose gradients are looked at as they become final; -1 for none."""
        self._left: set[int] = set()
        """Chunks whose gradients have left in this iteration."""
        self._logs = {iteration: self._submit(iteration) for iteration in (0, 1)}
        """Of the running iteration and the next, whose tasks on other lanes are queued already."""

    def _offloads_by_source(self) -> dict[TaskId, list[Task]]:
        """The offloads by the task that makes what they copy: the last compute task that they wait for.

        Gradients of parts that stay on the device leave their parameters too.
        """
        found: dict[TaskId, list[Task]] = {}
        for task in self._schedule.tasks:
            of_chunk = task.chunk if task.kind is TaskKind.REDUCE_SCATTER else None
            stays = of_chunk is not None and self._placed.chunks[of_chunk].residency is ChunkResidency.SHARDED
            if stays or task.kind in (TaskKind.GRADIENT_OFFLOAD, TaskKind.ACTIVATION_OFFLOAD):
                found.setdefault(self._source_of(task), []).append(task)
        return found

    def _source_of(self, task: Task) -> TaskId:
        """The last compute task that ``task`` waits for, itself or by way of what ranks make of gradients before it.

        Of a projection on the way, what it waits for: gradients have left their parameters by then.
        """
        tasks = self._schedule.tasks
        before = [
            self._source_of(tasks[other]) if tasks[other].kind in PROJECTIONS else other
            for other in task.after
            if tasks[other].lane is Lane.COMPUTE
        ]
        if not before:
            reductions = [tasks[other] for other in task.after if tasks[other].lane is Lane.COLLECTIVE]
            before = [self._source_of(reduction) for reduction in reductions]
        return max(before)

    def _reductions_by_source(self) -> dict[TaskId, list[Task]]:
        """What adds up over ranks the gradients that stay, by the task that completes these."""
        found: dict[TaskId, list[Task]] = {}
        for task in self._schedule.tasks:
            of_chunk = task.chunk if task.kind is TaskKind.ALL_REDUCE else None
            if of_chunk is not None and self._placed.chunks[of_chunk].is_persistent:
                found.setdefault(self._source_of(task), []).append(task)
        return found

    def _chunks_by_release(self) -> dict[TaskId, list[int]]:
        """The chunks that each compute task frees, and those that wait for new values behind it.

        A chunk that the host steps and the device keeps is not to be read between its last use and its gather.
        """
        found: dict[TaskId, list[int]] = {}
        filled = {place for task in self._schedule.tasks if task.kind is TaskKind.GATHER for place in task.writes}
        last_readers: dict[int, TaskId] = {}
        for task in self._program:
            for buffer in (self._schedule.buffers[freed] for freed in self._schedule.tasks[task].frees):
                if buffer.content is Content.PARAMETERS:
                    assert buffer.chunk is not None
                    found.setdefault(task, []).append(buffer.chunk)
            for buffer in (self._schedule.buffers[read] for read in self._schedule.tasks[task].reads):
                if buffer.is_static and buffer.id in filled:
                    assert buffer.chunk is not None
                    last_readers[buffer.chunk] = task
        for chunk, task in last_readers.items():
            found.setdefault(task, []).append(chunk)
        return found

    def _chunks_by_reader(self) -> dict[TaskId, list[DeviceChunk]]:
        """The chunks that come for each compute task, or have come for an earlier one."""
        found: dict[TaskId, list[DeviceChunk]] = {}
        for task in self._program:
            for buffer in (self._schedule.buffers[read] for read in self._schedule.tasks[task].reads):
                if buffer.content is Content.PARAMETERS and buffer.memory is Memory.DEVICE and buffer.chunk is not None:
                    found.setdefault(task, []).append(self._placed.chunks[buffer.chunk])
        return found

    def _from_other_lanes(self, task: Task) -> tuple[list[TaskId], list[TaskId]]:
        """What a compute task waits for beside its own lane: tasks of its iteration, and of the one before."""
        tasks, waits = self._schedule.tasks, self._lanes.waits[task.id]

        def others(found: Sequence[TaskId]) -> list[TaskId]:
            return [other for other in found if tasks[other].lane is not Lane.COMPUTE]

        return others(waits.now), others(waits.previous)

    def _awaited_elsewhere(self) -> frozenset[TaskId]:
        """The compute tasks that tasks of other lanes wait for."""
        waiting = [task for task in self._schedule.tasks if task.lane is not Lane.COMPUTE]
        return frozenset(other for task in waiting for other in (*task.after, *task.after_previous))

    def _exchanges_of_sequences(self) -> dict[TaskId, TaskId]:
        """By compute task, the task that ranks' exchanges within it are: a recomputation's are its backward's too."""
        tasks, found = self._schedule.tasks, dict[TaskId, TaskId]()
        for before, task in pairwise(self._program):
            own = [other for other in tasks[task].after if is_within_compute(tasks[other])]
            if own:
                found[task] = own[0]
            elif tasks[before].kind is TaskKind.RECOMPUTE and before in found:
                found[task] = found[before]
        return found

    def _submit(self, iteration: int) -> IterationLog:
        return IterationLog(iteration, spans=dict(self._lanes.submit(iteration)))

    @property
    def task_at_hand(self) -> Task:
        """The task that runs, or else the one that the schedule expects to begin next."""
        return self._schedule.tasks[self._program[self._place]]

    @property
    def iteration(self) -> int:
        """Iterations that are complete."""
        return self._progress.iteration

    def has_left(self, chunk: int) -> bool:
        """Whether a chunk's gradients of this iteration are gone from the device."""
        return chunk in self._left

    # -- an iteration ------------------------------------------------------------------------------------------------

    def begin_micro_batch(self, inputs: Sequence[torch.Tensor]) -> None:
        """Forward is about to run on ``inputs``.

        Raises ScheduleError if gradients were changed since the last one, or if it runs on another stream.
        """
        self._device.check_stream()
        if self._progress.phase is TrainingPhase.IDLE:
            self._logs[self.iteration].is_metered = self._metering.begin_iteration(self.iteration, inputs)
        else:
            self._placed.check_gradients()
            self._logs[self.iteration].is_metered = self._metering.begin_micro_batch(inputs)
        self._left.clear()

    def begin(self, kind: TaskKind, section: Section) -> None:
        """The walker's announcement: the running compute task ends and the next one begins."""
        self._run_on(kind, section)

    def exchange(self, kind: TaskKind, activation: torch.Tensor) -> None:
        """The pairs' announcement of what RECEIVE fills or SEND sends, once the running task has ended."""
        micro_batch = self.task_at_hand.micro_batch
        moved_bytes = self._exchanges.get((kind, micro_batch))
        stage = self._lanes.work.stage
        with self.failing():
            if moved_bytes is None or stage is None:
                raise ScheduleError(f"the model exchanges an activation ({kind}) where the schedule has no such task.")
            stage.lend(kind, self.iteration, micro_batch, activation, moved_bytes)

    def end_backward(self) -> None:
        """The walker's announcement that backward is over."""
        with self.failing():
            self._finish_running()
            self._project()
            is_last = self.task_at_hand.kind is TaskKind.DEVICE_ADAM
            self._progress.advance(Call.END_BACKWARD if is_last else Call.END_MICRO_BATCH)
            if is_last:
                if not self._placed.hands_over:
                    # Whoever reads or changes them before the step finds them whole.
                    self._wait_for_ranks()
                self._placed.hand_over(self._lanes.norms(self.iteration))
            else:
                done, number = self.task_at_hand.micro_batch, self._schedule.micro_batches
                self._placed.watch_gradients(f"after {done:,} of {number:,} micro-batches")

    def _wait_for_ranks(self) -> None:
        """Wait until gradients that stay have been added up over ranks."""
        for reductions in self._shared.values():
            for task in reductions:
                self._device.wait_event(self._lanes.mark(self.iteration, task.id).wait())
        self._placed.show_received()

    def step_on_device(self) -> IterationLog:
        """Step the persistent chunks, end the iteration and queue the one after next; gives the iteration's log."""
        with self.failing():
            self._run_on(TaskKind.DEVICE_ADAM, None)
            with torch.profiler.record_function("protwin::device_adam"):
                self._placed.step_on_device(self._lanes.work.clipped_in(self.iteration))
            self._placed.drop_gradients()
            self._finish_running()
            self._project()
            log = self._logs.pop(self.iteration)
            log.memory = self._metering.end_iteration()
            self._lanes.forget(self.iteration - 1)
            self._left.clear()
            self._progress.iteration += 1
            self._place = 0
            self._progress.advance(Call.STEP)
            self._logs[self.iteration + 1] = self._submit(self.iteration + 1)
        return log

    def failed(self, error: BaseException) -> None:
        """``Progress.fail``; a lack of memory gets a note of what the plan needs."""
        if self._progress.failure is None and is_operations_own(error):
            most_bytes = guaranteed_device_peak(self._schedule).size_bytes
            error.add_note(
                f"The plan was at {self.task_at_hand.name}. It accounts for at most {format_bytes(most_bytes)} of "
                f"device memory; what else the process holds, and what the allocator loses to pieces, comes on top. "
                f"Search a plan for a smaller budget, or let the allocator join its pieces (set "
                f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch starts)."
            )
        self._progress.fail(error)
        self._lanes.separate(error)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """What is raised within the block ends training."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    # -- giving an iteration up --------------------------------------------------------------------------------------

    def skip_step(self) -> None:
        """Give the running iteration up, wherever it is, and begin it anew.

        Raises ScheduleError, with nothing changed, if weights have been stepped that cannot be given back, and whatever
        has kept an earlier step from being completed.
        """
        self._progress.check_whole()
        if self._placed.has_begun_device_step(self.iteration):
            raise ScheduleError(
                f"the iteration cannot be given up: the step on the device has begun, and chunks that stay there are "
                f"stepped in part. Close the training. {_AFTERWARDS}"
            )
        can_undo = self._placed.last_step is not None
        begun = self._placed.gate.shut(self.iteration, may_have_begun=can_undo)
        if begun and not can_undo:
            num_stepped = sum(task.kind is TaskKind.CPU_ADAM for task in self._schedule.tasks)
            has_failed = self._progress.failure is not None or self._lanes.failure is not None
            instead = _AFTERWARDS if has_failed else _COMPLETE_IT
            by_block = any(isinstance(section, int) for section in self._lanes.work.limited)
            later = "" if by_block else " A plan with max_gradient_norm steps nothing before backward has ended;"
            raise ScheduleError(
                f"the iteration cannot be given up: CPU Adam, which steps a chunk as soon as its gradients have "
                f"arrived, has begun {len(begun)} of its {num_stepped} steps (chunk {begun[0]} first). {instead}"
                f"{later} keep_last_step=True of carry_out() keeps what is overwritten, so that an iteration can "
                f"always be given up."
            )
        with self.changing_state(Call.SKIP_STEP):
            # The steps of completed iterations are to be done; should one have failed, weights are of different steps.
            self._lanes.drain(before=self.iteration)
            self.suspend()
            empty_backward()
            self._placed.take_back_steps(num_completed=self.iteration)
            self.go_on()

    def suspend(self) -> None:
        """Bring every lane to rest, between two iterations or within one, of which nothing is left.

        Steps of completed iterations must have been done.
        """
        self._lanes.stop()
        self._placed.leave_device()
        self._metering.give_up_iteration()
        self._place, self._running = 0, None
        self._left.clear()
        self._logs.clear()

    def go_on(self) -> None:
        """Let the lanes begin the iteration that comes next."""
        self._placed.gate.open()
        self._lanes.start(self.iteration)
        self._logs = {iteration: self._submit(iteration) for iteration in (self.iteration, self.iteration + 1)}
        self._progress.failure = None

    @contextmanager
    def changing_state(self, call: Call) -> Iterator[None]:
        """``Progress.changing``; an error within the block is what ends training, whatever ended the iteration."""
        with self._progress.changing(call):
            try:
                yield
            except BaseException as error:
                self._progress.failure = None
                self.failed(error)
                raise

    # -- a task ------------------------------------------------------------------------------------------------------

    def _run_on(self, kind: TaskKind, section: Section | None) -> None:
        """The running task ends; the one of ``kind`` and ``section`` begins when what it waits for has ended."""
        with self.failing():
            self._finish_running()
            self._project()
            task = self.task_at_hand
            if (task.kind, task.section) != (kind, section):
                where = f" {section}" if section is not None else ""
                raise ScheduleError(f"the model begins {kind}{where} where the schedule expects {task.name}.")
            self._lanes.check()
            if kind is TaskKind.DEVICE_ADAM and self._placed.last_step is not None:
                # What is stepped on the device cannot be taken back, so nothing may be left that could still fail.
                self._lanes.wait_for_steps(self.iteration)
                self._lanes.check()
            self._begin_at_hand()
        self._placed.rows.is_in_prologue = (task.kind, task.section) == (TaskKind.FORWARD, OuterSection.PROLOGUE)
        if task.section is OuterSection.PROLOGUE and task.kind in _FORWARDS:
            self._progress.advance(Call.FORWARD)
        elif task.kind is TaskKind.BACKWARD and self._progress.phase is TrainingPhase.FORWARD:
            self._progress.advance(Call.BACKWARD)

    def _begin_at_hand(self) -> None:
        """The task at hand begins when what it waits for has ended."""
        task, section = self.task_at_hand, self.task_at_hand.section
        self._wait(task)
        for chunk in self._reading.get(task.id, ()):
            chunk.show()
        self._lanes.let_go(task, self.iteration)
        with self._metering.one_moment():
            travelling = self._swapping.get(section) if isinstance(section, int) else None
            if travelling is not None and task.kind is travelling.arrives_for:
                travelling.arrive()
            self._metering.begin_task(task)
        if self.peers is not None:
            self.peers.take_spans()  # of an evaluation
        log = self._logs[self.iteration]
        span = log.spans[task.id] = Span(self._device.stamp())
        if self._place == 0:
            log.started = span.start
        self._running = task

    def _project(self) -> None:
        """Do the projections that come next, each a task of its own: nothing of the model's own announces them."""
        while self._place < len(self._program) and self.task_at_hand.kind in PROJECTIONS:
            task = self.task_at_hand
            self._begin_at_hand()
            owned = self._placed.owned
            with torch.profiler.record_function(f"protwin::{task.name}"):
                if task.kind is TaskKind.PARAMETER_PROJECTION:
                    self._placed.projections.project_staying_parameters()
                    if owned is not None:
                        owned.project_parameters()
                elif task.chunk is not None:
                    self._lanes.work.project_leaving(task, self.iteration)
                else:
                    # Means over ranks of parameters that have no gradient here are projected too.
                    self._placed.show_received()
                    self._placed.projections.project_staying_gradients()
                    if owned is not None:
                        owned.project_gradients()
            self._finish_running()

    def _wait(self, task: Task) -> None:
        """Wait for the tasks of other lanes that a compute task needs; the first iteration has none before it."""
        same, previous = self._waits[task.id]
        for other in same:
            self._device.wait_event(self._lanes.mark(self.iteration, other).wait())
        if self._lanes.has_previous(self.iteration):
            for other in previous:
                self._device.wait_event(self._lanes.mark(self.iteration - 1, other).wait())

    def _finish_running(self) -> None:
        """End the running compute task: free what it frees, let its gradients leave, tell who waits."""
        task = self._running
        if task is None:
            return
        self._placed.rows.is_in_prologue = False
        log = self._logs[self.iteration]
        log.spans[task.id].end = self._device.stamp()
        if self.peers is not None and task.id in self._exchanged:
            log.exchanged.setdefault(self._exchanged[task.id], []).append((task.id, self.peers.take_spans()))
        for chunk in self._releasing.get(task.id, ()):
            self._placed.chunks[chunk].release()
        leaving: dict[Content, list[torch.Tensor]] = {}
        for offload in self._leaving.get(task.id, ()):
            content = Content.GRADIENTS if offload.chunk is not None else Content.SWAPPED
            leaving.setdefault(content, []).extend(self._lanes.work.send(offload, self.iteration))
            if offload.chunk is not None:
                self._left.add(offload.chunk)
        for reduction in self._shared.get(task.id, ()):
            self._lanes.work.lend(reduction, self.iteration)
            assert reduction.chunk is not None
            self._left.add(reduction.chunk)
        if task.kind is TaskKind.BACKWARD and task.micro_batch == self._looked_at:
            self._placed.look_at_gradients(task.section)
        self._metering.end_task(task, leaving, self._placed.gradients)
        self._lanes.make_room(task, self.iteration)
        if task.id in self._awaited:
            self._lanes.mark(self.iteration, task.id).set(self._device.record_event())
        self._running = None
        self._place += 1


PROJECTIONS: Final = frozenset({TaskKind.GRADIENT_PROJECTION, TaskKind.PARAMETER_PROJECTION})
"""Tasks of the lane that the schedule alone begins."""
_FORWARDS: Final = frozenset({TaskKind.FORWARD, TaskKind.TEACHER_FORWARD})
_COMPLETE_IT: Final = "Complete it: call backward() if that is missing, then step()."
_AFTERWARDS: Final = (
    "Close the training, which gives back the model with the weights as they are, or go on from the latest checkpoint "
    "of training.save()."
)


def empty_backward() -> None:
    """Run a backward of nothing: torch keeps what one that failed on this thread had ready until the next one.

    With it goes all that forward saved, if nobody else holds it.
    """
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).neg().backward()  # type: ignore[no-untyped-call]


def is_operations_own(error: BaseException) -> bool:
    """Whether it was an operation of the model that torch's allocator had no room for; it knows of no plan."""
    return isinstance(error, torch.OutOfMemoryError) and not isinstance(error, DeviceOutOfMemoryError)

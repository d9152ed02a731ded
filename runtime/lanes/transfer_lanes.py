"""When the tasks of every lane besides compute run: gathers, gradient offloads and CPU Adam, queued with their marks.

Lanes are queued up to the end of the next iteration, so that its first gathers run while this one still computes; a
task starts when what it waits for has ended, exactly as in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ...shared.order.memory_events import memory_events
from ...shared.schema.schedule import LANES_ALONE, OF_OWNERS, Lane, Schedule, Task, TaskId, TaskKind
from ..chunks.gradient_stand_ins import Norms
from ..chunks.placed_model import PlacedModel
from ..devices.device import TrainingDevice
from ..devices.lanes import Cancelled, Mark, Span, WorkerLane
from ..hooks.swapping import SwappedBlock
from ..ranks.collectives import Collectives
from .lane_work import LaneWork
from .rank_work import is_of_norm
from .stage_work import StageWork
from .waits import ahead_of, is_within_compute, waits_of


class TransferLanes:
    """Runs a schedule's transfers and CPU Adam (``work``), iteration after iteration."""

    def __init__(
        self,
        schedule: Schedule,
        placed: PlacedModel,
        device: TrainingDevice,
        swapping: Mapping[int, SwappedBlock],
        collectives: Collectives | None = None,
        stage: StageWork | None = None,
    ) -> None:
        """Start the lanes; ``collectives``: of several ranks; ``stage``: of several stages."""
        self.work = LaneWork(schedule, placed, device, swapping, collectives, stage)
        """What the tasks do."""
        self.waits = waits_of(schedule)
        """What every task waits for."""
        self._schedule = schedule
        self._tasks = schedule.tasks
        self._placed = placed
        self._device = device
        self._swapping = swapping
        norms = [t for t in schedule.tasks if t.kind is TaskKind.GRADIENT_NORM or is_of_norm(t)]
        self._norm_task = norms[-1].id if norms and norms[-1].section is None else None
        """The task after which the norm of all gradients is known."""
        self._memory = memory_events(schedule) if device.runs_behind else None
        # Keys name an iteration, since lanes are queued up to the end of the next one.
        self._marks: dict[tuple[int, TaskId], Mark] = {}
        """Made by ``mark`` for whoever asks first, the waiting or the ending task; dropped by ``forget`` one iteration
        later, when the last that could wait for them has begun.  By the compute thread alone."""
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
            self._make_room(self._tasks[copying.task], iteration + copying.iterations_later)
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
        waits = self.waits[task.id]
        marks = [self.mark(iteration, earlier) for earlier in waits.now]
        # A gather ahead of the next forward waits for the step that writes what it reads (``test_freshness``).
        if self.has_previous(iteration):
            marks += [self.mark(iteration - 1, earlier) for earlier in waits.previous]
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
        self.work.forget_norms(iteration)

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
        if self.work.ranks is None:
            return
        for at, task in ahead_of(self._schedule, iteration):
            if self._tasks[task].lane is Lane.COLLECTIVE:
                self.mark(at, task).wait()

    def separate(self, error: BaseException) -> None:
        """``error`` has ended training on this rank: let no other one wait for it.  Idempotent."""
        if not self.work.others or self._is_separate:
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
        self.work.separate(error, lane)

    def wait_for_steps(self, iteration: int) -> None:
        """Wait until CPU Adam of ``iteration`` has run, and what it has stepped is written, as far as it can.

        Raises nothing.
        """
        for task in self._tasks:
            is_step = task.kind in (TaskKind.CPU_ADAM, TaskKind.HOST_PARAMETER_PROJECTION, TaskKind.DISK_WRITE)
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

    def make_room(self, ended: Task, iteration: int) -> None:
        """``ended`` of ``iteration`` is at its end: make room for copies and collectives that wait for it last.

        Raises the device's out-of-memory error if there is none.
        """
        if self._memory is not None:
            for copying in self._memory.room_at_end.get(ended.id, ()):
                self._make_room(self._tasks[copying.task], iteration + copying.iterations_later)

    def _make_room(self, task: Task, iteration: int) -> None:
        if task.kind is TaskKind.ACTIVATION_FETCH:
            self.work.swapped(task).make_room()
        elif task.kind is TaskKind.REDUCE_SCATTER:
            assert self.work.ranks is not None
            self.work.ranks.make_room(task, iteration)
        elif task.kind in OF_OWNERS:
            assert self._placed.owned is not None
            self._placed.owned.make_room(task.kind)
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
                self.work.let_go(task.id, iteration + copying.iterations_later)
            elif task.kind is TaskKind.REDUCE_SCATTER:
                assert self.work.ranks is not None
                self.work.ranks.let_go(task.id, iteration + copying.iterations_later)
            elif task.kind in OF_OWNERS:
                assert self._placed.owned is not None
                self._placed.owned.let_go(task.kind)
            elif iteration + copying.iterations_later >= self._first:
                self.work.swapped(task).let_go()

    # -- tasks -------------------------------------------------------------------------------------------------------

    def submit(self, iteration: int) -> dict[TaskId, Span]:
        """Queue every task of an iteration that is not the compute thread's; gives their spans of time."""
        spans = {}
        for task in self._tasks:
            if task.lane is not Lane.COMPUTE and not is_within_compute(task):
                waits = self.marks_before(task, iteration)
                if task.lane is Lane.COLLECTIVE and not self._meeting.is_set:
                    waits.append(self._meeting)
                spans[task.id] = self._lanes[task.lane].submit(
                    self.work.of(task, iteration), waits, self.mark(iteration, task.id)
                )
        return spans

    def norms(self, iteration: int) -> Callable[[], Norms] | None:
        """What waits for the norms of an iteration's gradients, and raises what their task raised; None without."""
        task = self._norm_task
        if task is None:
            return None

        def wait() -> Norms:
            self._device.synchronize_event(self.mark(iteration, task).wait())
            return self.work.clipped[iteration, None].norms

        return wait

    def norm(self, iteration: int) -> Tensor | None:
        """The norm of all gradients of an iteration, once it is taken; raises what its task raised.  None without."""
        wait = self.norms(iteration)
        if wait is None:
            return None
        wait()
        return self.work.clipped[iteration, None].norm

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
            self.work.forget()
            for mark in self._marks.values():
                mark.error = None
            self._marks.clear()

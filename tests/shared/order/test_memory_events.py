"""Memory that comes and goes on the compute stream: there when it is needed, once, and never above the guarantee."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.order.memory_events import Copying, MemoryEvents, memory_events
from protwin.shared.schema.schedule import AllocationId, Content, Lane, Memory, Schedule, Task, TaskId, TaskKind
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from tests.proof_size import examples
from tests.shared.small_models import chain, plan
from tests.strategies.plans import PlannedWorkload, planned_workloads

ITERATIONS = 3
TO_DEVICE = (TaskKind.GATHER, TaskKind.ACTIVATION_FETCH)


class Replay:
    """Allocates and frees in the order of the compute thread.

    Copies to the device begin as early as what they wait for lets them, and find room; those to the host end as late as
    those that wait for them let them, and find their source.
    """

    def __init__(self, schedule: Schedule, memory: MemoryEvents) -> None:
        self._schedule = schedule
        self._memory = memory
        self._alive: dict[tuple[int, AllocationId], int] = {}
        self._level_bytes = schedule.static_bytes(Memory.DEVICE)
        self._early: set[tuple[int, TaskId]] = set()
        """What has ended if lanes do all they can."""
        self._late: set[tuple[int, TaskId]] = set()
        """What has ended if they do what they must."""
        self._heads = {lane: (0, 0) for lane in Lane if lane is not Lane.COMPUTE}
        self.peak_bytes = 0

    def run(self) -> int:
        """The peak over some iterations."""
        for copying in self._memory.room_at_start:
            self._allocate(self._schedule.tasks[copying.task], copying.iterations_later)
        self._hurry()
        for iteration in range(ITERATIONS):
            for task in self._schedule.lanes[Lane.COMPUTE]:
                self._run(self._schedule.tasks[task], iteration)
        return self.peak_bytes

    def _run(self, task: Task, iteration: int) -> None:
        self._end_before(task, iteration)
        for copying in self._memory.gone_at_begin.get(task.id, ()):
            if iteration + copying.iterations_later >= 0:
                assert (iteration + copying.iterations_later, copying.task) in self._late, "a copy may still read it"
                self._free(self._schedule.tasks[copying.task], iteration + copying.iterations_later)
        for buffer in task.reads:
            if self._is_transient(buffer):
                assert (iteration, buffer) in self._alive, f"{task.name} reads what is not there"
        self._note(task.phase.peak_bytes if task.phase is not None else 0)
        self._free(task, iteration)
        self._allocate(task, iteration)
        for copying in self._memory.room_at_end.get(task.id, ()):
            self._allocate(self._schedule.tasks[copying.task], iteration + copying.iterations_later)
        self._early.add((iteration, task.id))
        self._late.add((iteration, task.id))
        self._hurry()

    def _awaited(self, task: Task, iteration: int) -> list[tuple[int, TaskId]]:
        """Those of the other lanes and of its own that a task waits for."""
        program = self._schedule.lanes[task.lane]
        place = program.index(task.id)
        own = (iteration, program[place - 1]) if place else (iteration - 1, program[-1])
        found = [own, *((iteration, other) for other in task.after)]
        found += [(iteration - 1, other) for other in task.after_previous]
        return [(turn, other) for turn, other in found if turn >= 0]

    def _end_before(self, task: Task, iteration: int) -> None:
        for awaited in self._awaited(task, iteration):
            if awaited not in self._late:
                self._end_before(self._schedule.tasks[awaited[1]], awaited[0])
                self._late.add(awaited)

    def _hurry(self) -> None:
        """Every lane besides compute goes on until it has to wait."""
        is_moving = True
        while is_moving:
            is_moving = False
            for lane, (turn, place) in list(self._heads.items()):
                program = self._schedule.lanes[lane]
                if turn == ITERATIONS or not program:
                    continue
                task = self._schedule.tasks[program[place]]
                if self._early.issuperset(self._awaited(task, turn)):
                    if task.kind in TO_DEVICE:
                        for buffer in filter(self._is_transient, task.allocates):
                            assert (turn, buffer) in self._alive, "a copy may begin before there is room"
                    self._early.add((turn, task.id))
                    self._heads[lane] = (turn, place + 1) if place + 1 < len(program) else (turn + 1, 0)
                    is_moving = True

    def _is_transient(self, buffer: AllocationId) -> bool:
        found = self._schedule.buffers[buffer]
        return found.memory is Memory.DEVICE and not found.is_static

    def _allocate(self, task: Task, iteration: int) -> None:
        for buffer in filter(self._is_transient, task.allocates):
            size_bytes = self._schedule.buffers[buffer].size_bytes
            if task.kind is TaskKind.ACTIVATION_FETCH:
                self._take_over(task, iteration)
            chunk = self._schedule.buffers[buffer].chunk
            if self._schedule.buffers[buffer].content is Content.PARAMETERS:
                held = [b for _, b in self._alive if self._schedule.buffers[b].chunk == chunk]
                contents = {self._schedule.buffers[b].content for b in held}
                assert Content.PARAMETERS not in contents, f"chunk {chunk} would be there twice"
            self._alive[iteration, buffer] = size_bytes
            self._level_bytes += size_bytes
        self._note(0)

    def _take_over(self, fetch: Task, iteration: int) -> None:
        """What has not been let go of on its way out is where it comes back to."""
        for turn, other in list(self._alive):
            found = self._schedule.buffers[other]
            is_same = (found.section, found.micro_batch) == (fetch.section, fetch.micro_batch)
            if found.content is Content.SWAPPED and turn == iteration and is_same:
                self._level_bytes -= self._alive[turn, other]
                self._alive[turn, other] = 0

    def _free(self, task: Task, iteration: int) -> None:
        for buffer in filter(self._is_transient, task.frees):
            self._level_bytes -= self._alive.pop((iteration, buffer))

    def _note(self, transient_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, self._level_bytes + transient_bytes)


@settings(max_examples=examples(240, 24))
@given(planned_workloads(has_disk=True))
def test_it_is_there_when_it_is_needed_and_never_above_the_guarantee(case: PlannedWorkload) -> None:
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    memory = memory_events(schedule)
    planned = [c.task for copies in memory.room_at_end.values() for c in copies]
    assert sorted(planned) == [t.id for t in schedule.tasks if t.kind in TO_DEVICE and t.allocates]
    assert Replay(schedule, memory).run() <= guaranteed_device_peak(schedule).size_bytes


def offloading() -> Schedule:
    """Every chunk travels, in both directions."""
    workload = chain(num_blocks=5)
    return compile_schedule(plan(workload, n_persist=0, n_buffer=2, n_checkpoint=1, n_swap=2), workload)


def test_where_much_travels_the_guarantee_is_reached() -> None:
    schedule = offloading()
    assert Replay(schedule, memory_events(schedule)).run() == guaranteed_device_peak(schedule).size_bytes


def shifted(schedule: Schedule, memory: MemoryEvents, *, room: int = 0, gone: int = 0) -> MemoryEvents:
    """Room made, or sources let go of, so many compute tasks later (negative: earlier)."""
    compute = schedule.lanes[Lane.COMPUTE]

    def moved(table: Mapping[TaskId, Sequence[Copying]], by: int) -> dict[TaskId, list[Copying]]:
        found: dict[TaskId, list[Copying]] = {}
        for task, copies in table.items():
            turns, place = divmod(compute.index(task) + by, len(compute))
            for copying in copies:
                later = replace(copying, iterations_later=copying.iterations_later - turns)
                found.setdefault(compute[place], []).append(later)
        return found

    return MemoryEvents(moved(memory.room_at_end, room), moved(memory.gone_at_begin, gone))


@pytest.mark.parametrize("change", [{"room": -1}, {"room": 1}, {"gone": -1}, {"gone": 1}], ids=str)
def test_one_compute_task_earlier_or_later_is_too_much_or_too_late(change: dict[str, int]) -> None:
    schedule = offloading()
    wrong = shifted(schedule, memory_events(schedule), **change)
    try:
        peak_bytes = Replay(schedule, wrong).run()
    except AssertionError:
        return
    assert peak_bytes > guaranteed_device_peak(schedule).size_bytes

"""One timing of a schedule that is the same each time: before a compute task begins, the lanes have done all they can.

``settled_lanes`` makes a training run so; ``eager_peak`` adds up, from the schedule alone, what is on the device then.
So a measured peak can be held against the schedule's own account to the byte, transfers and all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from protwin.runtime import Training
from protwin.runtime.devices.ledger import MemoryLedger
from protwin.shared.schema.schedule import Lane, Memory, Schedule, Task, TaskId

WATCHED = 3
"""Iterations whose memory is watched."""
SLACK_BYTES = 256
"""Scalars, and places that a device rounds up."""
LANES = tuple(lane for lane in Lane if lane is not Lane.COMPUTE)


@dataclass(frozen=True)
class AccountedPeak:
    """What the schedule accounts for."""

    low_bytes: int
    """If what ends between two compute tasks makes room before what begins there."""
    high_bytes: int
    """If it does so afterwards."""


def eager_peak(schedule: Schedule, iterations: int = WATCHED) -> AccountedPeak:
    """The device's peak over the first iterations, by the schedule's buffers and the curves of its compute tasks."""
    stretches = eager_stretches(schedule, iterations)
    return AccountedPeak(max(low for low, _ in stretches), max(high for _, high in stretches))


def eager_stretches(schedule: Schedule, iterations: int = WATCHED) -> list[tuple[int, int]]:
    """Of every compute task and what follows it until the next one begins: ``AccountedPeak``'s figures, in order.

    What lanes do before the first task belongs to none.
    """
    return list(_Replay(schedule).run(iterations))


class _Replay:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._level_bytes = schedule.static_bytes(Memory.DEVICE)
        self._done: set[tuple[int, TaskId]] = set()
        self._heads = dict.fromkeys(LANES, (0, 0))
        """Iteration and place of the task that every lane does next."""

    def run(self, iterations: int) -> Iterator[tuple[int, int]]:
        """The highest levels of every stretch."""
        low = 0
        for iteration in range(iterations):
            for task_id in self._schedule.lanes[Lane.COMPUTE]:
                high = self._level_bytes + self._settle(iteration)
                if low:
                    yield low, max(low, high)
                task = self._schedule.tasks[task_id]
                assert self._is_ready(task, iteration), f"{task.name} waits for what no lane does"
                transient = task.phase.peak_bytes if task.phase is not None else 0
                low = self._level_bytes + transient
                self._finish(task, iteration)
        yield low, max(low, self._level_bytes + self._settle(iterations))

    def _settle(self, iteration: int) -> int:
        """Every lane goes on until it has to wait for a compute task; gives the bytes that were allocated."""
        allocated_bytes, is_moving = 0, True
        while is_moving:
            is_moving = False
            for lane, (at, place) in self._heads.items():
                program = self._schedule.lanes[lane]
                if not program or at > iteration + 1:
                    continue
                task = self._schedule.tasks[program[place]]
                if self._is_ready(task, at):
                    allocated_bytes += self._bytes_of(task.allocates)
                    self._finish(task, at)
                    self._heads[lane] = (at, place + 1) if place + 1 < len(program) else (at + 1, 0)
                    is_moving = True
        return allocated_bytes

    def _is_ready(self, task: Task, iteration: int) -> bool:
        before = [(iteration, other) for other in task.after]
        if iteration > 0:
            before += [(iteration - 1, other) for other in task.after_previous]
        return self._done.issuperset(before)

    def _finish(self, task: Task, iteration: int) -> None:
        self._level_bytes += self._bytes_of(task.allocates) - self._bytes_of(task.frees)
        self._done.add((iteration, task.id))

    def _bytes_of(self, buffers: tuple[int, ...]) -> int:
        found = (self._schedule.buffers[buffer] for buffer in buffers)
        return sum(buffer.size_bytes for buffer in found if buffer.memory is Memory.DEVICE)


@contextmanager
def settled_lanes(training: Training) -> Iterator[None]:
    """Within the block, every compute task begins when all lanes have done what they can."""
    metering = training._metering
    begin_task = metering.begin_task

    def begin_settled(task: Task) -> None:
        settle(training)
        begin_task(task)

    metering.begin_task = begin_settled  # type: ignore[method-assign]
    try:
        yield
    finally:
        metering.begin_task = begin_task  # type: ignore[method-assign]


@contextmanager
def watched_stretches(training: Training, ledger: MemoryLedger) -> Iterator[list[int]]:
    """As ``settled_lanes``; gives the ledger's peak from the begin of every compute task to that of the next one.

    It is complete when the block has ended, behind a step, and as long as ``eager_stretches``.
    """
    metering, found, has_begun = training._metering, list[int](), False
    begin_task: Callable[[Task], None] = metering.begin_task

    def begin_settled(task: Task) -> None:
        nonlocal has_begun
        settle(training)
        if has_begun:
            found.append(ledger.peak_bytes)
        has_begun = True
        ledger.reset_peak()
        begin_task(task)

    metering.begin_task = begin_settled  # type: ignore[method-assign]
    try:
        yield found
        # Lanes go on with the next iteration, as far as they can without it.
        settle(training)
        found.append(ledger.peak_bytes)
    finally:
        metering.begin_task = begin_task  # type: ignore[assignment, method-assign]


def excesses(schedule: Schedule, measured_bytes: Sequence[int], iterations: int) -> dict[str, int]:
    """By compute task, the bytes that it held beyond its account in ``watched_stretches``."""
    names = [schedule.tasks[task].name for task in schedule.lanes[Lane.COMPUTE]] * iterations
    stretches = eager_stretches(schedule, iterations)
    accounted = [max(high, low) for (_, high), (low, _) in pairwise([*stretches, (0, 0)])]
    found = dict[str, int]()
    for name, measured, high in zip(names, measured_bytes, accounted, strict=True):
        if measured > high + SLACK_BYTES:
            found[name] = max(found.get(name, 0), measured - high)
    return found


def settle(training: Training) -> None:
    """Wait for the task at hand of every lane, as long as it waits for nobody but other lanes."""
    lanes, iteration = training._lanes, training._compute.iteration
    is_moving = True
    while is_moving:
        is_moving = False
        for lane in LANES:
            for at in range(max(0, iteration - 1), iteration + 2):
                program = training.schedule.lanes[lane]
                waiting = [t for t in program if (at, t) in lanes._marks and not lanes._marks[at, t].is_set]
                if waiting:
                    task = training.schedule.tasks[waiting[0]]
                    if all(mark.is_set for mark in lanes.marks_before(task, at)):
                        lanes.mark(at, task.id).wait()
                        is_moving = True
                    break

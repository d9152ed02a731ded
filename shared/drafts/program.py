"""What policies say about a family of plans: groups of tasks, what they wait for, and the buffers that they move.

[Note: Task groups]
A policy adds tasks in groups: vectors of one kind.  Ids are numbers in the order of adding.  The order of the schedule
is another one: a compute task stands at its position in the compute lane, and every other task behind such a position,
with what leaves there or with what comes after that (``Part``).  All lanes keep the one order.

[Note: Family axes]
Shapes: D prefetch depths, n tasks of a group.  Positions and waits may be (D, n); they are (n,) where all depths agree.
Of the choices of activation modes a draft knows no number: a task depends on the mode of its own block alone.
``NOT_THERE`` stands for no task, no chunk, no section, and for the row of a task that a plan does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from ..layout.keeping import AS_PLANNED, Keeping
from ..layout.uses import numbered_section
from ..schema.schedule import Content, Memory, RankAxis, Section, TaskKind
from ..schema.workload import Phase

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Integers = IntArray | int

NOT_THERE: Final = -1


class Part(IntEnum):
    """Where a task stands at a position of the compute lane."""

    RUNS = 0
    """The compute task itself."""
    LEADS = 1
    """Behind it, ahead of all else: what the next compute task waits for."""
    LEAVES = 2
    """Behind that: what takes something away, or steps it."""
    COMES = 3
    """Behind these: what brings something."""


class Operand(IntEnum):
    """The order of a compute task's buffers: of those that it reads, makes or frees."""

    PARAMETERS = 0
    CONSUMED = 1
    """What is saved, where it comes before the input."""
    INPUT = 2
    """The output of the section before; among what a forward makes, its own."""
    SAVED = 3
    KEPT = 4
    """Results that a checkpointed block keeps."""
    SWAPPED = 5
    HANDED = 6
    """The gradient that a backward is given; among what it makes, the one that it hands on."""
    GRADIENTS = 7
    RELEASED = 8

    def at(self, index: Integers = 0) -> Integers:
        """The places of several buffers of this kind."""
        return index + self.value * _BUFFERS_PER_OPERAND


_BUFFERS_PER_OPERAND: Final = 2**32


@dataclass(frozen=True, eq=False)
class Work:
    """What tasks do, row by row: all that their seconds depend on.  One per layout and kind, shared by its families."""

    moved_bytes: Integers = 0
    num_stepped: Integers = 0
    stepped_bytes: Integers = 0
    num_tensors: Integers = 0
    flops: Integers = 0
    num_ranks: int = 1
    axis: RankAxis = RankAxis.WORLD
    stated_s: float | None = None
    """Seconds that the schedule itself states: of added kinds, which have no price."""


@dataclass(frozen=True, eq=False)
class PhaseWork:
    """What compute tasks do, row by row."""

    phases: tuple[Phase, ...]


@dataclass(frozen=True, eq=False)
class TaskGroup:
    """Tasks of one kind; see [Note: Task groups] and [Note: Family axes]."""

    kind: TaskKind
    position: IntArray
    """(n,) or (D, n) of the compute lane."""
    part: Part
    work: Work | PhaseWork
    rows: IntArray
    """(n,) of ``work``."""
    checkpointed: IntArray | None = None
    """(n,) the rows where the block of the task's section is in mode CHECKPOINT, if they are others then."""
    within: Integers = 0
    """(n,) the order among tasks at the same part of a position."""
    chunk: Integers = NOT_THERE
    section: Integers = NOT_THERE
    """A number of ``sections_by_number``."""
    micro_batch: Integers = 0

    def rows_in(self, is_checkpoint: BoolArray) -> IntArray:
        """(K, n) the rows under K choices of modes: (K, blocks) those that are checkpointed."""
        if self.checkpointed is None:
            return np.tile(self.rows, (len(is_checkpoint), 1))
        outside = np.zeros((len(is_checkpoint), 1), dtype=np.bool_)
        again = np.concatenate([outside, is_checkpoint, outside], axis=1)[:, self.section]
        return np.where(again, self.checkpointed, self.rows)


@dataclass(frozen=True, eq=False)
class BufferGroup:
    """Buffers of one content: made by tasks and freed by others, or there for good.  Arrays are (n,)."""

    content: Content
    memory: Memory
    size_bytes: IntArray
    chunk: Integers = NOT_THERE
    section: Integers = NOT_THERE
    micro_batch: Integers = 0
    slot: Integers = NOT_THERE
    made_by: IntArray | None = None
    """None: they are there for good."""
    made_at: Integers = 0
    """The place among what the task makes; of buffers that are there for good, the place among these."""
    freed_by: IntArray | None = None
    freed_at: Integers = 0
    replaces: Integers = NOT_THERE
    """The buffers that are gone before these come, though both may reach for the same compute task: they count once."""


@dataclass(frozen=True, eq=False)
class Wait:
    """Tasks that wait for others, of this iteration or of the previous one: (n,) or (D, n) each."""

    tasks: IntArray
    others: IntArray
    is_previous: bool


@dataclass(frozen=True, eq=False)
class Uses:
    """Who uses buffers without making or freeing them: (n,) tasks, buffers, and the places among the operands."""

    tasks: IntArray
    buffers: IntArray
    at: IntArray


class Draft:
    """Groups of tasks and buffers in the making."""

    def __init__(self, keeping: Keeping = AS_PLANNED) -> None:
        self.keeping = keeping
        """What lies otherwise than plans have it."""
        self.groups: list[tuple[IntArray, TaskGroup]] = []
        """With the ids of their tasks."""
        self.waits: list[Wait] = []
        self.buffer_groups: list[tuple[IntArray, BufferGroup]] = []
        """With the ids of the buffers."""
        self.reads: list[Uses] = []
        self.updates: list[Uses] = []
        """What is written and was there before."""
        self.arrivals: list[tuple[IntArray, IntArray, IntArray]] = []
        """What ``arrive`` was told."""
        self.phases: dict[int, Phase] = {}
        """By task."""
        self.between_bytes: list[tuple[IntArray, IntArray]] = []
        """What compute tasks between two positions add to the level before: tasks and bytes, (n,) each."""
        self.at_end_bytes = 0
        """The most that the last task adds to the level before."""
        self.repeats = True
        """Whether the fourth micro-batch and all that follow, but for the last one, are like the third."""
        self.num_tasks = 0
        self.num_buffers = 0

    def fork(self) -> Draft:
        """Another draft that begins with all of this one; neither changes the other."""
        other = Draft(self.keeping)
        other.groups, other.waits, other.buffer_groups = [*self.groups], [*self.waits], [*self.buffer_groups]
        other.reads, other.updates, other.arrivals = [*self.reads], [*self.updates], [*self.arrivals]
        other.phases, other.between_bytes = dict(self.phases), [*self.between_bytes]
        other.at_end_bytes, other.repeats = self.at_end_bytes, self.repeats
        other.num_tasks, other.num_buffers = self.num_tasks, self.num_buffers
        return other

    def tasks(self, group: TaskGroup) -> IntArray:
        """Add a group of tasks; gives their ids, (n,)."""
        ids = np.arange(self.num_tasks, self.num_tasks + len(group.rows))
        self.num_tasks += len(ids)
        if len(ids):
            self.groups.append((ids, group))
        return ids

    def wait(self, tasks: IntArray, others: IntArray, *, is_previous: bool = False) -> None:
        """Let ``tasks`` wait for ``others``, of the previous iteration if ``is_previous``; either may be absent."""
        if tasks.shape[-1] and others.shape[-1]:
            self.waits.append(Wait(tasks, others, is_previous))

    def arrive(self, tasks: IntArray, otherwise: IntArray, size_bytes: Integers) -> None:
        """Let ``tasks`` be the first that read so many bytes since something brought them to the device.

        ``otherwise``: tasks of the same sections, that do where a plan does not have those.  (n,) each.
        """
        if len(tasks):
            self.arrivals.append((tasks, otherwise, spread(size_bytes, tasks.shape)))

    def arrived_bytes(self) -> IntArray:
        """(2, N) what every task is the first to read; and the same of tasks whose block is checkpointed."""
        is_there = np.ones((2, self.num_tasks), dtype=np.bool_)
        for ids, group in self.groups:
            if group.checkpointed is not None:
                is_there[:, ids] = group.rows != NOT_THERE, group.checkpointed != NOT_THERE
        found = np.zeros((2, self.num_tasks), dtype=np.int64)
        for tasks, otherwise, size_bytes in self.arrivals:
            for of_modes, there in zip(found, is_there, strict=True):
                np.add.at(of_modes, np.where(there[tasks], tasks, otherwise), size_bytes)
        return found

    def buffers(self, group: BufferGroup) -> IntArray:
        """Add a group of buffers; gives their ids, (n,).  What one task makes is numbered in the order of adding."""
        ids = np.arange(self.num_buffers, self.num_buffers + len(group.size_bytes))
        self.num_buffers += len(ids)
        if len(ids):
            self.buffer_groups.append((ids, group))
        return ids

    def read(self, tasks: IntArray, buffers: IntArray, at: Integers) -> None:
        """Let ``tasks`` read ``buffers``, at these places; all three broadcast.  Needed of a single plan alone."""
        self.reads.append(_uses(tasks, buffers, at))

    def update(self, tasks: IntArray, buffers: IntArray, at: Integers) -> None:
        """Let ``tasks`` write ``buffers`` that were there before, as ``read``."""
        self.updates.append(_uses(tasks, buffers, at))


def _uses(tasks: IntArray, buffers: IntArray, at: Integers) -> Uses:
    shape = np.broadcast(tasks, buffers).shape
    return Uses(spread(tasks, shape), spread(buffers, shape), spread(at, shape))


def spread(values: Integers, shape: tuple[int, ...]) -> IntArray:
    """``values`` broadcast to ``shape``, flat."""
    # Faster than numpy's broadcast_to, whose calls cost more than these small copies.
    found: IntArray = np.empty(shape, dtype=np.int64)
    found[...] = values
    return found.reshape(-1)


def sections_by_number(num_blocks: int) -> list[Section | None]:
    """All sections; ``NOT_THERE``, from the end, is none."""
    return [*(numbered_section(number, num_blocks) for number in range(num_blocks + 2)), None]

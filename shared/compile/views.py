"""One plan of a family as objects: tasks and buffers, numbered in the order of the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import add
from typing import Any, Final

import numpy as np

from ..drafts.lanes import heirs, is_there, lanes_of_tasks, task_order
from ..drafts.program import (
    NOT_THERE,
    BoolArray,
    BufferGroup,
    Draft,
    IntArray,
    Uses,
    Wait,
    Work,
    sections_by_number,
    spread,
)
from ..schema.schedule import Allocation, RankAxis, Section, Task, TaskKind
from .family import Family

_BEFORE_TASKS: Final = -(2**62)
"""What is there for good comes before what tasks make."""
_PLACES: Final = ("section", "chunk", "micro_batch")
_FACTS: Final = ("size_bytes", "chunk", "section", "micro_batch", "slot")
_WORK: Final = ("moved_bytes", "num_stepped", "stepped_bytes", "num_tensors", "flops", "num_ranks")


def tasks_and_buffers(
    draft: Draft, family: Family, *, depth: int = 0, row: int = 0
) -> tuple[tuple[Task, ...], tuple[Allocation, ...]]:
    """The tasks and the buffers of one plan of ``family``, by the numbers of its depth and of its choice of modes.

    ``draft``: what the policies say of the family.  Of one of several plans, it lacks what is known of single plans
    alone: what tasks read and write, the buffers of activations, and phases.
    """
    orders = task_order(draft)
    order, there = orders[depth if len(orders) > 1 else 0], is_there(draft, family.is_checkpoint[row])
    heir = np.arange(draft.num_tasks)
    if not there.all():
        heir = heirs(order, lanes_of_tasks(draft), there)
        order = order[there[order]]
    rank = np.full(draft.num_tasks + 1, NOT_THERE)  # the last entry stands for no task
    rank[order] = np.arange(len(order))
    sections = sections_by_number(family.workload.num_blocks)
    number, buffers = _buffers(draft, rank, sections)
    made, freed, read, updated = (
        _operands(uses, rank, number, len(order))
        for uses in (*_lifetimes(draft.buffer_groups), draft.reads, draft.updates)
    )
    kinds, axes, stated_s, places, work = _of_tasks(draft, order, family.is_checkpoint[row])
    arrived = _arrived_bytes(draft, family.is_checkpoint[row])[order].tolist()
    section, chunk, micro_batch = places
    tasks = map(
        Task,
        range(len(order)),
        kinds,
        _named(section, sections),
        _numbered(chunk),
        micro_batch,
        *_waits(draft.waits, rank, heir, depth),
        made,
        freed,
        read,
        map(add, made, updated),
        map(draft.phases.get, order.tolist()),
        *work,
        axes,
        stated_s,
        arrived,
    )
    return tuple(tasks), buffers


# -- columns ---------------------------------------------------------------------------------------------------------


def _of_tasks(
    draft: Draft, order: IntArray, is_checkpoint: BoolArray
) -> tuple[list[TaskKind], list[RankAxis], list[float | None], list[list[int]], list[list[int]]]:
    """Kinds of tasks, the ranks that meet in them, and the seconds that they state.

    Their sections, chunks and micro-batches; and what they do where these blocks, (n,), are checkpointed.
    """
    values = np.zeros((len(_PLACES) + len(_WORK), draft.num_tasks), dtype=np.int64)
    values[-1] = 1  # ranks
    kinds: list[TaskKind] = []
    axes: list[RankAxis] = []
    stated_s: list[float | None] = []
    for ids, group in draft.groups:
        here = slice(ids[0], ids[-1] + 1)
        kinds += [group.kind] * len(ids)
        axes += [group.work.axis if isinstance(group.work, Work) else RankAxis.WORLD] * len(ids)
        stated_s += [group.work.stated_s if isinstance(group.work, Work) else None] * len(ids)
        for row, name in enumerate(_PLACES):
            values[row, here] = getattr(group, name)
        if isinstance(group.work, Work):
            rows = group.rows if group.checkpointed is None else group.rows_in(is_checkpoint[None])[0]
            for row, name in enumerate(_WORK, len(_PLACES)):
                of_rows = getattr(group.work, name)
                values[row, here] = of_rows[rows] if isinstance(of_rows, np.ndarray) else of_rows
    columns = values[:, order].tolist()
    numbers = order.tolist()
    return (
        [kinds[task] for task in numbers],
        [axes[task] for task in numbers],
        [stated_s[task] for task in numbers],
        columns[: len(_PLACES)],
        columns[len(_PLACES) :],
    )


def _arrived_bytes(draft: Draft, is_checkpoint: BoolArray) -> IntArray:
    """(N,) what every task is the first to read on the device where these blocks, (n,), are checkpointed."""
    kept, again = draft.arrived_bytes()
    outside = np.zeros(1, dtype=np.bool_)
    found: IntArray = kept.copy()
    # By number: the prologue, the blocks, the epilogue, and no section.
    in_mode = np.concatenate([outside, is_checkpoint, outside, outside])
    for ids, group in draft.groups:
        found[ids] = np.where(in_mode[group.section], again[ids], kept[ids])
    return found


def _named(numbers: Iterable[int], names: Sequence[Any]) -> list[Any]:
    """What numbers stand for; the last of ``names`` is none."""
    return [names[number] for number in numbers]


def _numbered(numbers: Sequence[int]) -> list[int | None]:
    """Numbers, with None for none."""
    return [number if number >= 0 else None for number in numbers]


# -- relations -------------------------------------------------------------------------------------------------------


def _tuples(tasks: IntArray, values: IntArray, num_tasks: int) -> list[tuple[Any, ...]]:
    """The ``values`` of every task, in their order; ``tasks``: of each value, ascending."""
    ends = np.cumsum(np.bincount(tasks, minlength=num_tasks)).tolist()
    found = tuple(values.tolist())
    return [found[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _waits(waits: Iterable[Wait], rank: IntArray, heir: IntArray, depth: int) -> Iterator[list[tuple[Any, ...]]]:
    """By task, what it waits for in this iteration, and in the previous one: each once, in ascending order."""
    num_tasks = int(rank.max()) + 1
    for is_previous in (False, True):
        pairs = [np.zeros((2, 0), dtype=np.int64)]
        pairs += [_pairs(wait, depth) for wait in waits if wait.is_previous is is_previous]
        tasks, others = np.concatenate(pairs, axis=1)
        both = (tasks >= 0) & (others >= 0)
        keys = np.sort(rank[heir[tasks[both]]] * num_tasks + rank[others[both]])
        # (numpy's own function for this, ``unique``, imports its masked arrays, which nobody needs.)
        yield _tuples(*np.divmod(keys[np.diff(keys, prepend=-1) > 0], num_tasks), num_tasks)


def _pairs(wait: Wait, depth: int) -> IntArray:
    """(2, n) the tasks that wait, and for what, at one depth."""
    tasks, others = (ids[depth] if ids.ndim > 1 else ids for ids in (wait.tasks, wait.others))
    pairs: IntArray = np.empty((2, max(len(tasks), len(others))), dtype=np.int64)
    pairs[0], pairs[1] = tasks, others
    return pairs


def _operands(uses: Sequence[Uses], rank: IntArray, number: IntArray, num_tasks: int) -> list[tuple[Any, ...]]:
    """By task, the buffers of one relation, in the order of their places."""
    if not uses:
        return [()] * num_tasks
    tasks = rank[np.concatenate([use.tasks for use in uses])]
    order = np.lexsort((np.concatenate([use.at for use in uses]), tasks))
    order = order[np.searchsorted(tasks[order], 0) :]  # tasks that the plan does not have use nothing
    return _tuples(tasks[order], number[np.concatenate([use.buffers for use in uses])[order]], num_tasks)


def _lifetimes(groups: Iterable[tuple[IntArray, BufferGroup]]) -> tuple[list[Uses], list[Uses]]:
    """Who makes and who frees buffers."""
    made, freed = [], []
    for ids, group in groups:
        if group.made_by is not None and group.freed_by is not None:
            made.append(Uses(group.made_by, ids, spread(group.made_at, ids.shape)))
            freed.append(Uses(group.freed_by, ids, spread(group.freed_at, ids.shape)))
    return made, freed


# -- buffers ---------------------------------------------------------------------------------------------------------


def _buffers(
    draft: Draft, rank: IntArray, sections: Sequence[Section | None]
) -> tuple[IntArray, tuple[Allocation, ...]]:
    """The number of every buffer in the schedule, and the buffers: first what is there for good, then as made."""
    values = np.empty((len(_FACTS) + 1, draft.num_buffers), dtype=np.int64)
    contents: list[Any] = []
    for ids, group in draft.buffer_groups:
        here = slice(ids[0], ids[-1] + 1)
        contents += [(group.content, group.memory)] * len(ids)
        values[-1, here] = _BEFORE_TASKS + group.made_at if group.made_by is None else rank[group.made_by]
        for row, name in enumerate(_FACTS):
            values[row, here] = getattr(group, name)
    order = np.argsort(values[-1], kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    size_bytes, chunk, section, micro_batch, slot, keys = values[:, order].tolist()
    found = [contents[buffer] for buffer in order.tolist()]
    buffers = map(
        Allocation,
        range(len(order)),
        [content for content, _ in found],
        [memory for _, memory in found],
        size_bytes,
        _numbered(chunk),
        _named(section, sections),
        micro_batch,
        _numbered(slot),
        [key < 0 for key in keys],
    )
    return number, tuple(buffers)

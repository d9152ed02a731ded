"""Seconds of what the tasks of a family do, row by row."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from ...shared.drafts.program import PhaseWork, Work
from ...shared.schema.schedule import Task, TaskId, TaskKind
from ..costs.task_costs import CostModel

FloatArray = npt.NDArray[np.float64]


class PriceList:
    """Seconds of what tasks do, row by row; the families of a layout share them."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._known: dict[Hashable, float] = {}
        self._of_rows: dict[tuple[TaskKind, int], tuple[Work | PhaseWork, FloatArray]] = {}
        """By kind and ``id`` of work with several rows, which is kept."""

    def seconds(self, kind: TaskKind, work: Work | PhaseWork) -> FloatArray:
        """(rows + 1,) seconds of tasks alone on their lane; the last one, of no task, is 0."""
        key = (kind, id(work))
        if key in self._of_rows:
            return self._of_rows[key][1]
        tasks = _tasks_of(kind, work)
        seconds = np.array([*(self._price(task) for task in tasks), 0.0])
        if len(tasks) > 1:
            self._of_rows[key] = work, seconds
        return seconds

    def arrival_s_per_byte(self, kind: TaskKind) -> float:
        """What a task of ``kind`` pays for every byte that it is the first to read on the device."""
        return self._costs.arrival_s_per_byte(kind)

    def overhead_s(self, kind: TaskKind) -> float:
        """What every task of ``kind`` costs alike; part of ``seconds``."""
        return self._costs.overhead_s(kind)

    def swap_s(self, kind: TaskKind) -> float:
        """What a task of ``kind`` takes longer because its block swaps."""
        return self._costs.swap_s(kind)

    def _price(self, task: Task) -> float:
        """Equal tasks are priced once."""
        stepped = task.num_stepped, task.stepped_bytes, task.num_tensors, task.flops
        key = (task.kind, id(task.phase), task.moved_bytes, stepped, task.num_ranks, task.axis, task.stated_s)
        if key not in self._known:
            self._known[key] = self._costs.task_s(task)
        return self._known[key]


def _tasks_of(kind: TaskKind, work: Work | PhaseWork) -> list[Task]:
    """A task per row, with nothing but what its seconds depend on."""
    if isinstance(work, PhaseWork):
        return [Task(TaskId(0), kind, phase=phase) for phase in work.phases]
    done = work.moved_bytes, work.num_stepped, work.stepped_bytes, work.num_tensors, work.flops
    columns = np.broadcast_arrays(*done)
    return [
        Task(
            TaskId(0),
            kind,
            moved_bytes=moved,
            num_stepped=stepped,
            stepped_bytes=size_bytes,
            num_tensors=tensors,
            flops=flops,
            num_ranks=work.num_ranks,
            axis=work.axis,
            stated_s=work.stated_s,
        )
        for moved, stepped, size_bytes, tensors, flops in zip(
            *(np.atleast_1d(one).tolist() for one in columns), strict=True
        )
    ]

"""What the collectives of several ranks cost and hold, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from ...shared.layout.layout import Layout
from ...shared.layout.shards import RankPart
from ...shared.schema.schedule import NORM_BYTES, Task, TaskId, TaskKind
from ..costs.task_costs import CostModel
from .compute_table import FloatArray
from .space import IntArray
from .step_spec import StepSpec

_NO_SECONDS: Final = 0.0


@dataclass(frozen=True)
class CollectiveTable:
    """Of every chunk (C,), whether the plan has the collective or not; seconds alone on the lane, calibrated."""

    gather_s: FloatArray
    """The all-gather of its shards; 0 where hosts have whole chunks."""
    stay_s: FloatArray
    """The all-reduction of its gradients if they stay on the device; 0 where nothing is stepped."""
    leave_s: FloatArray
    """The reduction of its gradients if they leave; 0 where nothing is stepped."""
    gathered_bytes: IntArray
    """Its buffer on the device if it is offloaded, the padding of shards included."""
    reduced_bytes: IntArray
    """Its gradients laid flat in the order of the shards; 0 where hosts have whole chunks."""
    norm_s: float
    """The all-reduction of a norm's parts."""


def collective_table(
    layout: Layout, parts: Sequence[RankPart], is_stepped: Sequence[bool], costs: CostModel, step: StepSpec
) -> CollectiveTable:
    """Tabulate ``layout``.  ``parts``: what a host has of each chunk; ``is_stepped``: whether it is."""

    @cache
    def seconds(kind: TaskKind, size_bytes: int) -> float:
        return costs.task_s(Task(TaskId(0), kind, moved_bytes=size_bytes, num_ranks=step.num_ranks))

    whole = [chunk.gradient_bytes for chunk in layout.chunks]
    stay = _of(is_stepped, [seconds(TaskKind.ALL_REDUCE, size) for size in whole])
    leave, gather = stay, np.zeros(len(parts))
    reduced = np.zeros(len(parts), dtype=np.int64)
    if step.is_sharded:
        leave = _of(is_stepped, [seconds(TaskKind.REDUCE_SCATTER, part.reduced_bytes) for part in parts])
        gather = np.array([seconds(TaskKind.ALL_GATHER, part.gathered_bytes) for part in parts])
        reduced = np.array([part.reduced_bytes for part in parts], dtype=np.int64)
    return CollectiveTable(
        gather_s=gather,
        stay_s=stay,
        leave_s=leave,
        gathered_bytes=np.array([part.gathered_bytes for part in parts], dtype=np.int64),
        reduced_bytes=reduced,
        norm_s=seconds(TaskKind.ALL_REDUCE, NORM_BYTES),
    )


def _of(is_stepped: Sequence[bool], seconds: Sequence[float]) -> FloatArray:
    return np.where(np.array(is_stepped, dtype=np.bool_), np.array(seconds, dtype=np.float64), _NO_SECONDS)

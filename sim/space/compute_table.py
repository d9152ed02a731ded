"""The compute lane under every choice of activation modes at once: seconds and device bytes, position by position.

Positions are those of [Note: Positions] in ``shared/compile/positions.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from ...shared.compile.activation_levels import NO_TASK_BYTES, ActivationLevels, activation_levels
from ...shared.compile.positions import Positions
from ...shared.schema.schedule import Task, TaskId, TaskKind
from ...shared.schema.workload import Phase, Workload
from ..costs.task_costs import CostModel
from .prices import FloatArray, PriceList
from .space import BoolArray, IntArray, ModeRows
from .step_spec import StepSpec

__all__ = ["NO_TASK_BYTES", "ComputeTable", "FloatArray", "Positions", "compute_table"]

_PLAIN_STEP: Final = StepSpec()


@dataclass(frozen=True)
class ComputeTable:
    """Seconds and bytes of compute tasks.  Shapes: K choices of modes, W positions of a micro-batch, n blocks."""

    workload: Workload
    prices: PriceList
    modes: ModeRows
    positions: Positions
    seconds: FloatArray
    """(K, W) alone on the machine, the same in every micro-batch; without device Adam, whose work depends on the
    persistent chunks."""
    levels: ActivationLevels
    swap_bytes: IntArray
    """(n,) what each block moves when it swaps."""
    swap_out_s: FloatArray
    """(n,) its copy to the host."""
    swap_in_s: FloatArray
    """(n,) its copy back."""

    @cached_property
    def swapped_bytes(self) -> IntArray:
        """(n + 1,) pinned host memory of the first so many blocks' swapping."""
        return np.append(0, self.swap_bytes.cumsum())


def compute_table(workload: Workload, modes: ModeRows, costs: CostModel, step: StepSpec = _PLAIN_STEP) -> ComputeTable:
    """Tabulate the compute lane of ``workload`` for each choice of ``modes``."""
    swap_bytes = np.array([workload.profile_of(block).swappable_bytes for block in range(workload.num_blocks)])

    def copies_s(kind: TaskKind) -> FloatArray:
        price = {size: costs.task_s(Task(TaskId(0), kind, moved_bytes=size)) if size else 0.0 for size in swap_bytes}
        return np.array([price[size] for size in swap_bytes])

    return ComputeTable(
        workload=workload,
        prices=PriceList(costs),
        modes=modes,
        positions=Positions(workload.num_blocks, step.micro_batches),
        seconds=_seconds(workload, modes.is_checkpoint, costs),
        levels=activation_levels(workload, modes.is_checkpoint, modes.is_swap, step.micro_batches),
        swap_bytes=swap_bytes,
        swap_out_s=copies_s(TaskKind.ACTIVATION_OFFLOAD),
        swap_in_s=copies_s(TaskKind.ACTIVATION_FETCH),
    )


def _seconds(workload: Workload, is_checkpoint: BoolArray, costs: CostModel) -> FloatArray:
    num_blocks = workload.num_blocks
    positions = Positions(num_blocks)
    profiles = [workload.profile_of(block) for block in range(num_blocks)]

    def by_mode(keep: list[Phase] | None, checkpoint: list[Phase], kind: TaskKind) -> FloatArray:
        kept = 0.0 if keep is None else np.array([costs.phase_s(phase, kind) for phase in keep])
        return np.where(is_checkpoint, np.array([costs.phase_s(phase, kind) for phase in checkpoint]), kept)

    seconds = np.zeros((len(is_checkpoint), positions.micro_length))
    seconds[:, 0] = costs.phase_s(workload.prologue_forward, TaskKind.FORWARD)
    seconds[:, 1 : num_blocks + 1] = by_mode(
        [p.forward for p in profiles], [p.checkpoint_forward for p in profiles], TaskKind.FORWARD
    )
    seconds[:, num_blocks + 1] = costs.phase_s(workload.epilogue_forward, TaskKind.FORWARD)
    seconds[:, num_blocks + 2] = costs.phase_s(workload.epilogue_backward, TaskKind.BACKWARD)
    backward = by_mode([p.backward for p in profiles], [p.checkpoint_backward for p in profiles], TaskKind.BACKWARD)
    recompute = by_mode(None, [p.recompute for p in profiles], TaskKind.RECOMPUTE)
    at = positions.backward(1 + np.arange(num_blocks))
    seconds[:, at] = backward
    seconds[:, at - 1] = recompute
    seconds[:, 3 * num_blocks + 3] = costs.phase_s(workload.prologue_backward, TaskKind.BACKWARD)
    return seconds

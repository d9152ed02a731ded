"""The compute lane under every number of checkpointed blocks at once: seconds and device bytes, position by position.

[Note: Positions]
The program of the compute lane, with a place for every recomputation whether the plan has it or not.  For n blocks:

    0              forward of the prologue
    1 + b          forward of block b
    n + 1, n + 2   forward and backward of the epilogue
    n + 3 + 2s     recomputation of block n - 1 - s (of no length where the block keeps its activations)
    n + 4 + 2s     backward of block n - 1 - s
    3n + 3         backward of the prologue
    3n + 4         device Adam

So plans that differ in activation modes alone have their tasks at the same positions, and one numpy axis holds them.
A step (see [Note: Steps] in ``shared/compile.py``) is one forward position, or a recomputation and its backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..shared.plan import ActivationMode, place_activation_modes
from ..shared.schedule import TaskKind
from ..shared.workload import Phase, Workload
from .costs import CostModel
from .space import BoolArray, IntArray

FloatArray = npt.NDArray[np.float64]

NO_TASK_BYTES: Final = -(2**62)
"""The level at a position without a task: below everything that can be added to it."""


@dataclass(frozen=True)
class Positions:
    """Where tasks stand in the program of the compute lane; see [Note: Positions]."""

    num_blocks: int

    @property
    def length(self) -> int:
        """Positions of one iteration."""
        return 3 * self.num_blocks + 5

    @property
    def device_adam(self) -> int:
        """The last position."""
        return self.length - 1

    def backward(self, block: IntArray) -> IntArray:
        """The backward of each block."""
        return self.num_blocks + 4 + 2 * (self.num_blocks - 1 - block)

    def step_begin(self, step: IntArray) -> IntArray:
        """The first position of each step."""
        return np.where(step < self.num_blocks, 1 + step, 3 - self.num_blocks + 2 * step)

    def step_end(self, step: IntArray) -> IntArray:
        """The last position of each step."""
        return np.where(step < self.num_blocks, 1 + step, 4 - self.num_blocks + 2 * step)


@dataclass(frozen=True)
class ComputeTable:
    """Seconds and bytes of compute tasks.  Shapes: K numbers of checkpointed blocks, L positions."""

    seconds: FloatArray
    """(K, L) alone on the machine; without device Adam, whose work depends on the persistent chunks."""
    alive_bytes: IntArray
    """(K, L) device level of activations, outputs and incoming gradients before the task starts."""
    peak_bytes: IntArray
    """(K, L) the task's own peak above that; ``NO_TASK_BYTES`` where there is no task."""


def compute_table(workload: Workload, n_checkpoint: IntArray, costs: CostModel) -> ComputeTable:
    """Tabulate the compute lane of ``workload`` for each entry of ``n_checkpoint``."""
    num_blocks = workload.num_blocks
    is_checkpoint = np.array(
        [
            [mode is ActivationMode.CHECKPOINT for mode in place_activation_modes(num_blocks, n_checkpoint=int(count))]
            for count in n_checkpoint
        ],
        dtype=np.bool_,
    ).reshape(len(n_checkpoint), num_blocks)
    alive_bytes, peak_bytes = _memory(workload, is_checkpoint)
    return ComputeTable(_seconds(workload, is_checkpoint, costs), alive_bytes, peak_bytes)


def _seconds(workload: Workload, is_checkpoint: BoolArray, costs: CostModel) -> FloatArray:
    num_blocks = workload.num_blocks
    positions = Positions(num_blocks)
    profiles = [workload.profile_of(block) for block in range(num_blocks)]

    def by_mode(keep: list[Phase] | None, checkpoint: list[Phase], kind: TaskKind) -> FloatArray:
        kept = 0.0 if keep is None else np.array([costs.phase_s(phase, kind) for phase in keep])
        return np.where(is_checkpoint, np.array([costs.phase_s(phase, kind) for phase in checkpoint]), kept)

    seconds = np.zeros((len(is_checkpoint), positions.length))
    seconds[:, 0] = costs.phase_s(workload.prologue_forward, TaskKind.FORWARD)
    seconds[:, 1 : num_blocks + 1] = by_mode(
        [p.forward for p in profiles], [p.checkpoint_forward for p in profiles], TaskKind.FORWARD
    )
    seconds[:, num_blocks + 1] = costs.phase_s(workload.epilogue_forward, TaskKind.FORWARD)
    seconds[:, num_blocks + 2] = costs.phase_s(workload.epilogue_backward, TaskKind.BACKWARD)
    backward = by_mode([p.backward for p in profiles], [p.checkpoint_backward for p in profiles], TaskKind.BACKWARD)
    recompute = by_mode(None, [p.recompute for p in profiles], TaskKind.RECOMPUTE)
    at = positions.backward(np.arange(num_blocks))
    seconds[:, at] = backward
    seconds[:, at - 1] = recompute
    seconds[:, 3 * num_blocks + 3] = costs.phase_s(workload.prologue_backward, TaskKind.BACKWARD)
    return seconds


def _memory(workload: Workload, is_checkpoint: BoolArray) -> tuple[IntArray, IntArray]:
    """``ComputeTable.alive_bytes`` and ``peak_bytes``: the compiler's buffers, followed through the iteration.

    While a task runs, everything that the tasks before it left is alive, and the task adds its own peak.  What
    backwards leave is the measured level, or what must still be alive if that is more: the incoming gradient is the
    difference, and not below 0.
    """
    num_blocks = workload.num_blocks
    gradient_bytes = _gradient_bytes(workload)
    profiles = [workload.profile_of(block) for block in range(num_blocks)]
    positions = Positions(num_blocks)
    alive_bytes = np.zeros((len(is_checkpoint), positions.length), dtype=np.int64)
    peak_bytes = np.zeros_like(alive_bytes)
    output_bytes = np.array([profile.output_bytes for profile in profiles])
    checkpointed_bytes = np.array([profile.checkpoint_forward.net_bytes for profile in profiles])
    outputs = np.where(is_checkpoint, np.maximum(output_bytes, checkpointed_bytes), output_bytes)
    saved = np.where(is_checkpoint, 0, np.array([max(0, p.forward.net_bytes - p.output_bytes) for p in profiles]))

    peak_bytes[:, 0] = workload.prologue_forward.peak_bytes
    measured = np.full(len(is_checkpoint), workload.prologue_forward.net_bytes, dtype=np.int64)
    alive = np.maximum(measured, 0)
    for block, profile in enumerate(profiles):
        net, peak = _by_mode(is_checkpoint[:, block], profile.forward, profile.checkpoint_forward)
        alive_bytes[:, 1 + block], peak_bytes[:, 1 + block] = alive, peak
        measured = measured + net
        alive = alive + outputs[:, block] + saved[:, block]

    forward, backward = workload.epilogue_forward, workload.epilogue_backward
    held = alive - outputs[:, -1]
    """Outputs and saved activations that backward has yet to consume; ``alive`` adds what tasks hand on."""
    alive_bytes[:, num_blocks + 1], peak_bytes[:, num_blocks + 1] = alive, forward.peak_bytes
    alive_bytes[:, num_blocks + 2] = alive + max(0, forward.net_bytes)
    peak_bytes[:, num_blocks + 2] = backward.peak_bytes
    measured = measured + forward.net_bytes + backward.net_bytes
    alive = np.maximum(measured, held)
    for block in reversed(range(num_blocks)):
        profile, checkpoint = profiles[block], is_checkpoint[:, block]
        at = int(positions.backward(np.array(block)))
        recomputed = np.where(checkpoint, profile.recompute.net_bytes, 0)
        alive_bytes[:, at - 1] = alive
        peak_bytes[:, at - 1] = np.where(checkpoint, profile.recompute.peak_bytes, NO_TASK_BYTES)
        net, peak = _by_mode(checkpoint, profile.backward, profile.checkpoint_backward)
        alive_bytes[:, at], peak_bytes[:, at] = alive + np.maximum(recomputed, 0), peak
        measured = measured + recomputed + net - gradient_bytes[block]
        held = held - saved[:, block] - (outputs[:, block - 1] if block > 0 else 0)
        alive = np.maximum(measured, held)
    alive_bytes[:, -2], peak_bytes[:, -2] = alive, workload.prologue_backward.peak_bytes
    alive_bytes[:, -1] = np.maximum(measured + workload.prologue_backward.net_bytes, 0)
    return alive_bytes, peak_bytes


def _by_mode(is_checkpoint: BoolArray, keep: Phase, checkpoint: Phase) -> tuple[IntArray, IntArray]:
    """Net and peak bytes (K,) of the phase that each plan runs."""
    net_bytes = np.where(is_checkpoint, checkpoint.net_bytes, keep.net_bytes)
    return net_bytes, np.where(is_checkpoint, checkpoint.peak_bytes, keep.peak_bytes)


def _gradient_bytes(workload: Workload) -> list[int]:
    """Bytes of gradients that the backward of each block leaves in buffers of their own."""
    sizes = [0] * workload.num_blocks
    for parameter in workload.parameters:
        if parameter.block is not None and parameter.trainable:
            sizes[parameter.block] += parameter.size_bytes
    return sizes

"""The compute lane under every choice of activation modes at once: seconds and device bytes, position by position.

Positions are those of the method's section program; of full training see [Note: Positions] in
``shared/compile/positions.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from ...shared.compile.activation_levels import ActivationLevels
from ...shared.compile.compile import FULL_TRAINING, Policies
from ...shared.layout.positions import Positions
from ...shared.schema.schedule import Task, TaskId, TaskKind
from ...shared.schema.workload import Workload
from ..costs.task_costs import CostModel
from .prices import FloatArray, PriceList
from .section_program import SectionProgram
from .space import BoolArray, IntArray, ModeRows, Trips
from .step_spec import StepSpec

_PLAIN_STEP: Final = StepSpec()


@dataclass(frozen=True)
class ComputeTable:
    """Seconds and bytes of compute tasks.

    Shapes: K choices of modes, T tilings, W positions of a micro-batch, n blocks.
    """

    workloads: tuple[Workload, ...]
    """(T,) what plans do in each tiling ([Note: Tilings] in ``tilings.py``)."""
    prices: PriceList
    modes: ModeRows
    positions: Positions
    seconds: FloatArray
    """(K, W) alone on the machine, the same in every micro-batch; without device Adam, whose work depends on the
    persistent chunks."""
    levels: ActivationLevels
    section_s: FloatArray
    """(T, 2, W) what tasks take where all blocks keep their activations, and where all are checkpointed."""
    swap_bytes: IntArray
    """(T, n) what each block moves when it swaps."""
    swap_out_s: FloatArray
    """(T, n) its copy to the host."""
    swap_in_s: FloatArray
    """(T, n) its copy back."""
    input_copies_s: FloatArray
    """(T, 2, n) what each block moves of its input, to the device and to the host; 0 where none does."""

    @property
    def workload(self) -> Workload:
        """What plans do in the first tiling: all that tiles do not change."""
        return self.workloads[0]

    def trip_s(self, trips: Trips) -> FloatArray:
        """(2,) of all that comes back in a micro-batch, and of all that leaves."""
        swapped = trips.tiling, slice(trips.n_swap)
        found: FloatArray = self.input_copies_s[trips.tiling][:, list(trips.inputs)].sum(axis=1)
        found += np.stack([self.swap_in_s[swapped], self.swap_out_s[swapped]]).sum(axis=1)
        return found

    def trip_bytes(self, trips: Trips) -> int:
        """Pinned host memory of what blocks send there."""
        sizes, inputs = self.modes.input_bytes, 0
        if sizes is not None:
            inputs = int((sizes if sizes.ndim == 1 else sizes[trips.tiling])[list(trips.inputs)].sum())
        return int(self.swap_bytes[trips.tiling, : trips.n_swap].sum()) + inputs

    @cached_property
    def swapped_bytes(self) -> IntArray:
        """(K, n) what each block moves in mode SWAP."""
        sizes = self.swap_bytes[0] if self.modes.tiling is None else self.swap_bytes[self.modes.tiling]
        swapped_bytes: IntArray = np.where(self.modes.is_swap, sizes, 0)
        return swapped_bytes


def compute_table_in_tiles(
    workloads: Sequence[Workload], modes: ModeRows, costs: CostModel, step: StepSpec, policies: Policies
) -> ComputeTable:
    """Tabulate the compute lane for each choice of ``modes``; ``workloads``: (T,) what plans do in each tiling."""
    prices = PriceList(costs)
    parts = [
        compute_table(workload, modes.in_tiling(number), costs, step, policies, prices=prices)
        for number, workload in enumerate(workloads)
    ]
    if len(parts) == 1:
        return replace(parts[0], modes=modes)
    return ComputeTable(
        workloads=tuple(workloads),
        prices=prices,
        modes=modes,
        positions=parts[0].positions,
        seconds=np.concatenate([part.seconds for part in parts]),
        levels=ActivationLevels.joined([part.levels for part in parts]),
        section_s=np.concatenate([part.section_s for part in parts]),
        swap_bytes=np.concatenate([part.swap_bytes for part in parts]),
        swap_out_s=np.concatenate([part.swap_out_s for part in parts]),
        swap_in_s=np.concatenate([part.swap_in_s for part in parts]),
        input_copies_s=np.concatenate([part.input_copies_s for part in parts]),
    )


def compute_table(
    workload: Workload,
    modes: ModeRows,
    costs: CostModel,
    step: StepSpec = _PLAIN_STEP,
    policies: Policies = FULL_TRAINING,
    *,
    prices: PriceList | None = None,
) -> ComputeTable:
    """Tabulate the compute lane of ``workload`` for each choice of ``modes``, all in one tiling.

    ``prices``: those of ``costs``, where several tables share them.
    """
    swap_bytes = np.array([workload.profile_of(block).swappable_bytes for block in range(workload.num_blocks)])

    def copies_s(kind: TaskKind, sizes: IntArray) -> FloatArray:
        price = {size: costs.task_s(Task(TaskId(0), kind, moved_bytes=size)) if size else 0.0 for size in set(sizes)}
        return np.array([price[size] for size in sizes])

    out, back = TaskKind.ACTIVATION_OFFLOAD, TaskKind.ACTIVATION_FETCH
    inputs = np.zeros(workload.num_blocks, dtype=np.int64) if modes.input_bytes is None else modes.input_bytes

    prices = PriceList(costs) if prices is None else prices
    program = SectionProgram.of(policies, workload, modes.is_checkpoint)
    either = np.array([[False], [True]]).repeat(workload.num_blocks, axis=1)
    return ComputeTable(
        workloads=(workload,),
        prices=prices,
        modes=modes,
        positions=policies.sections.positions_of(workload, step.micro_batches),
        seconds=program.seconds(prices)
        + _swapping_s(prices, modes, swap_bytes > 0, policies.sections.positions_of(workload)),
        levels=_levels(policies, workload, modes, step.micro_batches),
        section_s=SectionProgram.of(policies, workload, either).seconds(prices)[None],
        swap_bytes=swap_bytes[None],
        swap_out_s=copies_s(out, swap_bytes)[None],
        swap_in_s=copies_s(back, swap_bytes)[None],
        input_copies_s=np.stack([copies_s(back, inputs), copies_s(out, inputs)])[None],
    )


def _swapping_s(prices: PriceList, modes: ModeRows, moves: BoolArray, positions: Positions) -> FloatArray:
    """(K, W) what tasks take longer because their blocks swap; ``moves``: (n,) the blocks that have something to."""
    found = np.zeros((len(modes.n_swap), positions.micro_length))
    swaps = modes.is_swap & moves
    if not swaps.any():
        return found
    sections = np.arange(1, len(moves) + 1)
    for kind, position in (
        (TaskKind.FORWARD, positions.forward(sections)),
        (TaskKind.BACKWARD, positions.backward(sections)),
    ):
        if swap_s := prices.swap_s(kind):
            found[:, position] = np.where(swaps, swap_s, 0.0)
    return found


def _levels(policies: Policies, workload: Workload, modes: ModeRows, micro_batches: int) -> ActivationLevels:
    inputs = modes.moved_inputs
    levels = policies.sections.levels_of(workload, modes.is_checkpoint, modes.is_swap, inputs, micro_batches)
    if levels is not None:
        return levels
    return SectionProgram.of(policies, workload, modes.is_checkpoint, micro_batches=micro_batches).levels()

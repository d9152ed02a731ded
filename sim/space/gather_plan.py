"""One residency (persistent chunks, buffers) of a layout: when its chunks are gathered, for bounds that count copies.

What plans of the residency do in full stands in their families (``sim/space/plan_family.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...shared.compile.chunk_facts import Stays
from .chunk_table import ChunkTable
from .compute_table import Positions
from .space import IntArray


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """What comes to the device, and what goes, under one prefix and number of buffers.

    Shapes: G gathers, U updates (chunks with gradients that
    leave and that CPU Adam steps), V chunks whose gradients are reduced to parts on the devices, D prefetch depths.
    """

    table: ChunkTable
    prefix: int
    n_buffer: int
    gather_chunk: IntArray
    """(G,) in the order of the lanes."""
    gather_step: IntArray
    """(G,) the step that needs it first."""
    free_step: IntArray
    """(G,) the step whose end frees its buffer, or its chunk's place before; below 0 in the previous iteration."""
    slot_free: IntArray
    """(G,) compute tasks that must have ended for its buffer to be free and its chunk gone; below 0 in the previous
    iteration."""
    update_chunk: IntArray
    """(U,) in the order in which their gradients leave, in every micro-batch."""
    part_chunk: IntArray
    """(V,) in the order in which their gradients are reduced, in every micro-batch."""
    repeats: bool
    """Whether chunks lie in the same buffers when the third micro-batch begins and when the fourth does.

    From there on all that follow are alike, but for the last one: what makes room depends on nothing else."""

    @property
    def positions(self) -> Positions:
        """The program of the compute lane."""
        return self.table.positions

    def gather_wait(self, depths: IntArray) -> IntArray:
        """(D, G) compute tasks that must have ended for a gather's window to be open and its buffer to be free.

        Counted within the iteration; below 1 for tasks of the previous one.
        """
        positions = self.positions
        window = self.gather_step - depths[:, None] - 1
        is_here = window >= 0
        # Not more than an iteration ahead, however deep the prefetch.
        step = np.where(is_here, window, np.maximum(window + positions.num_steps, 0))
        opened = positions.step_end(step) + 1 - np.where(is_here, 0, positions.length)
        return np.maximum(opened, self.slot_free)


def residency(table: ChunkTable, prefix: int, n_buffer: int) -> GatherPlan:
    """The gathers and updates of the plans with these knobs; slots are assigned as the compiler assigns them."""
    positions = table.positions
    is_gathered, is_offloaded = table.is_gathered(prefix), table.is_offloaded(prefix)
    stays = table.stays(prefix, n_buffer)
    # Steps that must have ended, counted within the iteration; below 0 in the previous one.
    slot = _over(stays, stays.previous, stays.last_in_slot, positions.num_steps)
    before = np.maximum(slot, _over(stays, stays.earlier, stays.latest, positions.num_steps))
    is_previous = before < 0
    return GatherPlan(
        table=table,
        prefix=prefix,
        n_buffer=n_buffer,
        gather_chunk=stays.chunk,
        gather_step=stays.first_step,
        free_step=before,
        slot_free=positions.step_end(before % positions.num_steps) + 1 - np.where(is_previous, positions.length, 0),
        update_chunk=table.update_order[is_offloaded[table.update_order]],
        part_chunk=table.update_order[(is_gathered & ~is_offloaded)[table.update_order]],
        repeats=_repeats(stays, 2 * positions.num_blocks),
    )


def _over(stays: Stays, before: IntArray, last: IntArray, num_steps: int) -> IntArray:
    """(G,) the last step of the stay ``before`` each, or of the ``last`` one in the previous iteration."""
    found: IntArray = np.where(before >= 0, stays.last_step[before], stays.last_step[last] - num_steps)
    return found


def _repeats(stays: Stays, num_steps: int) -> bool:
    """Whether the chunks in all slots are the same before the third micro-batch as before the fourth."""
    first = stays.first_step
    if not len(first) or first[-1] < 3 * num_steps:
        # Nothing is gathered any more, or there are too few micro-batches to say.
        return True
    in_slot = np.full((2, int(stays.slot.max()) + 1), -1)
    for row, number in enumerate((2, 3)):
        is_before = first < number * num_steps
        # Of writes to one place the last one stays.
        in_slot[row, stays.slot[is_before]] = stays.chunk[is_before]
    return np.array_equal(*in_slot)

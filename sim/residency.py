"""One residency (persistent chunks, buffers) of a layout: its transfers and its memory, for all depths and modes.

This restates the compiler's policy ([Note: Steps] in ``shared/compile.py``) in numbers of tasks and positions, without
building tasks: every lane runs its tasks in order, so whatever a task waits for is one number per other lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..shared.slots import assign_slots
from .chunk_table import ChunkTable
from .compute_table import ComputeTable, Positions
from .space import IntArray


@dataclass(frozen=True)
class Residency:
    """Shapes: G gathers, U updates (gradient offload and CPU Adam), D prefetch depths, L compute positions."""

    table: ChunkTable
    n_persist: int
    n_buffer: int
    device_adam_s: float
    """Seconds of stepping the persistent chunks."""
    gather_chunk: IntArray
    """(G,) in the order of the H2D lane."""
    gather_step: IntArray
    """(G,) the step that needs it first."""
    last_step: IntArray
    """(G,) the last step that uses it before its buffer goes to another chunk."""
    slot_free: IntArray
    """(G,) compute tasks that must have ended for its buffer to be free; below 0 in the previous iteration."""
    update_chunk: IntArray
    """(U,) in the order of the D2H and CPU_OPTIM lanes."""

    @property
    def positions(self) -> Positions:
        """The program of the compute lane."""
        return Positions(self.table.layout.num_blocks)

    @cached_property
    def update_ready(self) -> IntArray:
        """(U,) compute tasks that must have ended before the gradients leave."""
        return self.positions.backward(self.table.first_block[self.update_chunk]) + 1

    @cached_property
    def gather_update(self) -> IntArray:
        """(G,) number of updates, within the previous iteration, that a gather waits for; 0 for none."""
        number = np.zeros(len(self.table.layout.chunks), dtype=np.int64)
        number[self.update_chunk] = np.arange(1, len(self.update_chunk) + 1)
        first = np.zeros(len(number), dtype=np.int64)
        places = np.arange(len(self.gather_chunk))
        # Of writes to one place the last one stays: the first gather of each chunk.
        first[self.gather_chunk[::-1]] = places[::-1]
        return np.where(first[self.gather_chunk] == places, number[self.gather_chunk], 0)

    def gather_wait(self, depths: IntArray) -> IntArray:
        """(D, G) compute tasks that must have ended for a gather's window to be open and its buffer to be free.

        Counted within the iteration; below 1 for tasks of the previous one.
        """
        positions, num_steps = self.positions, 2 * self.table.layout.num_blocks
        window = self.gather_step - depths[:, None] - 1
        previous = np.maximum(window + num_steps, 0)
        opened = np.where(
            window >= 0,
            positions.step_end(np.maximum(window, 0)) + 1,
            positions.step_end(previous) + 1 - positions.length,
        )
        return np.maximum(opened, self.slot_free)

    def earliest(self, depths: IntArray) -> IntArray:
        """(D, G) compute tasks that have surely ended before a gather starts, by whatever chain of waits."""
        length = self.positions.length
        after_update = (
            np.where(self.gather_update > 0, self.update_ready[np.maximum(self.gather_update - 1, 0)] - length, -length)
            if len(self.update_chunk)
            else np.full(len(self.gather_chunk), -length)
        )
        own = np.maximum(self.gather_wait(depths), after_update)
        # The lane keeps its order, the previous iteration's gathers included.
        return np.maximum.accumulate(np.concatenate([own - length, own], axis=1), axis=1)[:, own.shape[1] :]

    def gradients_gone(self, depths: IntArray) -> IntArray:
        """(D, U) the compute position that surely starts after the gradients have left.

        That is the step that must wait for them or, if it comes earlier, the one in the next iteration that waits for
        the last of CPU Adam.  Positions are counted on into the next iteration.
        """
        positions, num_steps = self.positions, 2 * self.table.layout.num_blocks
        first_block = self.table.first_block[self.update_chunk]
        waiting = num_steps - 1 - first_block + depths[:, None] + 1
        next_step = np.minimum(waiting - num_steps, first_block.min(initial=num_steps))
        within = positions.step_begin(np.minimum(waiting, num_steps - 1))
        return np.where(waiting < num_steps, within, positions.step_begin(np.maximum(next_step, 0)) + positions.length)

    def peak_bytes(self, compute: ComputeTable, depths: IntArray, resident_bytes: int) -> IntArray:
        """(D, K) the guaranteed device peak: of every compute task, and of the pause before it."""
        running, pausing = self._held_bytes(depths, resident_bytes)
        during = running[:, None, :] + (compute.alive_bytes + compute.peak_bytes)
        before = pausing[:, None, :] + compute.alive_bytes
        peaks: IntArray = np.maximum(during, before).max(axis=2)
        return peaks

    def _held_bytes(self, depths: IntArray, resident_bytes: int) -> tuple[IntArray, IntArray]:
        """(D, L) the highest level of parameters, state and gradients of blocks while each task runs, and before.

        In the pause before a compute task, gradients whose copy it waits for are still there.
        """
        table, length = self.table, self.positions.length
        rows = np.arange(len(depths))[:, None]
        # Intervals begin in one iteration and may end in the next: two are laid out, and folded into one at the end.
        width = 2 * length + 1
        change = np.zeros(len(depths) * width, dtype=np.int64)
        """Row by row."""
        row_begins = rows * width

        def change_at(positions: IntArray, sizes_bytes: IntArray) -> None:
            flat = row_begins + positions
            np.add.at(change, flat.ravel(), np.broadcast_to(sizes_bytes, flat.shape).ravel())

        sizes = table.size_bytes[self.gather_chunk]
        change_at(self.earliest(depths) + length, sizes)
        change_at(self.positions.step_end(self.last_step) + length + 1, -sizes)
        change_at(self.positions.backward(table.gradient_block) + 1, table.gradient_bytes)
        gone = np.full((len(depths), len(table.layout.chunks)), length)
        gone[:, self.update_chunk] = self.gradients_gone(depths)
        change_at(gone[:, table.gradient_chunk], -table.gradient_bytes)
        level = change.reshape(len(depths), width)[:, :-1].cumsum(axis=1)
        # In the pause before the task that waits for them, the gradients of an update are still there.
        leaving = np.zeros_like(level)
        update_bytes = np.bincount(table.gradient_chunk, table.gradient_bytes, minlength=len(table.layout.chunks))
        np.add.at(leaving, (rows, gone[:, self.update_chunk]), update_bytes[self.update_chunk].astype(np.int64))
        static_bytes = table.static_device_bytes(np.array([self.n_persist]), resident_bytes)
        running = level[:, :length] + level[:, length:] + static_bytes
        return running, running + leaving[:, :length] + leaving[:, length:]


def residency(table: ChunkTable, n_persist: int, n_buffer: int) -> Residency:
    """The transfers of the plans with these knobs; slots are assigned as the compiler assigns them."""
    layout = table.layout
    positions = Positions(layout.num_blocks)
    persistent = layout.persistent(n_persist)
    needed = [[chunk for chunk in chunks if chunk not in persistent] for chunks in layout.chunks_of_block]
    stays = assign_slots(needed + needed[::-1], n_buffer)
    last_step = np.array([stay.last_step for stay in stays], dtype=np.int64)
    last_in_slot = {stay.slot: stay.last_step for stay in stays}
    before = np.array(
        [last_in_slot[stay.slot] if stay.previous is None else stays[stay.previous].last_step for stay in stays],
        dtype=np.int64,
    )
    is_previous = np.array([stay.previous is None for stay in stays], dtype=np.bool_)
    return Residency(
        table=table,
        n_persist=n_persist,
        n_buffer=n_buffer,
        device_adam_s=float(table.device_adam_s[n_persist]),
        gather_chunk=np.array([stay.chunk for stay in stays], dtype=np.int64),
        gather_step=np.array([stay.first_step for stay in stays], dtype=np.int64),
        last_step=last_step,
        slot_free=positions.step_end(before) + 1 - np.where(is_previous, positions.length, 0),
        update_chunk=table.update_order[table.is_offloaded(n_persist)[table.update_order]],
    )

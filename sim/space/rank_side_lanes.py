"""What collectives of several ranks make compute wait for, at the least."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from .collective_table import CollectiveTable
from .compute_table import ComputeTable
from .gather_plan import GatherPlan
from .plan_family import COLLECTIVE
from .prices import FloatArray
from .side_lanes import SideLanes
from .space import IntArray


class RankSideLanes(SideLanes):
    """The lanes beside compute of one of several equal ranks.

    Shapes: D depths, M micro-batches; G, U, V as of residencies.
    """

    @property
    def collective_s(self) -> float:
        """Seconds of all collectives."""
        return float(self.lane_s(COLLECTIVE).sum())

    @cached_property
    def _micro_batch(self) -> IntArray:
        """(M, 1) by number."""
        return np.arange(self.positions.micro_batches)[:, None]

    @cached_property
    def swapped(self) -> IntArray:
        """The blocks that move something in mode SWAP."""
        return np.flatnonzero(self.compute.swap_bytes[: self.n_swap])

    @property
    def _table(self) -> CollectiveTable:
        table = self.residency.table.collectives
        assert table is not None, "several ranks have collectives"
        return table

    @property
    def is_sharded(self) -> bool:
        """Whether gathers bring a shard alone, and an all-gather the others."""
        return self.residency.table.step.is_sharded

    @cached_property
    def _staying(self) -> IntArray:
        """Chunks whose gradients stay whole, in the order of their reductions."""
        table = self.residency.table
        is_gathered = table.is_gathered(self.residency.prefix)
        staying: IntArray = table.update_order[~is_gathered[table.update_order]]
        return staying

    @cached_property
    def _reductions(self) -> tuple[IntArray, FloatArray]:
        """Steps and seconds of reductions within blocks.

        Those of gradients that leave, and of those that are reduced to parts, by micro-batch; and of those that stay.
        """
        num_steps, residency = 2 * self.positions.num_blocks, self.residency
        scattered = (residency.update_chunk, residency.part_chunk)
        leave, part, stay = (num_steps - 1 - residency.table.first_block[of] for of in (*scattered, self._staying))
        micro_batches = self.positions.micro_batches
        steps = [(num_steps * self._micro_batch + of).ravel() for of in (leave, part)]
        steps.append(num_steps * (micro_batches - 1) + stay)
        seconds = [np.tile(self._table.leave_s[of], micro_batches) for of in scattered]
        return np.concatenate(steps), np.concatenate([*seconds, self._table.stay_s[self._staying]])

    def _behind_step(self, depths: IntArray) -> IntArray:
        """(D, G) the step whose tasks an all-gather follows in the order of the lane; -1 before all of them."""
        residency, num_steps = self.residency, self.positions.num_steps
        steps = np.arange(num_steps)
        freed = np.full(num_steps, -1)
        np.maximum.at(freed, residency.gather_step, residency.free_step)
        if len(self.swapped):
            # What comes back is sent in the same order, and not before its way out.
            num_micro = 2 * self.positions.num_blocks
            back = (num_micro * self._micro_batch + num_micro - 1 - self.swapped).ravel()
            freed[back] = np.maximum(freed[back], (num_micro * self._micro_batch + self.swapped).ravel())
        opened = np.maximum(freed, steps - depths[:, None] - 1)
        behind = np.maximum.accumulate(np.minimum(opened, steps - 1), axis=1)
        # Before the end of the first step nothing but what the first step needs is sent.
        behind[:, 1:] = np.maximum(behind[:, 1:], 0)
        gathers: IntArray = behind[:, residency.gather_step]
        return gathers

    def waited_s(self, depths: IntArray) -> FloatArray:
        """(D,) seconds of collectives that are done between two steps while compute waits for the second one.

        An all-gather that follows the reductions of the step before its own in the lane comes after them and after that
        step, and so does one whose buffer that step frees.  Between the last step of a pass and the first of the next
        one the parts outside all blocks compute.
        """
        residency, num_steps = self.residency, self.positions.num_steps
        waited = np.zeros(len(depths))
        if not self.is_sharded or not len(residency.gather_step):
            return waited
        reduction_step, seconds = self._reductions
        reduced_s = np.bincount(reduction_step, seconds, minlength=num_steps)
        gathered_s = self._table.gather_s[residency.gather_chunk]
        before = residency.gather_step - 1
        is_behind = np.bincount(reduction_step, minlength=num_steps)[before] > 0
        is_pressed = (self._behind_step(depths) == before) & (is_behind | (residency.free_step == before))
        is_pressed &= residency.gather_step % self.positions.num_blocks > 0
        for row, pressed in enumerate(is_pressed):
            steps = residency.gather_step[pressed]
            is_step = np.bincount(steps, minlength=num_steps) > 0
            waited[row] = gathered_s[pressed].sum() + reduced_s[:-1][is_step[1:]].sum()
        return waited


def side_lanes_of(residency: GatherPlan, compute: ComputeTable, n_swap: int) -> SideLanes:
    """The plans of one rank alone, or of one of several."""
    kind = SideLanes if residency.table.step.num_ranks == 1 else RankSideLanes
    return kind(residency, compute, n_swap)

"""Stretches of one iteration in which work has to lie, for the bounds of [Note: Time bounds].

The note stands in ``sim/bounds/time_bounds.py``.  Shapes: R plans, J cuts; (R, 1) where nothing else is said.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..space.compute_table import FloatArray
from ..space.space import IntArray
from .work_sums import WorkRows

NUM_CUTS: Final = 4
"""Values of j that are tried, from p to the last block with an update.  Any number is admissible."""


class Cycle:
    """The places of [Note: Time bounds] for plans that offload something; all (R, 1) but the cuts, (R, J)."""

    def __init__(self, rows: WorkRows, depth: IntArray) -> None:
        sums = rows.sums
        self.rows = rows
        self.depth = depth
        self.first = sums.first[rows.row]
        span = sums.last[rows.row] - self.first
        self.cuts = np.rint(self.first + span * np.linspace(0, 1, NUM_CUTS)).astype(np.int64)
        self.last_gathered = sums.last_gathered[rows.row]
        self.last_gathers_s = sums.last_gathers_s[rows.row]
        self.shortest_offload_s = sums.shortest_offload_s[rows.row]

    def backward(self, block: IntArray) -> IntArray:
        """The compute position of a block's backward in the last micro-batch."""
        return self.rows.sums.positions.last_backward(block)

    def gathers_again_s(self, step: IntArray, block: IntArray) -> FloatArray:
        """Gathers in the last backward for steps from ``step`` on, ended before the backward of ``block`` starts.

        The step of a gather in the last backward is that of the last block's, less the chunk's last block.
        """
        return self.rows.gathers_again_s(block, self.rows.sums.positions.num_steps - step)

    def earlier_offloads_s(self, cuts: IntArray, num_earlier: int | None = None) -> FloatArray | float:
        """Copies of the gradients of micro-batches before the cut's own, where they are gone before the cut.

        ``num_earlier``: how many these are; None for all but the last one.
        """
        sums = self.rows.sums
        if num_earlier is None:
            num_earlier = sums.positions.micro_batches - 1
        if not num_earlier:
            return 0.0
        gone = np.where(self.depth + 1 <= 2 * sums.num_blocks - cuts, num_earlier, num_earlier - 1)
        earlier_s: FloatArray = gone * sums.offload_s[self.rows.row, -1]
        return earlier_s

    def outs_s(self, first: IntArray, cuts: IntArray) -> FloatArray:
        """What swaps, on its way to the host, that begins after the forward of ``first`` and is gone before the cut."""
        rows, num_blocks = self.rows, self.rows.sums.num_blocks
        micro_batches = rows.sums.positions.micro_batches
        is_gone = rows.n_swap + self.depth <= 2 * num_blocks - 1 - cuts
        begun_s, all_s = rows.outs_s(first, num_blocks), rows.outs_s(0, num_blocks)
        if micro_batches == 1:
            return np.where(is_gone, begun_s, 0.0)
        return begun_s + np.where(is_gone, micro_batches - 1, micro_batches - 2) * all_s

    def fetches_s(self, first: IntArray, cuts: IntArray) -> FloatArray:
        """Its way back, that begins after the forward of ``first`` and has ended before the backward of the cut."""
        rows, num_blocks = self.rows, self.rows.sums.num_blocks
        micro_batches = rows.sums.positions.micro_batches
        last_s = rows.fetches_s(np.maximum(cuts + 1, first), num_blocks)
        if micro_batches == 1:
            return last_s
        begun_s, all_s = rows.fetches_s(first, num_blocks), rows.fetches_s(0, num_blocks)
        return begun_s + (micro_batches - 2) * all_s + rows.fetches_s(cuts + 1, num_blocks)

    def later_fetches_s(self, step: IntArray, cuts: IntArray) -> FloatArray:
        """Its way back for steps from ``step`` on, that has ended before the backward of the cut."""
        rows, positions = self.rows, self.rows.sums.positions
        last_s = rows.fetches_s(cuts + 1, positions.num_steps - step)
        all_s = rows.fetches_s(0, rows.sums.num_blocks)
        num_between = np.maximum(0, positions.micro_batches - 1 - np.maximum(1, -(-step // (2 * rows.sums.num_blocks))))
        later_s: FloatArray = last_s + num_between * all_s
        return later_s

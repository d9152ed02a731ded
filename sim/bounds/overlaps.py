"""Copies in both directions that are guaranteed to run side by side.

[Note: Released together]
A lane *has released* a task when everything that the task waits for has ended and so have the waits of all tasks of
its lane before it: from then on the lane works until the task has ended.  In backward, gradients of a block are
released when its backward ends, and chunks that did not survive the turn are gathered again when some step ends: the
one that opens their window, or the one that frees their buffer.  So both directions get work at the same instants,
say ``in[e]`` and ``out[e]`` seconds when the backward of block e ends.

Let W and V be what the two lanes have released and not yet done, R and S their rates while both are active, and rho
the least R / S in any company.  Let t be the work of H2D that was done while D2H was active.  Then

    t + min(W, rho * V)

never falls: while both lanes are active, t grows by R dt, W falls by as much and rho * V by no more; while only one is
active, the other has nothing and the minimum is 0.  And it grows by at least min(in[e], rho * out[e]) at every release.
So when all these gradients have left, V = 0, at least the sum over e of min(in[e], rho * out[e]) was done side by
side, however the copies were timed.  Where lanes slow each other that costs more than any other arrangement.

[Note: When buffers fall free]
In the last backward a chunk is needed no more when the backward of its first block has ended.  The k-th chunk that
is gathered again takes the k-th buffer that fell free, and they fall free in the order of first blocks.
"""

from __future__ import annotations

import numpy as np

from ..space.chunk_table import ChunkTable
from ..space.compute_table import FloatArray
from ..space.space import IntArray

_MOST_MICRO_BATCHES = 2
"""From the third on, gradients wait for those of the micro-batch before to have been added, and not for a step."""


class Overlaps:
    """Shapes: R plans, n blocks, G offloaded chunks."""

    def __init__(self, table: ChunkTable, least_ratio: float) -> None:
        self._table = table
        self._least_ratio = least_ratio
        self._num_blocks = table.layout.num_blocks
        self._out_s = np.where(table.is_stepped, table.offload_s, 0.0)

    def together_s(self, prefix: IntArray, n_buffer: IntArray, depths: IntArray, n_swap: int) -> FloatArray:
        """(R, n + 1) seconds of H2D work guaranteed to lie beside D2H, of the releases at blocks before each one.

        The first three knobs are (R,).
        """
        found = np.zeros((len(prefix), self._num_blocks + 1))
        # What swaps must have gone in forward: then it holds up neither gradients nor what comes back.
        is_known = n_swap + depths + 1 <= self._num_blocks if n_swap else np.ones(len(depths), dtype=np.bool_)
        if self._table.step.micro_batches <= _MOST_MICRO_BATCHES:
            for one in sorted(set(prefix.tolist())):
                offloaded = np.flatnonzero(self._table.is_offloaded(one))
                rows = np.flatnonzero((prefix == one) & (n_buffer < len(offloaded)) & is_known)
                if len(rows):
                    in_s = self._gathered_s(offloaded, n_buffer[rows], depths[rows])
                    first = self._table.first_block[offloaded]
                    out_s = np.bincount(first, self._out_s[offloaded], minlength=self._num_blocks)
                    found[rows, 1:] = np.minimum(in_s, self._least_ratio * out_s).cumsum(axis=1)
        return found

    def released_at(self, offloaded: IntArray, n_buffer: IntArray, depths: IntArray) -> tuple[IntArray, IntArray]:
        """Chunks (G,) as the last backward needs them, and the block (R, G) whose backward releases their gathers.

        The number of blocks where a chunk may survive the turn; see [Note: Survivors] in ``sim/bounds/peak_bounds.py``.
        """
        table = self._table
        order = offloaded[np.argsort(-table.last_block[offloaded], kind="stable")]
        last = table.last_block[order]
        free = np.sort(table.first_block[offloaded])[::-1]
        place = np.arange(len(order)) - n_buffer[:, None]
        frees = free[np.maximum(place, 0)]
        opens = last + depths[:, None] + 1
        # Of chunks that end with the same block it is open which survive.
        num_before = np.searchsorted(-last, -last)
        is_gathered = num_before >= n_buffer[:, None]
        return order, np.where(is_gathered, np.minimum(frees, opens), self._num_blocks)

    def _gathered_s(self, offloaded: IntArray, n_buffer: IntArray, depths: IntArray) -> FloatArray:
        """(R, n) seconds of the gathers that are released when the backward of each block ends."""
        order, block = self.released_at(offloaded, n_buffer, depths)
        width = self._num_blocks + 1
        flat = np.arange(len(block))[:, None] * width + block
        seconds = np.broadcast_to(self._table.gather_s[order], block.shape)
        found: FloatArray = np.bincount(flat.ravel(), seconds.ravel(), minlength=len(block) * width).astype(np.float64)
        return found.reshape(-1, width)[:, : self._num_blocks]

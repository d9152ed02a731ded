"""Lower bounds of the guaranteed device peak, without assigning slots.

[Note: Survivors]
At most ``n_buffer`` offloaded chunks are on the device when forward turns into backward.  Which ones does not depend on
anything else: when a chunk must make room in forward, the one that is needed last goes (``shared/slots.py``), that is
the one whose last block is the earliest.  So the chunks that survive the turn are the last ones by last block, as many
as there are buffers; only among those that end with the same block it is open which.  A survivor is there from its
first forward to its last backward, and chunks that do not survive are gathered a second time.
"""

from __future__ import annotations

import numpy as np

from .chunk_table import ChunkTable
from .compute_table import ComputeTable, Positions
from .space import BoolArray, IntArray


class MemoryBounds:
    """Bounds for the plans of one layout.  Shapes: R rows of (n_persist, n_buffer), D depths, K checkpoint counts."""

    def __init__(self, table: ChunkTable, compute: ComputeTable, resident_bytes: int) -> None:
        self._table = table
        num_blocks = table.layout.num_blocks
        blocks = np.arange(num_blocks)
        positions = Positions(num_blocks)
        levels = compute.alive_bytes + compute.peak_bytes
        backward = positions.backward(blocks)
        self._forward = levels[:, 1 + blocks]
        """(K, n) level of activations during each block's forward."""
        self._backward = np.maximum(levels[:, backward - 1], levels[:, backward])
        """(K, n) the higher of its recomputation and its backward."""
        self._turn = levels[:, num_blocks + 1 : num_blocks + 3].max(axis=1)
        """(K,) at the epilogue."""
        self._ends = np.stack([levels[:, 0], levels[:, -2], levels[:, -1]], axis=1)
        """(K, 3) during both tasks of the prologue, and device Adam."""
        self._static = table.static_device_bytes(np.arange(len(table.size_bytes) + 1), resident_bytes)
        self._needs = np.zeros((num_blocks, len(table.size_bytes)), dtype=np.bool_)
        for block, chunks in enumerate(table.layout.chunks_of_block):
            self._needs[block, list(chunks)] = True

    def peak_bytes(
        self, n_persist: int, n_buffer: IntArray, depths: IntArray, checkpoints: IntArray | None = None
    ) -> IntArray:
        """(R, D, K) bytes that the guaranteed peak does not fall below, for the plans with ``n_persist``.

        ``checkpoints``: (K,) the rows of the compute table that are asked for; all of them if None.
        """
        table, blocks = self._table, np.arange(self._needs.shape[0])
        asked = np.arange(len(self._turn)) if checkpoints is None else checkpoints
        offloaded = table.is_offloaded(n_persist)
        # Ranks by last block; of chunks that end together the smallest are taken to survive.
        order = np.lexsort((-table.size_bytes, table.last_block))
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.cumsum(offloaded[order])
        survives = offloaded & (rank > np.count_nonzero(offloaded) - n_buffer[:, None])
        is_live = table.first_block <= blocks[:, None]
        is_needed = self._needs & offloaded
        sizes = table.size_bytes.astype(np.float64)
        # Survivors that are there at each block, and its own chunks where they do not survive; (R, n).
        held = survives @ ((is_live & ~is_needed) * sizes).T + is_needed @ sizes
        gradients = self._gradient_bytes(offloaded, depths)
        during_forward = (held[:, None, :] + self._forward[asked]).max(axis=2)
        during_backward = (held[:, None, None, :] + (gradients[:, None, :] + self._backward[asked])).max(axis=3)
        at_turn = (survives @ sizes)[:, None] + self._turn[asked]
        stepped = np.where(offloaded[table.gradient_chunk], 0, table.gradient_bytes).sum()
        ends = self._ends[asked]
        at_ends = np.maximum(ends[:, 0], stepped + ends[:, 1:].max(axis=1))
        elsewhere = np.maximum(np.maximum(during_forward, at_turn), at_ends)
        peaks: IntArray = np.maximum(during_backward, elsewhere[:, None, :]).astype(np.int64)
        peaks += self._static[n_persist]
        return peaks

    def _gradient_bytes(self, offloaded: BoolArray, depths: IntArray) -> IntArray:
        """(D, n) gradients of other blocks that may be there during each block's backward.

        Those of persistent chunks stay; those of offloaded ones leave when their last block is done, and may take as
        many more steps as the prefetch depth.
        """
        table, blocks = self._table, np.arange(self._needs.shape[0])
        is_made = table.gradient_block > blocks[:, None]
        leaves_at = table.first_block[table.gradient_chunk] - depths[:, None, None]
        is_there = is_made & (~offloaded[table.gradient_chunk] | (blocks[:, None] >= leaves_at))
        gradient_bytes: IntArray = is_there @ table.gradient_bytes
        return gradient_bytes

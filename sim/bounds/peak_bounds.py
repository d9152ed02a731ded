"""Lower bounds of the guaranteed device peak, without assigning slots.

[Note: Survivors]
At most ``n_buffer`` chunks are gathered on the device when forward turns into backward.  Which ones does not depend on
anything else: when a chunk must make room in forward, the one that is needed last goes (``shared/layout/slots.py``),
that is the one whose last block is the earliest.  So the chunks that survive the turn are the last ones by last block,
as many as there are buffers; only among those that end with the same block it is open which.  A survivor is there from
its first forward to its last backward, and chunks that do not survive are gathered a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..space.chunk_table import ChunkTable
from ..space.compute_table import ComputeTable, Positions
from ..space.space import BoolArray, IntArray


class MemoryBounds:
    """Bounds for the plans of one layout.

    Shapes: R rows of (prefix, n_buffer), D depths, K choices of activation modes, n blocks.
    """

    def __init__(self, table: ChunkTable, compute: ComputeTable, resident_bytes: int) -> None:
        self._table = table
        self._modes = compute.modes
        self._levels = compute.levels
        self._swap_bytes = compute.swap_bytes
        num_blocks = table.layout.num_blocks
        self._blocks = np.arange(num_blocks)
        self._backward_at = Positions(num_blocks).backward(self._blocks)
        self._static = table.static_device_bytes(table.places.all, resident_bytes)
        self._needs = np.zeros((num_blocks, len(table.size_bytes)), dtype=np.bool_)
        for block, chunks in enumerate(table.layout.chunks_of_block):
            self._needs[block, list(chunks)] = True
        kinds = range(compute.levels.alive_bytes.shape[1])
        self._parts = tuple(self._activation_levels(kind) for kind in kinds)

    @cached_property
    def activation_bytes(self) -> IntArray:
        """(K,) the highest level of activations alone."""
        highest = [part.highest_bytes for part in self._parts]
        bytes_: IntArray = np.maximum(np.stack(highest).max(axis=0), self._levels.end_bytes)
        return bytes_

    def peak_bytes(self, prefix: int, n_buffer: IntArray, depths: IntArray, modes: IntArray) -> IntArray:
        """(R, D, K) bytes that the guaranteed peak does not fall below, for the plans with ``prefix``.

        ``modes``: (K,) rows of the compute table.
        """
        table, blocks = self._table, self._blocks
        gathered = table.is_gathered(prefix)
        # Ranks by last block; of chunks that end together the smallest are taken to survive.
        order = np.lexsort((-table.size_bytes, table.last_block))
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.cumsum(gathered[order])
        survives = gathered & (rank > np.count_nonzero(gathered) - n_buffer[:, None])
        is_live = table.first_block <= blocks[:, None]
        is_needed = self._needs & gathered
        sizes = table.size_bytes.astype(np.float64)
        # Survivors that are there at each block, and its own chunks where they do not survive; (R, n).
        held = survives @ ((is_live & ~is_needed) * sizes).T + is_needed @ sizes
        at_turn = (survives @ sizes)[:, None]
        stay_bytes = np.where(gathered[table.gradient_chunk], 0, table.gradient_bytes).sum()
        peaks = np.full((len(n_buffer), len(depths), len(modes)), stay_bytes + self._levels.end_bytes[modes])
        for kind, part in enumerate(self._parts):
            is_later = kind > 0
            earlier_bytes = stay_bytes if is_later else 0
            # Sharded, gradients are scattered as soon as collectives allow, and may lag no step behind.
            lags = np.zeros_like(depths) if table.step.is_sharded else depths
            gradients = self._gradient_bytes(gathered, lags, is_later)
            during_forward = (held[:, None, :] + part.forward[modes]).max(axis=2) + earlier_bytes
            during_backward = held[:, None, None, :] + (gradients[:, None, :] + part.backward[modes])
            ends = np.maximum(part.begin[modes] + earlier_bytes, part.end[modes] + stay_bytes)
            turn = at_turn + part.turn[modes] + earlier_bytes
            elsewhere = np.maximum(np.maximum(during_forward, turn), ends)
            found = np.maximum(during_backward.max(axis=3), elsewhere[:, None, :])
            peaks = np.maximum(peaks, found.astype(np.int64))
        peaks += self._static[prefix]
        return peaks

    def _activation_levels(self, kind: int) -> _Part:
        levels, num_blocks = self._levels, len(self._blocks)
        # Which of the two peaks a later backward has depends on the persistent chunks: the lesser is the bound.
        own = levels.peak_bytes if kind == 0 else np.minimum(levels.peak_bytes, levels.adding_bytes)
        during = levels.alive_bytes[:, kind] + own
        at = self._backward_at
        swapped = np.where(self._modes.is_swap, self._swap_bytes, 0)
        forward = during[:, 1 + self._blocks].copy()
        # What a block swaps has a step at least to leave.
        forward[:, 1:] += swapped[:, :-1]
        turn = during[:, num_blocks + 1 : num_blocks + 3].max(axis=1) + swapped[:, -1]
        backward = np.maximum(during[:, at - 1], during[:, at] + swapped)
        return _Part(forward, backward, turn, during[:, 0], during[:, -1])

    def _gradient_bytes(self, gathered: BoolArray, depths: IntArray, is_later: bool) -> IntArray:
        """(D, n) gradients of other blocks that may be there during each block's backward.

        Those of persistent chunks stay; those of the others leave when their last block is done, and may take as
        many more steps as the prefetch depth.
        """
        table, blocks = self._table, self._blocks
        is_made = table.gradient_block > blocks[:, None]
        leaves_at = table.first_block[table.gradient_chunk] - depths[:, None, None]
        is_gathered = gathered[table.gradient_chunk]
        is_there = is_made & (~is_gathered | (blocks[:, None] >= leaves_at))
        if is_later:
            is_there |= ~is_gathered
        gradient_bytes: IntArray = is_there @ table.gradient_bytes
        return gradient_bytes


class NoMemoryBounds:
    """Of plans whose policies are not known."""

    def __init__(self, num_modes: int) -> None:
        self.activation_bytes: IntArray = np.zeros(num_modes, dtype=np.int64)
        """(K,) nothing."""

    def peak_bytes(self, prefix: int, n_buffer: IntArray, depths: IntArray, modes: IntArray) -> IntArray:
        """(R, D, K) nothing."""
        del prefix
        return np.zeros((len(n_buffer), len(depths), len(modes)), dtype=np.int64)


@dataclass(frozen=True)
class _Part:
    """Levels of activations within one kind of micro-batch."""

    forward: IntArray
    """(K, n) during each block's forward."""
    backward: IntArray
    """(K, n) the higher of its recomputation and its backward."""
    turn: IntArray
    """(K,) at the epilogue."""
    begin: IntArray
    """(K,) during the prologue's forward."""
    end: IntArray
    """(K,) during the prologue's backward."""

    @property
    def highest_bytes(self) -> IntArray:
        """(K,) the highest of all of them."""
        blocks = np.maximum(self.forward, self.backward).max(axis=1)
        highest: IntArray = np.maximum(np.maximum(blocks, self.turn), np.maximum(self.begin, self.end))
        return highest

"""Lower bounds of the guaranteed device peak, without compiling anything.

While a section runs, the chunks whose stay it is part of are there, and so are the gradients of persistent chunks that
earlier backwards have completed.  Stays are those of one micro-batch: of several, each keeps at least as much, since
what the next one needs goes before what this one needs.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ...shared.layout.residencies import ChunkResidency
from ..space.chunk_table import ChunkTable
from ..space.compute_table import ComputeTable, Positions
from ..space.space import IntArray


class MemoryBounds:
    """Bounds for the plans of one layout.

    Shapes: R rows of (prefix, n_buffer), D depths, K choices of activation modes, C chunks, T steps and W positions of
    a micro-batch.
    """

    def __init__(self, table: ChunkTable, compute: ComputeTable, resident_bytes: int) -> None:
        self._table = table
        self._levels = compute.levels
        self._static = table.static_device_bytes(table.places.all, resident_bytes)
        positions = Positions(table.layout.num_blocks)
        steps, sections = np.arange(positions.micro_steps), np.arange(table.layout.num_blocks + 2)
        self._step_at = np.zeros(positions.micro_length, dtype=np.int64)
        """(W,) the step of each position."""
        for at in (positions.step_begin(steps), positions.step_end(steps)):
            self._step_at[at] = steps
        self._step_number = positions.step_number
        self._held: dict[tuple[int, int], IntArray] = {}
        # Gradients that are there before each position: what the backwards before it have completed.
        backward = positions.backward(sections)
        self._is_made = backward[table.facts.gradients[1]] < np.arange(positions.micro_length)[:, None]
        """(W, E)"""
        swapped_bytes = np.where(compute.modes.is_swap, compute.swap_bytes, 0)
        self._swapped = np.zeros((len(swapped_bytes), positions.micro_length), dtype=np.int64)
        """(K, W) what has come back, and is there while the block's backward runs."""
        self._swapped[:, backward[1:-1]] = swapped_bytes

    @cached_property
    def activation_bytes(self) -> IntArray:
        """(K,) the highest level of activations alone."""
        highest = [self._during(kind).max(axis=1) for kind in range(self._levels.alive_bytes.shape[1])]
        bytes_: IntArray = np.maximum(np.stack(highest).max(axis=0), self._levels.end_bytes)
        return bytes_

    def peak_bytes(self, prefix: int, n_buffer: IntArray, depths: IntArray, modes: IntArray) -> IntArray:
        """(R, D, K) bytes that the guaranteed peak does not fall below, for the plans with ``prefix``.

        ``modes``: (K,) rows of the compute table.
        """
        table = self._table
        persistent = table.is_any_of(prefix, ChunkResidency.PERSISTENT)
        held = np.stack([self._held_bytes(prefix, number) for number in n_buffer.tolist()])[:, None, self._step_at]
        chunks, _, gradient_bytes = table.facts.gradients
        staying = np.where(persistent[chunks], gradient_bytes, 0)
        found = np.tile(staying.sum() + self._levels.end_bytes[modes], (len(n_buffer), 1))
        for kind in range(self._levels.alive_bytes.shape[1]):
            # In later micro-batches all of them are there from the first one.
            gradients = staying.sum() if kind else self._is_made @ staying
            level = self._during(kind)[modes] + gradients
            for row, of_row in enumerate(held):
                found[row] = np.maximum(found[row], (level + of_row).max(axis=1))
        shape = (len(n_buffer), len(depths), len(modes))
        peaks: IntArray = np.broadcast_to((found + self._static[prefix])[:, None], shape)
        return peaks

    def _held_bytes(self, prefix: int, n_buffer: int) -> IntArray:
        """(T,) gathered chunks on the device during each step."""
        key = (prefix, n_buffer)
        if key not in self._held:
            table = self._table
            stays = table.stays(prefix, n_buffer, self._step_number)
            sizes = table.facts.size_bytes[stays.chunk]
            changes = np.zeros(len(self._step_number) + 1, dtype=np.int64)
            np.add.at(changes, stays.first_step, sizes)
            np.add.at(changes, stays.last_step + 1, -sizes)
            self._held[key] = changes[:-1].cumsum()
        return self._held[key]

    def _during(self, kind: int) -> IntArray:
        """(K, W) the level of activations while the tasks of one kind of micro-batch run."""
        levels = self._levels
        # Which of the two peaks a later backward has depends on the persistent chunks: the lesser is the bound.
        own = levels.peak_bytes if kind == 0 else np.minimum(levels.peak_bytes, levels.adding_bytes)
        during: IntArray = levels.alive_bytes[:, kind] + own + self._swapped
        return during


class NoMemoryBounds:
    """Of plans whose policies are not known."""

    def __init__(self, num_modes: int) -> None:
        self.activation_bytes: IntArray = np.zeros(num_modes, dtype=np.int64)
        """(K,) nothing."""

    def peak_bytes(self, prefix: int, n_buffer: IntArray, depths: IntArray, modes: IntArray) -> IntArray:
        """(R, D, K) nothing."""
        del prefix
        return np.zeros((len(n_buffer), len(depths), len(modes)), dtype=np.int64)

"""Lower bounds of the guaranteed device peak, without compiling anything.

While a section runs, the chunks whose stay it is part of are there, and so are the gradients of persistent chunks that
earlier backwards have completed, and of those whose gradients are added up on the device before they leave.  Stays are
those of one micro-batch: of several, each keeps at least as much, since what the next one needs goes before what this
one needs.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ...shared.layout.residencies import GATHERED, STEPPED_BY_HOST, ChunkResidency
from ..space.chunk_table import ChunkTable
from ..space.compute_table import ComputeTable
from ..space.space import IntArray
from .held_chunks import HeldChunks


class MemoryBounds:
    """Bounds for the plans of one layout.

    Shapes: R rows of (prefix, n_buffer), D depths, K choices of activation modes, C chunks, T steps and W positions of
    a micro-batch, V kinds of micro-batches.
    """

    def __init__(self, table: ChunkTable, compute: ComputeTable, resident_bytes: int) -> None:
        self._table = table
        self._levels = compute.levels
        self._static = table.static_device_bytes(table.places.all, resident_bytes)
        positions = compute.positions
        self._step_begin = positions.step_begin(np.arange(positions.micro_steps))
        """(T,) the first position of each step."""
        step, chunk, _ = table.facts.uses
        self._held = HeldChunks(step, chunk, table.facts.size_bytes, positions.micro_steps)
        # Gradients that are there before each position: what the backwards before it have completed.
        completed = positions.backward(table.facts.gradients[1])
        self._is_made = completed < np.arange(positions.micro_length)[:, None]
        """(W, E)"""
        self._travelling = _travelling_bytes(compute)
        """(K, W) what leaves or has come back, and is there while a task runs."""

    @cached_property
    def activation_bytes(self) -> IntArray:
        """(K,) the highest level of activations alone."""
        highest = np.stack([during.max(axis=1) for during in self._during]).max(axis=0)
        bytes_: IntArray = np.maximum(highest, self._levels.end_bytes)
        return bytes_

    def peak_bytes(self, prefix: int, n_buffer: IntArray, depths: IntArray, modes: IntArray) -> IntArray:
        """(R, D, K) bytes that the guaranteed peak does not fall below, for the plans with ``prefix``.

        ``modes``: (K,) rows of the compute table.
        """
        table = self._table
        persistent = table.is_any_of(prefix, ChunkResidency.PERSISTENT)
        once = table.is_any_of(prefix, *STEPPED_BY_HOST) & table.facts.leaves_once
        chunks, _, gradient_bytes = table.facts.gradients
        staying, leaving = (np.where(of[chunks], gradient_bytes, 0) for of in (persistent, once))
        # In later micro-batches all gradients are there from the first position on; in the last one, those that leave
        # once, until the backward that completes them has ended.
        first = self._is_made @ (staying + leaving)
        last = staying.sum() + ~self._is_made @ leaving
        middle = np.full_like(last, (staying + leaving).sum())
        in_middle = set(self._levels.kind[1:-1].tolist())
        of_kinds = (first if not kind else middle if kind in in_middle else last for kind in range(len(self._during)))
        level = np.max([during[modes] + of for during, of in zip(self._during, of_kinds, strict=True)], axis=0)
        # Chunks come and go between steps alone.
        at_step = np.maximum.reduceat(level, self._step_begin, axis=1)
        held = self._held.least_bytes(table.is_any_of(prefix, *GATHERED), n_buffer)
        found = np.stack([(at_step + of_row).max(axis=1) for of_row in held])
        found = np.maximum(found, staying.sum() + self._levels.end_bytes[modes]) + self._static[prefix]
        shape = (len(n_buffer), len(depths), len(modes))
        peaks: IntArray = np.broadcast_to(found[:, None], shape)
        return peaks

    @cached_property
    def _during(self) -> tuple[IntArray, ...]:
        """By kind of micro-batch, (K, W): the level of activations while its tasks run."""
        levels = self._levels
        # Which of the two peaks a later backward has depends on the persistent chunks: the lesser is the bound.
        lesser = np.minimum(levels.peak_bytes, levels.adding_bytes)
        return tuple(
            levels.alive_bytes[:, kind] + (lesser if kind else levels.peak_bytes) + self._travelling
            for kind in range(levels.alive_bytes.shape[1])
        )


def _travelling_bytes(compute: ComputeTable) -> IntArray:
    """(K, W) device bytes of what blocks send to the host, that are there for every timing while each task may run.

    An input is there while the block's forward runs, and all that came back while its backward does.  Besides, what
    leaves has not gone before the step behind the forward ends, and what comes back comes during the step before the
    backward at the latest: ways out are waited for ``prefetch_depth`` steps later, ways back may begin as many earlier.
    """
    modes, positions = compute.modes, compute.positions
    travelling_bytes = np.zeros((len(modes.n_swap), positions.micro_length), dtype=np.int64)
    inputs = modes.moved_inputs
    moved = inputs + compute.swapped_bytes
    blocks = np.flatnonzero(moved.any(axis=0))
    if not len(blocks):
        return travelling_bytes
    by_step = np.zeros((len(moved), positions.micro_steps), dtype=np.int64)
    forward, backward = positions.forward_step(1 + blocks), positions.backward_step(1 + blocks)
    by_step[:, forward] = inputs[:, blocks]
    by_step[:, backward] = moved[:, blocks]
    by_step[:, forward + 1] += moved[:, blocks]
    # Between forward and backward of the last block lies one step, the epilogue.
    apart = blocks[backward - forward > 2]
    by_step[:, positions.backward_step(1 + apart) - 1] += moved[:, apart]
    begins = positions.step_begin(np.arange(positions.micro_steps))
    travelling_bytes += by_step.repeat(np.diff(begins, append=positions.micro_length), axis=1)
    return travelling_bytes


class NoMemoryBounds:
    """Of plans whose chunks may come and go in other ways."""

    def __init__(self, num_modes: int) -> None:
        self.activation_bytes: IntArray = np.zeros(num_modes, dtype=np.int64)
        """(K,) nothing."""

    def peak_bytes(self, prefix: int, n_buffer: IntArray, depths: IntArray, modes: IntArray) -> IntArray:
        """(R, D, K) nothing."""
        del prefix
        return np.zeros((len(n_buffer), len(depths), len(modes)), dtype=np.int64)

"""Seconds of work between two points of an iteration, for many plans at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..space.chunk_table import ChunkTable
from ..space.compute_table import ComputeTable, FloatArray
from ..space.space import BoolArray, IntArray


class WorkSums:
    """Sums over the offloaded chunks of one layout, by prefix.

    Shapes: C chunks, U chunks that CPU Adam may step, P prefixes, n blocks, K choices of activation modes, W compute
    positions of a micro-batch.  ``is_counted``: (P, C) the chunks to sum over, if not these.
    """

    def __init__(self, table: ChunkTable, compute: ComputeTable, is_counted: BoolArray | None = None) -> None:
        self._table = table
        self.num_blocks = table.layout.num_blocks
        self.positions = compute.positions
        micro_batches = self.positions.micro_batches
        offloaded = table.is_offloaded(table.places.all) if is_counted is None else is_counted  # (P, C)
        stepped = np.logical_and(offloaded, table.is_stepped)  # (P, C)
        self._offloaded, self._stepped = offloaded, stepped
        self.num_offloaded: IntArray = offloaded.sum(axis=1)
        """(P,)"""
        self.until_s = np.concatenate([np.zeros((1, len(compute.seconds))), compute.seconds.cumsum(axis=1).T])
        """(W + 1, K) seconds of compute before each position of a micro-batch."""
        self.compute_s: FloatArray = micro_batches * self.until_s[-1] + table.device_adam_s[:, None]
        """(P, K) of the whole iteration."""
        # (P, n + 2) each: sums over the chunks whose first block lies before each block.
        self.gather_s = self._by_first_block(table.gather_s, offloaded)
        self.offload_s = self._by_first_block(table.offload_s, stepped)
        self.adam_s = self._by_first_block(table.cpu_adam_s, stepped)
        self.sum_s = self._by_first_block(table.accumulate_s, stepped)
        """Of one micro-batch, where there are several."""
        self.norm_s = table.norm_s
        """(P,)"""
        self.cpu_s: FloatArray = self.adam_s[:, -1] + (micro_batches - 1) * self.sum_s[:, -1] + table.norm_s
        """(P,) of the whole iteration."""
        if micro_batches == 1:
            self.sum_s = np.zeros_like(self.sum_s)
        self.swap_in_s = np.append(0.0, compute.swap_in_s.cumsum())
        """(n + 1,) copies back of the first so many blocks, in one micro-batch."""
        self.swap_out_s = np.append(0.0, compute.swap_out_s.cumsum())
        """(n + 1,) their copies to the host."""
        self.moving = np.flatnonzero(compute.swap_bytes)
        """Blocks that have something to swap."""
        shortest_s = np.where(stepped, table.offload_s, np.inf).min(axis=1, initial=np.inf)
        self.shortest_offload_s: FloatArray = np.where(np.isfinite(shortest_s), shortest_s, 0.0)
        """(P,) the shortest copy of an update's gradients."""
        self._gathers_s = np.where(offloaded, table.gather_s, np.inf)
        """(P, C)"""
        self._order_gathers_of_backward()
        self._find_ends()
        self._list_stepped()

    def _by_first_block(self, seconds: FloatArray, counts: BoolArray) -> FloatArray:
        """(P, n + 2) sums over the chunks whose first block lies before each block; ``counts``: (P, C)."""
        first_block = self._table.first_block
        by_first = np.argsort(first_block, kind="stable")  # (C,)
        place = np.searchsorted(first_block[by_first], np.arange(self.num_blocks + 2))  # (n + 2,)
        return _prefix_sums(counts[:, by_first] * seconds[by_first])[:, place]

    def _order_gathers_of_backward(self) -> None:
        """Chunks in the order in which they fail to survive the turn; of those that end together the quickest first."""
        table, offloaded = self._table, self._offloaded
        order = np.lexsort((table.gather_s, table.last_block))  # (C,)
        self.again_s = _prefix_sums(offloaded[:, order] * table.gather_s[order])
        """(P, C + 1) seconds to gather the first so many in that order."""
        row_begins = (len(order) + 1) * np.arange(len(offloaded))  # (P,)
        self.ranks: IntArray = (np.cumsum(offloaded[:, order], axis=1) + row_begins[:, None]).ravel()
        """(P C,) how many chunks are gathered up to each one in that order; row by row, and C + 1 more from row to row,
        so that all together ascend."""
        self.place_of_block = np.searchsorted(table.last_block[order], np.arange(self.num_blocks + 1))
        """(n + 1,) how many chunks, in that order, end before each block."""

    def _find_ends(self) -> None:
        """The blocks at which offloaded chunks and their updates begin and end."""
        table, offloaded, stepped = self._table, self._offloaded, self._stepped
        num_chunks, num_blocks = len(table.size_bytes), self.num_blocks
        anchors: BoolArray = np.where(stepped.any(axis=1, keepdims=True), stepped, offloaded)  # (P, C)
        self.first: IntArray = np.where(anchors, table.first_block, num_blocks).min(axis=1, initial=num_blocks)
        """(P,) the first block with an update or, where there is none, with an offloaded chunk; n if neither."""
        self.last: IntArray = np.where(anchors, table.first_block, -1).max(axis=1, initial=-1)
        """(P,) the last one; -1 if there is none."""
        self.last_gathered: IntArray = np.where(offloaded, table.first_block, -1).max(axis=1, initial=-1)
        """(P,) the last block whose forward waits for a gather."""
        self.first_offloaded = table.places.n_persist + table.places.n_shard
        """(P,) the place from which chunks are offloaded."""
        is_of_first = np.logical_and(offloaded, table.first_block == self.first[:, None])  # (P, C)
        ids = np.arange(num_chunks)  # (C,)
        last_update = np.where(is_of_first & table.is_stepped, ids, num_chunks).min(axis=1, initial=num_chunks)  # (P,)
        is_after = np.logical_and(is_of_first, ids >= last_update[:, None])  # (P, C)
        self.last_gathers_s: FloatArray = np.where(is_after, table.gather_s, 0.0).sum(axis=1)
        """(P,) gathers for the first block with an update, from the chunk on that CPU Adam steps last."""

    def _list_stepped(self) -> None:
        """Where the norm is limited, CPU Adam steps chunks in their order, and each waits for those before it."""
        table = self._table
        self.stepped = np.flatnonzero(table.is_stepped)
        """(U,) their ids."""
        self.stepped_block = table.first_block[self.stepped]
        """(U,)"""
        self.stepped_gather_s = table.gather_s[self.stepped]
        """(U,)"""
        gathered_s = np.append(0.0, self.stepped_gather_s.cumsum())  # (U + 1,)
        # Where chunks do not follow the blocks, a later block's chunk may be stepped before an earlier one's.
        in_order = bool((self.stepped_block[1:] >= self.stepped_block[:-1]).all())
        self.stepped_gathered_s = gathered_s if in_order else np.zeros_like(gathered_s)
        """(U + 1,) least seconds to gather the first so many."""
        self.stepped_until_s = np.append(0.0, table.cpu_adam_s[self.stepped].cumsum())
        """(U + 1,) seconds to step them."""

    def least(self, prefix: IntArray, n_buffer: IntArray) -> FloatArray:
        """(R,) least seconds of gathers in any pass over the blocks but the first: as many as there are no buffers for.

        At the turn from one pass to the next at most ``n_buffer`` chunks are there.  0 where no pass comes between.
        """
        if self.positions.micro_batches == 1:
            return np.zeros(len(prefix))
        num_missing = np.maximum(self.num_offloaded[prefix] - n_buffer, 0)
        seconds: FloatArray = self.least_s[prefix, num_missing]
        return seconds

    @cached_property
    def least_s(self) -> FloatArray:
        """(P, C + 1) seconds of the so many quickest gathers."""
        quickest = np.sort(self._gathers_s, axis=1)
        return _prefix_sums(np.where(np.isfinite(quickest), quickest, 0.0))

    def again(self, prefix: IntArray, n_buffer: IntArray) -> FloatArray:
        """(R,) least seconds of gathers in backward: of the chunks that do not survive the turn."""
        num_missing = np.maximum(self.num_offloaded[prefix] - n_buffer, 0)
        num_chunks = self._gathers_s.shape[1]
        before = np.searchsorted(self.ranks, prefix * (num_chunks + 1) + num_missing) - prefix * num_chunks
        place = before + (num_missing > 0)
        seconds: FloatArray = self.again_s[prefix, place]
        return seconds


@dataclass(frozen=True)
class WorkRows:
    """Queries for R plans; blocks are (R, 1) or (R, J), and may lie outside the model.  All give (R, 1) or (R, J)."""

    sums: WorkSums
    row: IntArray
    """(R, 1) prefix."""
    again_s: FloatArray
    """(R, 1) ``WorkSums.again``."""
    least_s: FloatArray
    """(R, 1) ``WorkSums.least``."""
    until_together_s: FloatArray
    """(R, n + 1) ``Overlaps.together_s``."""
    columns: IntArray
    """(K,) the choices of modes that are asked for, as indices; all with the same ``n_swap``."""
    n_swap: int

    @property
    def iteration_s(self) -> FloatArray:
        """(R, 1, K) seconds of all compute."""
        seconds: FloatArray = self.sums.compute_s[self.row[..., None], self.columns]
        return seconds

    def compute_s(self, start: IntArray, stop: IntArray) -> FloatArray:
        """(R, J, K) seconds of the compute positions from ``start`` to before ``stop``."""
        until_s = self.sums.until_s[:, self.columns]
        if self.sums.positions.micro_batches == 1:
            seconds: FloatArray = until_s[stop] - until_s[start]
            return seconds
        length = self.sums.positions.micro_length
        (stop_in, stop_at), (start_in, start_at) = np.divmod(stop, length), np.divmod(start, length)
        seconds = until_s[stop_at] - until_s[start_at] + (stop_in - start_in)[..., None] * until_s[-1]
        return seconds

    def fetches_s(self, first: IntArray | int, stop: IntArray | int) -> FloatArray:
        """Copies back, in one micro-batch, of what the swapped blocks from ``first`` to before ``stop`` have saved."""
        if not self.n_swap:
            return np.zeros_like(self.least_s)
        return _range_s(self.sums.swap_in_s, first, np.minimum(stop, self.n_swap))

    def outs_s(self, first: IntArray | int, stop: IntArray | int) -> FloatArray:
        """Their copies to the host."""
        return _range_s(self.sums.swap_out_s, first, np.minimum(stop, self.n_swap))

    def passes_s(self, step: IntArray, until: int | None = None) -> FloatArray:
        """Gathers for the passes between the first one and the last one, of those that begin with ``step`` or later.

        ``until``: of the first so many of them alone.
        """
        sums = self.sums
        num_passes = 2 * sums.positions.micro_batches - 2 if until is None else until
        if not num_passes:
            return np.zeros_like(self.least_s)
        before = _within(-(-step // sums.num_blocks) - 1, num_passes)
        seconds: FloatArray = (num_passes - before) * self.least_s
        return seconds

    def gathers_s(self, first: IntArray, stop: IntArray | None = None) -> FloatArray:
        """First gathers of the chunks whose first block is ``first`` or later, and before ``stop``."""
        return self._between(self.sums.gather_s, first, stop)

    def offloads_s(self, first: IntArray, stop: IntArray | None = None) -> FloatArray:
        """Copies of the gradients of these chunks."""
        return self._between(self.sums.offload_s, first, stop)

    def adam_s(self, first: IntArray, stop: IntArray | None = None) -> FloatArray:
        """CPU Adam of these chunks and, where there are several micro-batches, adding up the last one's gradients."""
        adam_s = self._between(self.sums.adam_s, first, stop)
        if self.sums.positions.micro_batches == 1:
            return adam_s
        return adam_s + self._between(self.sums.sum_s, first, stop)

    def sums_s(self, first: IntArray, stop: IntArray | None = None) -> FloatArray:
        """Adding up the gradients of these chunks in one micro-batch."""
        return self._between(self.sums.sum_s, first, stop)

    def gathers_again_s(self, first: IntArray, stop: IntArray) -> FloatArray:
        """Gathers in backward of the chunks whose last block is ``first`` or later, and before ``stop``."""
        sums, top = self.sums, self.sums.num_blocks
        before = sums.again_s[self.row, sums.place_of_block[_within(first, top)]]
        until = sums.again_s[self.row, sums.place_of_block[_within(stop, top)]]
        seconds: FloatArray = np.maximum(np.minimum(until, self.again_s) - np.minimum(before, self.again_s), 0.0)
        return seconds

    def together_s(self, first: IntArray, stop: IntArray | None = None) -> FloatArray:
        """Work of H2D that is guaranteed beside D2H, released by the last backward of blocks from ``first`` on.

        And before ``stop``.
        """
        top, rows = self.sums.num_blocks, np.arange(len(self.row))[:, None]
        until = self.until_together_s[rows, top if stop is None else _within(stop, top)]
        seconds: FloatArray = np.maximum(until - self.until_together_s[rows, _within(first, top)], 0.0)
        return seconds

    def _between(self, prefix_s: FloatArray, first: IntArray, stop: IntArray | None) -> FloatArray:
        top = self.sums.num_blocks + 1
        before: FloatArray = prefix_s[self.row, _within(first, top)]
        until: FloatArray = prefix_s[self.row, top if stop is None else _within(stop, top)]
        seconds: FloatArray = np.maximum(until - before, 0.0)
        return seconds


def _range_s(until_s: FloatArray, first: IntArray | int, stop: IntArray | int) -> FloatArray:
    """Seconds of the blocks from ``first`` to before ``stop``."""
    top = len(until_s) - 1
    seconds: FloatArray = np.maximum(until_s[_within(stop, top)] - until_s[_within(first, top)], 0.0)
    return seconds


def _within(places: IntArray | int, top: int) -> IntArray:
    """``places``, from 0 to ``top``; ``numpy.clip`` takes many times as long for small arrays."""
    found: IntArray = np.minimum(np.maximum(places, 0), top)
    return found


def _prefix_sums(values: FloatArray) -> FloatArray:
    """Sums of the first so many values of each row."""
    return np.concatenate([np.zeros((len(values), 1)), values.cumsum(axis=1)], axis=1)

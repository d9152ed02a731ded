"""Bounds of one rank's iteration that cut it where lanes hand over to each other, collectives among them.

[Note: Cycles of several ranks]
As in [Note: Time bounds] of ``sim/bounds/time_bounds.py`` one period is measured at one place of the compute lane, the
start of the forward of p or the end of that of q, and cut into stretches.  An all-gather follows its copy and precedes
the step that the copy was made for, a reduction follows its backward and precedes the copy of the gradients: so where a
stretch is guaranteed to hold the copy on both ends, it holds the collective too.  Gradients that stay are reduced
between the last backward of their chunk and device Adam, whole or, in the last micro-batch, to the parts that stay.
Where chunks are sharded over devices, their all-gathers and the reductions of earlier micro-batches are left out here.
From the start of the forward of p:

1. To the end of the last backward of j.
2. To the end of CPU Adam, which steps p's chunks last: reductions, copies and CPU Adam of gradients of blocks up to j.
3. To the next forward of p: the chunks of p travel, and are gathered from all ranks.

3 and 1 are weighed together as well, since all gathers of later blocks follow those of p; and so are 2 and 3, since
device Adam and the reductions that it waits for lie in either of them.  Where the lane of collectives ends with these,
they end all others: then 2 lasts until device Adam, and the compute tasks up to the forward of p follow.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..space.chunk_table import ChunkTable
from ..space.collective_table import CollectiveTable
from ..space.compute_table import ComputeTable, FloatArray
from ..space.space import BoolArray, IntArray
from .cycle import Cycle
from .rank_throughput import RankThroughput, RankWork
from .work_sums import WorkRows, WorkSums


class RankCycles:
    """Shapes: R plans, J cuts, V weights, K choices of activation modes, C chunks, n blocks."""

    def __init__(
        self,
        table: ChunkTable,
        collectives: CollectiveTable,
        compute: ComputeTable,
        sums: WorkSums,
        throughput: RankThroughput,
    ) -> None:
        self._sums = sums
        self.links = WorkSums(replace(table, gather_s=collectives.gather_s, offload_s=collectives.leave_s), compute)
        """The same sums with collectives in place of the copies that they follow or precede."""
        self._n_swap = compute.modes.n_swap
        self._step = table.step
        self._device_adam_s = table.device_adam_s
        self._throughput = throughput
        self._outer_s = collectives.outer_s or 0.0
        """After all backwards, and before device Adam: compute rests."""
        num_blocks, every = table.layout.num_blocks, table.places.all
        is_staying = ~table.is_offloaded(every) & table.is_stepped
        is_until = table.first_block[:, None] <= np.arange(num_blocks)
        stay_s: FloatArray = np.where(table.is_gathered(every), collectives.leave_s, collectives.stay_s)
        self._staying_s: FloatArray = (is_staying * stay_s) @ is_until + self._outer_s
        """(P, n) reductions of gradients that stay, of chunks whose first block is each one or an earlier one."""
        self._is_stepping: BoolArray = np.any(table.is_offloaded(every) & table.is_stepped, axis=1)
        """(P,) whether CPU Adam has something to step."""
        self._is_last = self._ends_with_staying(table, is_staying)

    def _ends_with_staying(self, table: ChunkTable, is_staying: BoolArray) -> BoolArray:
        """(P,) whether the last reduction of all is one that device Adam waits for."""
        num_blocks = table.layout.num_blocks
        first = np.where(table.is_stepped, table.first_block, num_blocks)
        staying = np.where(is_staying, first, num_blocks).min(axis=1, initial=num_blocks)
        leaving = np.where(is_staying, num_blocks, first).min(axis=1, initial=num_blocks)
        is_last: BoolArray = (staying < num_blocks) & (staying <= leaving)
        return is_last | (self._outer_s > 0)

    def iteration_s(self, prefix: IntArray, n_buffer: IntArray, depths: IntArray, modes: IntArray) -> FloatArray:
        """(R, K) bounds of the plans with these knobs, each (R,), which offload something.

        ``modes``: (K,) rows of the compute table, all with the same ``n_swap``.
        """
        n_swap = int(self._n_swap[modes[0]])

        def cycle(sums: WorkSums) -> Cycle:
            together_s = np.zeros((len(prefix), sums.num_blocks + 1))
            again_s, least_s = (found(prefix, n_buffer)[:, None] for found in (sums.again, sums.least))
            rows = WorkRows(sums, prefix[:, None], again_s, least_s, together_s, modes, n_swap)
            return Cycle(rows, depths[:, None])

        copies, links = cycle(self._sums), cycle(self.links)
        found_s = self._through_block(copies, links)
        return np.maximum(found_s, self._through_compute(copies, links))

    def _first_s(
        self, copies: Cycle, links: Cycle, start: IntArray, step: IntArray, *, with_own: bool = False
    ) -> FloatArray:
        """(R, J, K) the least time from ``start`` to the backward of every cut; gathers from ``step`` on lie in it.

        ``with_own``: those of the chunks of p too, that follow the last CPU Adam.
        """
        rows, cuts, depth = copies.rows, copies.cuts, copies.depth
        stop = copies.backward(cuts) + 1
        awaited_s, reduced_s = (
            of.rows.offloads_s(cuts + depth + 1) + of.earlier_offloads_s(cuts) for of in (copies, links)
        )
        gathers_s, brought_s = (
            of.rows.gathers_s(step) + (of.last_gathers_s if with_own else 0.0) for of in (copies, links)
        )
        again_s, all_again_s = (of.rows.passes_s(step) + of.gathers_again_s(step, cuts) for of in (copies, links))
        swapped_in_s = swapped_out_s = np.zeros(1)
        if rows.n_swap:
            swapped_in_s, swapped_out_s = copies.fetches_s(start - 1, cuts), copies.outs_s(start - 1, cuts)
        whole_s = self._least_s(
            RankWork(
                rows.compute_s(start, stop),
                gathers_s + again_s + swapped_in_s,
                awaited_s + swapped_out_s,
                collective_s=brought_s + all_again_s + reduced_s,
            )
        )
        turn = np.maximum(1 + copies.last_gathered, start)
        until_turn_s = self._least_s(RankWork(rows.compute_s(start, turn), gathers_s, collective_s=brought_s))
        after = copies.last_gathered + depth + 1
        later_s, all_later_s = (of.rows.passes_s(after) + of.gathers_again_s(after, cuts) for of in (copies, links))
        if rows.n_swap:
            later_s = later_s + copies.later_fetches_s(after, cuts)
        from_turn_s = self._least_s(
            RankWork(rows.compute_s(turn, stop), later_s, awaited_s, collective_s=all_later_s + reduced_s)
        )
        return np.maximum(whole_s, until_turn_s + from_turn_s)

    def _through_block(self, copies: Cycle, links: Cycle) -> FloatArray:
        """(R, K) measured at the start of the forward of p."""
        rows, cuts, p, depth, sums = copies.rows, copies.cuts, copies.first, copies.depth, self._sums
        first_s = self._first_s(copies, links, 1 + p, p + depth + 1)
        cut = copies.backward(cuts) + 1
        device_adam = sums.positions.device_adam
        adam_s = rows.adam_s(p, cuts + 1)
        offload_s, reduced_s = (of.rows.offloads_s(p, cuts + 1) for of in (copies, links))
        later_s, all_later_s = (of.rows.gathers_again_s(p, cuts - depth) for of in (copies, links))
        if rows.n_swap:
            later_s = later_s + rows.fetches_s(p, cuts - depth)
        to_block_s = rows.compute_s(np.zeros_like(p), 1 + p) + self._device_adam_s[rows.row][..., None]
        staying_s = self._staying_s[rows.row, np.minimum(cuts, sums.num_blocks - 1)]
        until_adam_s = rows.compute_s(cut, np.full_like(p, device_adam))
        found_s = self._least_s(
            RankWork(
                until_adam_s + to_block_s,
                later_s + copies.last_gathers_s,
                offload_s,
                0.0 if self._step.limits_norm else adam_s,
                all_later_s + reduced_s + links.last_gathers_s + staying_s,
                self._outer_s,
            )
        )
        around_s = np.zeros(1)
        if not self._step.limits_norm:
            # Where the norm is limited, CPU Adam steps the chunks of p first.
            work = RankWork(
                rows.compute_s(cut, copies.backward(p) + 1), later_s, offload_s, adam_s, all_later_s + reduced_s
            )
            serial_s = copies.shortest_offload_s + links.shortest_offload_s + adam_s
            until_s = np.maximum(self._least_s(work), serial_s[..., None])
            last_s = np.maximum(copies.last_gathers_s, links.last_gathers_s)
            found_s = np.maximum(found_s, until_s + last_s[..., None])
            # All gathers after those of p follow them.
            opened_s = self._first_s(copies, links, 1 + p, p + 1, with_own=True)
            around_s = np.where(self._is_stepping[rows.row][..., None], opened_s + until_s, 0.0)
        ends_s = self._least_s(
            RankWork(
                until_adam_s,
                later_s,
                collective_s=all_later_s + staying_s + reduced_s,
                alone_s=self._outer_s,
            )
        )
        ends_s = np.where(self._is_last[rows.row][..., None], ends_s + to_block_s, 0.0)
        bound_s: FloatArray = np.maximum(first_s + np.maximum(found_s, ends_s), around_s).max(axis=1)
        return bound_s

    def _through_compute(self, copies: Cycle, links: Cycle) -> FloatArray:
        """(R, K) measured at the end of the forward of q, if that is a block; else 0."""
        rows, cuts, p, depth = copies.rows, copies.cuts, copies.first, copies.depth
        q = p - depth - 1
        is_block = q >= 0
        if not is_block.any():
            return np.zeros((len(p), len(rows.columns)))
        block = np.maximum(q, 0)
        start, stop = 2 + block, copies.backward(block) - 1
        first_s = self._first_s(copies, links, start, p)
        offload_s, reduced_s = (of.rows.offloads_s(p, cuts + 1) for of in (copies, links))
        later_s, all_later_s = (of.rows.gathers_again_s(p, cuts - depth) for of in (copies, links))
        if rows.n_swap:
            later_s = later_s + rows.fetches_s(p, cuts - depth)
        second_s = self._least_s(
            RankWork(
                rows.compute_s(copies.backward(cuts) + 1, stop),
                later_s,
                offload_s,
                collective_s=all_later_s + reduced_s,
            )
        )
        rest_s = rows.iteration_s - rows.compute_s(start, stop)
        third_s = self._least_s(RankWork(rest_s, collective_s=self._staying_s[rows.row, block], alone_s=self._outer_s))
        bound_s: FloatArray = np.where(is_block, (first_s + second_s + third_s).max(axis=1), 0.0)
        return bound_s

    def _least_s(self, work: RankWork) -> FloatArray:
        return self._throughput.least_s(work)

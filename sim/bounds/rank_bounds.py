"""Lower bounds of the iteration time of one of several equal ranks.

[Note: Bounds with collectives]
The schedule of a rank has the tasks of one rank alone and their waits, some of them through a collective, and more
tasks.  Other lanes are never faster beside collectives.  So the bounds of one rank alone, with what a rank
copies and steps, hold (``sim/bounds/time_bounds.py``); those of copies that are released at once do not.  Collectives
add:

*All of them.*  Their lane does all of its work in every period; the weights of four lanes at a time, collectives
among them ([Note: Throughput bound] in ``sim/bounds/throughput.py``), turn the work of a period into a time.

*The last ones.*  Where some gradients stay, device Adam waits for their reduction, and the next iteration's compute for
device Adam.  In the lane's order these come last.  So from the start of compute there is the compute up to the last
backward of a block, then all reductions of chunks that end with it or with earlier blocks, then device Adam.  Chunks
that are sharded over devices and stepped are gathered after device Adam, one after the other, and behind the first of
them all chunks of later blocks: a block's forward, before all of that, waits for its own and those of all earlier ones.

*Around the turn.*  So an iteration with such chunks is cut in three: from device Adam to the forward of the last block
that has one, in which all of them are gathered; from there to the last backward of some block; and from there to device
Adam, in which that block's and all earlier blocks' gradients are reduced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from ..costs.contention import ContentionModel
from ..space.chunk_table import ChunkTable
from ..space.compute_table import ComputeTable, FloatArray
from ..space.rank_side_lanes import RankSideLanes
from ..space.side_lanes import SideLanes
from ..space.space import BoolArray, IntArray
from .rank_cycles import RankCycles
from .rank_throughput import RankThroughput, RankWork
from .throughput import Throughput
from .time_bounds import TimeBounds
from .work_sums import WorkSums

_NUM_CUTS: Final = 4
"""Blocks whose last backward is tried; any number is admissible."""
_BOUND_FRAC: Final = 1 - 1e-5
"""Covers what the simulator tolerates as periodic, and rounding."""


class RankBounds(TimeBounds):
    """Bounds for the plans of one layout.

    Shapes: R plans, P prefixes, K choices of activation modes, C chunks, n blocks.
    """

    def __init__(
        self, table: ChunkTable, compute: ComputeTable, throughput: Throughput, contention: ContentionModel
    ) -> None:
        super().__init__(table, compute, throughput)
        self._table = table
        self._rank_throughput = RankThroughput.of(contention)
        step, collectives = table.step, table.collectives
        assert collectives is not None, "several ranks have collectives"
        self._cycles = RankCycles(table, collectives, compute, self._sums, self._rank_throughput)
        self._stay_s, self._leave_s = collectives.stay_s, collectives.leave_s
        self._outer_s = collectives.outer_s or 0.0
        self._norm_s = collectives.norm_s if step.is_sharded and step.limits_norm else 0.0
        self._offloaded, self._gathered = (of(table.places.all) for of in (table.is_offloaded, table.is_gathered))
        micro_batches = step.micro_batches
        is_stepped = table.is_stepped
        reduced_s = np.where(self._gathered, micro_batches * self._leave_s, self._stay_s) * is_stepped
        has_sharded_norm = (self._gathered & is_stepped).any(axis=1)
        self.reduced_s: FloatArray = reduced_s.sum(axis=1) + self._outer_s + self._norm_s * has_sharded_norm
        """(P,) all reductions of an iteration."""
        self._links = self._cycles.links
        if table.places.has_shards:
            all_gathers = replace(table, gather_s=collectives.gather_s)
            self._links = WorkSums(all_gathers, compute, is_counted=self._gathered)
        self._tail_s = self._tails()
        self._lead_s = self._leads()
        self._last_waiting = np.where(self._waits_for_adam(), table.first_block, -1).max(axis=1, initial=-1)
        """(P,) the last block whose forward waits for an all-gather after device Adam; below 0 if none does."""

    def whole_s(self, prefix: IntArray, n_buffer: IntArray, depths: IntArray, modes: IntArray) -> FloatArray:
        """(R, K) the bounds of the whole period and of swapping alone."""
        alone_s = super().whole_s(prefix, n_buffer, depths, modes)
        return np.maximum(alone_s, self._joint_s(prefix, n_buffer, modes))

    def iteration_s(self, prefix: IntArray, n_buffer: IntArray, depths: IntArray, modes: IntArray) -> FloatArray:
        """(R, K) bounds of the plans with these knobs; see [Note: Bounds with collectives]."""
        alone_s = super().iteration_s(prefix, n_buffer, depths, modes)
        bound_s = np.maximum(alone_s, self._joint_s(prefix, n_buffer, modes))
        is_cycle = self._sums.first[prefix] < self._sums.num_blocks
        if is_cycle.any():
            found_s = self._cycles.iteration_s(prefix[is_cycle], n_buffer[is_cycle], depths[is_cycle], modes)
            bound_s[is_cycle] = np.maximum(bound_s[is_cycle], found_s * _BOUND_FRAC)
        return bound_s

    def _least_work(self, prefix: IntArray, n_buffer: IntArray, modes: IntArray) -> tuple[FloatArray, ...]:
        """(R,) each: seconds of every lane but compute in a period, at least."""
        sums, micro_batches = self._sums, self._sums.positions.micro_batches
        n_swap = int(self._n_swap[modes[0]])
        h2d_s, gathered_s = (
            of.gather_s[prefix, -1] + of.again(prefix, n_buffer) + (2 * micro_batches - 2) * of.least(prefix, n_buffer)
            for of in (sums, self._links)
        )
        h2d_s = h2d_s + micro_batches * sums.swap_in_s[n_swap]
        d2h_s = micro_batches * (sums.offload_s[prefix, -1] + sums.swap_out_s[n_swap])
        return h2d_s, d2h_s, sums.cpu_s[prefix], self.reduced_s[prefix] + gathered_s

    def _joint_s(self, prefix: IntArray, n_buffer: IntArray, modes: IntArray) -> FloatArray:
        """(R, K) the bounds of all lanes together, and of the last reductions."""
        compute_s = self._sums.compute_s[prefix[:, None], modes]
        h2d_s, d2h_s, cpu_s, collective_s = self._least_work(prefix, n_buffer, modes)
        work = RankWork(compute_s, h2d_s, d2h_s, cpu_s, collective_s, self._outer_s)
        least_s = np.maximum(self._rank_throughput.least_s(work), self._last_s(prefix, modes))
        if self._table.places.has_shards:
            least_s = np.maximum(least_s, self._around_turn_s(prefix, modes))
        found: FloatArray = least_s * _BOUND_FRAC
        return found

    def side_lanes_s(self, side_lanes: SideLanes, depths: IntArray, modes: IntArray) -> FloatArray:
        """(D, K) bounds by what the lanes really do, and by what compute waits for at every step."""
        assert isinstance(side_lanes, RankSideLanes)
        compute_s = self._sums.compute_s[side_lanes.residency.prefix, modes]
        h2d_s, d2h_s, cpu_s = (lane_s.sum() for lane_s in (side_lanes.h2d_s, side_lanes.d2h_s, side_lanes.cpu_s))
        waited_s = side_lanes.waited_s(depths) + self._outer_s
        work = RankWork(compute_s, h2d_s, d2h_s, cpu_s, side_lanes.collective_s, waited_s)
        found: FloatArray = self._rank_throughput.least_s(work) * _BOUND_FRAC
        return found

    def _tails(self) -> FloatArray:
        """(P, n) reductions in the last micro-batch of chunks whose first block is each one or an earlier one."""
        table, num_blocks = self._table, self._table.layout.num_blocks
        seconds = np.where(self._gathered, self._leave_s, self._stay_s) * table.is_stepped
        is_until = table.first_block[:, None] <= np.arange(num_blocks)
        tails: FloatArray = seconds @ is_until + self._outer_s
        # Without gradients that stay, nothing of the iteration waits for the lane's last task.
        first = np.where(table.is_stepped, table.first_block, num_blocks)
        first_staying = np.where(self._offloaded, num_blocks, first).min(axis=1, initial=num_blocks)
        first_leaving = np.where(self._offloaded, first, num_blocks).min(axis=1, initial=num_blocks)
        is_last = (first_staying < num_blocks) & (first_staying <= first_leaving)
        found: FloatArray = np.where(is_last[:, None], tails, 0.0) if self._outer_s == 0 else tails
        return found

    def _waits_for_adam(self) -> BoolArray:
        """(P, C) whether a chunk's first all-gather comes after device Adam, by itself or behind another one's."""
        table, ids = self._table, np.arange(len(self._table.size_bytes))
        stepped = table.places.is_sharded(table.places.all) & table.is_stepped
        # The lane takes first gathers by the block that needs them, and then by chunk.
        rank = np.lexsort((ids, table.first_block)).argsort()
        first = np.where(stepped, rank, len(ids)).min(axis=1, initial=len(ids))
        waits: BoolArray = self._gathered & (rank >= first[:, None])
        return waits

    def _leads(self) -> FloatArray:
        """(P, n) all-gathers that wait for device Adam, of chunks whose first block is each one or an earlier one."""
        table, num_blocks = self._table, self._table.layout.num_blocks
        waits = self._waits_for_adam()
        is_until = table.first_block[:, None] <= np.arange(num_blocks)
        assert table.collectives is not None
        leads: FloatArray = (waits * table.collectives.gather_s) @ is_until
        return leads

    def _around_turn_s(self, prefix: IntArray, modes: IntArray) -> FloatArray:
        """(R, K) bounds of plans with chunks that are sharded and stepped, cut in three; 0 for others."""
        sums, positions = self._sums, self._sums.positions
        until_s = sums.until_s[:, modes]
        block = np.maximum(self._last_waiting[prefix], 0)
        before_s = until_s[1 + block]
        gathered_s = self._rank_throughput.least_s(RankWork(before_s, collective_s=self._lead_s[prefix, block]))
        cuts = np.unique(np.rint((sums.num_blocks - 1) * np.linspace(0, 1, _NUM_CUTS)).astype(np.int64))
        ends_s = until_s[positions.backward(cuts) + 1]
        between_s = (positions.micro_batches - 1) * until_s[-1] + ends_s - before_s[:, None]
        rest_s = np.broadcast_to(until_s[-1] - ends_s, between_s.shape)
        reduced_s = self._rank_throughput.least_s(
            RankWork(rest_s, collective_s=self._tail_s[prefix][:, cuts], alone_s=self._outer_s)
        )
        found_s = gathered_s + (between_s + reduced_s).max(axis=1) + self._table.device_adam_s[prefix][:, None]
        bound_s: FloatArray = np.where((self._last_waiting[prefix] >= 0)[:, None], found_s, 0.0)
        return bound_s

    def _last_s(self, prefix: IntArray, modes: IntArray) -> FloatArray:
        """(R, K) compute up to a block's last backward, the reductions from there on, and device Adam.

        And what the forward of some block waits longer for all-gathers than for compute.
        """
        sums, positions = self._sums, self._sums.positions
        until_s = sums.until_s[:, modes]
        before_s = (positions.micro_batches - 1) * until_s[-1]
        ends = positions.backward(np.arange(sums.num_blocks)) + 1
        compute_s = before_s + until_s[ends]
        whole_s: FloatArray = (self._tail_s[prefix][:, :, None] + compute_s).max(axis=1)
        adam_s: FloatArray = self._table.device_adam_s[prefix]
        found_s = whole_s + adam_s[:, None]
        if self._table.places.has_shards:
            forwards_s = until_s[1 + np.arange(sums.num_blocks)]
            found_s += np.maximum(self._lead_s[prefix][:, :, None] - forwards_s, 0.0).max(axis=1)
        return found_s

"""Lower bounds of the iteration time, for many plans at once.

[Note: Time bounds]
All bounds measure one period of the steady state at fixed places of the compute lane, cut it into stretches, and count
in each stretch the work that the schedule forces into it, whatever the timing.  [Note: Throughput bound] in
``sim/throughput.py`` turns the work of a stretch into a time, contention included.

*Whole period.*  Every lane does all of its work once.

*Cycle of the first update.*  Let p be the first block that owns an offloaded chunk with something to step.  CPU Adam
steps its chunks last, and its forward waits for their gathers: so the forward of p, of every iteration, starts after
all of CPU Adam of the previous one, and there the period is measured.  Cut it where the backward of some block j ends:

1. From the forward of p to the end of the backward of j lie the compute tasks between; gathers for later steps whose
   window opens in the stretch (p + depth + 1 on); chunks that did not survive the turn ([Note: Survivors] in
   ``sim/memory_bounds.py``) and are gathered again by then; and gradients that some backward in it waits for.
2. From there to the end of CPU Adam lie the backwards down to p; all gradients of blocks up to j, their copies and
   CPU Adam; and gathers whose window opens later.  Also, one of these copies comes before all that CPU Adam.
3. Then the chunks of p are gathered, one after the other.

CPU Adam and copies of blocks after j may fall in either of the first two stretches.  They count in both at the lesser
of their two weights: for weights v and w of the two stretches, v . work1 + w . work2 + min(v, w) . floating work is a
lower bound, since whatever share of it falls in a stretch weighs at least min(v, w) there.

More buffers, less prefetching ahead and fewer persistent chunks can only add to the work that is counted, so the bound
of the plan with the most buffers and the deepest prefetch holds for every plan with the same persistent chunks.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .chunk_table import ChunkTable
from .compute_table import ComputeTable, FloatArray, Positions
from .space import BoolArray, IntArray

_NUM_CUTS: Final = 5
"""Values of j that are tried, from p to the last block with an update.  Any number is admissible."""
_BOUND_FRAC: Final = 1 - 1e-5
"""Covers what the simulator tolerates as periodic, and rounding."""


class TimeBounds:
    """Bounds for the plans of one layout.

    Shapes: R plans, J cuts, V weights, K numbers of checkpointed blocks, C chunks, n blocks; tables by ``n_persist``
    have C + 1 rows.
    """

    def __init__(self, table: ChunkTable, compute: ComputeTable, weights: FloatArray) -> None:
        self._weights = weights
        num_chunks, num_blocks = len(table.size_bytes), table.layout.num_blocks
        self._num_blocks = num_blocks
        self._positions = Positions(num_blocks)
        offloaded = table.is_offloaded(np.arange(num_chunks + 1))
        stepped = offloaded & table.is_stepped
        self._num_offloaded = offloaded.sum(axis=1)
        self._until_s = np.concatenate([np.zeros((1, len(compute.seconds))), compute.seconds.cumsum(axis=1).T])
        """(L + 1, K) seconds of compute before each position."""
        self._compute_s = self._until_s[-1] + table.device_adam_s[:, None]
        """(C + 1, K) of the whole iteration."""

        by_first = np.argsort(table.first_block, kind="stable")
        place = np.searchsorted(table.first_block[by_first], np.arange(num_blocks + 2))

        def by_block(seconds: FloatArray, counts: BoolArray) -> FloatArray:
            """(C + 1, n + 2) sums over the chunks whose first block lies before each block."""
            return _prefix_sums(counts[:, by_first] * seconds[by_first])[:, place]

        self._gather_s = by_block(table.gather_s, offloaded)
        self._offload_s = by_block(table.offload_s, stepped)
        self._adam_s = by_block(table.cpu_adam_s, stepped)
        self._first_offload_s = np.where(stepped, table.offload_s, np.inf).min(axis=1, initial=np.inf)
        # Chunks in the order in which they fail to survive the turn; of those that end together the quickest first.
        order = np.lexsort((table.gather_s, table.last_block))
        self._again_s = _prefix_sums(offloaded[:, order] * table.gather_s[order])
        """(C + 1, C + 1) seconds to gather the first so many in that order."""
        self._rank = np.cumsum(offloaded[:, order], axis=1)
        self._place_of_block = np.searchsorted(table.last_block[order], np.arange(num_blocks + 1))
        """(n + 1,) how many chunks, in that order, end before each block."""

        self._first = np.where(stepped, table.first_block, num_blocks).min(axis=1, initial=num_blocks)
        """(C + 1,) p, or n if nothing offloaded is stepped."""
        self._last = np.where(stepped, table.first_block, -1).max(axis=1, initial=-1)
        is_of_first = offloaded & (table.first_block == self._first[:, None])
        ids = np.arange(num_chunks)
        last_update = np.where(is_of_first & table.is_stepped, ids, num_chunks).min(axis=1, initial=num_chunks)
        self._last_gathers_s = np.where(is_of_first & (ids >= last_update[:, None]), table.gather_s, 0.0).sum(axis=1)
        """(C + 1,) gathers for p, from the chunk on that CPU Adam steps last."""

    def iteration_s(self, n_persist: IntArray, n_buffer: IntArray, depths: IntArray) -> FloatArray:
        """(R, K) bounds of the plans with these knobs, each (R,)."""
        num_missing = np.maximum(self._num_offloaded[n_persist] - n_buffer, 0)
        place = (self._rank[n_persist] < num_missing[:, None]).sum(axis=1) + (num_missing > 0)
        again_s = self._again_s[n_persist, place]
        copies = self._work(
            self._gather_s[n_persist, -1] + again_s, self._offload_s[n_persist, -1], self._adam_s[n_persist, -1]
        )
        bound: FloatArray = (self._compute_s[n_persist][:, None, :] * self._weights[:, :1] + copies[:, :, None]).max(
            axis=1
        )
        has_update = self._first[n_persist] < self._num_blocks
        if has_update.any():
            cycle = self._cycle_s(n_persist[has_update], depths[has_update], again_s[has_update])
            bound[has_update] = np.maximum(bound[has_update], cycle)
        bound *= _BOUND_FRAC
        return bound

    def _work(self, h2d_s: FloatArray, d2h_s: FloatArray, cpu_s: FloatArray) -> FloatArray:
        """(..., V) weighted work of the lanes other than compute."""
        work: FloatArray = np.stack([h2d_s, d2h_s, cpu_s], axis=-1) @ self._weights[:, 1:].T
        return work

    def _cycle_s(self, n_persist: IntArray, depths: IntArray, again_s: FloatArray) -> FloatArray:
        """(R, K) the cycle of the first update, for plans that have one."""
        first, last = self._first[n_persist], self._last[n_persist]
        cuts = np.rint(first[:, None] + (last - first)[:, None] * np.linspace(0, 1, _NUM_CUTS)).astype(np.int64)
        row, depth, again = n_persist[:, None], depths[:, None], again_s[:, None]
        end = self._num_blocks + 1
        begin_s = self._until_s[1 + first][:, None]
        cut_s = self._until_s[self._positions.backward(cuts) + 1]
        end_s = self._until_s[self._positions.backward(first) + 1][:, None]

        ahead_s = self._gather_s[row, -1] - self._gather_s[row, np.minimum(first[:, None] + depth + 1, end)]
        again_before_s = np.maximum(again - self._again_s[row, self._place_of_block[cuts]], 0)
        again_after_s = np.minimum(again, self._again_s[row, self._place_of_block[np.maximum(cuts - depth, 0)]])
        all_offload_s, all_adam_s = self._offload_s[row, -1], self._adam_s[row, -1]
        offload_before_s = all_offload_s - self._offload_s[row, np.minimum(cuts + depth + 1, end)]
        offload_after_s = self._offload_s[row, cuts + 1]
        adam_after_s = self._adam_s[row, cuts + 1]

        weight = self._weights[:, 0, None]
        before = self._work(ahead_s + again_before_s, offload_before_s, np.zeros_like(adam_after_s))[..., None]
        before = before + weight * (cut_s - begin_s)[:, :, None, :]
        after = self._work(again_after_s, offload_after_s, adam_after_s)[..., None]
        after = after + weight * (end_s - cut_s)[:, :, None, :]
        serial_s = self._first_offload_s[n_persist, None] + adam_after_s
        cycle: FloatArray = (before.max(axis=2) + np.maximum(after.max(axis=2), serial_s[:, :, None])).max(axis=1)
        # The first cut, at the backward of p, leaves the most between the two stretches.
        floating = np.stack([all_offload_s - offload_before_s - offload_after_s, all_adam_s - adam_after_s], axis=-1)
        cycle = np.maximum(cycle, self._with_floating(before[:, 0], after[:, 0], floating[:, 0]))
        cycle += self._last_gathers_s[n_persist, None]
        return cycle

    def _with_floating(self, before: FloatArray, after: FloatArray, floating: FloatArray) -> FloatArray:
        """(R, K) bounds with work that may fall in either stretch, (R, 2) of D2H and CPU_OPTIM.

        Of all pairs of weights those are tried that are best for one of the two stretches as it is.
        """
        weights = self._weights[:, 2:]
        shared = np.minimum(weights[:, None], weights) @ floating.T
        """(V, V, R)"""
        rows = np.arange(len(floating))[:, None]
        totals = []
        for one, other in ((before, after), (after, before)):
            best = one.argmax(axis=1)
            chosen_s = np.take_along_axis(one, best[:, None, :], axis=1)
            totals.append((chosen_s + other + np.moveaxis(shared[best, :, rows], 2, 1)).max(axis=1))
        found: FloatArray = np.maximum(*totals)
        return found


def _prefix_sums(values: FloatArray) -> FloatArray:
    """Sums of the first so many values of each row."""
    return np.concatenate([np.zeros((len(values), 1)), values.cumsum(axis=1)], axis=1)

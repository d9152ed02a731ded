"""Lower bounds of the iteration time, for many plans at once.

[Note: Time bounds]
All bounds measure one period of the steady state at one place of the compute lane, cut it into stretches, and count in
each stretch the work that the schedule forces into it, whatever the timing.  [Note: Throughput bound] in
``sim/bounds/throughput.py`` turns the work of a stretch into a time, contention included, and the times add up.

*Whole period.*  Every lane does all of its work once.

For the others let p be the first block that owns an offloaded chunk with something to step, or, where nothing is
stepped, any offloaded chunk; t the last block whose forward waits for a gather; d the prefetch depth; and j any block
from p on.  A gather starts after the end of the step d + 1 before its own, so all gathers from some step on lie in a
stretch that begins with that end.  Gradients have left before the step d + 1 after their own begins.

*Through CPU Adam.*  CPU Adam steps the chunks of p last, and the forward of p waits for their gathers: so it starts, in
every iteration, after all of CPU Adam of the previous one.

1. From the start of the forward of p to the end of the backward of j.
2. From there to the end of CPU Adam: the backwards down to p; all gradients of blocks up to j, their copies and CPU
   Adam.  One of these copies comes before all that CPU Adam.
3. Then the chunks of p are gathered, one after the other.

CPU Adam and copies of blocks after j may fall in either of the first two stretches.  They count in both at the lesser
of their two weights: for weights v and w of the stretches, v . work1 + w . work2 + min(v, w) . floating work is a
lower bound, since whatever share of it falls in a stretch weighs at least min(v, w) there.

*Through sums.*  Where CPU Adam is slow, the sums of the gradients fall behind, from the second micro-batch on, in which
the first of them are added.  Then the way leads, with three micro-batches or more, from the start of the forward of p
to the end of the backward of j in the second one; from there all later sums, these gradients, and CPU Adam; then the
chunks of p are gathered.  Sums of blocks after j in the second micro-batch count in neither.

*Through compute.*  Let q = p - d - 1, if that is a block: all gathers begin after its forward, all gradients have left
before its backward.  (Otherwise the period is measured at the start of the forward of p, as above, and what its
updates do after its backward is counted in the last stretch.)

1. From the end of the forward of q to the end of the backward of j.
2. From there to the start of the backward of q.
3. From there on: the compute tasks that are left.

Where there are several micro-batches, the first stretch begins in the first one and j is the backward of the last one;
the passes between the two lie in the first stretch with all their work.  Of what swaps, the copies count that begin
after the stretch's first forward and are awaited before its last backward.

*Through the norm.*  Where the norm of all gradients is limited, CPU Adam takes the chunks in their order, after the
norm, and that after all backwards.  So from the forward of any block with an update there are the compute tasks to the
last backward, with all gradients on their way; the norm; then CPU Adam up to the block's chunk, the gathers of what it
has stepped, and the compute tasks that are left.  The way through CPU Adam is not one then.

*Swapping.*  What swaps leaves after the forward of the first of its blocks, and is gone before the step d + 1 after the
forward of the last of them.  It comes back after the end of the step d + 1 before the backward of that one, and is
there before the backward of the first.  Compute waits where a copy takes longer than what it computes meanwhile.

*Copies side by side.*  Some gathers for the second time are guaranteed to run while gradients leave ([Note: Released
together] in ``sim/bounds/overlaps.py``); stretches in which these gradients have all left by the end weigh that in.

Through CPU Adam and compute, the first stretch may be cut once more where the forward of t starts, after the last of
the first gathers.
Chunks that do not survive the turn ([Note: Survivors] in ``sim/bounds/peak_bounds.py``) are gathered again in backward.

More buffers, less prefetching ahead and fewer persistent chunks can only add to the work that is counted, so the bound
of the plan with the most buffers and the deepest prefetch holds for every plan with the same persistent chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..space.chunk_table import ChunkTable
from ..space.compute_table import ComputeTable, FloatArray
from ..space.side_lanes import SideLanes
from ..space.space import IntArray
from .cycle import NUM_CUTS, Cycle
from .overlaps import Overlaps
from .throughput import Throughput
from .work_sums import WorkRows, WorkSums

_BOUND_FRAC: Final = 1 - 1e-5
"""Covers what the simulator tolerates as periodic, and rounding."""
_NONE: Final = np.zeros(1)


@dataclass(frozen=True)
class _Stretch:
    """Work that lies in a stretch of an iteration: of compute (..., K), of the other lanes (...)."""

    compute_s: FloatArray
    h2d_s: FloatArray
    d2h_s: FloatArray
    cpu_s: FloatArray
    together_s: FloatArray | None = None
    """Of H2D, the part that is guaranteed to lie beside D2H."""

    @property
    def of_first_cut(self) -> _Stretch:
        """The same for the first of the cuts (R, J) alone."""
        together_s = None if self.together_s is None else self.together_s[:, 0]
        h2d_s, d2h_s, cpu_s = (lane[:, 0] if lane.ndim > 1 else lane for lane in (self.h2d_s, self.d2h_s, self.cpu_s))
        return _Stretch(self.compute_s[:, 0], h2d_s, d2h_s, cpu_s, together_s)


class TimeBounds:
    """Bounds for the plans of one layout.

    Shapes: R plans, J cuts, V weights, K choices of activation modes.
    """

    def __init__(self, table: ChunkTable, compute: ComputeTable, throughput: Throughput) -> None:
        self._weights = throughput.weights
        self._counts_compute = self._weights[:, 0] > 0
        self._of_lanes = self._weights[:, 1:].T.copy()
        """(3, V) weights of H2D, D2H and CPU_OPTIM."""
        self._together = throughput.together
        self._overlaps = Overlaps(table, throughput.least_ratio)
        self._sums = WorkSums(table, compute)
        self._step = table.step
        self._n_swap = compute.modes.n_swap

    def whole_s(self, prefix: IntArray, n_buffer: IntArray, depths: IntArray, modes: IntArray) -> FloatArray:
        """(R, K) the bounds of the whole period and of swapping alone.  Arguments as of ``iteration_s``."""
        whole_s = self._whole_s(prefix, n_buffer, modes)
        bound: FloatArray = np.maximum(whole_s, self._swapping_s(prefix, depths, modes)) * _BOUND_FRAC
        return bound

    def iteration_s(self, prefix: IntArray, n_buffer: IntArray, depths: IntArray, modes: IntArray) -> FloatArray:
        """(R, K) bounds of the plans with these knobs, each (R,).

        ``modes``: (K,) rows of the compute table, all with the same ``n_swap``.
        """
        return self._iteration_s((prefix, n_buffer, depths), modes, self._sums.least(prefix, n_buffer))

    def _iteration_s(
        self, knobs: tuple[IntArray, IntArray, IntArray], modes: IntArray, least_s: FloatArray
    ) -> FloatArray:
        """(R, K) as ``iteration_s``; ``least_s``: (R,) gathers in any pass over the blocks but the first and last."""
        prefix, n_buffer, depths = knobs
        sums = self._sums
        n_swap = int(self._n_swap[modes[0]])
        if self._step.num_ranks == 1:
            together_s = self._overlaps.together_s(prefix, n_buffer, depths, n_swap)
        else:
            # Their gradients leave after they were reduced, and not when their backward ends.
            together_s = np.zeros((len(prefix), sums.num_blocks + 1))
        whole_s = self._whole_s(prefix, n_buffer, modes, together_s[:, -1])
        bound = np.maximum(whole_s, self._swapping_s(prefix, depths, modes))
        is_cycle = sums.first[prefix] < sums.num_blocks
        if is_cycle.any():
            prefixes, buffers = prefix[is_cycle], n_buffer[is_cycle]
            rows = WorkRows(
                sums,
                prefixes[:, None],
                sums.again(prefixes, buffers)[:, None],
                least_s[is_cycle, None],
                together_s[is_cycle],
                modes,
                n_swap,
            )
            cycle = Cycle(rows, depths[is_cycle, None])
            through_cpu = self._through_norm(cycle) if self._step.limits_norm else self._through_adam(cycle)
            bound[is_cycle] = np.maximum(bound[is_cycle], np.maximum(through_cpu, self._through_compute(cycle)))
        bound *= _BOUND_FRAC
        return bound

    def side_lanes_s(self, side_lanes: SideLanes, depths: IntArray, modes: IntArray) -> FloatArray | float:
        """(D, K) bounds by what one residency brings about, where these are worth their price.

        Of one rank, where several micro-batches gather more often than the number of buffers alone would tell.
        """
        if self._sums.positions.micro_batches <= 2 or self._step.num_ranks > 1:
            return 0.0
        gathers = side_lanes.residency
        passes = gathers.gather_step // self._sums.num_blocks
        between_s = np.bincount(
            passes, gathers.table.gather_s[gathers.gather_chunk], minlength=2 * gathers.positions.micro_batches
        )[1:-1]
        # Passes that are left out are like some of those that are kept.
        prefix, n_buffer = (np.full(len(depths), knob) for knob in (gathers.prefix, gathers.n_buffer))
        return self._iteration_s((prefix, n_buffer, depths), modes, np.full(len(depths), between_s.min()))

    def _whole_s(
        self, prefix: IntArray, n_buffer: IntArray, modes: IntArray, together_s: FloatArray | None = None
    ) -> FloatArray:
        sums, micro_batches = self._sums, self._sums.positions.micro_batches
        n_swap = int(self._n_swap[modes[0]])
        h2d_s = sums.gather_s[prefix, -1] + sums.again(prefix, n_buffer)
        if micro_batches > 1:
            h2d_s = h2d_s + (2 * micro_batches - 2) * sums.least(prefix, n_buffer)
        d2h_s = sums.offload_s[prefix, -1]
        return self._least_s(
            _Stretch(
                sums.compute_s[prefix[:, None], modes],
                h2d_s + micro_batches * sums.swap_in_s[n_swap],
                micro_batches * (d2h_s + sums.swap_out_s[n_swap]),
                sums.cpu_s[prefix],
                together_s,
            )
        )

    def _swapping_s(self, prefix: IntArray, depths: IntArray, modes: IntArray) -> FloatArray | float:
        """(R, K) compute, with the waits for what swaps on its way out and back."""
        sums = self._sums
        moving = sums.moving[sums.moving < int(self._n_swap[modes[0]])]
        if not len(moving):
            return 0.0
        num_blocks, positions = sums.num_blocks, sums.positions
        until_s = sums.until_s[:, modes]
        first, stop = int(moving[0]), int(moving[-1]) + 1
        gone, opened = stop + depths, 2 * num_blocks - 1 - stop - depths
        out = np.full_like(depths, 2 + first), positions.step_begin(np.minimum(gone, 2 * num_blocks - 1))
        back = positions.step_end(np.maximum(opened, 0)) + 1, np.full_like(depths, positions.backward(np.array(first)))
        waits_s = []
        for (start, end), copies_s, lane in ((out, sums.swap_out_s, 2), (back, sums.swap_in_s, 1)):
            compute_s = until_s[np.maximum(end, start)] - until_s[start]
            copy_s = copies_s[stop] - copies_s[first]
            weighed = self._weights[:, :1] * compute_s[:, None, :] + self._weights[:, lane, None] * copy_s
            waits_s.append(np.maximum(weighed.max(axis=1) - compute_s, 0.0))
        waits_s[0] = np.where((gone < 2 * num_blocks)[:, None], waits_s[0], 0.0)
        waits_s[1] = np.where((opened >= 0)[:, None], waits_s[1], 0.0)
        is_apart = (gone <= opened)[:, None]
        waited_s = np.where(is_apart, waits_s[0] + waits_s[1], np.maximum(*waits_s))
        bound: FloatArray = sums.compute_s[prefix[:, None], modes] + positions.micro_batches * waited_s
        return bound

    def _weigh(self, work: _Stretch) -> FloatArray:
        """(..., V, K) weighted work of a stretch."""
        weighed: FloatArray = self._weights[:, :1] * work.compute_s[..., None, :] + self._others(work)[..., None]
        return weighed

    def _least_s(self, work: _Stretch) -> FloatArray:
        """(..., K) the least time that a stretch takes: the largest of its weighted work.

        Where nothing slows compute, few weights count it, and the others say the same for every choice of modes.
        """
        others = self._others(work)
        least_s = others[..., ~self._counts_compute].max(axis=-1, initial=0.0)[..., None]
        for vertex in np.flatnonzero(self._counts_compute):
            weighed = self._weights[vertex, 0] * work.compute_s
            weighed += others[..., vertex, None]
            least_s = np.maximum(least_s, weighed)
        found: FloatArray = least_s
        return found

    def _others(self, work: _Stretch) -> FloatArray:
        """(..., V) weighted work of all lanes but compute."""
        of_h2d, of_d2h, of_cpu = self._of_lanes
        others: FloatArray = work.h2d_s[..., None] * of_h2d + work.d2h_s[..., None] * of_d2h
        if work.cpu_s is not _NONE:
            others = others + work.cpu_s[..., None] * of_cpu
        if work.together_s is not None:
            others = others + work.together_s[..., None] * self._together
        return others

    def _first_stretch(self, cycle: Cycle, start: IntArray, step: IntArray) -> tuple[_Stretch, FloatArray]:
        """The work from ``start`` to the backward of every cut, and the least time (R, J, K) that it takes.

        ``start``: compute position; ``step``: gathers from this step on lie in the stretch.
        """
        rows, cuts = cycle.rows, cycle.cuts
        stop = cycle.backward(cuts) + 1
        awaited_s = rows.offloads_s(cuts + cycle.depth + 1) + cycle.earlier_offloads_s(cuts)
        gathers_s = rows.gathers_s(step)
        h2d_s = gathers_s + rows.passes_s(step) + cycle.gathers_again_s(step, cuts)
        d2h_s = awaited_s
        if rows.n_swap:
            h2d_s = h2d_s + cycle.fetches_s(start - 1, cuts)
            d2h_s = d2h_s + cycle.outs_s(start - 1, cuts)
        together_s = rows.together_s(cuts + cycle.depth + 1)
        whole = _Stretch(rows.compute_s(start, stop), h2d_s, d2h_s, _NONE, together_s)
        turn = np.maximum(1 + cycle.last_gathered, start)
        until_turn_s = self._least_s(_Stretch(rows.compute_s(start, turn), gathers_s, _NONE, _NONE))
        after = cycle.last_gathered + cycle.depth + 1
        again_s = rows.passes_s(after) + cycle.gathers_again_s(after, cuts)
        if rows.n_swap:
            again_s = again_s + cycle.later_fetches_s(after, cuts)
        from_turn_s = self._least_s(_Stretch(rows.compute_s(turn, stop), again_s, awaited_s, _NONE, together_s))
        return whole, np.maximum(self._least_s(whole), until_turn_s + from_turn_s)

    def _through_adam(self, cycle: Cycle) -> FloatArray:
        """(R, K) the way through CPU Adam."""
        rows, cuts, p = cycle.rows, cycle.cuts, cycle.first
        first, first_s = self._first_stretch(cycle, 1 + p, p + cycle.depth + 1)
        adam_s, offload_s = rows.adam_s(p, cuts + 1), rows.offloads_s(p, cuts + 1)
        later_s = rows.gathers_again_s(p, cuts - cycle.depth) + rows.fetches_s(p, cuts - cycle.depth)
        second = _Stretch(
            rows.compute_s(cycle.backward(cuts) + 1, cycle.backward(p) + 1),
            later_s,
            offload_s,
            adam_s,
            rows.together_s(p, cuts + 1),
        )
        serial_s = cycle.shortest_offload_s + adam_s
        found = (first_s + np.maximum(self._least_s(second), serial_s[..., None])).max(axis=1)
        # The first cut, at the backward of p, leaves the most between the two stretches.
        awaited_s = rows.offloads_s(cuts + cycle.depth + 1)
        floating = np.stack([rows.offloads_s(cuts + 1) - awaited_s, rows.adam_s(cuts + 1)], axis=-1)
        floated = self._with_floating(self._weigh(first.of_first_cut), self._weigh(second.of_first_cut), floating[:, 0])
        found = np.maximum(found, floated)
        if self._sums.positions.micro_batches > 2:
            found = np.maximum(found, self._through_sums(cycle))
        bound: FloatArray = found + cycle.last_gathers_s
        return bound

    def _through_sums(self, cycle: Cycle) -> FloatArray:
        """(R, K) from the forward of p to the end of CPU Adam, through the backward of a cut in micro-batch 2."""
        rows, cuts, p = cycle.rows, cycle.cuts, cycle.first
        positions, num_blocks = self._sums.positions, self._sums.num_blocks
        num_later = positions.micro_batches - 2
        start, middle = 1 + p, positions.micro_length + positions.backward(cuts) + 1
        step = p + cycle.depth + 1
        first_s = self._least_s(
            _Stretch(
                rows.compute_s(start, middle),
                rows.gathers_s(step) + rows.passes_s(step, until=2),
                cycle.earlier_offloads_s(cuts, 1) + rows.offloads_s(cuts + cycle.depth + 1),
                _NONE,
            )
        )
        after = 4 * num_blocks - cuts + cycle.depth
        """Gathers from this step on begin after the cut."""
        cpu_s = rows.sums_s(p, cuts + 1) + (num_later - 1) * rows.sums_s(p) + rows.adam_s(p)
        second_s = self._least_s(
            _Stretch(
                rows.compute_s(middle, cycle.backward(p) + 1),
                rows.passes_s(after) + cycle.gathers_again_s(after, p),
                rows.offloads_s(p, cuts + 1) + num_later * rows.offloads_s(p),
                cpu_s,
            )
        )
        serial_s = cycle.shortest_offload_s + cpu_s
        found: FloatArray = (first_s + np.maximum(second_s, serial_s[..., None])).max(axis=1)
        return found

    def _through_norm(self, cycle: Cycle) -> FloatArray:
        """(R, K) the way through the norm: to a chunk that CPU Adam steps after it, and to its block's forward."""
        rows, sums = cycle.rows, self._sums
        begin = np.searchsorted(sums.stepped, sums.first_offloaded[rows.row])
        num_stepped = len(sums.stepped) - begin
        if not num_stepped.any():
            return np.zeros((len(rows.row), len(rows.columns)))
        cuts = begin + np.rint((np.maximum(num_stepped, 1) - 1) * np.linspace(0, 1, NUM_CUTS)).astype(np.int64)
        cuts, begin = np.minimum(cuts, len(sums.stepped) - 1), np.minimum(begin, len(sums.stepped) - 1)
        block = sums.stepped_block[cuts]
        until_norm_s = rows.compute_s(1 + block, np.full_like(block, sums.positions.device_adam))
        step = block + cycle.depth + 1
        gathers_s = rows.passes_s(step) + cycle.gathers_again_s(step, np.zeros_like(block))
        offloads_s = sums.positions.micro_batches * sums.offload_s[rows.row, -1]
        together_s = rows.together_s(np.zeros_like(block))
        first_s = self._least_s(_Stretch(until_norm_s, gathers_s, offloads_s, _NONE, together_s))
        adam_s = sums.stepped_until_s[cuts + 1] - sums.stepped_until_s[begin]
        gathered_s = sums.stepped_gathered_s[cuts + 1] - sums.stepped_gathered_s[begin]
        second_s = self._least_s(_Stretch(rows.iteration_s - until_norm_s, gathered_s, _NONE, adam_s))
        second_s = np.maximum(second_s, (adam_s + sums.stepped_gather_s[cuts])[..., None])
        found_s = first_s + sums.norm_s[rows.row][..., None] + second_s
        bound: FloatArray = np.where(num_stepped[..., None] > 0, found_s, 0.0).max(axis=1)
        return bound

    def _through_compute(self, cycle: Cycle) -> FloatArray:
        """(R, K) the way through compute."""
        rows, cuts, p, depth = cycle.rows, cycle.cuts, cycle.first, cycle.depth
        q = p - depth - 1
        is_block = q >= 0
        start = np.where(is_block, 2 + q, 1 + p)
        stop = np.where(is_block, cycle.backward(q) - 1, cycle.backward(p) + 1)
        least = np.where(is_block, p, p + depth + 1)
        """Gathers and gradients of blocks from here on lie between the two."""
        _, first_s = self._first_stretch(cycle, start, least)
        offload_s = rows.offloads_s(least, cuts + 1)
        later_s = rows.gathers_again_s(p, cuts - depth) + rows.fetches_s(p, cuts - depth)
        second_s = self._least_s(
            _Stretch(
                rows.compute_s(cycle.backward(cuts) + 1, stop),
                later_s,
                offload_s,
                _NONE,
                rows.together_s(least, cuts + 1),
            )
        )
        rest_s = rows.iteration_s - rows.compute_s(start, stop)
        own = [np.where(is_block, 0.0, work(p, p + 1)) for work in (rows.offloads_s, rows.adam_s)]
        tail_s = np.where(is_block, 0.0, cycle.last_gathers_s)
        serial_s = np.where(is_block, 0.0, cycle.shortest_offload_s) + own[1] + tail_s
        third_s = np.maximum(self._least_s(_Stretch(rest_s, tail_s, *own)), serial_s[..., None])
        bound: FloatArray = (first_s + second_s + third_s).max(axis=1)
        if self._step.limits_norm:
            # CPU Adam steps the chunks of p first there, and not last.
            bound = np.where(is_block, bound, 0.0)
        return bound

    def _with_floating(self, first: FloatArray, second: FloatArray, floating: FloatArray) -> FloatArray:
        """(R, K) bounds with work that may fall in either stretch, (R, 2) of D2H and CPU_OPTIM.

        Of all pairs of weights those are tried that are best for one of the two stretches as it is.
        """
        weights = self._weights[:, 2:]
        shared = np.minimum(weights[:, None], weights) @ floating.T
        """(V, V, R) floating work that two choices of weights share."""
        rows = np.arange(len(floating))[:, None]
        totals = []
        for one, other in ((first, second), (second, first)):
            best = one.argmax(axis=1)
            chosen_s = np.take_along_axis(one, best[:, None, :], axis=1)
            totals.append((chosen_s + other + np.moveaxis(shared[best, :, rows], 2, 1)).max(axis=1))
        found: FloatArray = np.maximum(*totals)
        return found

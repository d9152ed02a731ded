"""What travels and is stepped beside compute on one of several ranks, collectives among it.

[Note: Order of collectives]
The lane of collectives runs its tasks in the order of the schedule ([Note: Ranks] in ``shared/compile/compile.py``):
behind every step the reductions of the chunks whose last backward it was, and then the all-gathers that its end opens
the way for.  Those of the first step come before everything, what no block owns is reduced after the last step, and
the parts of a norm after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .collective_table import CollectiveTable
from .compute_table import ComputeTable, FloatArray
from .gather_plan import GatherPlan
from .lane_order import NOTHING, Waits, ended_with, reached_before
from .side_lanes import COLLECTIVE, COMPUTE, CPU_OPTIM, D2H, H2D, LaneWork, Order, SideLanes
from .space import IntArray

_BESIDE_COMPUTE = (H2D, D2H, CPU_OPTIM, COLLECTIVE)


@dataclass(frozen=True, eq=False)
class CollectiveLane:
    """The lane of collectives at every prefetch depth.

    Shapes: D depths, Z tasks, M micro-batches; G, U, V as of residencies.
    """

    seconds: FloatArray
    """(D, Z) of every task."""
    gather_place: IntArray
    """(D, G) places of all-gathers; none if hosts have whole chunks."""
    leaving_place: IntArray
    """(D, M, U) places of reductions of gradients that leave."""
    part_place: IntArray
    """(D, M, V) places of reductions to parts on the devices."""
    part_step: IntArray
    """(M * V,) the steps that these follow, ascending."""
    num_awaited: IntArray
    """(D,) tasks that must have ended for all gradients that stay, whole or in parts, to be reduced; ``NOTHING`` if
    there are none."""
    norm_place: int | None
    """The place of the reduction of a norm's parts, if there is one."""
    waits_compute: IntArray
    """(D, Z) compute tasks that must have ended."""
    waits_h2d: IntArray
    """(D, Z) copies to the device that must have ended."""


class RankSideLanes(SideLanes):
    """The lanes beside compute of one of several equal ranks."""

    @property
    def _table(self) -> CollectiveTable:
        table = self.residency.table.collectives
        assert table is not None, "several ranks have collectives"
        return table

    @property
    def is_sharded(self) -> bool:
        """Whether gathers bring a shard alone, and an all-gather the others."""
        return self.residency.table.step.is_sharded

    @cached_property
    def _staying(self) -> IntArray:
        """Chunks whose gradients stay whole, in the order of their reductions."""
        table = self.residency.table
        is_gathered = table.is_gathered(self.residency.prefix)
        staying: IntArray = table.update_order[~is_gathered[table.update_order]]
        return staying

    @cached_property
    def _reductions(self) -> tuple[IntArray, FloatArray]:
        """Steps and seconds of reductions within blocks.

        Those of gradients that leave, and of those that are reduced to parts, by micro-batch; and of those that stay.
        """
        num_steps, residency = 2 * self.positions.num_blocks, self.residency
        scattered = (residency.update_chunk, residency.part_chunk)
        leave, part, stay = (num_steps - 1 - residency.table.first_block[of] for of in (*scattered, self._staying))
        micro_batches = self.positions.micro_batches
        steps = [(num_steps * self._micro + of).ravel() for of in (leave, part)]
        steps.append(num_steps * (micro_batches - 1) + stay)
        seconds = [np.tile(self._table.leave_s[of], micro_batches) for of in scattered]
        return np.concatenate(steps), np.concatenate([*seconds, self._table.stay_s[self._staying]])

    def _behind_step(self, depths: IntArray) -> IntArray:
        """(D, G) the step whose tasks an all-gather follows in the order of the lane; -1 before all of them."""
        residency, num_steps = self.residency, self.positions.num_steps
        steps = np.arange(num_steps)
        freed = np.full(num_steps, -1)
        np.maximum.at(freed, residency.gather_step, residency.free_step)
        if len(self.swapped):
            # What comes back is sent in the same order, and not before its way out.
            num_micro = 2 * self.positions.num_blocks
            back = (num_micro * self._micro + num_micro - 1 - self.swapped).ravel()
            freed[back] = np.maximum(freed[back], (num_micro * self._micro + self.swapped).ravel())
        opened = np.maximum(freed, steps - depths[:, None] - 1)
        behind = np.maximum.accumulate(np.minimum(opened, steps - 1), axis=1)
        # Before the end of the first step nothing but what the first step needs is sent.
        behind[:, 1:] = np.maximum(behind[:, 1:], 0)
        gathers: IntArray = behind[:, residency.gather_step]
        return gathers

    @cached_property
    def collective_s(self) -> float:
        """Seconds of all collectives."""
        seconds = self._reductions[1].sum() + (self._table.outer_s or 0.0)
        if self.is_sharded:
            seconds += self._table.gather_s[self.residency.gather_chunk].sum()
        return float(seconds)

    def waited_s(self, depths: IntArray) -> FloatArray:
        """(D,) seconds of collectives that are done between two steps while compute waits for the second one.

        An all-gather that follows the reductions of the step before its own in the lane comes after them and after that
        step, and so does one whose buffer that step frees.  Between the last step of a pass and the first of the next
        one the parts outside all blocks compute.
        """
        residency, num_steps = self.residency, self.positions.num_steps
        waited = np.zeros(len(depths))
        if not self.is_sharded or not len(residency.gather_step):
            return waited
        reduction_step, seconds = self._reductions
        reduced_s = np.bincount(reduction_step, seconds, minlength=num_steps)
        gathered_s = self._table.gather_s[residency.gather_chunk]
        before = residency.gather_step - 1
        is_behind = np.bincount(reduction_step, minlength=num_steps)[before] > 0
        is_pressed = (self._behind_step(depths) == before) & (is_behind | (residency.free_step == before))
        is_pressed &= residency.gather_step % self.positions.num_blocks > 0
        for row, pressed in enumerate(is_pressed):
            steps = residency.gather_step[pressed]
            is_step = np.bincount(steps, minlength=num_steps) > 0
            waited[row] = gathered_s[pressed].sum() + reduced_s[:-1][is_step[1:]].sum()
        return waited

    def micro_batch_places(self, micro_batch: int) -> tuple[tuple[int, int], ...]:
        """By lane, the place about which a micro-batch begins, and how many tasks it has."""
        residency, num_steps = self.residency, 2 * self.positions.num_blocks
        num_tasks = len(residency.update_chunk) + len(residency.part_chunk)
        begin = micro_batch * num_tasks
        if self.is_sharded:
            steps = (micro_batch * num_steps, (micro_batch + 1) * num_steps)
            gathers = np.searchsorted(residency.gather_step, steps).tolist()
            begin, num_tasks = begin + gathers[0], num_tasks + gathers[1] - gathers[0]
        return (*super().micro_batch_places(micro_batch), (begin, num_tasks))

    def collectives(self, depths: IntArray) -> CollectiveLane:
        """The lane of collectives; see [Note: Order of collectives]."""
        steps, seconds = self._reductions
        num_depths, num_reductions = len(depths), len(steps)
        keys, lane_s = np.broadcast_to(2 * steps, (num_depths, num_reductions)), [seconds]
        opened = np.broadcast_to(self.positions.step_end(steps) + 1, keys.shape)
        copied = np.full(keys.shape, NOTHING)
        if self.is_sharded:
            gathers = self.residency.gather_chunk
            keys = np.concatenate([keys, 2 * self._behind_step(depths) + 1], axis=1)
            lane_s.append(self._table.gather_s[gathers])
            of_gathers = self._waits_of_gathers(depths)
            opened, copied = (np.concatenate(pair, axis=1) for pair in zip((opened, copied), of_gathers, strict=True))
        order = np.argsort(keys, axis=1, kind="stable")
        places = np.empty_like(order)
        np.put_along_axis(places, order, np.broadcast_to(np.arange(order.shape[1]), order.shape), axis=1)
        micro_batches = self.positions.micro_batches
        ends = micro_batches * np.array([len(self.residency.update_chunk), len(self.residency.part_chunk)]).cumsum()
        leaving = places[:, : ends[0]].reshape(num_depths, micro_batches, len(self.residency.update_chunk))
        parts = places[:, ends[0] : ends[1]].reshape(num_depths, micro_batches, len(self.residency.part_chunk))
        num_awaited = places[:, ends[0] : num_reductions].max(axis=1, initial=NOTHING - 1) + 1
        waits_compute, waits_h2d = (np.take_along_axis(waits, order, axis=1) for waits in (opened, copied))
        in_order_s = np.concatenate(lane_s)[order]
        last_s: list[float] = []
        norm_place = None
        if self._table.outer_s is not None:
            last_s.append(self._table.outer_s)
            num_awaited = np.full(num_depths, order.shape[1] + 1)
        if self.is_sharded and self.norm_place is not None and ends[1]:
            norm_place = order.shape[1] + len(last_s)
            last_s.append(self._table.norm_s)
        if last_s:
            shape = (num_depths, len(last_s))
            in_order_s = np.concatenate([in_order_s, np.broadcast_to(last_s, shape)], axis=1)
            # The backward of the prologue has ended; a norm waits for more, and for it too.
            waits_compute = np.concatenate([waits_compute, np.full(shape, self.positions.device_adam)], axis=1)
            waits_h2d = np.concatenate([waits_h2d, np.full(shape, NOTHING)], axis=1)
        return CollectiveLane(
            seconds=in_order_s,
            gather_place=places[:, num_reductions:],
            leaving_place=leaving,
            part_place=parts,
            part_step=steps[ends[0] : ends[1]],
            num_awaited=num_awaited,
            norm_place=norm_place,
            waits_compute=waits_compute,
            waits_h2d=waits_h2d,
        )

    def _waits_of_gathers(self, depths: IntArray) -> tuple[IntArray, IntArray]:
        """(D, G) compute tasks and copies that all-gathers wait for.

        Those of offloaded chunks wait for their copy, those of sharded ones for what others' copies wait for: their
        window, their place, and whoever steps the chunk, which is device Adam.
        """
        residency, shape = self.residency, (len(depths), len(self.residency.gather_chunk))
        opened, copied = np.full(shape, NOTHING), np.full(shape, NOTHING)
        copied[:, residency.copied] = self.gather_place + 1
        alone = residency.sharded
        if len(alone):
            is_stepped = residency.table.is_stepped[residency.gather_chunk[alone]]
            stepped = np.where(residency.is_first_gather[alone] & is_stepped, 0, NOTHING)
            opened[:, alone] = np.maximum(residency.gather_wait(depths)[:, alone], stepped)
        return opened, copied

    # -- what waits for what -----------------------------------------------------------------------------------------

    def _waits(self, lane: CollectiveLane, depths: IntArray) -> tuple[Waits, ...]:
        """What the tasks of every lane wait for, each (D, T); of compute every step, and device Adam."""
        num_depths, num_steps = len(depths), self.positions.num_steps
        last = np.full((num_depths, 1), NOTHING)

        def by_step(waits: IntArray, at_end: IntArray) -> IntArray:
            return np.concatenate([np.broadcast_to(waits, (num_depths, num_steps)), at_end], axis=1)

        awaited = lane.num_awaited[:, None]
        if lane.norm_place is not None:
            awaited = np.full_like(awaited, lane.norm_place + 1)
        gathered = np.full((num_depths, num_steps), NOTHING)
        if self.is_sharded:
            num_gathered = np.searchsorted(self.residency.gather_step, np.arange(num_steps), side="right")
            begun = num_gathered > 0
            gathered[:, begun] = lane.gather_place[:, num_gathered[begun] - 1] + 1
        if lane.part_place.size:
            gathered = np.maximum(gathered, self._steps_wait_for_parts(lane, depths))
        compute = {COLLECTIVE: by_step(gathered, awaited), D2H: by_step(self.step_waits_d2h(depths), last)}
        if self.norm_place is not None:
            compute[CPU_OPTIM] = by_step(np.array(NOTHING), np.full_like(last, self.norm_place + 1))
        if len(self.swapped) or not self.is_sharded:
            compute[H2D] = by_step(self.step_waits_h2d, last)
        h2d = {COMPUTE: self.h2d_waits_compute(depths), CPU_OPTIM: self.h2d_waits_cpu}
        d2h = {COLLECTIVE: self._d2h_waits_collective(lane)}
        if len(self.swapped):
            h2d[D2H] = self.h2d_waits_d2h
            d2h[COMPUTE] = self.d2h_waits_compute
        if self.positions.micro_batches > 1:
            d2h[CPU_OPTIM] = self.d2h_waits_cpu
        cpu = {D2H: self.cpu_waits_d2h}
        collective = {COMPUTE: lane.waits_compute, H2D: lane.waits_h2d}
        if self.norm_place is not None:
            cpu[COMPUTE] = self.cpu_waits_compute
            cpu[COLLECTIVE] = self._cpu_waits_collective(lane)
            if lane.norm_place is not None:
                collective[CPU_OPTIM] = np.full_like(lane.waits_h2d, NOTHING)
                collective[CPU_OPTIM][:, lane.norm_place] = self.norm_place + 1
        return tuple(
            {other: np.broadcast_to(waits, (num_depths, waits.shape[-1])) for other, waits in of_lane.items()}
            for of_lane in (compute, h2d, d2h, cpu, collective)
        )

    def work(self, depth: int) -> LaneWork:
        """What the lanes do."""
        depths = np.array([depth])
        lane = self.collectives(depths)
        waits = tuple({other: found[0] for other, found in of.items()} for of in self._waits(lane, depths))
        return LaneWork(waits, (np.zeros(0), self.h2d_s, self.d2h_s, self.cpu_s, lane.seconds[0]))

    def _steps_wait_for_parts(self, lane: CollectiveLane, depths: IntArray) -> IntArray:
        """(D, S) for gradients to have been reduced to parts ``depth + 1`` steps before, in this iteration."""
        steps = np.arange(self.positions.num_steps)
        num_over = np.searchsorted(lane.part_step, steps - depths[:, None] - 1, side="right")
        places = lane.part_place.reshape(len(depths), -1)
        found = np.take_along_axis(places, np.maximum(num_over - 1, 0), axis=1) + 1
        return np.where(num_over > 0, found, NOTHING)

    def _d2h_waits_collective(self, lane: CollectiveLane) -> IntArray:
        """(D, X) gradients for their reduction."""
        waits = np.full((len(lane.seconds), len(self.d2h_step)), NOTHING)
        waits[:, self.gradient_place] = lane.leaving_place + 1
        return waits

    def _cpu_waits_collective(self, lane: CollectiveLane) -> IntArray:
        """(D, Y) the norm for the gradients that stay; CPU Adam for the norm of all ranks."""
        assert self.norm_place is not None
        waits = np.full((len(lane.seconds), self.cpu_length), NOTHING)
        waits[:, self.norm_place] = lane.num_awaited
        if lane.norm_place is not None:
            waits[:, self.adam_place] = lane.norm_place + 1
        return waits

    # -- guaranteed order ---------------------------------------------------------------------------------------------

    def order(self, depths: IntArray) -> Order:
        """What the waits of all lanes guarantee."""
        lane = self.collectives(depths)
        waits, lengths = self._waits(lane, depths), self._lengths(lane)
        reached = reached_before(COMPUTE, waits, lengths, among=_BESIDE_COMPUTE)
        d2h = self._starts_after(D2H, waits, lengths)
        if not self.is_sharded:
            return Order(reached[H2D], d2h)
        leaving, parts = (of.reshape(len(depths), of[0].size) for of in (lane.leaving_place, lane.part_place))
        alone = lane.gather_place[:, self.residency.sharded]
        ended = leaving
        if leaving.size or parts.size:
            ended = self._starts_after(COLLECTIVE, waits, lengths)
        before = reached[COLLECTIVE]
        return Order(
            reached[H2D],
            d2h,
            np.take_along_axis(before, leaving, axis=1),
            np.take_along_axis(ended, leaving, axis=1),
            np.take_along_axis(before, alone, axis=1),
            np.take_along_axis(before, parts, axis=1),
            np.take_along_axis(ended, parts, axis=1),
        )

    def _lengths(self, lane: CollectiveLane) -> tuple[int, ...]:
        """Tasks of every lane in an iteration."""
        return self.positions.length, len(self.h2d_step), len(self.d2h_step), self.cpu_length, lane.seconds.shape[1]

    def _starts_after(self, target: int, waits: tuple[Waits, ...], lengths: tuple[int, ...]) -> IntArray:
        """(D, X) the first compute position guaranteed to start after each task of ``target`` has ended.

        Positions are counted on into the next iteration; two iterations' length where none is sure.
        """
        others = tuple(lane for lane in _BESIDE_COMPUTE if lane != target)
        reached = reached_before(target, waits, lengths, among=others)
        compute, num_gone, length = waits[COMPUTE], lengths[target], lengths[COMPUTE]
        over = compute.get(target, np.full_like(compute[COLLECTIVE], NOTHING))
        for other in others:
            if other in compute:
                over = np.maximum(over, ended_with(reached[other], compute[other], num_gone))
        begins = np.append(self.positions.step_begin(np.arange(self.positions.num_steps)), self.positions.device_adam)
        places = np.concatenate([begins, begins + length, [2 * length]])
        counts = np.arange(1, num_gone + 1)
        both = np.maximum.accumulate(np.concatenate([over, over + num_gone], axis=1), axis=1)
        return np.stack([places[np.searchsorted(row, counts)] for row in both])


def side_lanes_of(residency: GatherPlan, compute: ComputeTable, n_swap: int) -> SideLanes:
    """The lanes beside compute, of one rank alone or of one of several."""
    kind = SideLanes if residency.table.step.num_ranks == 1 else RankSideLanes
    return kind(residency, compute, n_swap)

"""The lanes beside compute under one residency and one number of swapped blocks: copies and steps, task by task.

Every lane runs its tasks in order, so whatever a task waits for is one number per other lane: how many of that lane's
tasks must have ended, counted within the iteration; below 1 for tasks of the iterations before.  The order of the
tasks and their waits restate ``shared/compile/compile.py`` and its ``compile_`` modules in arrays.

[Note: Guaranteed order]
A chain of waits from one lane to another and back to a lane adds nothing there, since a lane's tasks are in order
already.  So the tasks that are guaranteed to have ended before a task follow from chains that pass each lane once: all
of them are written out here, one ``maximum`` each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...shared.compile.family import Family
from ...shared.schema.schedule import Lane
from .compute_table import ComputeTable, FloatArray, Positions
from .gather_plan import GatherPlan
from .lane_order import NOTHING, Waits
from .plan_family import PlanFamily
from .space import BoolArray, IntArray

COMPUTE, H2D, D2H, CPU_OPTIM, COLLECTIVE = (
    tuple(Lane).index(lane) for lane in (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.CPU_OPTIM, Lane.COLLECTIVE)
)


@dataclass(frozen=True, eq=False)
class LaneWork:
    """What the lanes do in an iteration at one prefetch depth, in the order of ``Lane``."""

    waits: tuple[Waits, ...]
    """Of tasks (T,); of compute, whose tasks depend on more, of every step and of device Adam."""
    seconds: tuple[FloatArray, ...]
    """(T,); none of compute."""


@dataclass(frozen=True, eq=False)
class Order:
    """The order that is guaranteed, whatever tasks take.  Positions are places in the program of compute."""

    fetch_position: IntArray
    """(D, H) compute tasks guaranteed to have ended before a task of H2D starts."""
    gone_position: IntArray
    """(D, X) the first compute position guaranteed to start after a task of D2H has ended; counted on into the next
    iteration, two iterations' length where none is sure."""
    scatter_position: IntArray | None = None
    """(D, M * U) compute tasks guaranteed to have ended before gradients are scattered; None where they are not."""
    scattered_position: IntArray | None = None
    """(D, M * U) the first compute position guaranteed to start after that."""
    all_gather_position: IntArray | None = None
    """(D, S) compute tasks guaranteed to have ended before an all-gather starts that nothing was copied for."""
    reduce_position: IntArray | None = None
    """(D, M * V) those guaranteed to have ended before gradients are reduced to parts on the devices."""
    reduced_position: IntArray | None = None
    """(D, M * V) the first compute position guaranteed to start after that."""


def plan_family(gathers: GatherPlan, compute: ComputeTable, n_swap: int, depths: IntArray) -> PlanFamily:
    """The plans with these gathers and so many swapped blocks, under all choices of modes of ``compute``."""
    table, workload = gathers.table, compute.workload
    family = Family(
        workload=workload,
        facts=table.facts,
        is_gathered=table.is_gathered(gathers.prefix),
        is_offloaded=table.is_offloaded(gathers.prefix),
        n_buffer=gathers.n_buffer,
        is_swap=np.arange(workload.num_blocks) < n_swap,
        is_checkpoint=compute.modes.is_checkpoint,
        depths=depths,
    )
    return PlanFamily(family, compute.levels, compute.prices)


@dataclass(frozen=True, eq=False)
class SideLanes:
    """The lanes beside compute.  Shapes: H tasks of H2D, X of D2H, Y of CPU_OPTIM, S steps, D prefetch depths."""

    residency: GatherPlan
    compute: ComputeTable
    n_swap: int

    @cached_property
    def _families(self) -> dict[tuple[int, ...], PlanFamily]:
        return {}

    def family(self, depths: IntArray) -> PlanFamily:
        """The same plans at these prefetch depths, in the compiler's arrays."""
        key = tuple(depths.tolist())
        if key not in self._families:
            self._families[key] = plan_family(self.residency, self.compute, self.n_swap, depths)
        return self._families[key]

    def family_with(self, depth: int) -> tuple[PlanFamily, int]:
        """One of them with this prefetch depth, and the depth's number."""
        known = next((depths for depths in self._families if depth in depths), (depth,))
        return self.family(np.array(known)), known.index(depth)

    @property
    def positions(self) -> Positions:
        """The program of the compute lane."""
        return self.residency.positions

    @cached_property
    def swapped(self) -> IntArray:
        """The blocks that move something in mode SWAP."""
        return np.flatnonzero(self.compute.swap_bytes[: self.n_swap])

    @cached_property
    def _micro(self) -> IntArray:
        """(M, 1) the micro-batches by number."""
        return np.arange(self.positions.micro_batches)[:, None]

    @property
    def _num_updates(self) -> int:
        return len(self.residency.update_chunk)

    # -- D2H: what blocks swap, and gradients -------------------------------------------------------------------------

    @cached_property
    def _d2h_order(self) -> tuple[IntArray, IntArray]:
        """Steps (X,) in the order of the lane, and where activations and then gradients have gone, before sorting."""
        num_steps = 2 * self.positions.num_blocks
        out = num_steps * self._micro + self.swapped
        first_block = self.residency.table.first_block[self.residency.update_chunk]
        gradients = num_steps * self._micro + (num_steps - 1 - first_block)
        steps = np.concatenate([out.ravel(), gradients.ravel()])
        order = np.argsort(steps, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return steps[order], places

    @cached_property
    def out_place(self) -> IntArray:
        """(M, swapped) places in D2H of what swaps."""
        places: IntArray = self._d2h_order[1][: self._micro.size * len(self.swapped)]
        return places.reshape(self._micro.size, len(self.swapped))

    @cached_property
    def gradient_place(self) -> IntArray:
        """(M, U) places in D2H of gradients."""
        places: IntArray = self._d2h_order[1][self._micro.size * len(self.swapped) :]
        return places.reshape(self._micro.size, self._num_updates)

    @property
    def d2h_step(self) -> IntArray:
        """(X,) the step that each task follows."""
        return self._d2h_order[0]

    @cached_property
    def d2h_s(self) -> FloatArray:
        """(X,) seconds."""
        seconds = np.empty(len(self.d2h_step))
        seconds[self.out_place] = self.compute.swap_out_s[self.swapped]
        seconds[self.gradient_place] = self.residency.table.offload_s[self.residency.update_chunk]
        return seconds

    @cached_property
    def d2h_waits_compute(self) -> IntArray:
        """(X,) compute tasks that must have ended: up to the end of the step that each task follows."""
        return self.positions.step_end(self.d2h_step) + 1

    @cached_property
    def d2h_waits_cpu(self) -> IntArray:
        """(X,) for what the micro-batch before brought to have been added."""
        waits = np.full(len(self.d2h_step), NOTHING)
        if self.positions.micro_batches > 2:
            added = np.arange(self.gradient_place[2:].size).reshape(self.gradient_place[2:].shape)
            waits[self.gradient_place[2:]] = added + 1
        return waits

    # -- CPU_OPTIM: sums, the norm and CPU Adam -----------------------------------------------------------------------

    @cached_property
    def _sum_place(self) -> IntArray:
        """(M - 1, U) places in CPU_OPTIM of what adds gradients up."""
        micro_batches, num_updates = self.positions.micro_batches, self._num_updates
        places = np.arange((micro_batches - 1) * num_updates).reshape(micro_batches - 1, num_updates)
        if micro_batches > 1 and not self.residency.table.step.limits_norm:
            places[-1] += np.arange(num_updates)
        return places

    @cached_property
    def norm_place(self) -> int | None:
        """The place of the norm of all gradients in CPU_OPTIM, if it is limited."""
        return self._sum_place.size if self.residency.table.step.limits_norm else None

    @cached_property
    def adam_place(self) -> IntArray:
        """(U,) places of CPU Adam in CPU_OPTIM."""
        if self.norm_place is not None:
            places: IntArray = self.norm_place + 1 + np.argsort(np.argsort(self.residency.update_chunk))
            return places
        if self.positions.micro_batches > 1:
            last: IntArray = self._sum_place[-1] + 1
            return last
        return np.arange(self._num_updates)

    @property
    def cpu_length(self) -> int:
        """Tasks of CPU_OPTIM."""
        return self._sum_place.size + self._num_updates + (self.norm_place is not None)

    @cached_property
    def cpu_s(self) -> FloatArray:
        """(Y,) seconds."""
        table, updates = self.residency.table, self.residency.update_chunk
        seconds = np.empty(self.cpu_length)
        seconds[self._sum_place] = table.accumulate_s[updates]
        seconds[self.adam_place] = table.cpu_adam_s[updates]
        if self.norm_place is not None:
            seconds[self.norm_place] = table.norm_s[self.residency.prefix]
        return seconds

    @cached_property
    def cpu_waits_d2h(self) -> IntArray:
        """(Y,) copies to the host that must have ended: the gradients that are added up, measured or stepped."""
        waits = np.full(self.cpu_length, NOTHING)
        waits[self._sum_place] = self.gradient_place[1:] + 1
        if self.positions.micro_batches == 1 and self._num_updates:
            if self.norm_place is None:
                waits[self.adam_place] = self.gradient_place[0] + 1
            else:
                waits[self.norm_place] = self.gradient_place[0, -1] + 1
        return waits

    @cached_property
    def cpu_waits_compute(self) -> IntArray:
        """(Y,) compute tasks that must have ended: of the norm, all up to device Adam."""
        waits = np.full(self.cpu_length, NOTHING)
        if self.norm_place is not None:
            waits[self.norm_place] = self.positions.device_adam
        return waits

    # -- H2D: what blocks swapped, and gathers ------------------------------------------------------------------------

    @cached_property
    def _h2d_order(self) -> tuple[IntArray, IntArray]:
        """Steps (H,) in the order of the lane, and where fetches and then gathers have gone, before sorting."""
        num_steps = 2 * self.positions.num_blocks
        back = num_steps * self._micro + (num_steps - 1 - self.swapped)
        steps = np.concatenate([back.ravel(), self.residency.gather_step[self.residency.copied]])
        order = np.argsort(steps, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return steps[order], places

    @cached_property
    def fetch_place(self) -> IntArray:
        """(M, swapped) places in H2D of what comes back."""
        places: IntArray = self._h2d_order[1][: self._micro.size * len(self.swapped)]
        return places.reshape(self._micro.size, len(self.swapped))

    @cached_property
    def gather_place(self) -> IntArray:
        """(G - S,) places in H2D of gathers that copy."""
        places: IntArray = self._h2d_order[1][self._micro.size * len(self.swapped) :]
        return places

    @property
    def h2d_step(self) -> IntArray:
        """(H,) the step that each task comes for."""
        return self._h2d_order[0]

    @cached_property
    def h2d_s(self) -> FloatArray:
        """(H,) seconds."""
        seconds = np.empty(len(self.h2d_step))
        seconds[self.fetch_place] = self.compute.swap_in_s[self.swapped]
        residency = self.residency
        seconds[self.gather_place] = residency.table.gather_s[residency.gather_chunk[residency.copied]]
        return seconds

    def h2d_waits_compute(self, depths: IntArray) -> IntArray:
        """(D, H) compute tasks that must have ended before a copy to the device: those that its window waits for."""
        waits = np.empty((len(depths), len(self.h2d_step)), dtype=np.int64)
        waits[:, self.gather_place] = self.residency.gather_wait(depths)[:, self.residency.copied]
        if len(self.swapped):
            window = self.h2d_step[self.fetch_place] - depths[:, None, None] - 1
            opened = self.positions.step_end(np.maximum(window, 0)) + 1
            waits[:, self.fetch_place] = np.where(window >= 0, opened, NOTHING)
        return waits

    @cached_property
    def h2d_waits_cpu(self) -> IntArray:
        """(H,) a chunk's first gather in the iteration for its CPU Adam in the one before."""
        number = np.full(len(self.residency.table.layout.chunks), NOTHING)
        number[self.residency.update_chunk] = self.adam_place + 1 - self.cpu_length
        waits = np.full(len(self.h2d_step), NOTHING)
        copied = self.residency.copied
        is_first, chunks = self.residency.is_first_gather[copied], self.residency.gather_chunk[copied]
        waits[self.gather_place] = np.where(is_first, number[chunks], NOTHING)
        return waits

    @cached_property
    def h2d_waits_d2h(self) -> IntArray:
        """(H,) what comes back for its way out."""
        waits = np.full(len(self.h2d_step), NOTHING)
        waits[self.fetch_place] = self.out_place + 1
        return waits

    # -- COMPUTE -----------------------------------------------------------------------------------------------------

    @cached_property
    def step_waits_h2d(self) -> IntArray:
        """(S,) for all that comes for the step."""
        return np.searchsorted(self.h2d_step, np.arange(self.positions.num_steps), side="right")

    def step_waits_d2h(self, depths: IntArray) -> IntArray:
        """(D, S) for what left ``depth + 1`` steps before, in this iteration or in the one before."""
        num_steps = self.positions.num_steps
        gone = np.searchsorted(self.d2h_step, np.arange(num_steps), side="right")
        key = np.arange(num_steps) - depths[:, None] - 1
        before = key + num_steps
        within = np.where(before >= 0, gone[np.clip(before, 0, num_steps - 1)] - len(self.d2h_step), NOTHING)
        return np.where(key >= 0, gone[np.maximum(key, 0)], within)

    def work(self, depth: int) -> LaneWork:
        """What the lanes do.  What nothing waits for is left out: most plans swap nothing and limit no norm."""
        depths = np.array([depth])
        compute = {H2D: np.append(self.step_waits_h2d, NOTHING), D2H: np.append(self.step_waits_d2h(depths), NOTHING)}
        h2d = {COMPUTE: self.h2d_waits_compute(depths)[0], CPU_OPTIM: self.h2d_waits_cpu}
        d2h = {COMPUTE: self.d2h_waits_compute}
        cpu = {D2H: self.cpu_waits_d2h}
        if len(self.swapped):
            h2d[D2H] = self.h2d_waits_d2h
        if self.positions.micro_batches > 1:
            d2h[CPU_OPTIM] = self.d2h_waits_cpu
        if self.norm_place is not None:
            cpu[COMPUTE] = self.cpu_waits_compute
            compute[CPU_OPTIM] = np.full(self.positions.num_steps + 1, NOTHING)
            compute[CPU_OPTIM][-1] = self.norm_place + 1
        return LaneWork((compute, h2d, d2h, cpu), (np.zeros(0), self.h2d_s, self.d2h_s, self.cpu_s))

    # -- micro-batches -----------------------------------------------------------------------------------------------

    def micro_batch_places(self, micro_batch: int) -> tuple[tuple[int, int], ...]:
        """By lane, the place about which a middle micro-batch begins, and how many tasks it has.

        Lanes run ahead and behind: tasks of neighbours may lie on either side.
        """
        positions, num_updates = self.positions, self._num_updates
        num_steps, num_d2h = 2 * positions.num_blocks, len(self.swapped) + num_updates
        h2d = np.searchsorted(self.h2d_step, (micro_batch * num_steps, (micro_batch + 1) * num_steps)).tolist()
        return (
            (micro_batch * positions.micro_length, positions.micro_length),
            (h2d[0], h2d[1] - h2d[0]),
            (micro_batch * num_d2h, num_d2h),
            # Nothing is added up of the first micro-batch.
            ((micro_batch - 1) * num_updates, num_updates),
        )

    # -- guaranteed order ---------------------------------------------------------------------------------------------

    def order(self, depths: IntArray) -> Order:
        """What the waits of all lanes guarantee; see [Note: Guaranteed order]."""
        return Order(self.h2d_after_compute(depths), self.gone_position(depths))

    def h2d_after_compute(self, depths: IntArray) -> IntArray:
        """(D, H) compute tasks guaranteed to have ended before a task of H2D starts; [Note: Guaranteed order]."""
        length = self.positions.length
        cpu = np.maximum(self.cpu_waits_compute, _reached(self.d2h_waits_compute, self.cpu_waits_d2h, 0))
        cpu = np.maximum.accumulate(cpu)
        own = np.maximum(self.h2d_waits_compute(depths), _reached(cpu, self.h2d_waits_cpu, length))
        if len(self.swapped):
            own = np.maximum(own, _reached(self.d2h_waits_compute, self.h2d_waits_d2h, length))
        own = np.maximum(own, -length)
        # The lane keeps its order, the previous iteration's tasks included.
        both = np.concatenate([own - length, own], axis=1)
        reached: IntArray = np.maximum.accumulate(both, axis=1)[:, own.shape[1] :]
        return reached

    def gone_position(self, depths: IntArray) -> IntArray:
        """(D, X) the first compute position guaranteed to start after a task of D2H has ended.

        Positions are counted on into the next iteration; two iterations' length where none is sure.
        """
        num_gone, length = len(self.d2h_step), self.positions.length
        cpu = np.maximum.accumulate(self.cpu_waits_d2h)
        own = np.maximum(self.h2d_waits_d2h, _reached(cpu, self.h2d_waits_cpu, num_gone))
        both = np.maximum.accumulate(np.concatenate([own - num_gone, own]))
        h2d = np.append(both[len(own) - 1] if len(own) else NOTHING, both[len(own) :])
        steps = np.maximum(self.step_waits_d2h(depths), h2d[self.step_waits_h2d])
        last = np.full((len(depths), 1), NOTHING if self.norm_place is None else cpu[self.norm_place])
        over = np.maximum.accumulate(np.concatenate([steps, last], axis=1), axis=1)
        begins = np.append(self.positions.step_begin(np.arange(self.positions.num_steps)), self.positions.device_adam)
        places = np.concatenate([begins, begins + length, [2 * length]])
        counts = np.arange(1, num_gone + 1)
        both = np.maximum.accumulate(np.concatenate([over, over + num_gone], axis=1), axis=1)
        return np.stack([places[np.searchsorted(row, counts)] for row in both])


def _reached(reached: IntArray, waits: IntArray, per_iteration: int) -> IntArray:
    """What tasks have reached by waiting for others; ``reached``: by the end of each of these, in one iteration."""
    num_tasks = len(reached)
    if not num_tasks:
        return np.full(len(waits), NOTHING)
    iteration, place = np.divmod(np.maximum(waits, -num_tasks) - 1, num_tasks)
    is_wait: BoolArray = waits > NOTHING
    return np.where(is_wait, reached[place] + iteration * per_iteration, NOTHING)

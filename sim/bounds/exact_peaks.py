"""The guaranteed device peak of plans, exactly as ``shared/verify/guaranteed_peak.py`` finds it in their schedules."""

from __future__ import annotations

import numpy as np

from ..space.compute_table import ComputeTable
from ..space.gather_plan import GatherPlan
from ..space.side_lanes import SideLanes
from ..space.space import BoolArray, IntArray


def guaranteed_peaks(side_lanes: SideLanes, depths: IntArray, modes: IntArray, resident_bytes: int) -> IntArray:
    """(D, K) guaranteed device peaks: of every compute task, and of the pause before it.

    ``modes``: (K,) rows of the compute table, all with the ``n_swap`` of ``side_lanes``.
    """
    running, pausing = _held_bytes(side_lanes, depths, resident_bytes)
    levels, positions = side_lanes.compute.levels, side_lanes.positions
    adds = adding_positions(side_lanes.compute, side_lanes.residency)
    shape = (len(depths), positions.micro_batches, positions.micro_length)
    widened_bytes = side_lanes.residency.table.device_adam_bytes[side_lanes.residency.prefix]
    at_end = np.maximum(running[:, -1] + widened_bytes, pausing[:, -1])
    peaks: IntArray = at_end[:, None] + levels.end_bytes[modes]
    running, pausing = running[:, :-1].reshape(shape), pausing[:, :-1].reshape(shape)
    for kind in range(levels.alive_bytes.shape[1]):
        micro_batches = levels.kind == kind
        alive = levels.alive_bytes[modes, kind]
        during = running[:, micro_batches].max(axis=1)[:, None] + (alive + levels.task_peaks(kind, adds)[modes])
        before = pausing[:, micro_batches].max(axis=1)[:, None] + alive
        peaks = np.maximum(peaks, np.maximum(during, before).max(axis=2))
    return peaks


def adding_positions(compute: ComputeTable, residency: GatherPlan) -> BoolArray:
    """(W,) whether the task at each position of a later micro-batch adds all its gradients to those of an earlier one.

    Chunks that are not persistent have new gradients in every micro-batch.
    """
    table, positions = residency.table, compute.positions
    adds = np.ones(positions.micro_length, dtype=np.bool_)
    is_new = table.is_gathered(residency.prefix)[table.gradient_chunk]
    adds[positions.backward(table.gradient_block[is_new])] = False
    return adds


def _held_bytes(side_lanes: SideLanes, depths: IntArray, resident_bytes: int) -> tuple[IntArray, IntArray]:
    """(D, L) the highest level of all but activations that stay, while each task runs and in the pause before it.

    In the pause before a compute task, the source of a copy that the task waits for is still there.
    """
    held = _Held(side_lanes, depths)
    held.add_gathered()
    held.add_gradients_of_persistent()
    held.add_gradients_on_their_way()
    held.add_parts()
    held.add_swapped()
    residency, length = side_lanes.residency, side_lanes.positions.length
    # Intervals begin in one iteration and may end in the next: two were laid out, and are folded into one.
    level, leaving = held.running.table[:, :-1].cumsum(axis=1), held.pausing.table[:, :-1]  # (D, 2 L)
    static_bytes = residency.table.static_device_bytes(np.array([residency.prefix]), resident_bytes)  # (1,)
    running = level[:, :length] + level[:, length:] + static_bytes
    return running, running + leaving[:, :length] + leaving[:, length:]


class _Held:
    """Contents of the device one after another, as changes of its level.

    Shapes: D prefetch depths, L compute positions, G gathers, M micro-batches, U updates, V parts, C chunks,
    E (chunk, block) pairs with gradients.
    """

    def __init__(self, side_lanes: SideLanes, depths: IntArray) -> None:
        self._lanes = side_lanes
        self._residency = side_lanes.residency
        self._table = side_lanes.residency.table
        self._positions = side_lanes.positions
        self._order = side_lanes.order(depths)
        length = self._positions.length
        self.running = _LevelChanges(len(depths), 2 * length + 1)
        """The level while a task runs."""
        self.pausing = _LevelChanges(len(depths), 2 * length + 1)
        """What the pause before a task holds besides, at that position alone."""
        self._micro_batch = np.arange(self._positions.micro_batches)[:, None]  # (M, 1)
        table = self._table
        self._is_gathered = table.is_gathered(self._residency.prefix)[table.gradient_chunk]  # (E,)
        self._chunk_bytes = np.bincount(
            table.gradient_chunk, table.gradient_bytes, minlength=len(table.size_bytes)
        )  # (C,) gradients

    def add_gathered(self) -> None:
        """Gathered chunks, from the first moment at which their copy may begin to the end of their last step."""
        residency, positions, table = self._residency, self._positions, self._table
        buffer_bytes = table.size_bytes if table.collectives is None else table.collectives.gathered_bytes
        sizes = buffer_bytes[residency.gather_chunk]  # (G,)
        reached = self._order.fetch_position[:, self._lanes.gather_place]  # (D, gathers that copy)
        self.running.change(reached + positions.length, sizes[residency.copied])
        if self._order.all_gather_position is not None:
            self.running.change(self._order.all_gather_position + positions.length, sizes[residency.sharded])
        self.running.change(positions.step_end(residency.last_step) + positions.length + 1, -sizes)

    def add_gradients_of_persistent(self) -> None:
        """Gradients of persistent chunks: they stay until device Adam."""
        table, positions = self._table, self._positions
        stay, stay_bytes = table.gradient_block[~self._is_gathered], table.gradient_bytes[~self._is_gathered]
        self.running.change(positions.backward(stay) + 1, stay_bytes)
        self.running.change(np.full(len(stay), positions.length), -stay_bytes)

    def add_gradients_on_their_way(self) -> None:
        """Gradients of gathered chunks, made by every backward, until their copy to the host is guaranteed to be over.

        Laid flat for a collective they are there once more until they are scattered, and then the rank's own shard
        until its copy is over.
        """
        table, residency, order = self._table, self._residency, self._order
        leaves, leave_bytes = table.gradient_block[self._is_gathered], table.gradient_bytes[self._is_gathered]
        made = self._positions.backward(leaves, self._micro_batch) + 1
        self.running.change(made.ravel(), self._of_all(leave_bytes))
        update_bytes = self._chunk_bytes[residency.update_chunk].astype(np.int64)  # (U,)
        left = order.gone_position[:, self._lanes.gradient_place.ravel()]  # (D, M * U)
        if order.scatter_position is None or order.scattered_position is None:
            self.running.change(left, -self._of_all(update_bytes))
            self.pausing.change(left, self._of_all(update_bytes))
            return
        assert table.collectives is not None
        flat = self._of_all(table.collectives.reduced_bytes[residency.update_chunk])  # (M * U,) like own and whole
        own = self._of_all(table.offload_bytes[residency.update_chunk])
        whole = self._of_all(update_bytes)
        self.running.change(order.scatter_position, flat + own)
        self.running.change(order.scattered_position, -flat - whole)
        self.running.change(left, -own)
        self.pausing.change(order.scattered_position, flat + whole)
        self.pausing.change(left, own)

    def add_parts(self) -> None:
        """Gradients that are reduced to parts on the devices, and the buffers of their collectives.

        Of later micro-batches a rank's shard is there beside the part that it is added to.
        """
        table, order, parts = self._table, self._order, self._residency.part_chunk
        if order.reduce_position is None or order.reduced_position is None or not len(parts):
            return
        assert table.collectives is not None
        added = table.offload_bytes[parts] * (self._micro_batch > 0)  # (M, V)
        passing = (table.collectives.reduced_bytes[parts] + added).ravel()  # (M * V,)
        whole = self._of_all(self._chunk_bytes[parts].astype(np.int64))  # (M * V,)
        self.running.change(order.reduce_position, passing)
        self.running.change(order.reduced_position, -passing - whole)
        self.pausing.change(order.reduced_position, passing + whole)

    def add_swapped(self) -> None:
        """What blocks swap, on its way out and again from the first moment at which it may come back."""
        lanes, positions = self._lanes, self._positions
        if not len(lanes.swapped):
            return
        swapped_bytes = self._of_all(lanes.compute.swap_bytes[lanes.swapped])  # (M * swapped,)
        out = self._order.gone_position[:, lanes.out_place.ravel()]  # (D, M * swapped)
        back = np.maximum(self._order.fetch_position[:, lanes.fetch_place.ravel()], out)  # (D, M * swapped)
        forward = (positions.micro_length * self._micro_batch + 1 + lanes.swapped).ravel()
        self.running.change(forward + 1, swapped_bytes)
        self.running.change(out, -swapped_bytes)
        self.running.change(back, swapped_bytes)
        self.running.change((positions.backward(lanes.swapped, self._micro_batch) + 1).ravel(), -swapped_bytes)
        # The way back begins when the way out has ended: the two count once.
        self.pausing.change(out, np.where(back == out, 0, swapped_bytes))

    def _of_all(self, sizes: IntArray) -> IntArray:
        """(M * N,) the same (N,) sizes in every micro-batch."""
        return np.tile(sizes, len(self._micro_batch))


class _LevelChanges:
    """Changes of a level at positions, for every depth."""

    def __init__(self, num_rows: int, width: int) -> None:
        self._row_begins = np.arange(num_rows)[:, None] * width
        self._shape = (num_rows, width)
        self._places: list[IntArray] = []
        self._sizes: list[IntArray] = []

    @property
    def table(self) -> IntArray:
        """(D, width) the sum of all changes."""
        table = np.zeros(self._shape, dtype=np.int64)
        if self._places:
            np.add.at(table.reshape(-1), np.concatenate(self._places), np.concatenate(self._sizes))
        return table

    def change(self, positions: IntArray, sizes_bytes: IntArray) -> None:
        """Add ``sizes_bytes`` at ``positions``, each (D, ...) or the same for every depth."""
        flat = self._row_begins + positions
        self._places.append(flat.ravel())
        self._sizes.append(np.broadcast_to(sizes_bytes, flat.shape).ravel())

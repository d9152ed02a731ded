"""The guaranteed device peak of plans, exactly as ``shared/verify/guaranteed_peak.py`` finds it in their schedules.

Shapes: D prefetch depths, L positions of the compute lane in an iteration, M micro-batches, W positions of one of them,
G gathers of an iteration, U chunks that CPU Adam steps, K rows of activation modes.
"""

from __future__ import annotations

import numpy as np

from ..space.chunk_table import ChunkTable
from ..space.compute_table import ComputeTable
from ..space.gather_plan import GatherPlan
from ..space.side_lanes import Order, SideLanes
from ..space.space import BoolArray, IntArray


def guaranteed_peaks(side_lanes: SideLanes, depths: IntArray, modes: IntArray, resident_bytes: int) -> IntArray:
    """(D, K) guaranteed device peaks: of every compute task, and of the pause before it.

    ``modes``: (K,) rows of the compute table, all with the side_lanes's ``n_swap``.
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

    In the pause before a compute task, what has a copy that it waits for is still there.
    """
    residency, length = side_lanes.residency, side_lanes.positions.length
    order = side_lanes.order(depths)
    # Intervals begin in one iteration and may end in the next: two are laid out, and folded into one at the end.
    running, pausing = _Changes(len(depths), 2 * length + 1), _Changes(len(depths), 2 * length + 1)
    _add_gathers(running, side_lanes, order)
    _add_whole_gradients(running, side_lanes)
    _add_offloads(running, pausing, side_lanes, order)
    _add_reductions(running, pausing, side_lanes, order)
    _add_swapped(running, pausing, side_lanes, order)
    level, leaving = running.table[:, :-1].cumsum(axis=1), pausing.table[:, :-1]  # (D, 2 L) each
    static_bytes = residency.table.static_device_bytes(np.array([residency.prefix]), resident_bytes)
    held = level[:, :length] + level[:, length:] + static_bytes
    return held, held + leaving[:, :length] + leaving[:, length:]


def _add_gathers(running: _Changes, side_lanes: SideLanes, order: Order) -> None:
    """Chunks from the position at which room is made for them until their last use."""
    residency, positions = side_lanes.residency, side_lanes.positions
    table, length = residency.table, positions.length
    buffer_bytes = table.size_bytes if table.collectives is None else table.collectives.gathered_bytes
    sizes = buffer_bytes[residency.gather_chunk]  # (G,)
    running.change(order.fetch_position[:, side_lanes.gather_place] + length, sizes[residency.copied])
    if order.all_gather_position is not None:
        running.change(order.all_gather_position + length, sizes[residency.sharded])
    running.change(positions.step_end(residency.last_step) + length + 1, -sizes)


def _add_whole_gradients(running: _Changes, side_lanes: SideLanes) -> None:
    """Gradients of a block from its backward on: persistent chunks' until the end, others' until they are taken away.

    Whatever takes them away subtracts them (``_add_offloads``, ``_add_reductions``).
    """
    residency, positions = side_lanes.residency, side_lanes.positions
    table, micro_batch = residency.table, _micro_batches(side_lanes)
    is_new = table.is_gathered(residency.prefix)[table.gradient_chunk]  # one per gradient of a chunk in a block
    stay, stay_bytes = table.gradient_block[~is_new], table.gradient_bytes[~is_new]
    running.change(positions.backward(stay) + 1, stay_bytes)
    running.change(np.full(len(stay), positions.length), -stay_bytes)
    leaves, leave_bytes = table.gradient_block[is_new], table.gradient_bytes[is_new]
    running.change((positions.backward(leaves, micro_batch) + 1).ravel(), np.tile(leave_bytes, len(micro_batch)))


def _add_offloads(running: _Changes, pausing: _Changes, side_lanes: SideLanes, order: Order) -> None:
    """Gradients of offloaded chunks go with their copy; where ranks share chunks, they are scattered before."""
    residency, table = side_lanes.residency, side_lanes.residency.table
    num_micro_batches = side_lanes.positions.micro_batches
    update_bytes = _gradient_bytes(table)[residency.update_chunk]  # (U,)
    left = order.gone_position[:, side_lanes.gradient_place.ravel()]  # (D, M U), as all that follows
    whole = np.tile(update_bytes, num_micro_batches)
    if order.scatter_position is None or order.scattered_position is None:
        running.change(left, -whole)
        pausing.change(left, whole)
        return
    # Laid flat they are there once more until they are scattered, and then the rank's own shard until it is gone.
    assert table.collectives is not None
    flat = np.tile(table.collectives.reduced_bytes[residency.update_chunk], num_micro_batches)
    own = np.tile(table.offload_bytes[residency.update_chunk], num_micro_batches)
    running.change(order.scatter_position, flat + own)
    running.change(order.scattered_position, -flat - whole)
    running.change(left, -own)
    pausing.change(order.scattered_position, flat + whole)
    pausing.change(left, own)


def _add_reductions(running: _Changes, pausing: _Changes, side_lanes: SideLanes, order: Order) -> None:
    """Gradients of chunks that are sharded over devices go when they are reduced to each rank's shard."""
    table, parts = side_lanes.residency.table, side_lanes.residency.part_chunk  # (S,) sharded chunks with gradients
    if order.reduce_position is None or order.reduced_position is None or not len(parts):
        return
    assert table.collectives is not None
    micro_batch = _micro_batches(side_lanes)
    # Of later micro-batches a rank's shard is there beside the part that it is added to.
    added = table.offload_bytes[parts] * (micro_batch > 0)  # (M, S)
    passing = (table.collectives.reduced_bytes[parts] + added).ravel()
    whole = np.tile(_gradient_bytes(table)[parts], len(micro_batch))
    running.change(order.reduce_position, passing)
    running.change(order.reduced_position, -passing - whole)
    pausing.change(order.reduced_position, passing + whole)


def _add_swapped(running: _Changes, pausing: _Changes, side_lanes: SideLanes, order: Order) -> None:
    """What blocks swap: from their forward until it is out, and from its way back until their backward."""
    if not len(side_lanes.swapped):
        return
    positions, micro_batch = side_lanes.positions, _micro_batches(side_lanes)
    swapped_bytes = np.tile(side_lanes.compute.swap_bytes[side_lanes.swapped], len(micro_batch))
    out = order.gone_position[:, side_lanes.out_place.ravel()]  # (D, M swapped)
    back = np.maximum(order.fetch_position[:, side_lanes.fetch_place.ravel()], out)  # (D, M swapped)
    forward = (positions.micro_length * micro_batch + 1 + side_lanes.swapped).ravel()
    running.change(forward + 1, swapped_bytes)
    running.change(out, -swapped_bytes)
    running.change(back, swapped_bytes)
    running.change((positions.backward(side_lanes.swapped, micro_batch) + 1).ravel(), -swapped_bytes)
    # The way back begins when the way out has ended: the two count once.
    pausing.change(out, np.where(back == out, 0, swapped_bytes))


def _micro_batches(side_lanes: SideLanes) -> IntArray:
    """(M, 1) their numbers."""
    numbers: IntArray = np.arange(side_lanes.positions.micro_batches)[:, None]
    return numbers


def _gradient_bytes(table: ChunkTable) -> IntArray:
    """(C,) bytes of a chunk's gradients in all of its blocks."""
    sums = np.bincount(table.gradient_chunk, table.gradient_bytes, minlength=len(table.size_bytes))
    sizes: IntArray = sums.astype(np.int64)
    return sizes


class _Changes:
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

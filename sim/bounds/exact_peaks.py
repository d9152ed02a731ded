"""The guaranteed device peak of plans, exactly as ``shared/verify/guaranteed_peak.py`` finds it in their schedules."""

from __future__ import annotations

import numpy as np

from ..space.compute_table import ComputeTable
from ..space.gather_plan import GatherPlan
from ..space.side_lanes import SideLanes
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
    residency, positions = side_lanes.residency, side_lanes.positions
    table, length = residency.table, positions.length
    # Intervals begin in one iteration and may end in the next: two are laid out, and folded into one at the end.
    book = _Book(len(depths), 2 * length + 1)
    order = side_lanes.order(depths)
    reached, gone = order.fetch_position, order.gone_position
    buffer_bytes = table.size_bytes if table.collectives is None else table.collectives.gathered_bytes
    sizes = buffer_bytes[residency.gather_chunk]
    book.change(reached[:, side_lanes.gather_place] + length, sizes[residency.copied])
    if order.all_gather_position is not None:
        book.change(order.all_gather_position + length, sizes[residency.sharded])
    book.change(positions.step_end(residency.last_step) + length + 1, -sizes)

    is_new = table.is_gathered(residency.prefix)[table.gradient_chunk]
    stay, stay_bytes = table.gradient_block[~is_new], table.gradient_bytes[~is_new]
    book.change(positions.backward(stay) + 1, stay_bytes)
    book.change(np.full(len(stay), length), -stay_bytes)
    micro_batch = np.arange(positions.micro_batches)[:, None]
    leaves, leave_bytes = table.gradient_block[is_new], table.gradient_bytes[is_new]
    book.change((positions.backward(leaves, micro_batch) + 1).ravel(), np.tile(leave_bytes, len(micro_batch)))
    chunk_bytes = np.bincount(table.gradient_chunk, table.gradient_bytes, minlength=len(table.size_bytes))
    update_bytes = chunk_bytes[residency.update_chunk].astype(np.int64)
    left = gone[:, side_lanes.gradient_place.ravel()]
    pausing = _Book(len(depths), 2 * length + 1)
    if order.scatter_position is None or order.scattered_position is None:
        book.change(left, -np.tile(update_bytes, len(micro_batch)))
        pausing.change(left, np.tile(update_bytes, len(micro_batch)))
    else:
        # Laid flat they are there once more until they are scattered, and then the rank's own shard until it is gone.
        assert table.collectives is not None
        scatter, scattered = order.scatter_position, order.scattered_position
        flat, own = (sizes[residency.update_chunk] for sizes in (table.collectives.reduced_bytes, table.offload_bytes))
        flat, own, whole = (np.tile(sizes, len(micro_batch)) for sizes in (flat, own, update_bytes))
        book.change(scatter, flat + own)
        book.change(scattered, -flat - whole)
        book.change(left, -own)
        pausing.change(scattered, flat + whole)
        pausing.change(left, own)
    if order.reduce_position is not None and order.reduced_position is not None and len(residency.part_chunk):
        # Of later micro-batches a rank's shard is there beside the part that it is added to.
        assert table.collectives is not None
        parts = residency.part_chunk
        added = table.offload_bytes[parts] * (micro_batch > 0)
        passing = (table.collectives.reduced_bytes[parts] + added).ravel()
        whole = np.tile(chunk_bytes[parts].astype(np.int64), len(micro_batch))
        book.change(order.reduce_position, passing)
        book.change(order.reduced_position, -passing - whole)
        pausing.change(order.reduced_position, passing + whole)

    if len(side_lanes.swapped):
        swapped_bytes = np.tile(side_lanes.compute.swap_bytes[side_lanes.swapped], len(micro_batch))
        out = gone[:, side_lanes.out_place.ravel()]
        back = np.maximum(reached[:, side_lanes.fetch_place.ravel()], out)
        forward = (positions.micro_length * micro_batch + 1 + side_lanes.swapped).ravel()
        book.change(forward + 1, swapped_bytes)
        book.change(out, -swapped_bytes)
        book.change(back, swapped_bytes)
        book.change((positions.backward(side_lanes.swapped, micro_batch) + 1).ravel(), -swapped_bytes)
        # The way back begins when the way out has ended: the two count once.
        pausing.change(out, np.where(back == out, 0, swapped_bytes))
    level, leaving = book.table[:, :-1].cumsum(axis=1), pausing.table[:, :-1]
    static_bytes = table.static_device_bytes(np.array([residency.prefix]), resident_bytes)
    running = level[:, :length] + level[:, length:] + static_bytes
    return running, running + leaving[:, :length] + leaving[:, length:]


class _Book:
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

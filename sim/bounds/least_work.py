"""The work that every lane does at least in an iteration, for all persistent chunks of a layout at once."""

from __future__ import annotations

import numpy as np

from ..space.chunk_table import ChunkTable
from ..space.compute_table import ComputeTable
from ..space.prices import FloatArray
from ..space.space import IntArray
from .throughput import Throughput

_BOUND_FRAC = 1 - 1e-5
"""Covers what the simulator tolerates as periodic, and rounding."""


class LeastWork:
    """Shapes: P prefixes, F of them, K rows of activation modes, L lanes in the order of ``Lane``."""

    def __init__(self, table: ChunkTable, compute: ComputeTable, throughput: Throughput) -> None:
        step, places = table.step, table.places
        micro_batches = step.micro_batches
        stepped = table.is_stepped
        self._throughput = throughput
        self._compute = compute
        self._compute_s = micro_batches * compute.seconds.sum(axis=1)  # (K,)
        self._adam_s = table.device_adam_s  # (P,)
        swap_out_s, swap_in_s = (np.append(0.0, of.cumsum()) for of in (compute.swap_out_s, compute.swap_in_s))
        self._swap_s = micro_batches * np.stack([swap_in_s, swap_out_s])  # (2, n + 1)
        # Every chunk that is offloaded comes once at least; its gradients leave in every micro-batch.
        cpu_s = table.cpu_adam_s + (micro_batches - 1) * table.accumulate_s
        lanes = [
            places.offloaded_sum(table.gather_s),
            micro_batches * places.offloaded_sum(np.where(stepped, table.offload_s, 0.0)),
            places.offloaded_sum(np.where(stepped, cpu_s, 0.0)) + table.norm_s,
        ]
        collectives = table.collectives
        if collectives is not None:
            leaving_s = micro_batches * np.where(stepped, collectives.leave_s, 0.0)
            gathered_s = places.offloaded_sum(leaving_s) + places.sharded_sum(leaving_s)
            brought_s = places.offloaded_sum(collectives.gather_s) + places.sharded_sum(collectives.gather_s)
            staying_s = places.persistent_sum(np.where(stepped, collectives.stay_s, 0.0))
            lanes.append(gathered_s + brought_s + staying_s)
        self._lanes_s = np.stack(lanes, axis=1)
        """(P, L - 1) of the lanes beside compute, without what blocks swap."""

    def period_s(self, prefixes: IntArray, modes: IntArray) -> FloatArray:
        """(F, K) no plan with these prefixes and rows of modes, all with the same blocks swapped, takes less."""
        lanes_s = self._lanes_s[prefixes].copy()
        lanes_s[:, :2] += self._swap_s[:, self._compute.modes.n_swap[modes[0]]]
        compute_s = self._compute_s[modes] + self._adam_s[prefixes, None]
        weights = self._throughput.weights
        others_s = lanes_s @ weights[:, 1:].T
        least_s = np.repeat(others_s.max(axis=1)[:, None], len(modes), axis=1)
        for vertex in np.flatnonzero(weights[:, 0]):
            np.maximum(least_s, weights[vertex, 0] * compute_s + others_s[:, vertex, None], out=least_s)
        return least_s * _BOUND_FRAC


class NoLeastWork:
    """Of plans whose policies are not known."""

    def period_s(self, prefixes: IntArray, modes: IntArray) -> FloatArray:
        """(F, K) nothing."""
        return np.zeros((len(prefixes), len(modes)))

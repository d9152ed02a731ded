"""The work that every lane does at least in an iteration, for all residencies of a layout's chunks at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from ...shared.drafts.program import Work
from ...shared.layout.residencies import GATHERED, STEPPED_BY_HOST, ChunkResidency
from ...shared.schema.plan import ProjectionPlace
from ...shared.schema.schedule import TaskKind
from ..space.chunk_table import ChunkTable
from ..space.compute_table import ComputeTable
from ..space.prices import FloatArray, PriceList
from ..space.space import BoolArray, IntArray
from .throughput import Throughput

_READING: Final = (TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.TEACHER_FORWARD)
"""What may begin a step, and so be the first to read its chunks."""
BOUND_FRAC = 1 - 1e-5
"""Covers what the simulator tolerates as periodic, and rounding."""


class LeastWork:
    """Shapes: P prefixes, F of them, K rows of activation modes, L lanes in the order of ``lanes_of``."""

    def __init__(self, table: ChunkTable, compute: ComputeTable, throughput: Throughput) -> None:
        step, sum_of, facts = table.step, table.places.sum_of, table.facts
        micro_batches = step.micro_batches
        self._throughput = throughput
        self._compute = compute
        self._micro_batches = micro_batches
        self._compute_s = micro_batches * compute.seconds.sum(axis=1)  # (K,)
        self._once_s: FloatArray = table.device_adam_s + _arrivals_s(table, compute.prices)
        """(P,) of compute beside the tasks of sections alone."""

        def alone_s(kind: TaskKind, work: Work) -> FloatArray:
            """(C,) of a task of every chunk."""
            return compute.prices.seconds(kind, work)[:-1]

        def stepped_s(kind: TaskKind, work: Work) -> FloatArray:
            """(C,) the same, of chunks that something steps."""
            return np.where(facts.is_trainable, alone_s(kind, work), 0.0)

        # What the host steps comes once at least; gradients leave in every micro-batch, or when they are added up.
        sums_s = (facts.num_offloads - 1) * stepped_s(TaskKind.GRADIENT_ACCUMULATE, facts.accumulate_work)
        if step.knobs.widens:
            sums_s += stepped_s(TaskKind.GRADIENT_ACCUMULATE, facts.widen_work)
        cpu_s = stepped_s(TaskKind.CPU_ADAM, facts.cpu_adam_work) + sums_s
        cpu_s, projected_s = cpu_s + _projected_s(table, alone_s, on_host=True), _projected_s(table, alone_s)
        self._once_s = self._once_s + sum_of(projected_s, *STEPPED_BY_HOST)
        lanes = [
            sum_of(alone_s(TaskKind.GATHER, facts.gather_work), *STEPPED_BY_HOST),
            sum_of(facts.num_offloads * stepped_s(TaskKind.GRADIENT_OFFLOAD, facts.offload_work), *STEPPED_BY_HOST),
            sum_of(cpu_s, *STEPPED_BY_HOST) + table.norm_s,
        ]
        if step.num_ranks * compute.workload.num_stages > 1:
            lanes.append(_together_s(table, compute) + micro_batches * _exchanged_s(compute))
        if table.has_disk:
            lanes.append(_disk_s(table, compute.prices))
        self._lanes_s = np.stack(lanes, axis=1)
        """(P, L - 1) of the lanes beside compute, without what blocks swap."""

    def period_s(self, prefixes: IntArray, modes: IntArray) -> FloatArray:
        """(F, K) no plan with these prefixes and rows of modes, all with the same trips, takes less."""
        lanes_s = self._lanes_s[prefixes].copy()
        lanes_s[:, :2] += self._micro_batches * self._compute.trip_s(self._compute.modes.trips[modes[0]])
        compute_s = self._compute_s[modes] + self._once_s[prefixes, None]
        weights = self._throughput.weights
        others_s = lanes_s @ weights[:, 1:].T
        least_s = np.repeat(others_s.max(axis=1)[:, None], len(modes), axis=1)
        for vertex in np.flatnonzero(weights[:, 0]):
            np.maximum(least_s, weights[vertex, 0] * compute_s + others_s[:, vertex, None], out=least_s)
        return least_s * BOUND_FRAC


def _projected_s(
    table: ChunkTable, alone_s: Callable[[TaskKind, Work], FloatArray], *, on_host: bool = False
) -> FloatArray:
    """(C,) seconds of projections of chunks that the host steps, on the host or on the device."""
    facts, is_on_device = table.facts, table.step.projects_gradients_on is ProjectionPlace.DEVICE
    found = np.zeros(len(facts.size_bytes))
    if facts.has_subspaces.any():
        if on_host:
            found = found + alone_s(TaskKind.HOST_PARAMETER_PROJECTION, facts.parameter_projections[0])
        if on_host and not is_on_device:
            found = found + alone_s(TaskKind.HOST_GRADIENT_PROJECTION, facts.host_gradient_projections[0])
        if is_on_device and not on_host:
            found = found + alone_s(TaskKind.GRADIENT_PROJECTION, facts.gradient_projections[0])
    return np.where(facts.has_subspaces, found, 0.0)


def _arrivals_s(table: ChunkTable, prices: PriceList) -> FloatArray:
    """(P,) the least that compute pays for chunks that come: each once, for the task that pays least by the byte.

    Chunks in buffers come for one stay at least, and new values of those that the host steps once.
    """
    rate = min(map(prices.arrival_s_per_byte, _READING))
    facts, coming = table.facts, (*GATHERED, ChunkResidency.HOST_STEPPED)
    is_read = np.isin(np.arange(len(facts.size_bytes)), facts.uses[1])
    arrived_bytes = np.minimum(facts.part("gathered_bytes"), facts.size_bytes)
    return table.places.sum_of(np.where(is_read, rate * arrived_bytes, 0.0), *coming)


def _together_s(table: ChunkTable, compute: ComputeTable) -> FloatArray:
    """(P,) seconds of collectives."""
    step, sum_of, facts = table.step, table.places.sum_of, table.facts
    if step.num_ranks == 1:
        return sum_of(np.zeros(len(facts.size_bytes)), *GATHERED)

    def alone_s(kind: TaskKind, work: Work) -> FloatArray:
        return compute.prices.seconds(kind, work)[:-1]

    def stepped_s(kind: TaskKind, work: Work) -> FloatArray:
        return np.where(facts.is_trainable, alone_s(kind, work), 0.0)

    summed_s = stepped_s(TaskKind.ALL_REDUCE, facts.all_reduce_work)
    leaving_s, brought_s = summed_s, np.zeros_like(summed_s)
    if step.knobs.is_sharded:
        leaving_s = stepped_s(TaskKind.REDUCE_SCATTER, facts.scatter_work)
        brought_s = alone_s(TaskKind.ALL_GATHER, facts.all_gather_work)
    replicated_s = np.zeros_like(summed_s)
    if step.shard_ranks is not None:
        replicated_s = stepped_s(TaskKind.ALL_REDUCE, facts.replica_work)
    # What leaves is added up as often as it does, parts of it over shard groups too; what stays, once.
    return (
        sum_of(step.micro_batches * leaving_s, ChunkResidency.SHARDED)
        + sum_of(facts.num_offloads * leaving_s, *STEPPED_BY_HOST)
        + sum_of(step.micro_batches * replicated_s, *STEPPED_BY_HOST)
        + sum_of(replicated_s, ChunkResidency.SHARDED)
        + sum_of(brought_s, *GATHERED)
        + sum_of(summed_s, ChunkResidency.PERSISTENT)
    )


def _exchanged_s(compute: ComputeTable) -> float:
    """Seconds of what a stage of a pipeline receives and sends in a micro-batch."""
    stage = compute.workload.stage
    exchanged = {} if stage is None else {TaskKind.RECEIVE: stage.receives_bytes, TaskKind.SEND: stage.sends_bytes}
    prices = compute.prices
    return sum(
        float(prices.seconds(kind, Work(moved_bytes=moved_bytes, num_ranks=2))[0])
        for kind, moved_bytes in exchanged.items()
        if moved_bytes
    )


def _disk_s(table: ChunkTable, prices: PriceList) -> FloatArray:
    """(P,) seconds of reads and writes: what is stepped comes and goes once, parameters come for one stay at least."""
    facts, places = table.facts, table.places
    parameters, state = facts.part("parameter_bytes"), facts.part("state_bytes")

    def sums_s(moved_bytes: IntArray, *kinds: TaskKind, of: BoolArray | None = None) -> FloatArray:
        """(C + 1,) of the last chunks, by their number."""
        work = Work(moved_bytes=moved_bytes)
        alone_s = sum(prices.seconds(kind, work)[:-1] for kind in kinds)
        return np.append(0.0, np.where(True if of is None else of, alone_s, 0.0)[::-1].cumsum())

    both = (TaskKind.DISK_READ, TaskKind.DISK_WRITE)
    state_s = sums_s(state, *both, of=facts.is_trainable)
    whole_s = sums_s(parameters + state, *both, of=facts.is_trainable)
    read_s = sums_s(parameters, TaskKind.DISK_READ)
    of_state, of_parameters = places.on_disk[:, 0], places.on_disk[:, 1]
    found: FloatArray = state_s[of_state] + (whole_s - state_s + read_s)[of_parameters]
    return found


class NoLeastWork:
    """Of plans whose chunks may come and go in other ways."""

    def period_s(self, prefixes: IntArray, modes: IntArray) -> FloatArray:
        """(F, K) nothing."""
        return np.zeros((len(prefixes), len(modes)))

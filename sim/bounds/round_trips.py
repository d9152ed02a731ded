"""Lower bounds by what must go to the host and be back in time, for all residencies of a layout's chunks at once.

[Note: Round trips]
``LeastWork`` adds up what every lane does, as if all lanes were busy from the first second to the last.  But some work
waits for other work, and the moments at which it may begin and must have ended follow each other.

*A chunk that the host steps.*  Take the chunk x whose CPU Adam is the last one (of a step without limit of the norm),
and let an iteration count from the first forward that needs x.  The host has stepped every chunk by then.  It has
nothing to step until the backward ends that completes the first gradients; all of CPU Adam comes behind that, and the
next gather of x behind all of CPU Adam.  So two stretches follow each other, one of compute alone and one with all
that the host steps.  With a limit of the norm, all gradients come first, then the norm, then CPU Adam in the order in
which chunks are needed: then x may be any chunk, and the first and the last of them are taken.

*Blocks that swap.*  What they save leaves behind their forwards, and must have left before the step ``prefetch_depth``
+ 1 after the last of these begins.  It comes back when the step ``prefetch_depth`` + 1 before the first of their
backwards has ended, and before the last of these.  Copies that take longer than the compute of these stretches make
them longer.

All stretches begin and end with steps of compute, follow each other, and end where they begin, an iteration later: so
their least times ([Note: Throughput bound]) add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from ...shared.layout.positions import Positions
from ...shared.layout.residencies import STEPPED_BY_HOST
from ...shared.schema.schedule import TaskKind
from ..space.chunk_table import ChunkTable
from ..space.compute_table import ComputeTable
from ..space.prices import FloatArray
from ..space.space import BoolArray, IntArray
from .least_work import BOUND_FRAC, LeastWork
from .throughput import Throughput

_COMPUTE, _TO_DEVICE, _TO_HOST, _CPU = range(4)


@dataclass(frozen=True, eq=False)
class _Trip:
    """A chunk's way from a forward to the next one, under every prefix; all (P,)."""

    is_there: BoolArray
    """Whether the host steps any chunk."""
    section: IntArray
    """The section whose forward needs it first."""
    from_section: IntArray
    """The section with whose last backward the second stretch begins."""
    cpu_s: FloatArray
    """What the host steps in the second stretch."""
    to_host_s: FloatArray
    """Gradients that leave there."""
    to_device_s: FloatArray
    """The chunk's gather."""
    waiting_s: FloatArray
    """The copy that comes before the first and the gather that comes behind the last of ``cpu_s``."""


class RoundTrips(LeastWork):
    """Shapes: P prefixes, F of them, K rows of activation modes, W positions of a micro-batch.

    ``deepest``: the most look-ahead of the plans.
    """

    def __init__(self, table: ChunkTable, compute: ComputeTable, throughput: Throughput, deepest: int) -> None:
        super().__init__(table, compute, throughput)
        self._modes, self._ahead = compute.modes, deepest + 1
        self._copies = [_Copies.of(compute, tiling, throughput) for tiling in range(len(compute.workloads))]
        """(T,)"""
        self._weights = throughput.weights
        self._positions, self._micro_batches = compute.positions, table.step.micro_batches
        self._until_s = np.concatenate([np.zeros((len(compute.seconds), 1)), compute.seconds.cumsum(axis=1)], axis=1)
        """(K, W + 1) of compute before each position."""
        self._device_adam_s = table.device_adam_s  # (P,)
        self._trips = _trips(table, compute)

    def period_s(self, prefixes: IntArray, modes: IntArray) -> FloatArray:
        """(F, K) no plan with these prefixes and rows of modes, all with the same blocks swapped, takes less."""
        until_s = self._until_s[modes]
        trips = self._modes.trips[modes[0]]
        swaps = self._copies[trips.tiling].windows(trips.n_swap, self._ahead, self._positions, until_s)
        least_s = self._micro_batches * (until_s[:, -1] + swaps.beyond_s) + self._once_s[prefixes, None]
        for trip in self._trips:
            least_s = np.maximum(least_s, self._trip_s(trip, prefixes, until_s, swaps))
        sharper_s: FloatArray = np.maximum(least_s * BOUND_FRAC, super().period_s(prefixes, modes))
        return sharper_s

    def _trip_s(self, trip: _Trip, prefixes: IntArray, until_s: FloatArray, swaps: _Windows) -> FloatArray:
        """(F, K) by one chunk's trip; 0 where there is none."""
        positions = self._positions
        section, from_section = trip.section[prefixes], trip.from_section[prefixes]
        begins = positions.backward_step(from_section)
        before_s = until_s[:, section].T
        after_s = until_s[:, -1:].T - until_s[:, positions.backward(from_section) + 1].T
        # First stretch: from the forward that needs the chunk to the backward that lets the host begin.
        first_s = self._micro_batches * until_s[:, -1] - before_s - after_s
        first_s += (self._micro_batches - 1) * swaps.beyond_s
        first_s += np.where((swaps.out_before <= begins)[:, None], swaps.out_beyond_s(section), 0.0)
        # Second stretch: what is left of compute, and all that the host does.
        work_s = np.zeros((*first_s.shape, self._weights.shape[1]))
        work_s[:, :, _COMPUTE] = before_s + after_s + self._device_adam_s[prefixes, None]
        back_s = np.where(swaps.is_apart & (begins <= swaps.back_after), swaps.in_s, 0.0)
        work_s[:, :, _TO_DEVICE] = (trip.to_device_s[prefixes] + back_s)[:, None]
        work_s[:, :, _TO_HOST] = trip.to_host_s[prefixes, None]
        work_s[:, :, _CPU] = trip.cpu_s[prefixes, None]
        second_s = (work_s @ self._weights.T).max(axis=2)
        second_s = np.maximum(second_s, (trip.cpu_s + trip.waiting_s)[prefixes, None])
        return np.where(trip.is_there[prefixes, None], first_s + second_s, 0.0)


@dataclass(frozen=True, eq=False)
class _Copies:
    """What blocks swap.  n blocks, V vertices, L lanes."""

    weights: FloatArray
    """(V, L)"""
    swap_bytes: IntArray
    """(n,)"""
    out_until_s: FloatArray
    """(n + 1,) of the ways out of the first so many blocks."""
    in_until_s: FloatArray
    """(n + 1,) of the ways back."""

    @classmethod
    def of(cls, compute: ComputeTable, tiling: int, throughput: Throughput) -> Self:
        copies_s = compute.swap_out_s[tiling], compute.swap_in_s[tiling]
        out_s, in_s = (np.append(0.0, of.cumsum()) for of in copies_s)
        return cls(throughput.weights, compute.swap_bytes[tiling], out_s, in_s)

    def windows(self, n_swap: int, ahead: int, positions: Positions, until_s: FloatArray) -> _Windows:
        """When the first ``n_swap`` blocks swap, with ``ahead`` steps between a forward and the end of its copy."""
        moving = np.flatnonzero(self.swap_bytes[:n_swap] > 0) + 1
        first, last = (int(moving[0]), int(moving[-1])) if len(moving) else (0, 0)
        out_before, back_after = last + ahead, positions.micro_steps - 1 - last - ahead
        is_apart = last > 0 and out_before <= back_after
        return _Windows(self, positions, until_s, first, last, out_before, back_after, is_apart)


@dataclass(frozen=True, eq=False)
class _Windows:
    """When the blocks of a micro-batch swap; sections as in ``Positions``.  Shapes: K rows of modes, F sections."""

    copies: _Copies
    positions: Positions
    until_s: FloatArray
    """(K, W + 1) of compute before each position."""
    first: int
    """Section of the first block that moves anything; 0 if none does."""
    last: int
    """Of the last one."""
    out_before: int
    """The step before which all has left."""
    back_after: int
    """The step behind which all comes back."""
    is_apart: bool
    """Whether all has left before anything comes back, whatever the timing; otherwise nothing is known."""

    @property
    def in_s(self) -> float:
        """Of all ways back."""
        return float(self.copies.in_until_s[self.last])

    @cached_property
    def beyond_s(self) -> FloatArray:
        """(K,) by how much copies lengthen a micro-batch."""
        if not self.is_apart:
            return np.zeros(len(self.until_s))
        begin = self.positions.step_end(np.array([self.back_after])) + 1
        end = self.positions.step_begin(np.array([self.positions.micro_steps - 1 - self.first]))
        beyond_s: FloatArray = self._beyond_s(begin, end, _TO_DEVICE, np.array([self.in_s]))[0]
        beyond_s += self.out_beyond_s(np.ones(1, dtype=np.int64))[0]
        return beyond_s

    def out_beyond_s(self, sections: IntArray) -> FloatArray:
        """(F, K) by how much what leaves lengthens what follows the forward of each of ``sections``."""
        if not self.is_apart:
            return np.zeros((len(sections), len(self.until_s)))
        first, out_s = np.clip(sections, self.first, self.last), self.copies.out_until_s
        copies_s = np.where(sections > self.last, 0.0, out_s[self.last] - out_s[first - 1])
        end = np.broadcast_to(self.positions.step_begin(np.array([self.out_before])), first.shape)
        return self._beyond_s(first + 1, end, _TO_HOST, copies_s)

    def _beyond_s(self, begin: IntArray, end: IntArray, lane: int, copies_s: FloatArray) -> FloatArray:
        """(F, K) by how much copies make stretches longer than their compute, from positions to before others."""
        compute_s = (self.until_s[:, end] - self.until_s[:, begin]).T
        weights = self.copies.weights
        work_s = compute_s[..., None] * weights[:, _COMPUTE] + (copies_s[:, None] * weights[:, lane])[:, None]
        beyond_s: FloatArray = np.maximum(work_s.max(axis=2) - compute_s, 0.0)
        return beyond_s


def _trips(table: ChunkTable, compute: ComputeTable) -> list[_Trip]:
    """Round trips of a chunk that the host steps last, and under a limit of the norm of one that it steps first."""
    facts, layout = table.facts, table.layout
    order, limits_norm = facts.update_order, table.step.knobs.limits_norm
    steps = order if not limits_norm else np.sort(order)
    num_chunks = len(layout.chunks)

    def alone_s(kind: TaskKind) -> FloatArray:
        """(C,) of a task of every chunk."""
        work = {
            TaskKind.CPU_ADAM: facts.cpu_adam_work,
            TaskKind.GRADIENT_OFFLOAD: facts.offload_work,
            TaskKind.GATHER: facts.gather_work,
        }
        return compute.prices.seconds(kind, work[kind])[:-1]

    adam_s = np.where(facts.is_trainable, alone_s(TaskKind.CPU_ADAM), 0.0)
    offload_s = np.where(facts.is_trainable, alone_s(TaskKind.GRADIENT_OFFLOAD), 0.0)
    gather_s = alone_s(TaskKind.GATHER)
    forward = np.array([min(chunk.forward, default=-1) for chunk in layout.chunks])
    on_host = np.zeros((len(table.places.counts), num_chunks), dtype=np.bool_)
    for prefix in table.places.all:
        on_host[prefix] = table.is_any_of(int(prefix), *STEPPED_BY_HOST)
    completed = _ends_of(on_host, order)
    stepped = _ends_of(on_host, steps)
    adams_s: FloatArray = table.places.sum_of(adam_s, *STEPPED_BY_HOST)
    offloads_s: FloatArray = table.places.sum_of(offload_s, *STEPPED_BY_HOST)
    any_there = on_host[:, order].any(axis=1)

    def trip(chunk: IntArray, begins: IntArray, cpu_s: FloatArray, to_host_s: FloatArray) -> _Trip:
        return _Trip(
            is_there=any_there & (forward[chunk] >= 0),
            section=np.maximum(forward[chunk], 0),
            from_section=np.where(any_there, facts.completed_by[begins], 0),
            cpu_s=cpu_s,
            to_host_s=to_host_s,
            to_device_s=gather_s[chunk],
            waiting_s=offload_s[begins] + gather_s[chunk],
        )

    first, last = stepped
    if not limits_norm:
        return [trip(last, completed[0], adams_s, offloads_s)]
    begins = completed[1]
    only_s = offload_s[begins]
    return [
        trip(last, begins, table.norm_s + adams_s, only_s),
        trip(first, begins, table.norm_s + adam_s[first], only_s),
    ]


def _ends_of(is_among: BoolArray, order: IntArray) -> tuple[IntArray, IntArray]:
    """(P,) the first chunk of ``order`` that is among those of each prefix, and the last; 0 where none is."""
    if not len(order):
        return np.zeros(len(is_among), dtype=np.int64), np.zeros(len(is_among), dtype=np.int64)
    found = is_among[:, order]
    first: IntArray = order[found.argmax(axis=1)]
    last: IntArray = order[len(order) - 1 - found[:, ::-1].argmax(axis=1)]
    return first, last

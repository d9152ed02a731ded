"""A family of plans: all that differ in prefetch depth and in which of the other blocks are checkpointed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from ..drafts.program import BoolArray, IntArray, Work
from ..layout.layout import Layout
from ..layout.residencies import GATHERED, STEPPED_BY_HOST, ChunkResidency, residencies
from ..layout.travelling_inputs import input_bytes
from ..schema.plan import ActivationMode, Plan, ProjectionPlace
from ..schema.workload import Workload
from .chunk_facts import ChunkFacts, StepKnobs

Kept = TypeVar("Kept")


@dataclass(frozen=True, eq=False)
class Family:
    """Plans that share all but the prefetch depth and which blocks are checkpointed.

    Shapes: D depths, K choices of modes, n blocks, C chunks.  Everything about one of its plans follows from the
    family, a depth and a row.
    """

    workload: Workload
    facts: ChunkFacts
    residency: IntArray
    """(C,) each chunk's, as the numbers of ``ChunkResidency``; those that the host steps are trainable or offloaded."""
    n_buffer: int
    is_swap: BoolArray
    """(n,) blocks in mode SWAP."""
    offloads_input: BoolArray
    """(n,) blocks in mode OFFLOAD_INPUT; all choices of modes recompute them."""
    is_checkpoint: BoolArray
    """(K, n) blocks that are recomputed, in mode CHECKPOINT or OFFLOAD_INPUT."""
    depths: IntArray
    """(D,) prefetch depths."""
    num_disk_state: int = 0
    """The last chunks, whose optimizer state is on the disk; all are offloaded."""
    num_disk: int = 0
    """The last of these, whose parameters are there too."""
    num_staging: int = 0
    """Places in host memory that they share, of each sort."""

    @property
    def step(self) -> StepKnobs:
        """What its plans say about the step."""
        return self.facts.step

    @property
    def layout(self) -> Layout:
        """Its chunks."""
        return self.facts.layout

    def once(self, make: Callable[[Workload], Kept]) -> Kept:
        """What ``make`` gives of the workload; made once for all families of the layout."""
        key = (make, id(self.workload))
        if key not in self.layout.derived:
            # The workload is kept, so that nothing else gets its ``id``.
            self.layout.derived[key] = self.workload, make(self.workload)
        found: Kept = self.layout.derived[key][1]
        return found

    @property
    def trip_work(self) -> Work:
        """The copy of what each block moves in mode SWAP, and then, (2n,) in all, in mode OFFLOAD_INPUT."""
        return self.once(_trip_work)

    @cached_property
    def trip_rows(self) -> IntArray:
        """(n,) the row of ``trip_work`` that each block's mode has, if it has any."""
        num_blocks = self.workload.num_blocks
        return np.arange(num_blocks) + np.where(self.offloads_input, num_blocks, 0)

    @cached_property
    def trip_bytes(self) -> IntArray:
        """(n,) what each block moves to the host and back."""
        moved = np.asarray(self.trip_work.moved_bytes)[self.trip_rows]
        return np.where(self.is_swap | self.offloads_input, moved, 0)

    @cached_property
    def travelling(self) -> IntArray:
        """The blocks that move something."""
        return np.flatnonzero(self.trip_bytes > 0)

    @cached_property
    def swapped(self) -> IntArray:
        """Those of them in mode SWAP."""
        return np.flatnonzero(self.is_swap & (self.trip_bytes > 0))

    @property
    def input_bytes(self) -> IntArray:
        """(n,) what each block moves of its input."""
        return np.where(self.offloads_input, self.trip_bytes, 0)

    @cached_property
    def is_gathered(self) -> BoolArray:
        """(C,) whether a chunk comes to the device for stays; the others have their place there."""
        return is_among(self.residency, GATHERED)

    @cached_property
    def is_offloaded(self) -> BoolArray:
        """(C,) whether it is on the hosts."""
        return is_among(self.residency, (ChunkResidency.OFFLOADED,))

    @cached_property
    def is_sharded(self) -> BoolArray:
        """(C,) whether the devices of all ranks have it in parts."""
        return is_among(self.residency, (ChunkResidency.SHARDED,))

    @cached_property
    def is_host_stepped(self) -> BoolArray:
        """(C,) whether it has its place on the device and is stepped on the host."""
        return is_among(self.residency, (ChunkResidency.HOST_STEPPED,))

    @cached_property
    def is_persistent(self) -> BoolArray:
        """(C,) whether a chunk is on the device for good, with all that it is stepped with."""
        return is_among(self.residency, (ChunkResidency.PERSISTENT,))

    @cached_property
    def leaves(self) -> BoolArray:
        """(C,) whether the host has a chunk's home, where its gradients leave to and where it is stepped."""
        return is_among(self.residency, STEPPED_BY_HOST)

    @cached_property
    def is_on_disk(self) -> BoolArray:
        """(C,) whether the disk has a chunk's parameters."""
        return self._is_among_last(self.num_disk)

    @cached_property
    def is_stepped_from_disk(self) -> BoolArray:
        """(C,) whether a chunk's optimizer state is on the disk; such chunks are trainable."""
        is_stepped: BoolArray = self._is_among_last(self.num_disk_state) & self.facts.is_trainable
        return is_stepped

    def _is_among_last(self, number: int) -> BoolArray:
        num_chunks = len(self.is_gathered)
        is_last: BoolArray = np.arange(num_chunks) >= num_chunks - number
        return is_last

    @cached_property
    def stages_gradients(self) -> BoolArray:
        """(C,) whether a chunk's gradients arrive where it is stepped, in a place that chunks share.

        Where they are added up, or wait for a norm, each chunk's need a place of their own.
        """
        are_final = self.step.micro_batches == 1 and not self.step.limits_norm
        return self.is_stepped_from_disk & are_final

    @cached_property
    def leaves_once(self) -> BoolArray:
        """(C,) whether a chunk's gradients are added up on the device, and leave behind the last backward alone."""
        once: BoolArray = self.leaves & self.facts.leaves_once
        return once

    @property
    def adds_on_device(self) -> BoolArray:
        """(C,) whether backwards of later micro-batches add to a chunk's gradients where the first one left them."""
        adds: BoolArray = self.is_persistent | self.leaves_once
        return adds

    @cached_property
    def has_new_gradients(self) -> BoolArray:
        """(n + 2,) whether each section has new gradients in every micro-batch, beside those that it adds to."""
        chunks, sections, _ = self.facts.gradients
        has_new = np.zeros(self.workload.num_blocks + 2, dtype=np.bool_)
        has_new[sections[~self.adds_on_device[chunks]]] = True
        has_new[0] |= self.facts.of_rows("gradient_bytes").any()
        return has_new


def is_among(residency: IntArray, some: Iterable[ChunkResidency]) -> BoolArray:
    """Whether each entry of ``residency`` is one of ``some``."""
    is_one = np.zeros(len(ChunkResidency), dtype=np.bool_)
    is_one[list(some)] = True
    found: BoolArray = is_one[residency]
    return found


def _trip_work(workload: Workload) -> Work:
    blocks = range(workload.num_blocks)
    moved = [workload.profile_of(block).swappable_bytes for block in blocks]
    return Work(moved_bytes=np.array(moved + input_bytes(workload), dtype=np.int64))


def family_of(plan: Plan, workload: Workload, layout: Layout) -> Family:
    """The family of one plan alone: one depth, one row.

    Raises PlanError if the plan's modes or chunks contradict the workload or the layout.
    """
    modes = plan.modes(workload.num_blocks)
    step = StepKnobs(
        plan.micro_batches,
        plan.max_gradient_norm is not None,
        plan.parallel,
        plan.num_ranks,
        plan.optimizer,
        plan.host_gradients,
        plan.shard_ranks,
        plan.projects_gradients_on is ProjectionPlace.DEVICE,
    )
    return Family(
        workload=workload,
        facts=ChunkFacts.of(layout, workload.parameters, step),
        residency=np.array(residencies(plan, layout), dtype=np.int64),
        n_buffer=plan.n_buffer,
        is_swap=np.array([mode is ActivationMode.SWAP for mode in modes]),
        offloads_input=np.array([mode is ActivationMode.OFFLOAD_INPUT for mode in modes]),
        is_checkpoint=np.array([[mode.is_recomputed for mode in modes]]),
        depths=np.array([plan.prefetch_depth]),
        num_disk_state=plan.n_disk_state,
        num_disk=plan.n_disk,
        num_staging=plan.n_staging,
    )

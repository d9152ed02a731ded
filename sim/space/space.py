"""The space of plans that the search looks through: which values each knob may take, and plans as arrays of knobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from ...shared.basics.documents import FrozenModel
from ...shared.layout.layout import Layout
from ...shared.schema.plan import Plan
from ...shared.schema.plan_kind import PlanKind
from ...shared.schema.workload import Workload
from .placements import Placements
from .step_spec import StepSpec

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def _as_values(value: Any) -> Any:
    return (value,) if isinstance(value, int) else value


LARGEST_KNOB: Final = 10**6
"""No layout has as many chunks, no model as many blocks; much larger numbers would not fit into numpy's."""
_LARGEST_CHUNK_BYTES: Final = 2**62

_Sizes = Annotated[
    tuple[Annotated[PositiveInt, Field(le=_LARGEST_CHUNK_BYTES)], ...],
    BeforeValidator(_as_values),
    Field(min_length=1),
]
_Positive = Annotated[
    tuple[Annotated[PositiveInt, Field(le=LARGEST_KNOB)], ...], BeforeValidator(_as_values), Field(min_length=1)
]
_NonNegative = Annotated[
    tuple[Annotated[NonNegativeInt, Field(le=LARGEST_KNOB)], ...], BeforeValidator(_as_values), Field(min_length=1)
]


class SearchSpace(FrozenModel):
    """What each knob may be: None for everything sensible, one value, or several.

    By default no block swaps: with swaps there are three times as many plans, whose bounds lie close together, and a
    search takes a few times as long.

    ``n_shard`` is for ranks in mode sharded; nobody else has any.  By default, [Note: Shards in the space].
    """

    chunk_bytes: _Sizes | None = None
    n_persist: _NonNegative | None = None
    n_shard: _NonNegative | None = None
    n_buffer: _NonNegative | None = None
    prefetch_depth: _Positive = (1, 2, 3)
    n_checkpoint: _NonNegative | None = None
    n_swap: _NonNegative | None = (0,)


@dataclass(frozen=True)
class ModeRows:
    """The choices of activation modes in the space: K of n_swap and n_checkpoint, for n blocks."""

    num_blocks: int
    n_swap: IntArray
    """(K,) ascending."""
    n_checkpoint: IntArray
    """(K,) ascending for each ``n_swap``."""
    moves: BoolArray | None = None
    """(n,) the blocks that have something to move in mode SWAP; None if all have."""

    @cached_property
    def swaps(self) -> BoolArray:
        """(K,) whether something is moved in mode SWAP."""
        moved = self.is_swap if self.moves is None else np.logical_and(self.is_swap, self.moves)
        swaps: BoolArray = np.asarray(np.any(moved, axis=1))
        return swaps

    @cached_property
    def is_checkpoint(self) -> BoolArray:
        """(K, n) the blocks in mode CHECKPOINT, as ``place_activation_modes`` places them."""
        is_checkpoint = np.zeros((len(self.n_swap), self.num_blocks), dtype=np.bool_)
        row = np.repeat(np.arange(len(self.n_swap)), self.n_checkpoint)
        first = np.repeat(self.n_checkpoint.cumsum() - self.n_checkpoint, self.n_checkpoint)
        number = np.arange(len(row)) - first
        others = self.num_blocks - self.n_swap[row]
        is_checkpoint[row, self.n_swap[row] + ((2 * number + 1) * others) // (2 * self.n_checkpoint[row])] = True
        return is_checkpoint

    @cached_property
    def is_swap(self) -> BoolArray:
        """(K, n) the blocks in mode SWAP."""
        is_swap: BoolArray = np.arange(self.num_blocks) < self.n_swap[:, None]
        return is_swap

    @cached_property
    def groups(self) -> tuple[tuple[int, IntArray], ...]:
        """Every ``n_swap`` with its rows."""
        values = sorted(set(self.n_swap.tolist()))
        return tuple((value, np.flatnonzero(self.n_swap == value)) for value in values)


@dataclass(frozen=True)
class LayoutGrid:
    """All candidates that share a layout: residencies x prefetch depths x choices of activation modes.

    Shapes: R residencies, D prefetch depths, K choices of modes.
    """

    layout: Layout
    places: Placements
    prefix: IntArray
    """(R,) which chunks are persistent and which are sharded, as a prefix of ``places``."""
    n_buffer: IntArray
    """(R,) ascending for each prefix."""
    prefetch_depth: IntArray
    """(D,) ascending."""
    modes: ModeRows
    step: StepSpec = field(default_factory=StepSpec)

    @cached_property
    def n_persist(self) -> IntArray:
        """(R,) persistent chunks."""
        found: IntArray = self.places.n_persist[self.prefix]
        return found

    @cached_property
    def n_shard(self) -> IntArray:
        """(R,) the knob: chunks after the persistent ones that are sharded over the devices."""
        found: IntArray = self.places.n_shard[self.prefix]
        return found

    @cached_property
    def num_offloaded(self) -> IntArray:
        """(R,) chunks on the hosts."""
        return self.places.offloaded_sum(np.ones(self.places.num_chunks, dtype=np.int64))[self.prefix]

    @cached_property
    def num_sharded(self) -> IntArray:
        """(R,) chunks that are sharded over the devices."""
        return self.places.sharded_sum(np.ones(self.places.num_chunks, dtype=np.int64))[self.prefix]

    def is_distinct(self, n_swap: int) -> BoolArray:
        """(R, D) whether the plans with this ``n_swap`` differ from those before them.

        Where nothing travels, no chunk and no activation, no depth matters.
        """
        travels = (self.num_offloaded + self.num_sharded > 0) | (n_swap > 0)
        is_distinct: BoolArray = travels[:, None] | (np.arange(len(self.prefetch_depth)) == 0)
        return is_distinct

    def is_of_kind(self, kind: PlanKind, prefixes: IntArray, modes: IntArray) -> BoolArray:
        """(F, M) whether the plans with these of the layout's ``prefixes`` and rows of ``ModeRows`` are of ``kind``."""
        ones = np.ones(self.places.num_chunks, dtype=np.int64)
        is_offloaded = self.places.offloaded_sum(ones)[prefixes] > 0
        is_sharded = self.places.sharded_sum(ones)[prefixes] > 0
        resident, checkpointed, sharded, offloaded, swapped = (
            kind.complexity
            for kind in (
                PlanKind.RESIDENT,
                PlanKind.CHECKPOINTED,
                PlanKind.SHARDED,
                PlanKind.OFFLOADED,
                PlanKind.SWAPPED,
            )
        )
        place = np.where(is_offloaded, offloaded, np.where(is_sharded, sharded, resident))[:, None]
        recomputed = np.where(self.modes.n_checkpoint[modes] > 0, checkpointed, resident)
        activations = np.where(self.modes.swaps[modes], swapped, recomputed)
        is_of_kind: BoolArray = np.maximum(place, activations) == kind.complexity
        return is_of_kind

    @cached_property
    def num_candidates(self) -> int:
        """Distinct plans of this layout."""
        return sum(int(self.is_distinct(n_swap).sum()) * len(rows) for n_swap, rows in self.modes.groups)

    def plan(self, workload: Workload, residency: int, depth: int, mode: int) -> Plan:
        """The plan at these indices."""
        return Plan(
            workload_id=workload.identity,
            chunk_bytes=self.layout.chunk_bytes,
            n_persist=int(self.n_persist[residency]),
            n_shard=int(self.n_shard[residency]),
            n_buffer=int(self.n_buffer[residency]),
            prefetch_depth=int(self.prefetch_depth[depth]),
            n_swap=int(self.modes.n_swap[mode]),
            n_checkpoint=int(self.modes.n_checkpoint[mode]),
            micro_batches=self.step.micro_batches,
            max_gradient_norm=self.step.max_gradient_norm,
            optimizer=self.step.optimizer,
            parallel=self.step.parallel,
            num_ranks=self.step.num_ranks,
        )

    def simplicity(self, residency: int, depth: int, mode: int) -> tuple[int, ...]:
        """Smaller is simpler.

        Fewer swapped blocks, fewer recomputed ones, less look-ahead, fewer offloaded chunks, fewer sharded ones, fewer
        buffers, larger chunks.  No two distinct plans of a space share it, so a choice by it depends on no order of
        enumeration.
        """
        return (
            int(self.modes.n_swap[mode]),
            int(self.modes.n_checkpoint[mode]),
            int(self.prefetch_depth[depth]),
            int(self.num_offloaded[residency]),
            int(self.num_sharded[residency]),
            int(self.n_buffer[residency]),
            -self.layout.chunk_bytes,
        )

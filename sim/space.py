"""The space of plans that the search looks through: which values each knob may take, every distinct plan once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from ..shared.errors import PlanError
from ..shared.files import FrozenModel
from ..shared.layout import ALIGNMENT_BYTES, Layout, aligned, build_layout
from ..shared.plan import Plan
from ..shared.workload import Workload
from .step_rule import StepRule

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_BLOCK_FRACTIONS: Final = (0.25, 0.5, 1.0, 2.0)
"""Chunk sizes in units of the largest block."""
_WHOLE_MIB_FROM_BYTES: Final = 64 * 2**20
"""Blocks from this size on get chunk sizes in whole MiB: rounding costs them nothing and reads well."""
_MAX_CHUNKS: Final = 600
"""A layout of more chunks makes a schedule of thousands of tasks, which only a large model on a slow search meets."""
_DENSE_BUFFERS: Final = 8
"""So many values of ``n_buffer`` above the fewest possible are all in the space; beyond, steps grow by a quarter."""

_MOST_COUNTS: Final = 48
"""Of deeper models not every number of checkpointed blocks is in the space, but every second one, or third, and so on:
one block more or less changes the iteration by less than a hundredth."""
_FEW_BLOCKS: Final = 4
"""Up to here every number of swapped blocks is in the space."""
_SWAPPED_SHARES: Final = (2, 4, 8)


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
    """

    chunk_bytes: _Sizes | None = None
    n_persist: _NonNegative | None = None
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
    n_persist: IntArray
    """(R,) ascending."""
    n_buffer: IntArray
    """(R,) ascending for each ``n_persist``."""
    num_offloaded: IntArray
    """(R,) chunks that are not persistent."""
    prefetch_depth: IntArray
    """(D,) ascending."""
    modes: ModeRows
    rule: StepRule = field(default_factory=StepRule)

    def is_distinct(self, n_swap: int) -> BoolArray:
        """(R, D) whether the plans with this ``n_swap`` differ from those before them.

        Where nothing travels, no chunk and no activation, no depth matters.
        """
        travels = (self.num_offloaded > 0) | (n_swap > 0)
        is_distinct: BoolArray = travels[:, None] | (np.arange(len(self.prefetch_depth)) == 0)
        return is_distinct

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
            n_buffer=int(self.n_buffer[residency]),
            prefetch_depth=int(self.prefetch_depth[depth]),
            n_swap=int(self.modes.n_swap[mode]),
            n_checkpoint=int(self.modes.n_checkpoint[mode]),
            micro_batches=self.rule.micro_batches,
            max_gradient_norm=self.rule.max_gradient_norm,
            parallel=self.rule.parallel,
            num_ranks=self.rule.num_ranks,
        )

    def simplicity(self, residency: int, depth: int, mode: int) -> tuple[int, ...]:
        """Smaller is simpler.

        Fewer swapped blocks, fewer recomputed ones, less look-ahead, fewer offloaded chunks, fewer buffers, larger
        chunks.  No two distinct plans of a space share it, so a choice by it depends on no order of enumeration.
        """
        return (
            int(self.modes.n_swap[mode]),
            int(self.modes.n_checkpoint[mode]),
            int(self.prefetch_depth[depth]),
            int(self.num_offloaded[residency]),
            int(self.n_buffer[residency]),
            -self.layout.chunk_bytes,
        )


def enumerate_space(
    workload: Workload,
    space: SearchSpace | None = None,
    rule: StepRule | None = None,
    *,
    is_offloading: bool | None = None,
) -> tuple[LayoutGrid, ...]:
    """Every distinct plan of ``space`` under ``rule``, grouped by layout; smallest chunks first.

    Two plans are the same if they have the same layout, persistent chunks, buffers in use, modes and, where a chunk
    is offloaded or a block swaps, prefetch depth.  ``is_offloading`` leaves only plans that offload chunks, or only
    plans that do not.  Raises PlanError if no plan is left.
    """
    space, rule = space or SearchSpace(), rule or StepRule()
    modes = _mode_rows(workload, space)
    layouts = _layouts(workload, space.chunk_bytes)
    # All layouts agree when every chunk is persistent: only the one with the largest chunks keeps that residency.
    residencies: list[tuple[Layout, _Residencies]] = []
    largest_has_persistent = False
    for layout in reversed(layouts):
        without_offload = not largest_has_persistent and is_offloading is not True
        found = _residencies(layout, space, with_offload=is_offloading is not False, without_offload=without_offload)
        largest_has_persistent |= bool((found.num_offloaded == 0).any())
        residencies.append((layout, found))
    grids = tuple(
        LayoutGrid(
            layout=layout,
            n_persist=found.n_persist,
            n_buffer=found.n_buffer,
            num_offloaded=found.num_offloaded,
            prefetch_depth=np.array(sorted(set(space.prefetch_depth)), dtype=np.int64),
            modes=modes,
            rule=rule,
        )
        for layout, found in reversed(residencies)
        if len(found.n_persist)
    )
    if not grids:
        raise _empty_space(layouts, space, is_offloading)
    return grids


# -- modes -----------------------------------------------------------------------------------------------------------


def _mode_rows(workload: Workload, space: SearchSpace) -> ModeRows:
    """Every distinct choice of modes that the space allows.

    A block that has nothing to move keeps its activations in mode SWAP, so that several choices may come to the same:
    the one with the fewest swapped blocks stands for them.
    """
    num_blocks = workload.num_blocks
    pairs = [
        (n_swap, n_checkpoint)
        for n_swap in _swap_counts(workload, space.n_swap)
        for n_checkpoint in _checkpoint_counts(num_blocks, space.n_checkpoint)
        if n_swap + n_checkpoint <= num_blocks
    ]
    if not pairs:
        raise _no_modes(num_blocks, space)
    every = np.array(pairs, dtype=np.int64)
    rows = ModeRows(num_blocks, every[:, 0].copy(), every[:, 1].copy())
    moves = np.array([workload.profile_of(block).swappable_bytes > 0 for block in range(num_blocks)])
    if moves.all():
        return rows
    distinct: dict[bytes, int] = {}
    for row, modes in enumerate(np.concatenate([rows.is_checkpoint, rows.is_swap & moves], axis=1)):
        distinct.setdefault(modes.tobytes(), row)
    kept = sorted(distinct.values())
    return ModeRows(num_blocks, rows.n_swap[kept], rows.n_checkpoint[kept])


def _swap_counts(workload: Workload, wanted: Sequence[int] | None) -> list[int]:
    """None, and an eighth, a quarter, a half of the blocks; where nothing can be moved, none."""
    num_blocks = workload.num_blocks
    if wanted is not None:
        return sorted({count for count in wanted if count <= num_blocks})
    if not any(workload.profile_of(block).swappable_bytes for block in range(num_blocks)):
        return [0]
    if num_blocks <= _FEW_BLOCKS:
        return list(range(num_blocks + 1))
    return sorted({0, *(-(-num_blocks // share) for share in _SWAPPED_SHARES)})


def _checkpoint_counts(num_blocks: int, wanted: Sequence[int] | None) -> list[int]:
    if wanted is None:
        return sorted({*range(0, num_blocks, -(-num_blocks // _MOST_COUNTS)), num_blocks})
    return sorted({count for count in wanted if count <= num_blocks})


def _no_modes(num_blocks: int, space: SearchSpace) -> PlanError:
    for knob, wanted in (("n_checkpoint", space.n_checkpoint), ("n_swap", space.n_swap)):
        if wanted is not None and min(wanted) > num_blocks:
            return PlanError(
                f"the space holds no plan: {knob} is at least {min(wanted)} but the workload has "
                f"{num_blocks} blocks. Allow {num_blocks} or fewer."
            )
    assert space.n_checkpoint is not None
    assert space.n_swap is not None
    least = min(space.n_swap)
    return PlanError(
        f"the space holds no plan: n_swap is at least {least} and n_checkpoint at least {min(space.n_checkpoint)}, "
        f"together more than the workload's {num_blocks} blocks. Allow n_checkpoint = {num_blocks - least} or fewer."
    )


# -- layouts ---------------------------------------------------------------------------------------------------------


def chunk_sizes(workload: Workload) -> list[int]:
    """Sensible values of ``chunk_bytes``: fractions and multiples of the largest block, ascending."""
    block_bytes = [0] * workload.num_blocks
    for parameter in workload.parameters:
        if parameter.block is not None:
            block_bytes[parameter.block] += aligned(parameter.size_bytes)
    largest = max(block_bytes)
    unit = 2**20 if largest >= _WHOLE_MIB_FROM_BYTES else ALIGNMENT_BYTES
    return sorted({max(1, math.ceil(largest * fraction / unit)) * unit for fraction in _BLOCK_FRACTIONS})


def _layouts(workload: Workload, wanted: Sequence[int] | None) -> list[Layout]:
    """Distinct layouts, smallest chunks first; of equal ones that with the smallest ``chunk_bytes``."""
    sizes = chunk_sizes(workload) if wanted is None else sorted(set(wanted))
    distinct: dict[tuple[object, ...], Layout] = {}
    for chunk_bytes in sizes:
        layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=chunk_bytes)
        distinct.setdefault(tuple(chunk.parameters for chunk in layout.chunks), layout)
    layouts = list(distinct.values())
    if wanted is None:
        small = [layout for layout in layouts if len(layout.chunks) - len(layout.unowned) <= _MAX_CHUNKS]
        layouts = small or layouts[-1:]
    return layouts


# -- residencies -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Residencies:
    """Distinct residencies of a layout, all (R,)."""

    n_persist: IntArray
    n_buffer: IntArray
    num_offloaded: IntArray


def _residencies(layout: Layout, space: SearchSpace, *, with_offload: bool, without_offload: bool) -> _Residencies:
    """What the space leaves of a layout's residencies: those that offload chunks, those that do not, or both."""
    prefixes = [
        prefix
        for prefix in _persistent_prefixes(layout, space.n_persist)
        if (with_offload if prefix[2] > 0 else without_offload)
    ]
    counts = [_buffer_counts(fewest, num_offloaded, space.n_buffer) for _, fewest, num_offloaded in prefixes]
    sizes = [len(of_prefix) for of_prefix in counts]
    return _Residencies(
        n_persist=np.repeat(np.array([n_persist for n_persist, _, _ in prefixes], dtype=np.int64), sizes),
        n_buffer=np.array(list(chain.from_iterable(counts)), dtype=np.int64),
        num_offloaded=np.repeat(np.array([offloaded for _, _, offloaded in prefixes], dtype=np.int64), sizes),
    )


def _persistent_prefixes(layout: Layout, wanted: Iterable[int] | None) -> list[tuple[int, int, int]]:
    """Distinct persistent sets as (smallest n_persist, fewest buffers, number of offloaded chunks)."""
    num_chunks = len(layout.chunks)
    is_owned = np.array([bool(chunk.blocks) for chunk in layout.chunks], dtype=bool)
    needs = np.zeros((layout.num_blocks, num_chunks), dtype=np.int64)
    for block, chunks in enumerate(layout.chunks_of_block):
        needs[block, list(chunks)] = 1
    # needed_after[b, p]: chunks of block b at or after position p, those left when p chunks are persistent.
    needed_after = np.zeros((layout.num_blocks, num_chunks + 1), dtype=np.int64)
    needed_after[:, :num_chunks] = needs[:, ::-1].cumsum(axis=1)[:, ::-1]
    fewest = needed_after.max(axis=0)
    offloaded = np.append(is_owned[::-1].cumsum()[::-1], 0)
    prefixes: dict[int, tuple[int, int, int]] = {}
    candidates = range(num_chunks + 1) if wanted is None else sorted({p for p in wanted if p <= num_chunks})
    for n_persist in candidates:
        key = int(offloaded[n_persist])
        prefixes.setdefault(key, (n_persist, int(fewest[n_persist]), key))
    return list(prefixes.values())


def _buffer_counts(fewest: int, num_offloaded: int, wanted: Iterable[int] | None) -> list[int]:
    """Distinct values of ``n_buffer``: every small one, then in growing steps up to a buffer for every chunk."""
    if wanted is not None:
        distinct: dict[int, int] = {}
        for n_buffer in sorted({n_buffer for n_buffer in wanted if n_buffer >= fewest}):
            distinct.setdefault(min(n_buffer, num_offloaded), n_buffer)
        return list(distinct.values())
    counts = []
    n_buffer = fewest
    while n_buffer < num_offloaded:
        counts.append(n_buffer)
        n_buffer += max(1, (n_buffer - fewest - _DENSE_BUFFERS) // 4)
    return [*counts, num_offloaded]


def _empty_space(layouts: Sequence[Layout], space: SearchSpace, is_offloading: bool | None) -> PlanError:
    if is_offloading is not None:
        kept = "offloads no chunk" if is_offloading else "keeps every chunk on the device"
        return PlanError(f"the space holds no plan of this mode: none {kept} or has the buffers for it. Allow more.")
    most_chunks = max(len(layout.chunks) for layout in layouts)
    if space.n_persist is not None and min(space.n_persist) > most_chunks:
        return PlanError(
            f"the space holds no plan: n_persist is at least {min(space.n_persist)} but no layout has more than "
            f"{most_chunks} chunks. Allow a smaller n_persist, or a smaller chunk_bytes."
        )
    needed = min(fewest for layout in layouts for _, fewest, _ in _persistent_prefixes(layout, space.n_persist))
    return PlanError(
        f"the space holds no plan: n_buffer is at most {max(space.n_buffer or (0,))} but the block with the most "
        f"offloaded chunks needs {needed}. Allow n_buffer = {needed}, or a larger chunk_bytes."
    )

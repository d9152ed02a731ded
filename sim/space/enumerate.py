"""Every distinct plan of a space, once: choices of activation modes, layouts, and residencies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np

from ...shared.basics.errors import PlanError
from ...shared.layout.layout import ALIGNMENT_BYTES, Layout, largest_block_bytes, layout_of, why_not_on_device
from ...shared.layout.looked_up import looking_up, why_not_looked_up
from ...shared.layout.residencies import ChunkResidency
from ...shared.layout.travelling_inputs import input_bytes
from ...shared.schema.plan import ParallelMode, ProjectionPlace
from ...shared.schema.workload import Workload
from .disk_choices import OnDisk, named
from .placements import COUNTED, Placement, Placements, Wanted, distinct_placements
from .space import IntArray, LayoutGrid, ModeRows, SearchSpace
from .step_spec import StepSpec

_BLOCK_FRACTIONS: Final = (0.25, 0.5, 1.0, 2.0)
"""Chunk sizes in units of the largest block."""
_WHOLE_MIB_FROM_BYTES: Final = 64 * 2**20
"""Blocks from this size on get chunk sizes in whole MiB: rounding costs them nothing and reads well."""
_MAX_CHUNKS: Final = 600
"""A layout of more chunks makes a schedule of thousands of tasks, which only a large model on a slow search meets."""
_DENSE_BUFFERS: Final = 8
"""So many values of ``n_buffer`` above the fewest possible are all in the space; beyond, steps grow by a quarter."""

_INPUT_SHARES: Final = (1, 2, 4)
"""[Note: Offloaded inputs]  Inputs leave where room is short, and there most blocks are checkpointed.  Where all are
that do not swap, all offload their input, a half or a quarter of them; where three quarters are at least, all or none;
of fewer none."""
_MOST_COUNTS: Final = 48
"""Of deeper models not every number of checkpointed blocks is in the space, but every second one, or third, and so on:
one block more or less changes the iteration by less than one percent."""
_FEW_BLOCKS: Final = 4
"""Up to here every number of swapped blocks is in the space."""
_SWAPPED_SHARES: Final = (2, 4, 8)


def enumerate_space(
    workload: Workload,
    space: SearchSpace | None = None,
    step: StepSpec | None = None,
    *,
    is_offloading: bool | None = None,
    on_disk: OnDisk | None = None,
) -> tuple[LayoutGrid, ...]:
    """Every distinct plan of ``space`` under ``step``, grouped by layout; smallest chunks first.

    Two plans are the same if they have the same layout, residencies of chunks, buffers in use, modes and, where a chunk
    is not persistent or a block swaps, prefetch depth.  ``is_offloading`` leaves only plans with chunks that are not
    persistent, or only plans without.  ``on_disk``: what may lie on the disk where the space does not name it, nothing
    if None.  Raises PlanError if no plan is left.
    """
    space, step = space or SearchSpace(), step or StepSpec()
    if space.names_disk:
        on_disk = _named_on_disk(space, step)
    others = {residency: _wanted(space, step, residency) for residency in COUNTED[1:]}
    modes = mode_rows(workload, space)
    layouts = _layouts(workload, space.chunk_bytes)
    if space.looks_up_rows:
        layouts = _looking_up(workload, layouts, step)
    if step.projects_gradients_on is ProjectionPlace.DEVICE:
        layouts = _projecting_on_device(layouts)
    # All layouts agree when every chunk is persistent: only the one with the largest chunks keeps that residency.
    residencies: list[tuple[Layout, _Residencies]] = []
    largest_has_persistent = False
    for layout in reversed(layouts):
        without_offload = not largest_has_persistent and is_offloading is not True
        prefixes = [
            prefix
            for prefix in distinct_placements(layout, space.n_persist, others, on_disk)
            if (without_offload if prefix.is_persistent else is_offloading is not False)
            and (layout.num_owned if step.knobs.is_sharded else 0) <= sum(prefix.counts) <= _first_on_host(layout)
        ]
        found = _residencies(layout, prefixes, space)
        largest_has_persistent |= any(prefix.is_persistent for prefix in prefixes)
        residencies.append((layout, found))
    grids = tuple(
        LayoutGrid(
            layout=layout,
            places=found.places,
            prefix=found.prefix,
            n_buffer=found.n_buffer,
            prefetch_depth=np.array(sorted(set(space.prefetch_depth)), dtype=np.int64),
            modes=modes,
            step=step,
        )
        for layout, found in reversed(residencies)
        if len(found.prefix)
    )
    if not grids:
        raise _empty_space(layouts, space, step, is_offloading)
    return grids


def _wanted(space: SearchSpace, step: StepSpec, residency: ChunkResidency) -> Wanted:
    """Numbers of chunks of a residency that the space allows; none where the mode does not know it."""
    assert residency.knob is not None
    wanted: tuple[int, ...] | None = getattr(space, residency.knob)
    if residency.is_known_to(step.parallel):
        return wanted
    if wanted is not None and min(wanted) > 0:
        raise PlanError(
            f"the space holds no plan: {residency.knob} is at least {min(wanted)} but parallel is {step.parallel}, and "
            f"{_WHO_KNOWS[residency]}. Allow {residency.knob} = 0, or another mode."
        )
    return (0,)


def _named_on_disk(space: SearchSpace, step: StepSpec) -> OnDisk | None:
    """What the space names to lie on the disk.  Raises PlanError if the mode knows no disk, or nothing agrees."""
    least = min(space.n_disk_state or (0,))
    if step.parallel is not ParallelMode.SINGLE:
        if least == 0:
            return None
        raise PlanError(
            f"the space holds no plan: n_disk_state is at least {least} but parallel is {step.parallel}, and one rank "
            f"alone knows chunks on a disk. Allow n_disk_state = 0, or one rank."
        )
    most = max(space.n_disk_state or (0,))
    if min(space.n_disk) > most:
        raise PlanError(
            f"the space holds no plan: n_disk is at least {min(space.n_disk)} but n_disk_state is at most {most}; "
            f"chunks whose parameters lie on the disk have their optimizer state there too. Allow n_disk_state = "
            f"{min(space.n_disk)}, or n_disk = 0."
        )
    return named(space.n_disk_state or (0,), space.n_disk, space.n_staging)


_WHO_KNOWS: Final = {
    ChunkResidency.SHARDED: "only ranks in mode sharded have chunks that lie on their devices in parts",
    ChunkResidency.HOST_STEPPED: "only hosts of one rank, or of ranks in mode replicated, have whole chunks to step",
}


# -- modes -----------------------------------------------------------------------------------------------------------


def mode_rows(workload: Workload, space: SearchSpace) -> ModeRows:
    """Every distinct choice of modes that the space allows.

    A block that has nothing to move keeps its activations in mode SWAP, and its input in mode OFFLOAD_INPUT, so that
    several choices may come to the same: the one with the fewest swapped blocks, and then offloaded inputs, stands for
    them.
    """
    num_blocks = workload.num_blocks
    choices = [
        (n_swap, n_checkpoint, n_offload_input)
        for n_swap in _swap_counts(workload, space.n_swap)
        for n_checkpoint in _checkpoint_counts(num_blocks, space.n_checkpoint)
        if n_swap + n_checkpoint <= num_blocks
        for n_offload_input in _input_counts(num_blocks - n_swap, n_checkpoint, space.n_offload_input)
    ]
    if not choices:
        raise _no_modes(num_blocks, space)
    n_swap, n_checkpoint, n_offload_input = np.array(choices, dtype=np.int64).T.copy()
    sizes = np.array(input_bytes(workload), dtype=np.int64)
    inputs = (n_offload_input, sizes) if n_offload_input.any() else (None, None)
    moves = np.array([workload.profile_of(block).swappable_bytes > 0 for block in range(num_blocks)])
    rows = ModeRows(num_blocks, n_swap, n_checkpoint, None if moves.all() else moves, *inputs)
    if moves.all() and not n_offload_input.any():
        return rows
    distinct: dict[bytes, int] = {}
    moved = np.concatenate([rows.is_checkpoint, rows.is_swap & moves, rows.moved_inputs > 0], axis=1)
    for row, modes in enumerate(moved):
        distinct.setdefault(modes.tobytes(), row)
    kept = sorted(distinct.values())
    n_offload_input = n_offload_input[kept]
    inputs = (n_offload_input, sizes) if n_offload_input.any() else (None, None)
    return ModeRows(num_blocks, n_swap[kept], n_checkpoint[kept], rows.moves, *inputs)


def keeping_all(space: SearchSpace) -> SearchSpace:
    """The space without plans whose blocks are checkpointed or swap.  Raises PlanError if all plans have some."""
    for knob in ("n_checkpoint", "n_swap", "n_offload_input"):
        wanted = getattr(space, knob)
        if wanted is not None and min(wanted) > 0:
            raise PlanError(
                f"the space holds no plan: {knob} is at least {min(wanted)}, but by this training method the backward "
                f"of a block follows its forward at once, and there is nothing to recompute or to swap. Allow "
                f"{knob} = 0."
            )
    return space.model_copy(update=dict.fromkeys(("n_checkpoint", "n_swap", "n_offload_input", "product_stride"), (0,)))


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


def _input_counts(num_others: int, n_checkpoint: int, wanted: Sequence[int] | None) -> list[int]:
    """Of ``n_checkpoint`` blocks among those that do not swap; see [Note: Offloaded inputs]."""
    if wanted is not None:
        return sorted({count for count in wanted if count <= n_checkpoint})
    if n_checkpoint == num_others:
        return sorted({0, *(-(-n_checkpoint // share) for share in _INPUT_SHARES)})
    return sorted({0, n_checkpoint}) if 4 * n_checkpoint >= 3 * num_others else [0]


def _no_modes(num_blocks: int, space: SearchSpace) -> PlanError:
    for knob in ("n_checkpoint", "n_swap", "n_offload_input"):
        wanted = getattr(space, knob)
        if wanted is not None and min(wanted) > num_blocks:
            return PlanError(
                f"the space holds no plan: {knob} is at least {min(wanted)} but the workload has "
                f"{num_blocks} blocks. Allow {num_blocks} or fewer."
            )
    most = max(_checkpoint_counts(num_blocks, space.n_checkpoint), default=0)
    if space.n_offload_input is not None and min(space.n_offload_input) > most:
        return PlanError(
            f"the space holds no plan: n_offload_input is at least {min(space.n_offload_input)} but n_checkpoint at "
            f"most {most}, and only blocks that are recomputed have their input offloaded. Allow n_checkpoint = "
            f"{min(space.n_offload_input)}, or fewer inputs."
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
    largest = largest_block_bytes(workload)
    unit = 2**20 if largest >= _WHOLE_MIB_FROM_BYTES else ALIGNMENT_BYTES
    return sorted({max(1, math.ceil(largest * fraction / unit)) * unit for fraction in _BLOCK_FRACTIONS})


def _layouts(workload: Workload, wanted: Sequence[int] | None) -> list[Layout]:
    """Distinct layouts, smallest chunks first; of equal ones that with the smallest ``chunk_bytes``."""
    sizes = chunk_sizes(workload) if wanted is None else sorted(set(wanted))
    distinct: dict[tuple[object, ...], Layout] = {}
    for chunk_bytes in sizes:
        layout = layout_of(workload, chunk_bytes)
        distinct.setdefault(tuple(chunk.parameters for chunk in layout.chunks), layout)
    layouts = list(distinct.values())
    if wanted is None:
        small = [layout for layout in layouts if len(layout.chunks) <= _MAX_CHUNKS]
        layouts = small or layouts[-1:]
    return layouts


def _looking_up(workload: Workload, layouts: Sequence[Layout], step: StepSpec) -> list[Layout]:
    """The layouts as they are where rows of embeddings are looked up.  Raises PlanError if none can be."""
    if step.parallel is not ParallelMode.SINGLE:
        raise PlanError(
            f"the space holds no plan: looks_up_rows with parallel {step.parallel}, but gradients of rows are added up "
            f"on one host, so that a rank alone knows them. Leave looks_up_rows out."
        )
    if step.knobs.widens:
        raise PlanError(
            f"the space holds no plan: looks_up_rows with host_gradients {step.host_gradients}, but gradients of rows "
            f"are added up in their own type alone. Leave one of the two out."
        )
    reasons = [why_not_looked_up(workload, layout) for layout in layouts]
    found = [looking_up(workload, layout)[1] for layout, reason in zip(layouts, reasons, strict=True) if reason is None]
    if not found:
        raise PlanError(f"the space holds no plan that looks rows up: {reasons[-1]}, or leave looks_up_rows out.")
    return found


def _projecting_on_device(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts whose gradients can be projected before they leave.  Raises PlanError if there is none."""
    reasons = [why_not_on_device(layout) for layout in layouts]
    found = [layout for layout, reason in zip(layouts, reasons, strict=True) if reason is None]
    if not found:
        raise PlanError(
            f"the space holds no plan that projects gradients on the device: {reasons[-1]}. Project on the host."
        )
    return found


def _first_on_host(layout: Layout) -> int:
    """The first chunk that must lie on the host, since rows of it are looked up there; else the number of chunks."""
    return next((chunk.id for chunk in layout.chunks if chunk.rows is not None), len(layout.chunks))


# -- residencies -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Residencies:
    """Distinct residencies of a layout, both (R,)."""

    places: Placements
    prefix: IntArray
    n_buffer: IntArray


def _residencies(layout: Layout, prefixes: Sequence[Placement], space: SearchSpace) -> _Residencies:
    """The residencies with these prefixes."""
    # The plainest are numbered first: of families with equal bounds the search opens them before others.
    by_number = sorted(range(len(prefixes)), key=lambda place: prefixes[place].plainness)
    numbers = np.empty(len(prefixes), dtype=np.int64)
    numbers[by_number] = np.arange(len(prefixes))
    counts = [_buffer_counts(prefix.fewest, prefix.num_gathered, space.n_buffer) for prefix in prefixes]
    return _Residencies(
        places=Placements.of(
            layout,
            [prefixes[place].counts for place in by_number],
            [prefixes[place].on_disk for place in by_number],
        ),
        prefix=np.repeat(numbers, np.array([len(of_prefix) for of_prefix in counts], dtype=np.int64)),
        n_buffer=np.array(list(chain.from_iterable(counts)), dtype=np.int64),
    )


def _buffer_counts(fewest: int, num_gathered: int, wanted: Iterable[int] | None) -> list[int]:
    """Distinct values of ``n_buffer``: every small one, then in growing steps up to a buffer for every chunk."""
    if wanted is not None:
        distinct: dict[int, int] = {}
        for n_buffer in sorted({n_buffer for n_buffer in wanted if n_buffer >= fewest}):
            distinct.setdefault(min(n_buffer, num_gathered), n_buffer)
        return list(distinct.values())
    counts = []
    n_buffer = fewest
    while n_buffer < num_gathered:
        counts.append(n_buffer)
        n_buffer += max(1, (n_buffer - fewest - _DENSE_BUFFERS) // 4)
    return [*counts, num_gathered]


def _empty_space(
    layouts: Sequence[Layout], space: SearchSpace, step: StepSpec, is_offloading: bool | None
) -> PlanError:
    if (
        step.knobs.is_sharded
        and (space.n_persist or space.n_shard)
        and (owned := max(one.num_owned for one in layouts))
    ):
        return PlanError(
            f"the space holds no plan: parallel is {step.parallel}, and chunks with orthogonal subspaces cannot lie on "
            f"hosts in parts, but n_persist and n_shard together count fewer than the first {owned} chunks. Allow more "
            f"of either, or set parallel to ddp or replicated."
        )
    if is_offloading is not None:
        kept = "offloads no chunk" if is_offloading else "keeps every chunk on the device"
        return PlanError(f"the space holds no plan of this mode: none {kept} or has the buffers for it. Allow more.")
    most_chunks = max(len(layout.chunks) for layout in layouts)
    if space.n_persist is not None and min(space.n_persist) > most_chunks:
        return PlanError(
            f"the space holds no plan: n_persist is at least {min(space.n_persist)} but no layout has more than "
            f"{most_chunks} chunks. Allow a smaller n_persist, or a smaller chunk_bytes."
        )
    least = min(space.n_disk_state or (0,))
    most_offloaded = max(
        len(layout.chunks) - sum(prefix.counts)
        for layout in layouts
        for prefix in distinct_placements(layout, space.n_persist)
    )
    if least > most_offloaded:
        return PlanError(
            f"the space holds no plan: n_disk_state is at least {least} but no plan offloads more than "
            f"{most_offloaded} chunks. Allow a smaller n_disk_state, n_persist or chunk_bytes."
        )
    needed = min(prefix.fewest for layout in layouts for prefix in distinct_placements(layout, space.n_persist))
    return PlanError(
        f"the space holds no plan: n_buffer is at most {max(space.n_buffer or (0,))} but the block with the most "
        f"offloaded chunks needs {needed}. Allow n_buffer = {needed}, or a larger chunk_bytes."
    )

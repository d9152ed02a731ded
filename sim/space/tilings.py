"""Rows of activation modes in several tilings: one space for all numbers of tiles that plans may have.

[Note: Tilings]
MLPs, and head and loss, run whole or in tiles of tokens.  Plans that differ in that alone have the same tasks, in the
same order, with the same waits: tiles change what sections take and hold, and nothing beside the compute lane.  So the
numbers of tiles are one more choice of a row of modes (``ModeRows.tiling``).  A look at a residency, which compiles it,
and what is known of its copies serve all tilings at once.  What blocks swap may differ, and what they send of their
input: rows of different ``Trips.tiling`` do not share a look.

Which results checkpointed blocks keep (mode SELECTIVE) is such a choice too: their phases are others, and all that runs
beside them is the same.  All checkpointed blocks of a plan of the space keep results, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from itertools import product
from typing import Final

import numpy as np

from ...shared.basics.errors import PlanError
from ...shared.layout.tiling import keeping_results
from ...shared.layout.travelling_inputs import input_bytes
from ...shared.phases.activation_modes import why_no_product_stride
from ...shared.phases.tiling import why_no_loss_tiles, why_no_mlp_tiles
from ...shared.schema.workload import Workload
from .enumerate import mode_rows
from .space import ModeRows, SearchSpace

Tiles = tuple[int, int, int]
"""Of MLPs, and of head and loss; and the ``product_stride`` of checkpointed blocks, 0 if they keep no results."""
WHOLE: Final[Tiles] = (1, 1, 0)


def run_in(workload: Workload, tiles: Tiles) -> Workload:
    """What plans in these tiles do, with what they keep.  Raises PlanError if nobody knows."""
    mlp_tiles, loss_tiles, product_stride = tiles
    found = workload.tiled(mlp_tiles, loss_tiles)
    return keeping_results(found, (True,) * found.num_blocks, product_stride) if product_stride else found


def tile_counts(space: SearchSpace, workload: Workload) -> list[Tiles]:
    """The numbers of tiles that MLPs may run in, and those of the loss, the fewest first, with what blocks may keep.

    All that the workload knows, or those that the space allows.  Raises PlanError if the workload knows none of these.
    """
    mlp = (1, *(tiling.mlp_tiles for tiling in workload.tilings))
    loss = (1, *(tiling.loss_tiles for tiling in workload.loss_tilings))
    found: list[list[int]] = []
    for known, allowed in ((mlp, space.mlp_tiles), (loss, space.loss_tiles)):
        found.append([number for number in known if allowed is None or number in allowed])
    if not found[0]:
        assert space.mlp_tiles is not None
        raise PlanError(f"{why_no_mlp_tiles(space.mlp_tiles[0], workload.tilings, workload.model_name)}.")
    if not found[1]:
        assert space.loss_tiles is not None
        raise PlanError(f"{why_no_loss_tiles(space.loss_tiles[0], workload.loss_tilings, workload.model_name)}.")
    found.append(_product_strides(space.product_stride, workload))
    # Blocks whose MLPs run in tiles keep no results.
    tiles = [(mlp, loss, stride) for mlp, loss, stride in product(*found) if mlp == 1 or not stride]
    if not tiles:
        raise PlanError(
            f"the space holds no plan: product_stride is at least {min(found[2])} and mlp_tiles at least "
            f"{min(found[0])}, but blocks in tiles keep no results. Allow mlp_tiles = 1, or product_stride = 0."
        )
    return tiles


def _product_strides(wanted: tuple[int, ...] | None, workload: Workload) -> list[int]:
    """What checkpointed blocks may keep; 0: nothing.  Raises PlanError if the workload knows none of what is named."""
    of_profiles = [{of.product_stride for of in profile.selective} for profile in workload.profiles]
    known = (0, *sorted(set.intersection(*of_profiles)))
    found = [stride for stride in known if wanted is None or stride in wanted]
    if not found:
        assert wanted is not None
        raise PlanError(f"{why_no_product_stride(min(wanted), known[1:], workload.model_name)}.")
    return found


def mode_rows_in_tiles(tilings: Mapping[Tiles, Workload], space: SearchSpace) -> ModeRows:
    """Every distinct choice of modes that the space allows, in each of the tilings.

    ``tilings``: what the plans do in each.  Raises PlanError as ``mode_rows``.
    """
    tiles, workloads = sorted(tilings), [tilings[one] for one in sorted(tilings)]
    rows = [_distinct(mode_rows(tilings[one], space), one, space) for one in tiles]
    filled = [number for number, part in enumerate(rows) if len(part.n_swap)] or [0]
    tiles, workloads = [tiles[number] for number in filled], [workloads[number] for number in filled]
    parts = [rows[number] for number in filled]
    if len(parts) == 1:
        return replace(parts[0], tiles=tuple(tiles))
    num_blocks, sizes = parts[0].num_blocks, [len(part.n_swap) for part in parts]
    none = [np.zeros(size, dtype=np.int64) for size in sizes]
    inputs = [
        nothing if part.n_offload_input is None else part.n_offload_input
        for part, nothing in zip(parts, none, strict=True)
    ]
    offloads_any = any(part.n_offload_input is not None for part in parts)
    moves = [np.ones(num_blocks, dtype=np.bool_) if part.moves is None else part.moves for part in parts]
    return ModeRows(
        num_blocks,
        np.concatenate([part.n_swap for part in parts]),
        np.concatenate([part.n_checkpoint for part in parts]),
        np.stack(moves),
        np.concatenate(inputs) if offloads_any else None,
        np.array([input_bytes(workload) for workload in workloads], dtype=np.int64) if offloads_any else None,
        tuple(tiles),
        np.repeat(np.arange(len(parts)), sizes),
        _first_alike(workloads, lambda workload: (_swapped(workload), *input_bytes(workload), *_exchanged(workload))),
        _first_alike(workloads, _exchanged),
    )


def _distinct(rows: ModeRows, tiles: Tiles, space: SearchSpace) -> ModeRows:
    """``rows`` without plans that keep results and offload inputs, and without those that others are already.

    Where no block is checkpointed, none keeps results.
    """
    product_stride, allowed = tiles[2], space.product_stride or (0,)
    if not product_stride:
        return rows
    is_here = rows.n_checkpoint >= (0 if product_stride == min(allowed) else 1)
    if rows.n_offload_input is not None:
        is_here &= rows.n_offload_input == 0
    return ModeRows(rows.num_blocks, rows.n_swap[is_here], rows.n_checkpoint[is_here], rows.moves)


def _first_alike(workloads: list[Workload], key: Callable[[Workload], Hashable]) -> tuple[int, ...]:
    """By workload, the number of the first one with the same key."""
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(key(workload), number) for number, workload in enumerate(workloads))


def _swapped(workload: Workload) -> tuple[int, ...]:
    return tuple(workload.profile_of(block).swappable_bytes for block in range(workload.num_blocks))


def _exchanged(workload: Workload) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """What ranks that share sequences exchange in every phase of every block."""
    profiles = [workload.profile_of(block) for block in range(workload.num_blocks)]
    return tuple(
        tuple(
            phase.exchanges
            for phase in (
                profile.forward,
                profile.checkpoint_forward,
                profile.recompute,
                profile.backward,
                profile.checkpoint_backward,
            )
        )
        for profile in profiles
    )

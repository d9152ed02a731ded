"""A workload that knows other numbers: of tiles that its parts run in, of ranks that share its sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ..basics.errors import WorkloadError
from ..basics.units import counted
from ..phases.sequence_sharing import MOST_SEQUENCE_RANKS, SequenceSharing
from ..phases.tiling import MOST_TILES, LossTiling
from ..schema.workload import Phase, Tiling, Workload

_OUTSIDE: Final = ("prologue_forward", "epilogue_forward", "epilogue_backward", "prologue_backward")


def checked_tiles(mlp_tiles: int | Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """The numbers of tiles beside 1, in order.  Raises WorkloadError if one is none, or exceeds the tokens."""
    asked = (mlp_tiles,) if isinstance(mlp_tiles, int) else tuple(mlp_tiles)
    most = min(num_tokens, MOST_TILES)
    for number in asked:
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
            raise WorkloadError(
                f"mlp_tiles is {number!r}, but the batch has {counted(num_tokens, 'token')}, of which every tile has "
                f"at least one. Name numbers from 1 to {most:,}."
            )
    return tuple(sorted(set(asked) - {1}))


def with_tilings(workload: Workload, tiled: Mapping[int, Workload], modules: Sequence[str]) -> Workload:
    """``workload`` with the blocks of the others, by the number of tiles that ``modules`` ran in there.

    Raises WorkloadError if tiles change what the model takes outside of its blocks.
    """
    for mlp_tiles, other in tiled.items():
        _check_outside(workload, other, mlp_tiles)
    tilings = tuple(
        Tiling(
            mlp_tiles=mlp_tiles,
            modules=tuple(modules),
            # Tiles are recomputed tile by tile: nothing is kept of them by operation.
            profiles=tuple(profile.model_copy(update={"selective": ()}) for profile in other.profiles),
            profile_of=tuple(block.profile for block in other.blocks),
        )
        for mlp_tiles, other in sorted(tiled.items())
    )
    fields = {name: getattr(workload, name) for name in Workload.model_fields}
    return Workload(**fields | {"tilings": tilings}) if tilings else workload


def checked_sequence_ranks(sequence_ranks: int | Sequence[int]) -> tuple[int, ...]:
    """The numbers of ranks beside 1, in order.  Raises WorkloadError if one is none."""
    asked = (sequence_ranks,) if isinstance(sequence_ranks, int) else tuple(sequence_ranks)
    for number in asked:
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_SEQUENCE_RANKS:
            raise WorkloadError(
                f"sequence_ranks is {number!r}; it must be a whole number from 1 to {MOST_SEQUENCE_RANKS:,}."
            )
    return tuple(sorted(set(asked) - {1}))


def with_sharings(workload: Workload, shared: Mapping[int, Workload]) -> Workload:
    """``workload`` that knows what one of several ranks does, as ``shared`` by their number, tilings included."""
    if not shared:
        return workload
    same = SequenceSharing.model_fields.keys() & Workload.model_fields.keys()
    sharings = tuple(
        SequenceSharing(
            sequence_ranks=number,
            profile_of=tuple(block.profile for block in other.blocks),
            **{name: getattr(other, name) for name in same},
        )
        for number, other in sorted(shared.items())
    )
    fields = {name: getattr(workload, name) for name in Workload.model_fields}
    return Workload(**fields | {"sequence_sharings": sharings})


def _check_outside(workload: Workload, other: Workload, mlp_tiles: int) -> None:
    changed = [name for name in _OUTSIDE if _memory(getattr(workload, name)) != _memory(getattr(other, name))]
    changed += ["shared_inputs"] if workload.shared_inputs != other.shared_inputs else []
    changed += ["resident_bytes"] if workload.resident_bytes < other.resident_bytes else []
    if changed:
        raise WorkloadError(
            f"with mlp_tiles = {mlp_tiles} {workload.model_name} takes other memory outside of its blocks "
            f"({', '.join(changed)}). Leave mlp_tiles out, or name other modules (mlp_modules)."
        )


def _memory(phase: Phase) -> tuple[int, int, int]:
    return phase.net_bytes, phase.peak_bytes, phase.stated_gradient_bytes


def with_loss_tilings(workload: Workload, traced: Mapping[int, Workload]) -> Workload:
    """``workload`` that knows what its epilogue does in each number of tiles, as ``traced`` by that number.

    Blocks, prologue and who uses which parameter are those of ``workload``: tiles read no weight that a whole loss
    leaves alone.
    """
    if not traced:
        return workload
    tilings = tuple(
        LossTiling(loss_tiles=tiles, epilogue_forward=found.epilogue_forward, epilogue_backward=found.epilogue_backward)
        for tiles, found in sorted(traced.items())
    )
    return Workload(**{name: getattr(workload, name) for name in Workload.model_fields} | {"loss_tilings": tilings})

"""What mode SELECTIVE does, from what a trace saw of mode CHECKPOINT.

[Note: From checkpointed to selective]
Both modes run the same forward, and in the recomputation autograd saves the same tensors: it records above the point
where results are handed back.  So three things differ.

Forward: each kept result stays from where the forward would have let it go.  Where that was, no level says by itself;
it was not before the first moment at which as many bytes went.  From there on the result is counted beside what is
there: the levels within are upper bounds, the level at the end is exact.

Recomputation: a kept result is there before it begins, and is handed over where it would have been computed.  From then
on it is held by whoever would have held it, and goes when it would have gone.  So every level is lower by the results
handed over so far.  The recomputation ends at the same tensor, and results behind it were kept in vain.

Backward: its levels are the same.  What was kept in vain goes with it.

Compiled blocks keep nothing in vain: the partitioner saves what the backward reads, of what is to be kept as of all
else (``get_recomputable_banned_nodes`` in PyTorch's ``torch/_functorch/partitioners.py``).

Products in float8 cast an input twice where it is saved, and once where it is not, so that a recomputation may have
casts that the forward has not ([Note: Float8 products] in ``float8.py``).  No cast is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ..phases.activation_modes import PRODUCT_STRIDES, KeptResults
from ..phases.block_profile import SelectiveRecomputation
from ..phases.phase import Phase
from .float8 import CAST
from .observation import Observation, OperatorCall

_MOST_BEFORE: Final = 8
"""Calls between a block's output and its recomputation."""


def selective_recomputations(
    forward: Observation,
    recompute: Observation,
    backward: Observation,
    *,
    is_compiled: bool = False,
    has_casts: bool = False,
) -> tuple[SelectiveRecomputation, ...]:
    """For every stride, of a block whose checkpointed forward, recomputation and backward were seen.

    ``is_compiled``: the three are what compiled code does.  ``has_casts``: the recomputation may cast what the forward
    does not, as products in float8 do.  A cast of autocast that an earlier block's forward made for this one too is
    none of these: PyTorch refuses a recomputation that calls an operator which the forward did not.
    None where results of one cannot be handed to the other: the recomputation runs other operations, or in tiles.
    """
    origins = _origins(forward, recompute, has_casts=has_casts)
    in_tiles = forward.passes or forward.repeated or recompute.passes or recompute.repeated
    if in_tiles or origins is None:
        return ()
    num_again = max((origin + 1 for origin in origins if origin is not None), default=0)
    num_kept = num_again if is_compiled else len(forward.calls)
    found = (_recomputation(forward, recompute, origins, num_kept, stride) for stride in PRODUCT_STRIDES)
    if not backward.calls:
        # Nobody will recompute it, and results go with the end of its forward.
        found = (of.model_copy(update={"kept_bytes": 0, "unused_bytes": 0}) for of in found)
    return tuple(found)


def _origins(forward: Observation, recompute: Observation, *, has_casts: bool) -> list[int | None] | None:
    """Of every call of the recomputation, the forward's call that it repeats; None if it repeats it in no order.

    A few calls may come before: they belong to the backward of the section behind, which hands its gradient on, by a
    cast or a sum.
    """
    for num_before in range(min(_MOST_BEFORE, len(recompute.calls)) + 1):
        repeated = _repeated(forward.calls, recompute.calls[num_before:], has_casts=has_casts)
        if repeated is not None:
            return [*[None] * num_before, *repeated]
    return None


def _repeated(
    first: Sequence[OperatorCall], again: Sequence[OperatorCall], *, has_casts: bool
) -> list[int | None] | None:
    """Of every call of ``again``, the one of ``first`` whose turn it is; None for a cast that ``first`` does not do."""
    origins: list[int | None] = []
    turn = 0
    for call in again:
        if turn < len(first) and call.name == first[turn].name:
            origins.append(turn)
            turn += 1
        elif has_casts and call.name == CAST:
            origins.append(None)
        else:
            return None
    return origins


def _recomputation(
    forward: Observation, recompute: Observation, origins: Sequence[int | None], num_kept: int, product_stride: int
) -> SelectiveRecomputation:
    """``origins``: as of ``_origins``; ``num_kept``: calls of the forward whose results may be kept, from the first."""
    changed = _changed(forward, product_stride)
    kept = KeptResults(product_stride, changed)
    is_kept = [kept.keeps(call.name, draws=call.draws) and n < num_kept for n, call in enumerate(forward.calls)]
    sizes = [sum(call.writes_bytes) if keeps else 0 for call, keeps in zip(forward.calls, is_kept, strict=True)]
    is_handed = [origin is not None and is_kept[origin] for origin in origins]
    handed_bytes = [0 if origin is None else sizes[origin] for origin in origins]
    kept_bytes, used_bytes = sum(sizes), sum(handed_bytes)
    keeping = replace(forward, levels=_with_kept(forward, is_kept), end_bytes=forward.end_bytes + kept_bytes)
    return SelectiveRecomputation(
        product_stride=product_stride,
        kept_bytes=kept_bytes,
        changed=changed,
        unused_bytes=kept_bytes - used_bytes,
        forward_curve=keeping.curve(),
        forward_changes=keeping.changes(),
        recompute=_phase(_without_kept(recompute, is_handed, handed_bytes)),
    )


def _changed(forward: Observation, product_stride: int) -> tuple[int, ...]:
    """``SelectiveRecomputation.changed``."""
    kept = KeptResults(product_stride)
    chosen = [call for call in forward.calls if kept.keeps(call.name, draws=call.draws)]
    return tuple(number for number, call in enumerate(chosen) if call.is_changed)


def _with_kept(forward: Observation, is_kept: list[bool]) -> list[int]:
    """Levels of the forward, with each kept result beside the others from where it could have gone."""
    levels: list[int] = []
    waiting: list[int] = []
    before_bytes = beside_bytes = 0
    for call, level_bytes, keeps in zip(forward.calls, forward.levels, is_kept, strict=True):
        gone_bytes = sum(call.writes_bytes) - (level_bytes - before_bytes)
        beside_bytes += sum(size for size in waiting if size <= gone_bytes)
        waiting = [size for size in waiting if size > gone_bytes]
        if keeps:
            waiting += call.writes_bytes
        levels.append(level_bytes + beside_bytes)
        before_bytes = level_bytes
    return levels


def _without_kept(recompute: Observation, is_kept: list[bool], sizes: list[int]) -> Observation:
    handed_bytes = 0
    again: list[int] = []
    levels: list[int] = []
    for index, keeps in enumerate(is_kept):
        handed_bytes += sizes[index]
        if not keeps:
            again.append(index)
            levels.append(recompute.levels[index] - handed_bytes)
    return replace(
        recompute,
        calls=[recompute.calls[index] for index in again],
        operations=[recompute.operations[index] for index in again],
        levels=levels,
        end_bytes=recompute.end_bytes - handed_bytes,
    )


def _phase(observation: Observation) -> Phase:
    return Phase(
        operations=observation.counted(),
        net_bytes=observation.net_bytes,
        gradient_bytes=max(0, observation.gradient_bytes),
        curve=observation.curve(),
        changes=observation.changes(),
        exchanges=tuple(observation.exchanges),
        num_graphs=observation.num_graphs,
    )

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
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..phases.activation_modes import PRODUCT_STRIDES, KeptResults
from ..phases.block_profile import SelectiveRecomputation
from ..phases.phase import Phase
from .observation import Observation

_MOST_BEFORE: Final = 8
"""Calls between a block's output and its recomputation."""


def selective_recomputations(
    forward: Observation, recompute: Observation, backward: Observation, *, is_compiled: bool = False
) -> tuple[SelectiveRecomputation, ...]:
    """For every stride, of a block whose checkpointed forward, recomputation and backward were seen.

    ``is_compiled``: the three are what compiled code does.
    None where results of one cannot be handed to the other: the recomputation runs other operations, or in tiles.
    """
    num_before = _num_before(forward, recompute)
    in_tiles = forward.passes or forward.repeated or recompute.passes or recompute.repeated
    if in_tiles or num_before is None:
        return ()
    num_again = len(recompute.calls) - num_before
    num_kept = num_again if is_compiled else len(forward.calls)
    found = (_recomputation(forward, recompute, num_before, num_kept, stride) for stride in PRODUCT_STRIDES)
    if not backward.calls:
        # Nobody will recompute it, and results go with the end of its forward.
        found = (of.model_copy(update={"kept_bytes": 0, "unused_bytes": 0}) for of in found)
    return tuple(found)


def _num_before(forward: Observation, recompute: Observation) -> int | None:
    """Calls before the recomputation runs what the forward ran, in its order; None if it never does.

    They belong to the backward of the section behind, which hands its gradient on: a cast, a sum.
    """
    first, again = ([call.name for call in seen.calls] for seen in (forward, recompute))
    for num_before in range(min(_MOST_BEFORE, len(again)) + 1):
        rest = again[num_before:]
        if rest == first[: len(rest)]:
            return num_before
    return None


def _recomputation(
    forward: Observation, recompute: Observation, num_before: int, num_kept: int, product_stride: int
) -> SelectiveRecomputation:
    """``num_kept``: of the forward's calls those whose results may be kept, from the first on."""
    changed = _changed(forward, product_stride)
    kept = KeptResults(product_stride, changed)
    is_kept = [kept.keeps(call.name, draws=call.draws) and n < num_kept for n, call in enumerate(forward.calls)]
    sizes = [sum(call.writes_bytes) if keeps else 0 for call, keeps in zip(forward.calls, is_kept, strict=True)]
    num_again = len(recompute.calls) - num_before
    handed_bytes = [0] * num_before + sizes[:num_again]
    kept_bytes, used_bytes = sum(sizes), sum(handed_bytes)
    keeping = replace(forward, levels=_with_kept(forward, is_kept), end_bytes=forward.end_bytes + kept_bytes)
    return SelectiveRecomputation(
        product_stride=product_stride,
        kept_bytes=kept_bytes,
        changed=changed,
        unused_bytes=kept_bytes - used_bytes,
        forward_curve=keeping.curve(),
        forward_changes=keeping.changes(),
        recompute=_phase(_without_kept(recompute, [False] * num_before + is_kept[:num_again], handed_bytes)),
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

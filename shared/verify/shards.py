"""What one rank must hold of a chunk that is gathered, found by laying the chunk out element by element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Final

from ..layout.layout import Chunk
from ..schema.plan import ParallelMode, Plan
from ..schema.workload import DType, Parameter
from .steps import Stepped, state_bytes, stepped_of

_ALIGNMENT_BYTES: Final = 256
"""Where parameters begin, and so their gradients: at multiples of it."""


@dataclass(frozen=True)
class Held:
    """A rank's part of a chunk on its host or its device; the whole chunk unless ranks have shards."""

    parameter_bytes: int
    gradient_bytes: int
    arrival_bytes: int
    """Where gradients arrive on a host beside those that they are added to."""
    summed_bytes: int
    """The gradients as the host adds them up."""
    staging_bytes: int
    """Where it does."""
    state_bytes: int
    stepped: list[Stepped]
    """What the optimizer steps: parameters, or the fullest shards of runs of them."""
    num_parts: int
    """Ranks that have such a part each, and together the chunk."""

    @property
    def gathered_bytes(self) -> int:
        """The parameters of all parts together."""
        return self.num_parts * self.parameter_bytes


def held(chunk: Chunk, parameters: Sequence[Parameter], plan: Plan) -> Held:
    """What each rank has of ``chunk``.

    Sharded, every run of neighbouring parameters that are treated alike is dealt out in equal parts, rank by rank: the
    first rank has the fullest.
    """
    if plan.parallel is not ParallelMode.SHARDED:
        stepped = stepped_of([chunk], parameters)
        return Held(
            chunk.size_bytes,
            chunk.gradient_bytes,
            chunk.staging_bytes,
            sum(_summed_item_bytes(dtype, plan) * prod(shape) for dtype, shape in stepped),
            sum(_in_units(_summed_item_bytes(dtype, plan) * prod(shape)) for dtype, shape in stepped),
            state_bytes(stepped, plan.optimizer),
            stepped,
            1,
        )
    extents = _extents(chunk, parameters)
    parameter_bytes = gradient_bytes = 0
    stepped = []
    for (dtype, trainable), run in groupby(extents, key=lambda extent: (extent[0].dtype, extent[0].trainable)):
        elements, rest = divmod(sum(size for _, size in run), dtype.item_bytes)
        assert rest == 0, "alignment keeps elements whole"
        each, left = divmod(elements, plan.num_ranks)
        fullest = each + (left > 0)
        parameter_bytes += fullest * dtype.item_bytes
        if trainable:
            gradient_bytes += fullest * dtype.item_bytes
            stepped.append((dtype, (fullest,)))
    kept_bytes = state_bytes(stepped, plan.optimizer)
    summed_bytes = sum(_summed_item_bytes(dtype, plan) * count for dtype, (count,) in stepped)
    return Held(
        parameter_bytes,
        gradient_bytes,
        gradient_bytes,
        summed_bytes,
        summed_bytes,
        kept_bytes,
        stepped,
        plan.num_ranks,
    )


def _summed_item_bytes(dtype: DType, plan: Plan) -> int:
    """Bytes of one gradient where the host adds it to others."""
    return max(4, dtype.item_bytes) if plan.widens_on_host else dtype.item_bytes


def _in_units(size_bytes: int) -> int:
    """Parameters begin at multiples of 256 bytes, and so do their gradients."""
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def fullest_regions(chunk: Chunk, parameters: Sequence[Parameter], num_ranks: int) -> list[tuple[DType, int]]:
    """Element type and scalars of the fullest shard of every run of neighbouring trained parameters of one type."""
    sizes = _extents(chunk, parameters)
    runs = groupby(sizes, key=lambda extent: (extent[0].dtype, extent[0].trainable))
    return [
        (dtype, -(-sum(size for _, size in run) // (dtype.item_bytes * num_ranks)))
        for (dtype, trainable), run in runs
        if trainable
    ]


def _extents(chunk: Chunk, parameters: Sequence[Parameter]) -> list[tuple[Parameter, int]]:
    """Every parameter of a chunk, with the bytes to where the next one begins."""
    ends = [*(placed.offset_bytes for placed in chunk.parameters[1:]), chunk.size_bytes]
    return [
        (parameters[placed.index], end - placed.offset_bytes)
        for placed, end in zip(chunk.parameters, ends, strict=True)
    ]

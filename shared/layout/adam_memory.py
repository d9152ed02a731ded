"""What device Adam needs beside weights, state and gradients: the gradient that it widens.

[Note: Steps of device Adam]
Parameters as wide as their state are stepped together, and their gradients dropped.  Then the narrower ones follow one
by one, in the order of the chunks: the gradient is widened to float32, a large one piece by piece, the master stepped,
and both gradients dropped.  Of chunks that are sharded over devices the rank's parts come last, region by region
([Note: Shards] in ``shards.py``), and their gradients stay where they are.  An optimizer that cannot step pieces widens
whole gradients; that is not accounted for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..schema.workload import Parameter
from .layout import Chunk, master_bytes
from .shards import regions

WIDENED_SCALARS: Final = 2**20
"""Scalars whose gradients are widened at once."""


def narrow_peak_bytes(chunk: Chunk, parameters: Sequence[Parameter]) -> tuple[int, int]:
    """The most that stepping the narrow parameters of ``chunk`` adds to the level before, and what it drops of it."""
    highest_bytes = dropped_bytes = 0
    for parameter in (parameters[placed.index] for placed in chunk.parameters):
        if parameter.trainable and master_bytes(parameter.dtype):
            widened_bytes = min(parameter.num_elements, WIDENED_SCALARS) * master_bytes(parameter.dtype)
            highest_bytes = max(highest_bytes, widened_bytes - dropped_bytes)
            dropped_bytes += parameter.size_bytes
    return highest_bytes, dropped_bytes


def wide_gradient_bytes(chunk: Chunk, parameters: Sequence[Parameter]) -> int:
    """Gradients of the parameters of ``chunk`` that are their own masters."""
    found = (parameters[placed.index] for placed in chunk.parameters)
    return sum(p.size_bytes for p in found if p.trainable and not master_bytes(p.dtype))


def widened_part_bytes(chunk: Chunk, parameters: Sequence[Parameter], num_ranks: int) -> int:
    """The most that stepping one rank's part of ``chunk`` adds to the level before."""
    return max(
        (
            min(region.shard_elements(num_ranks), WIDENED_SCALARS) * master_bytes(region.dtype)
            for region in regions(chunk, parameters)
            if region.trainable
        ),
        default=0,
    )

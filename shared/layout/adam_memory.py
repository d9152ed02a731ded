"""What a step on the device needs beside weights, state and gradients: widened gradients, and an update's own tensors.

[Note: Steps of device Adam]
Parameters that an optimizer steps themselves, and any number at once, come first, and their gradients are dropped
together after them.  All others follow one by one, in the order of the chunks: those with a float32 master, and, of an
optimizer that does not treat every scalar by itself, all.  The gradient is widened to float32 if there is a master, the
weight stepped, and its gradients dropped.  A large gradient is widened piece by piece where the optimizer treats every
scalar by itself, else whole.  Adafactor makes tensors as large as the weight on the way (``temporary_bytes``).  Of
chunks that are sharded over devices the rank's parts come last, region by region ([Note: Shards] in ``shards.py``), and
their gradients stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..optimizers.state import master_bytes
from ..optimizers.work import temporary_bytes, widened_scalars
from ..schema.optimizer import Optimizer
from ..schema.workload import DType, Parameter
from .layout import Chunk
from .shards import regions

WIDENED_SCALARS: Final = 2**20
"""Scalars whose gradients are widened at once, where pieces will do."""


def is_stepped_alone(dtype: DType, optimizer: Optimizer) -> bool:
    """Whether a parameter of a persistent chunk has a step of its own, after which its gradient is dropped."""
    return master_bytes(dtype, optimizer) > 0 or not optimizer.is_elementwise


def alone_peak_bytes(chunk: Chunk, parameters: Sequence[Parameter], optimizer: Optimizer) -> tuple[int, int]:
    """The most that parameters of ``chunk`` that are stepped alone add to the level before, and what they drop."""
    highest_bytes = dropped_bytes = 0
    for parameter in (parameters[placed.index] for placed in chunk.parameters):
        if parameter.trainable and is_stepped_alone(parameter.dtype, optimizer):
            count = widened_scalars(parameter.num_elements, optimizer, WIDENED_SCALARS)
            made_bytes = count * master_bytes(parameter.dtype, optimizer)
            made_bytes += temporary_bytes((parameter.dtype, parameter.shape), optimizer)
            highest_bytes = max(highest_bytes, made_bytes - dropped_bytes)
            dropped_bytes += parameter.size_bytes
    return highest_bytes, dropped_bytes


def together_gradient_bytes(chunk: Chunk, parameters: Sequence[Parameter], optimizer: Optimizer) -> int:
    """Gradients of the parameters of ``chunk`` that are stepped together."""
    found = (parameters[placed.index] for placed in chunk.parameters)
    return sum(p.size_bytes for p in found if p.trainable and not is_stepped_alone(p.dtype, optimizer))


def widened_part_bytes(chunk: Chunk, parameters: Sequence[Parameter], num_shards: int, optimizer: Optimizer) -> int:
    """The most that stepping one of so many parts of ``chunk`` adds to the level before."""
    return max(
        (
            widened_scalars(region.shard_elements(num_shards), optimizer, WIDENED_SCALARS)
            * master_bytes(region.dtype, optimizer)
            for region in regions(chunk, parameters)
            if region.trainable
        ),
        default=0,
    )

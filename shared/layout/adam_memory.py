"""What a step on the device needs beside weights, state and gradients: widened gradients, and an update's own tensors.

[Note: Steps of device Adam]
Parameters that an optimizer steps themselves, and any number at once, come first, and their gradients are dropped
together after them.  All others follow in the order of the chunks: those with a float32 master, and, of an optimizer
that does not treat every scalar by itself, all.  Where it does, neighbours of one chunk are stepped in one call, as
long as they have ``WIDENED_SCALARS`` together: what a call costs the host is more than what few scalars cost the
device.  Their gradients are widened to float32 if there are masters, the weights stepped, and the gradients dropped.  A
gradient of more scalars is widened piece by piece where the optimizer treats every scalar by itself, else whole.
Adafactor makes tensors as large as the weight on the way (``temporary_bytes``).  Of chunks that are sharded over
devices the rank's parts come last, region by region ([Note: Shards] in ``shards.py``), and their gradients stay where
they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ..optimizers.state import master_bytes
from ..optimizers.work import temporary_bytes, widened_scalars
from ..schema.optimizer import Optimizer
from ..schema.workload import DType, Parameter
from .layout import Chunk
from .shards import regions

WIDENED_SCALARS: Final = 2**24
"""Scalars whose gradients are widened at once, where pieces will do.

A call of an optimizer takes the host some 200 microseconds, and 16 million scalars take a fast device as long: a step
moves some 40 bytes each.  Pieces of 2**20 made the step of a model of 445 million parameters 13 times as long as the
device needs for it (one H100, measured by ``make bench-gpu``).
"""


def is_stepped_alone(dtype: DType, optimizer: Optimizer) -> bool:
    """Whether a parameter of a persistent chunk is stepped alone, or with neighbours, and its gradient dropped then."""
    return master_bytes(dtype, optimizer) > 0 or not optimizer.is_elementwise


def alone_peak_bytes(chunk: Chunk, parameters: Sequence[Parameter], optimizer: Optimizer) -> tuple[int, int]:
    """The most that parameters of ``chunk`` that are stepped alone add to the level before, and what they drop."""
    highest_bytes = dropped_bytes = 0
    for made_bytes, gradient_bytes in _stepped_alone(chunk, parameters, optimizer):
        highest_bytes = max(highest_bytes, made_bytes - dropped_bytes)
        dropped_bytes += gradient_bytes
    return highest_bytes, dropped_bytes


def widened_bytes(chunk: Chunk, parameters: Sequence[Parameter], optimizer: Optimizer) -> int:
    """The most that stepping ``chunk`` adds to the level before, where its gradients stay."""
    return max((made_bytes for made_bytes, _ in _stepped_alone(chunk, parameters, optimizer)), default=0)


def _stepped_alone(chunk: Chunk, parameters: Sequence[Parameter], optimizer: Optimizer) -> Iterator[tuple[int, int]]:
    """Bytes that each call for parameters of ``chunk`` that are stepped alone makes, and those of their gradients."""
    members = (parameters[placed.index] for placed in chunk.parameters)
    alone = [p for p in members if p.trainable and is_stepped_alone(p.dtype, optimizer)]
    most = WIDENED_SCALARS if optimizer.is_elementwise else 0
    for start, end in neighbours([parameter.num_elements for parameter in alone], most):
        made_bytes = 0
        for parameter in alone[start:end]:
            count = widened_scalars(parameter.num_elements, optimizer, WIDENED_SCALARS)
            made_bytes += count * master_bytes(parameter.dtype, optimizer)
            made_bytes += temporary_bytes((parameter.dtype, parameter.shape), optimizer)
        yield made_bytes, sum(parameter.size_bytes for parameter in alone[start:end])


def neighbours(counts: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Stretches of ``counts``, each as long as its sum is at most ``most``, and no shorter than one."""
    start, total = 0, 0
    for place, count in enumerate(counts):
        if place > start and total + count > most:
            yield start, place
            start, total = place, 0
        total += count
    if counts:
        yield start, len(counts)


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

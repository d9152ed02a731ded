"""Tensors that come once and stay: in the set-up, or with the first step.

[Note: State that is made together]
DeepSpeed's optimizers hold masters and moments of many parameters as one tensor each, of a parameter group under ZeRO-1
and ZeRO-2, of ``sub_group_size`` scalars at most under ZeRO-3.  All is made with the optimizer: masters from a copy of
the 16-bit weights, moments in a step of zeros as large as the largest group, so that both leave segments behind
(``_create_fp32_partitions`` and ``initialize_optimizer_states`` in zero/stage3.py; likewise in zero/stage_1_and_2.py).
Gradients that stay come after that (``grad_partitions_flat_buffer``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

from ...shared.layout.layout import Layout
from ...shared.layout.shards import stepped_parts
from ...shared.optimizers.state import (
    MAP_BYTES,
    PAGED_NAMES,
    Stepped,
    is_paged,
    map_bytes,
    master_bytes,
    state_tensors,
)
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.schedule import ChunkId, Content, Memory, Schedule
from ...shared.schema.workload import DType, Parameter

_PLACE: Final = (Memory.DEVICE, Content.PARAMETERS)


@dataclass(frozen=True, slots=True)
class SetUp:
    """One allocation of the set-up."""

    size_bytes: int
    stays: bool
    """Whether it is there for good; an offloaded chunk is filled on the device's side once and goes again."""


@dataclass(frozen=True)
class StaticTensors:
    """What comes once and stays, tensor by tensor."""

    set_up: tuple[SetUp, ...]
    """In order: the batch and module buffers, then chunk by chunk parameters and float32 masters."""
    first_step: tuple[int, ...]
    """Optimizer state that the first device Adam makes: moments, counts of steps, maps.  Bytes each."""


def _chunks_with_paged_state(schedule: Schedule) -> set[ChunkId | None]:
    """Chunks whose moments lie on the host between two steps."""
    return {b.chunk for b in schedule.buffers if b.is_static and b.content is Content.PAGED_STATE}


def static_tensors(
    schedule: Schedule, parameters: tuple[Parameter, ...], layout: Layout, *, num_together: int = 0
) -> StaticTensors:
    """The static device buffers of ``schedule`` as tensors; together they have the same bytes.

    Chunks are one tensor each.  The masters and moments of a narrow parameter are made in pieces of 2**20 scalars,
    which fill segments of 20 MiB to the last byte, as one tensor does that is rounded up to 2 MiB.  Of a chunk that is
    sharded over devices there is the rank's part, region by region.

    ``num_together``: as of ``Segments``; see [Note: State that is made together].
    """
    kept = {b.chunk for b in schedule.buffers if b.is_static and (b.memory, b.content) == _PLACE}
    state = _State(schedule.optimizer)
    sharded = {b.chunk for b in schedule.buffers if b.content is Content.REDUCED_GRADIENTS}
    visiting = set() if schedule.optimizer is Optimizer.PAGED_ADAMW_8BIT else _chunks_with_paged_state(schedule)
    set_up: list[SetUp] = []
    gradients: list[SetUp] = []
    for buffer in schedule.buffers:
        if not buffer.is_static or not buffer.size_bytes:
            continue
        if buffer.memory in (Memory.PINNED_HOST, Memory.DISK) and buffer.content is Content.PARAMETERS:
            if buffer.chunk is not None and buffer.chunk not in kept:
                set_up.append(SetUp(buffer.size_bytes, stays=False))
        elif buffer.memory is Memory.DEVICE and buffer.content is Content.OPTIMIZER_STATE:
            assert buffer.chunk is not None
            num_shards = schedule.num_shards if buffer.chunk in sharded else 1
            together = stepped_parts(layout.chunks[buffer.chunk], parameters, num_shards)
            masters = state.add(together, visits=buffer.chunk in visiting)
            if not num_together:
                set_up += masters
        elif buffer.memory is Memory.DEVICE:
            is_behind = bool(num_together) and buffer.content in (Content.GRADIENTS, Content.REDUCED_GRADIENTS)
            (gradients if is_behind else set_up).append(SetUp(buffer.size_bytes, stays=True))
    if not num_together:
        return StaticTensors(tuple(set_up), tuple(state.tensors))
    return StaticTensors((*set_up, *state.made_together(num_together), *gradients), ())


class _State:
    """Masters and moments of what the device steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.tensors: list[int] = []
        """Sizes of all but masters, tensor by tensor."""
        self._others: list[int] = []
        """Of these, those that are no moment as large as the master."""
        self._scalars: Counter[str] = Counter()
        """Of masters, and of moments as large, by name."""
        self._num_copied = 0
        """Scalars with a master beside 16 bits."""

    def add(self, together: Iterable[Stepped], *, visits: bool) -> list[SetUp]:
        """The state of what is stepped of one chunk; the masters of it, in the set-up.

        ``visits``: whether its moments are there for the step alone.
        """
        together, optimizer = tuple(together), self._optimizer
        maps = [MAP_BYTES] * (map_bytes(together, optimizer) // MAP_BYTES)
        self.tensors += maps
        self._others += maps
        masters: list[SetUp] = []
        for dtype, shape in together:
            if of_master := prod(shape) * master_bytes(dtype, optimizer):
                masters.append(SetUp(of_master, stays=True))
                self._num_copied += prod(shape)
            paged = PAGED_NAMES if is_paged((dtype, shape), optimizer) else ()
            for tensor in state_tensors((dtype, shape), optimizer):
                if tensor.name in paged or not tensor.size_bytes or (visits and tensor.is_moment):
                    continue
                self.tensors.append(tensor.size_bytes)
                if tensor.dtype is DType.FLOAT32 and tensor.num_elements == prod(shape) and tensor.is_moment:
                    self._scalars[tensor.name] += tensor.num_elements
                else:
                    self._others.append(tensor.size_bytes)
        return masters

    def made_together(self, most: int) -> Iterator[SetUp]:
        """Flat tensors of so many scalars at most, and what is made for them on the way."""
        for count in _groups(self._num_copied, most):
            yield SetUp(count * DType.BFLOAT16.item_bytes, stays=False)
            yield SetUp(count * DType.FLOAT32.item_bytes, stays=True)
        for of_moment in self._scalars.values():
            for count in _groups(of_moment, most):
                yield SetUp(count * DType.FLOAT32.item_bytes, stays=True)
        yield from (SetUp(size_bytes, stays=True) for size_bytes in self._others)
        if zeros := min(most, max(self._scalars.values(), default=0)):
            yield SetUp(zeros * DType.FLOAT32.item_bytes, stays=False)


def _groups(scalars: int, most: int) -> list[int]:
    return [min(most, scalars - first) for first in range(0, scalars, most)]

"""The tensors that the runtime makes on the device before the first iteration, and in its first step."""

from __future__ import annotations

from dataclasses import dataclass

from ...shared.layout.layout import STEP_COUNT_BYTES, Chunk, Layout, master_bytes, moment_bytes
from ...shared.layout.shards import regions
from ...shared.schema.schedule import Content, Memory, Schedule
from ...shared.schema.workload import DType, Parameter


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
    """Optimizer state that the first device Adam makes: moments and counts of steps.  Bytes each."""


def static_tensors(schedule: Schedule, parameters: tuple[Parameter, ...], layout: Layout) -> StaticTensors:
    """The static device buffers of ``schedule`` as tensors; together they have the same bytes.

    Chunks are one tensor each.  The masters and moments of a narrow parameter are made in pieces of 2**20 scalars,
    which fill segments of 20 MiB to the last byte, as one tensor does that is rounded up to 2 MiB.  Of a chunk that is
    sharded over devices there is the rank's part, region by region.
    """
    sharded = {b.chunk for b in schedule.buffers if b.is_static and b.content is Content.REDUCED_GRADIENTS}
    set_up: list[SetUp] = []
    first_step: list[int] = []
    for buffer in schedule.buffers:
        if not buffer.is_static or not buffer.size_bytes:
            continue
        if buffer.memory is Memory.PINNED_HOST and buffer.content is Content.PARAMETERS:
            set_up.append(SetUp(buffer.size_bytes, stays=False))
        elif buffer.memory is Memory.DEVICE and buffer.content is Content.OPTIMIZER_STATE:
            assert buffer.chunk is not None
            num_ranks = schedule.num_ranks if buffer.chunk in sharded else 1
            for dtype, count in _stepped(layout.chunks[buffer.chunk], parameters, num_ranks):
                if count:
                    if master_bytes(dtype):
                        set_up.append(SetUp(count * master_bytes(dtype), stays=True))
                    first_step += [count * moment_bytes(dtype) // 2] * 2
                first_step.append(STEP_COUNT_BYTES)
        elif buffer.memory is Memory.DEVICE:
            set_up.append(SetUp(buffer.size_bytes, stays=True))
    return StaticTensors(tuple(set_up), tuple(first_step))


def _stepped(chunk: Chunk, parameters: tuple[Parameter, ...], num_ranks: int) -> list[tuple[DType, int]]:
    """Element types and scalars of what is stepped one by one: parameters, or one of ``num_ranks`` parts of regions."""
    if num_ranks > 1:
        return [(r.dtype, r.shard_elements(num_ranks)) for r in regions(chunk, parameters) if r.trainable]
    members = [parameters[placed.index] for placed in chunk.parameters]
    return [(p.dtype, p.num_elements) for p in members if p.trainable]

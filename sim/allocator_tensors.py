"""The tensors that the runtime makes on the device before the first iteration, and in its first step."""

from __future__ import annotations

from dataclasses import dataclass

from ..shared.layout import STEP_COUNT_BYTES, Layout, master_bytes, moment_bytes
from ..shared.schedule import Content, Memory, Schedule
from ..shared.workload import Parameter


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
    which fill segments of 20 MiB to the last byte, as one tensor does that is rounded up to 2 MiB.
    """
    set_up: list[SetUp] = []
    first_step: list[int] = []
    for buffer in schedule.buffers:
        if not buffer.is_static or not buffer.size_bytes:
            continue
        if buffer.memory is Memory.PINNED_HOST and buffer.content is Content.PARAMETERS:
            set_up.append(SetUp(buffer.size_bytes, stays=False))
        elif buffer.memory is Memory.DEVICE and buffer.content is Content.OPTIMIZER_STATE:
            assert buffer.chunk is not None
            members = [parameters[placed.index] for placed in layout.chunks[buffer.chunk].parameters]
            for parameter in members:
                count = parameter.num_elements
                if parameter.trainable and count:
                    if master_bytes(parameter.dtype):
                        set_up.append(SetUp(count * master_bytes(parameter.dtype), stays=True))
                    first_step += [count * moment_bytes(parameter.dtype) // 2] * 2
                if parameter.trainable:
                    first_step.append(STEP_COUNT_BYTES)
        elif buffer.memory is Memory.DEVICE:
            set_up.append(SetUp(buffer.size_bytes, stays=True))
    return StaticTensors(tuple(set_up), tuple(first_step))

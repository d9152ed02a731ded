"""R4: the largest model that can be trained, over the depth of a Llama of fixed width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...shared.catalogue.machines import machine
from ...shared.compile.compile import compile_schedule
from ...shared.layout.layout import Chunk, Layout, build_layout
from ...shared.layout.shards import chunk_state_bytes
from ...shared.schema.hardware import Hardware
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
from ...shared.schema.schedule import Memory
from ...shared.schema.workload import Parameter, Workload
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ...sim.memory.host import default_host_budget_bytes
from .runs import LARGEST_ON_24_GB, LARGEST_ON_80_GB, Prediction, Quantity
from .workloads import dense_workload, llama, with_depth

_TRACED_BLOCKS: Final = 5
_LEAST_BYTES: Final = 12
"""What every parameter takes on device and host together at least: master and moments in float32."""
_WIDTH: Final = 8192
_GIB: Final = 2**30
_HOSTS: Final = {
    LARGEST_ON_24_GB: ("rtx-3090", (256 * _GIB, 512 * _GIB, 1024 * _GIB)),
    LARGEST_ON_80_GB: ("a100-80gb", (512 * _GIB, 1024 * _GIB, 2048 * _GIB)),
}
"""The device, and host memories from small to large: what one socket takes with modules of 32, 64 and 128 GiB in eight
channels, and twice that in a DGX A100, whose data sheet has 1 TB and 2 TB."""


def largest_predictions() -> list[Prediction]:
    """Parameters of the deepest model that fits, by host memory."""
    shape = llama(_WIDTH, _TRACED_BLOCKS, _WIDTH // 128, 8 * _WIDTH // 3)
    workload = dense_workload(shape, "llama-of-any-depth", batch_size=1, sequence_length=1024)
    found = []
    for case, (name, memories) in _HOSTS.items():
        largest = [_largest(workload, _with_memory(machine(name), memory_bytes)) for memory_bytes in memories]
        hosts = ", ".join(f"{memory_bytes // _GIB} GiB" for memory_bytes in memories)
        how = (
            f"hosts of {hosts}, which limit it; a Llama {_WIDTH} wide, 1 sequence of 1 024 tokens, every block "
            f"checkpointed; bfloat16 with float32 masters and moments, 16 bytes a parameter"
        )
        found.append(Prediction.of(case=case, row="R4", quantity=Quantity.LARGEST, readings=largest, how=how))
    return found


def _largest(workload: Workload, hardware: Hardware) -> int:
    """Parameters of the deepest model that fits; bisected, since memory grows with every block."""
    fits, fails = _TRACED_BLOCKS, _TRACED_BLOCKS + _least_too_many(workload, hardware)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if _fits(with_depth(workload, middle), hardware) else (fits, middle)
    return with_depth(workload, fits).num_parameters


def _fits(workload: Workload, hardware: Hardware) -> bool:
    """Whether a plan fits that keeps as much on the device as it has room for, everything else on the host."""
    block_bytes = sum(parameter.size_bytes for parameter in workload.parameters if parameter.block == 0)
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=block_bytes)
    host_bytes = default_host_budget_bytes(hardware, hardware.device.usable_bytes)
    least = _need(workload, layout, n_persist=0)
    room_bytes = hardware.device.usable_bytes - least.device_bytes
    if room_bytes < 0 or least.host_bytes <= host_bytes:
        return room_bytes >= 0
    n_persist = 0
    for chunk in layout.chunks:
        room_bytes -= _persistent_bytes(chunk, workload.parameters)
        if room_bytes < 0:
            break
        n_persist += 1
    most = _need(workload, layout, n_persist)
    return most.device_bytes <= hardware.device.usable_bytes and most.host_bytes <= host_bytes


def _least_too_many(workload: Workload, hardware: Hardware) -> int:
    """Blocks that fit under no plan: their optimizer state alone exceeds both memories."""
    scalars = sum(parameter.num_elements for parameter in workload.parameters if parameter.block == 0)
    return (hardware.device.memory_bytes + hardware.host.memory_bytes) // (_LEAST_BYTES * scalars) + 1


def _persistent_bytes(chunk: Chunk, parameters: Sequence[Parameter]) -> int:
    """What a chunk takes of the device for good: parameters, gradients and the optimizer's state."""
    return chunk.size_bytes + chunk.gradient_bytes + chunk_state_bytes(chunk, parameters, Optimizer.ADAMW)


@dataclass(frozen=True, slots=True)
class _Need:
    device_bytes: int
    host_bytes: int


def _need(workload: Workload, layout: Layout, n_persist: int) -> _Need:
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=layout.chunk_bytes,
        n_persist=n_persist,
        n_buffer=max(1, layout.min_buffers(n_persist)),
        n_checkpoint=workload.num_blocks,
    )
    schedule = compile_schedule(plan, workload, layout)
    return _Need(
        device_bytes=guaranteed_device_peak(schedule).size_bytes,
        host_bytes=schedule.static_bytes(Memory.PINNED_HOST) + schedule.static_bytes(Memory.HOST),
    )


def _with_memory(hardware: Hardware, memory_bytes: int) -> Hardware:
    return hardware.model_copy(update={"host": hardware.host.model_copy(update={"memory_bytes": memory_bytes})})

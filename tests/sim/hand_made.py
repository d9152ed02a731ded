"""Small workloads and a machine whose figures are whole numbers, for timelines that are worked out by hand.

A chunk has 64 float32 scalars: 256 bytes, which is one chunk of ``chunk_bytes = 256``.  A link of 256 bytes per second
carries it in one second.  CPU Adam moves 24 + 4 bytes per scalar, 1 792 bytes for a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from protwin.shared.schema.hardware import Device, DeviceKind, Disk, Hardware, Host, Link
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Record
from protwin.shared.schema.schedule import Lane, Task, TaskId, TaskKind
from protwin.shared.schema.workload import Block, BlockProfile, DType, OperationClass, Parameter, Phase, Workload

CHUNK_BYTES = 256
STEPPED_BYTES = 64 * (24 + 4)
MACHINE = "slow machine"


def machine(
    *,
    gather_s: float = 1.0,
    offload_s: float = 1.0,
    cpu_adam_s: float = 1.0,
    kind: DeviceKind = DeviceKind.CUDA,
    full_duplex: bool = True,
    host_bytes_per_s: float = 1e9,
    disk: Disk | None = None,
) -> Hardware:
    """A machine that copies and steps a chunk in the given seconds; its lanes disturb each other only on request."""
    return Hardware(
        name=MACHINE,
        device=Device(
            name="slow device",
            kind=kind,
            memory_bytes=10**9,
            memory_bandwidth_bytes_per_s=STEPPED_BYTES,
            peak_flop_per_s={DType.FLOAT32: 1000.0},
            vector_flop_per_s=100.0,
            launch_overhead_s=0.0,
            efficiency=dict.fromkeys(OperationClass, 1.0),
        ),
        host=Host(
            name="slow host",
            num_cores=2,
            memory_bytes=10**9,
            memory_bandwidth_bytes_per_s=host_bytes_per_s,
            adam_bytes_per_s=STEPPED_BYTES / cpu_adam_s,
        ),
        host_to_device=Link(name="down", latency_s=0.0, bandwidth_bytes_per_s=CHUNK_BYTES / gather_s),
        device_to_host=Link(name="up", latency_s=0.0, bandwidth_bytes_per_s=CHUNK_BYTES / offload_s),
        full_duplex=full_duplex,
        disk=disk,
    )


def phase(seconds: float, net_bytes: int = 0, peak_bytes: int | None = None) -> Phase:
    """A phase of so many seconds, whose level rises at once to ``peak_bytes`` and ends at ``net_bytes``."""
    high = max(0, net_bytes) if peak_bytes is None else peak_bytes
    return Phase(measured_s=seconds, net_bytes=net_bytes, curve=((0.5, high), (1.0, max(net_bytes, 0))))


@dataclass(frozen=True)
class Seconds:
    """What the phases of every block take."""

    prologue: float = 1.0
    forward: float = 1.0
    recompute: float = 1.0
    backward: float = 2.0
    epilogue_forward: float = 1.0
    epilogue_backward: float = 1.0


def workload(num_blocks: int = 2, seconds: Seconds | None = None, *, is_trainable: bool = True) -> Workload:
    """Blocks of one chunk each, and nothing outside them.

    A block hands on 100 bytes and saves 1 000 for its backward; a backward leaves the chunk's gradients.
    """
    gradient_bytes = CHUNK_BYTES if is_trainable else 0
    takes = seconds if seconds is not None else Seconds()
    profile = BlockProfile(
        output_bytes=100,
        forward=phase(takes.forward, 1100, 1500),
        backward=phase(takes.backward, gradient_bytes - 1100, 700),
        checkpoint_forward=phase(takes.forward, 100, 1500),
        recompute=phase(takes.recompute, 1000, 1400),
        checkpoint_backward=phase(takes.backward, gradient_bytes - 1100, 700),
    )
    return Workload(
        model_name="hand-made",
        model_hash="0",
        batch_shapes={"input_ids": (1, 2)},
        num_samples=1,
        num_tokens=2,
        compute_dtype=DType.FLOAT32,
        parameters=tuple(
            Parameter(
                name=f"blocks.{block}.weight", shape=(64,), dtype=DType.FLOAT32, block=block, trainable=is_trainable
            )
            for block in range(num_blocks)
        ),
        blocks=tuple(Block(name=f"blocks.{block}", profile=0) for block in range(num_blocks)),
        profiles=(profile,),
        prologue_forward=phase(takes.prologue, 100),
        epilogue_forward=phase(takes.epilogue_forward, 40),
        epilogue_backward=phase(takes.epilogue_backward, -40, 60),
        prologue_backward=phase(takes.prologue, -100),
        traced_with="real",
        measured_on=MACHINE,
    )


def plan(
    workload: Workload, *, n_persist: int = 0, n_buffer: int = 2, prefetch_depth: int = 1, n_checkpoint: int = 0
) -> Plan:
    """A plan with one chunk per block."""
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=CHUNK_BYTES,
        n_persist=n_persist,
        n_buffer=n_buffer,
        prefetch_depth=prefetch_depth,
        n_checkpoint=n_checkpoint,
    )


def adam(kind: TaskKind, num_stepped: int, stepped_bytes: int) -> Task:
    """An Adam task on its own."""
    return Task(TaskId(0), kind, num_stepped=num_stepped, stepped_bytes=stepped_bytes)


def copy(kind: TaskKind, moved_bytes: int) -> Task:
    """A copy on its own."""
    return Task(TaskId(0), kind, moved_bytes=moved_bytes)


def assert_timeline(record: Record, lane: Lane, expected: Sequence[tuple[str, float, float]]) -> None:
    """The lane carries out exactly these tasks, in order: (name, start, end)."""
    found = [task for task in record.tasks if task.lane is lane]
    assert [task.name for task in found] == [name for name, _, _ in expected]
    times_s = [(task.start_s, task.end_s) for task in found]
    assert times_s == [pytest.approx((start_s, end_s)) for _, start_s, end_s in expected]

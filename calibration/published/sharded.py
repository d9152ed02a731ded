"""Full training sharded over devices (FSDP2) as torchtitan's pages state it, from data sheets and configurations.

A unit of FSDP2 is a block: chunks are as large as the largest one, all of them are sharded over the devices, and the
next one is gathered while one runs.  Parameters outside all blocks are whole on every device here, where FSDP2 shards
them too: 0.3 to 6 % of the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...shared.catalogue.machines import machine, override_hardware
from ...shared.catalogue.parts import network_part
from ...shared.families.shipped import shipped_family
from ...shared.layout.layout import layout_of
from ...shared.methods.runtime_profile import Runtime, RuntimeProfile
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import ParallelMode, Plan
from ...shared.schema.workload import DType, Workload
from ...sim.engine.simulator import simulate
from .machines import Range, slowed
from .runs import PUBLISHED_RUNS, Prediction, Quantity, ShardedRun

_EVERY_SECOND: Final = 2
"""torchtitan's choice by operation keeps attention and every second product."""
_FSDP2: Final = RuntimeProfile(Runtime.FSDP2, DType.FLOAT32)
_POWER_FRAC: Final = 500 / 700
"""Power limit of the H100 boards over that of their data sheet."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """One reading of what a run leaves open."""

    hardware: Hardware
    checkpointed_frac: float
    """Share of the blocks that are checkpointed."""
    product_stride: int | None = None
    """Of the products of these, the first of every so many is kept; None: blocks are recomputed whole."""


def sharded_predictions() -> list[Prediction]:
    """Iteration times of every run of R6."""
    found = []
    for run in (run for published in PUBLISHED_RUNS for run in published.sharded):
        family = shipped_family(run.model, DType.BFLOAT16)
        assert family is not None
        workload = family.at(batch_size=run.batch_size, sequence_length=run.sequence_length)
        readings = _readings(run)
        plans = [
            fsdp_plan(workload, run.num_ranks, reading.checkpointed_frac, reading.product_stride)
            for reading in readings
        ]
        times_s = [
            simulate(plan, workload, reading.hardware, runtime=_FSDP2).iteration_s
            for plan, reading in zip(plans, readings, strict=True)
        ]
        found.append(Prediction.of("R6", run.case, Quantity.ITERATION, times_s, how=_how(readings)))
    return found


def fsdp_plan(workload: Workload, num_ranks: int, checkpointed_frac: float, product_stride: int | None = None) -> Plan:
    """Every block a chunk, all of them sharded over the devices, two places for those that are gathered."""
    chunk_bytes = block_chunk_bytes(workload)
    layout = layout_of(workload, chunk_bytes)
    n_checkpoint = round(workload.num_blocks * checkpointed_frac)
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=chunk_bytes,
        n_persist=0,
        n_shard=len(layout.chunks),
        n_buffer=2 * layout.min_buffers(0),
        n_checkpoint=n_checkpoint,
        n_selective=0 if product_stride is None else n_checkpoint,
        product_stride=product_stride or 1,
        parallel=ParallelMode.SHARDED,
        num_ranks=num_ranks,
    )


def block_chunk_bytes(workload: Workload) -> int:
    """Bytes of the block with the largest parameters: chunks of this size hold one block each."""
    return max(
        sum(parameter.size_bytes for parameter in workload.parameters if parameter.block == block)
        for block in range(workload.num_blocks)
    )


def sixty_four_a100() -> Range:
    """Eight nodes; which network joins them is not stated: eight adapters of 400, eight of 200, or four of 100 Gb/s."""
    node = machine("a100-80gb-x8")
    joined = [
        node.model_copy(update={"network": network_part(name, count).model_copy(update={"num_nodes": 8})})
        for name, count in (("infiniband-ndr", 8), ("infiniband-hdr", 8), ("infiniband-edr", 4))
    ]
    return Range(*joined)


def eight_limited_h100() -> Range:
    """Boards of 96 GB and 2.4 TB/s, limited to 500 W: no slower, as an H100's clocks follow, or in proportion."""
    boards = override_hardware(
        machine("h100-80gb-x8"),
        {
            "device.memory_bytes": "96GB",
            "device.memory_bandwidth_bytes_per_s": "2.4TB/s",
            # PyTorch of December 2024 took cuDNN's attention where it was asked to.
            "device.attention_kernel": "flash-2",
        },
    )
    in_proportion = boards.model_copy(update={"device": slowed(boards.device, _POWER_FRAC, 1.0)})
    return Range(boards, override_hardware(boards, {"device.power_limit_w": "500"}), in_proportion)


def _readings(run: ShardedRun) -> list[_Reading]:
    if run.checkpointed_frac is not None:
        return [_Reading(hardware, run.checkpointed_frac) for hardware in sixty_four_a100().all]
    return [_Reading(hardware, 1.0, _EVERY_SECOND) for hardware in eight_limited_h100().all]


def _how(readings: list[_Reading]) -> str:
    if readings[0].product_stride is None:
        return "every block a chunk, sharded over 64 devices in eight nodes, the next one gathered while one runs"
    return (
        "the same over 8 devices; attention and every second product of every block kept; clocks as on the data sheet, "
        "as an H100's follow its power limit, or in proportion to it"
    )

"""Small workloads made by hand, for expectations that are worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import Block, BlockProfile, DType, Parameter, Phase, Workload

OUTPUT_BYTES = 1_000
SAVED_BYTES = 10_000
SWAPPABLE_BYTES = 7_000


def parameter(
    name: str, elements: int, block: int | None, *, trainable: bool = True, dtype: str = "float32"
) -> Parameter:
    """A parameter with one dim."""
    return Parameter(name=name, shape=(elements,), dtype=DType(dtype), block=block, trainable=trainable)


def phase(net_bytes: int, peak_bytes: int | None = None) -> Phase:
    """A phase of one second that peaks at its end, or where it is told to."""
    high = max(0, net_bytes) if peak_bytes is None else peak_bytes
    return Phase(net_bytes=net_bytes, curve=((1.0, high),), measured_s=1.0)


def profile(gradient_bytes: int) -> BlockProfile:
    """A block that outputs 1 000 bytes and saves 10 000, of which a recomputation makes all but 500 again."""
    return BlockProfile(
        output_bytes=OUTPUT_BYTES,
        forward=phase(OUTPUT_BYTES + SAVED_BYTES),
        backward=phase(gradient_bytes - SAVED_BYTES - OUTPUT_BYTES, peak_bytes=2_000),
        checkpoint_forward=phase(OUTPUT_BYTES, peak_bytes=4_000),
        recompute=phase(SAVED_BYTES - 500),
        checkpoint_backward=phase(gradient_bytes - SAVED_BYTES + 500 - OUTPUT_BYTES, peak_bytes=2_000),
        swappable_bytes=SWAPPABLE_BYTES,
    )


def workload(parameters: Sequence[Parameter], num_blocks: int) -> Workload:
    """A workload over ``parameters``; blocks differ in their gradients alone."""

    def gradient_bytes(block: int | None) -> int:
        return sum(p.size_bytes for p in parameters if p.block == block and p.trainable)

    return Workload(
        model_name="small",
        model_hash="0123456789abcdef",
        batch_shapes={"input_ids": (1, 4)},
        num_samples=1,
        num_tokens=4,
        compute_dtype=DType.FLOAT32,
        parameters=tuple(parameters),
        blocks=tuple(Block(name=f"layers.{block}", profile=block) for block in range(num_blocks)),
        profiles=tuple(profile(gradient_bytes(block)) for block in range(num_blocks)),
        prologue_forward=phase(OUTPUT_BYTES),
        epilogue_forward=phase(3_000),
        epilogue_backward=phase(-3_000, peak_bytes=1_000),
        prologue_backward=phase(gradient_bytes(None) - OUTPUT_BYTES, peak_bytes=gradient_bytes(None)),
        resident_bytes=64,
        traced_with="real",
        measured_on="a machine",
    )


def chain(num_blocks: int, *, elements: int = 1_000, frozen: Sequence[int] = ()) -> Workload:
    """One parameter per block: one chunk per block for ``chunk_bytes`` = 4096."""
    return workload(
        [parameter(f"layers.{b}.weight", elements, b, trainable=b not in frozen) for b in range(num_blocks)], num_blocks
    )


def plan(
    workload: Workload,
    *,
    chunk_bytes: int = 4_096,
    n_persist: int = 0,
    n_buffer: int = 1,
    prefetch_depth: int = 1,
    n_checkpoint: int = 0,
    n_swap: int = 0,
    n_offload_input: int = 0,
    micro_batches: int = 1,
    max_gradient_norm: float | None = None,
) -> Plan:
    """A plan for ``workload`` that offloads everything and prefetches one block ahead."""
    return Plan(
        workload_id=workload.identity,
        chunk_bytes=chunk_bytes,
        n_persist=n_persist,
        n_buffer=n_buffer,
        prefetch_depth=prefetch_depth,
        n_checkpoint=n_checkpoint,
        n_swap=n_swap,
        n_offload_input=n_offload_input,
        micro_batches=micro_batches,
        max_gradient_norm=max_gradient_norm,
    )

"""A workload as ``protwin trace`` would save it: a decoder with operations, so that any machine can price it."""

from __future__ import annotations

from typing import Final

from protwin.shared.schema.workload import (
    Block,
    BlockProfile,
    DType,
    Operation,
    OperationClass,
    Parameter,
    Phase,
    Workload,
)

WIDTH: Final = 1024
NUM_TOKENS: Final = 2 * 512
ITEM_BYTES: Final = 2
NUM_BLOCKS: Final = 8
_MATRICES: Final = (4 * WIDTH, 8 * WIDTH)
"""Rows of a block's matrices, each ``WIDTH`` wide."""


def decoder(num_blocks: int = NUM_BLOCKS, *, model_name: str = "small-decoder") -> Workload:
    """A bfloat16 decoder of equal blocks, 24 MiB of parameters and 28 MiB of saved activations each."""
    parameters = [Parameter(name="embedding", shape=(4096, WIDTH), dtype=DType.BFLOAT16)]
    for block in range(num_blocks):
        parameters += [
            Parameter(name=f"layers.{block}.{place}", shape=(rows, WIDTH), dtype=DType.BFLOAT16, block=block)
            for place, rows in enumerate(_MATRICES)
        ]
    output_bytes = NUM_TOKENS * WIDTH * ITEM_BYTES
    saved_bytes = 14 * output_bytes
    gradient_bytes = sum(_MATRICES) * WIDTH * ITEM_BYTES
    forward_flops = 2 * NUM_TOKENS * WIDTH * sum(_MATRICES)
    profile = BlockProfile(
        output_bytes=output_bytes,
        forward=_phase(output_bytes + saved_bytes, forward_flops),
        backward=_phase(gradient_bytes - output_bytes - saved_bytes, 2 * forward_flops),
        checkpoint_forward=_phase(output_bytes, forward_flops, transient_bytes=saved_bytes),
        recompute=_phase(saved_bytes, forward_flops),
        checkpoint_backward=_phase(gradient_bytes - output_bytes - saved_bytes, 2 * forward_flops),
    )
    embedding_bytes = parameters[0].size_bytes
    return Workload(
        model_name=model_name,
        model_hash=f"{num_blocks:016x}",
        batch_shapes={"input_ids": (2, 512)},
        num_samples=2,
        num_tokens=NUM_TOKENS,
        compute_dtype=DType.BFLOAT16,
        parameters=tuple(parameters),
        blocks=tuple(Block(name=f"layers.{block}", profile=0) for block in range(num_blocks)),
        profiles=(profile,),
        prologue_forward=_phase(output_bytes, NUM_TOKENS * WIDTH),
        epilogue_forward=_phase(output_bytes, forward_flops),
        epilogue_backward=_phase(embedding_bytes - output_bytes, 2 * forward_flops),
        prologue_backward=_phase(-output_bytes, NUM_TOKENS * WIDTH),
        resident_bytes=2**20,
        traced_with="fake",
    )


def _phase(net_bytes: int, flops: int, *, transient_bytes: int = 0) -> Phase:
    operation = Operation(
        name="aten.mm",
        operation_class=OperationClass.MATMUL,
        dtype=DType.BFLOAT16,
        flops=flops,
        bytes_moved=flops // WIDTH,
    )
    peak_bytes = max(0, net_bytes) + transient_bytes + 2**20
    return Phase(operations=(operation,), net_bytes=net_bytes, curve=((1.0, peak_bytes),))

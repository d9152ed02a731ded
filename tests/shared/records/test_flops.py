"""FLOPs of training against sums that were worked out by hand from a model's sizes."""

from __future__ import annotations

import pytest

from protwin.shared.catalogue.models import model_configuration
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.records.flops import hardware_flops, model_flops
from protwin.shared.schema.plan import Plan
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
from protwin.shared.workloads.source import load_workload

LLAMAS = ["smollm2-135m", "llama-3.2-1b", "llama-3-8b", "qwen2.5-0.5b", "tinyllama-1.1b", "mistral-7b"]
"""Decoders of grouped attention and gated layers, with and without tied heads."""


def forward_flops(model: str, batch: int, length: int) -> tuple[int, int]:
    """Of products with weights, and of attention, counted whole: from the configuration's sizes alone."""
    sizes = model_configuration(model).config
    d, layers, heads = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["num_attention_heads"]
    width = sizes.get("head_dim") or d // heads
    q, kv = heads * width, sizes["num_key_value_heads"] * width
    weights = layers * (2 * d * q + 2 * d * kv + 3 * d * sizes["intermediate_size"]) + d * sizes["vocab_size"]
    tokens = batch * length
    return 2 * weights * tokens, layers * 4 * tokens * length * q


@pytest.mark.parametrize("model", LLAMAS)
def test_a_llama_needs_what_its_sizes_say(model: str) -> None:
    workload = load_workload(model, batch_size=3, sequence_length=256, dtype="bfloat16")
    products, attention = forward_flops(model, 3, 256)
    found = model_flops(workload)
    assert found is not None
    # Rotary angles are products too: one outer product of positions and half a head, of no weight.
    assert found == pytest.approx(3 * products + 3 * attention, rel=2e-5)


@pytest.mark.parametrize(
    ("model", "length", "below"), [("llama-3-8b", 2048, 0.07), ("mistral-7b", 512, 0.02), ("gpt2-xl", 1024, 0.07)]
)
def test_it_agrees_with_the_formula_of_palm(model: str, length: int, below: float) -> None:
    """6 N + 12 L H Q T per token, which also counts the embedding that is looked up and vectors: N is too large by
    them, 6.5 % of llama-3-8b, 1.8 % of mistral-7b, and the positions alone of gpt2-xl, whose head is its embedding."""
    workload = load_workload(model, batch_size=1, sequence_length=length, dtype="bfloat16")
    config = model_configuration(model).config
    layers = config.get("num_hidden_layers") or config["n_layer"]
    size = config.get("hidden_size") or config["n_embd"]
    by_formula = (6 * workload.num_parameters + 12 * layers * size * length) * length
    found = model_flops(workload)
    assert found is not None
    assert 1 - below < found / by_formula <= 1


def small_workload(attention_shape: tuple[int, ...] = (8, 16, 16, 4)) -> Workload:
    """One block, worked out by hand: forward a product of 100 FLOPs twice, and attention."""

    def phase(*, products: int, attention: str | None) -> Phase:
        found = [
            Operation(
                name="mm",
                operation_class=OperationClass.MATMUL,
                dtype=DType.BFLOAT16,
                flops=100,
                bytes_moved=1,
                count=products,
            ),
            Operation(
                name="add", operation_class=OperationClass.ELEMENTWISE, dtype=DType.FLOAT32, flops=7, bytes_moved=1
            ),
        ]
        if attention is not None:
            found.append(
                Operation(
                    name=attention,
                    operation_class=OperationClass.ATTENTION,
                    dtype=DType.BFLOAT16,
                    flops=5000,
                    bytes_moved=1,
                    shape=attention_shape,
                )
            )
        return Phase(operations=tuple(found))

    forward, backward = phase(products=2, attention="flash"), phase(products=3, attention="flash_backward")
    profile = BlockProfile(
        output_bytes=8,
        forward=forward,
        backward=backward,
        checkpoint_forward=forward,
        recompute=forward,
        checkpoint_backward=backward,
    )
    outer = phase(products=1, attention=None)
    return Workload(
        model_name="small",
        model_hash="",
        batch_shapes={"input_ids": (1, 4)},
        num_samples=1,
        num_tokens=4,
        compute_dtype=DType.BFLOAT16,
        parameters=(Parameter(name="w", shape=(4,), dtype=DType.BFLOAT16, block=0),),
        blocks=(Block(name="0", profile=0), Block(name="1", profile=0)),
        profiles=(profile,),
        prologue_forward=outer,
        epilogue_forward=outer,
        epilogue_backward=outer,
        prologue_backward=outer,
        traced_with="fake",
    )


@pytest.mark.parametrize(
    ("shape", "forward", "backward", "carried_out"),
    [
        ((8, 16, 16, 4), 4 * 8 * 16 * 16 * 4, 8 * 8 * 16 * 16 * 4, 10 * 8 * 16 * 16 * 4),
        ((), 5000, 4000, 5000),
    ],
)
@pytest.mark.parametrize("n_checkpoint", [0, 1, 2])
def test_recomputation_is_the_hardwares(
    shape: tuple[int, ...], forward: int, backward: int, carried_out: int, n_checkpoint: int
) -> None:
    workload = small_workload(shape)
    needed = 400 + 2 * (200 + forward + 300 + backward)
    assert model_flops(workload) == needed
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=2**20,
        n_persist=1,
        n_buffer=0,
        n_checkpoint=n_checkpoint,
        micro_batches=3,
    )
    done = 400 + 2 * (200 + forward + 300 + carried_out) + n_checkpoint * (200 + forward)
    assert hardware_flops(compile_schedule(plan, workload)) == 3 * done


def test_nothing_is_known_without_operations() -> None:
    workload = small_workload()
    empty = Phase(measured_s=1.0)
    profile = BlockProfile(
        output_bytes=8,
        forward=empty,
        backward=empty,
        checkpoint_forward=empty,
        recompute=empty,
        checkpoint_backward=empty,
    )
    outer = dict.fromkeys(("prologue_forward", "epilogue_forward", "epilogue_backward", "prologue_backward"), empty)
    silent = workload.model_copy(update={"profiles": (profile,), **outer})
    assert model_flops(silent) is None
    plan = Plan(workload_id=silent.identity, chunk_bytes=2**20, n_persist=1, n_buffer=0)
    assert hardware_flops(compile_schedule(plan, silent)) is None

"""LoRA and frozen parts: what is trained, what it computes, and what it costs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from protwin.runtime import carry_out, trace
from protwin.runtime.model.adapters import LowRankLinear, add_lora, freeze
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.layout.layout import build_layout
from protwin.shared.optimizers.state import state_bytes, stepped_of
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.training_options import LoraOptions, TrainingOptions
from protwin.shared.schema.workload import DType, Workload
from tests.runtime.models import adamw, gpt2, llama, snapshot, token_batches, uncached

CONFIGURATION = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": 256, "n_positions": 64}


def traced(model: torch.nn.Module) -> Workload:
    return trace(model, token_batches(1)[0], repeats=0)


@pytest.mark.parametrize(("build", "num_maps"), [(llama, 7), (gpt2, 4)])
def test_all_linear_maps_of_the_blocks_are_adapted(build: Any, num_maps: int) -> None:
    model = build()
    paths = add_lora(model, rank=2)
    workload = traced(model)
    assert len(paths) == num_maps * workload.num_blocks
    trained = [parameter for parameter in workload.parameters if parameter.trainable]
    assert {p.name.rpartition(".")[2] for p in trained} == {"lora_a", "lora_b"}
    assert all(parameter.block is not None for parameter in trained)
    assert all(2 in parameter.shape for parameter in trained)


def test_the_adapted_map_is_the_formula() -> None:
    """h = W x + b + (alpha / r) B A x."""
    torch.manual_seed(0)
    base = torch.nn.Linear(6, 5)
    weight, bias = base.weight.detach().clone(), base.bias.detach().clone()
    adapted = LowRankLinear(base, (6, 5), options=LoraOptions(rank=3, alpha=12.0))
    x = torch.randn(4, 6)
    assert torch.equal(adapted(x), torch.nn.functional.linear(x, weight, bias))
    with torch.no_grad():
        adapted.lora_b.copy_(torch.randn(5, 3))
    merged = weight + 4.0 * adapted.lora_b.detach() @ adapted.lora_a.detach()
    assert torch.allclose(adapted(x), torch.nn.functional.linear(x, merged, bias), atol=1e-5)


def test_low_rank_costs_what_its_products_cost() -> None:
    """Forward: two thin products for each map, of 2 * tokens * rank * (inputs + outputs)."""
    plain, model = llama(), llama()
    paths = add_lora(model, rank=2, targets=("q_proj", "mlp.up_proj"))
    maps = [model.get_submodule(path) for path in paths]
    full, low = traced(plain), traced(model)
    products = [
        sum(op.flops * op.count for op in workload.profile_of(1).forward.operations if op.name in ("mm", "addmm"))
        for workload in (full, low)
    ]
    per_block = maps[: len(maps) // low.num_blocks]
    thin = sum(2 * full.num_tokens * 2 * (m.lora_a.shape[1] + m.lora_b.shape[0]) for m in per_block)
    assert products[1] == products[0] + thin
    gradients = sum(p.size_bytes for p in low.parameters if p.block == 1 and p.trainable)
    assert low.profile_of(1).backward.gradient_bytes == gradients
    assert low.profile_of(1).backward.flops < full.profile_of(1).backward.flops


def test_frozen_parts_have_neither_gradients_nor_products_for_them() -> None:
    plain, model = llama(num_layers=4), llama(num_layers=4)
    freeze(model, ["model.embed_tokens", "model.layers.[01].*"])
    full, part = traced(plain), traced(model)
    assert [p.trainable for p in part.parameters] == [
        p.block not in (0, 1) and "embed_tokens" not in p.name for p in part.parameters
    ]
    assert part.profile_of(0).backward.flops == 0
    assert part.profile_of(0).backward.gradient_bytes == 0
    assert part.profile_of(3).backward.gradient_bytes == full.profile_of(3).backward.gradient_bytes > 0
    assert part.identity != full.identity


@pytest.mark.parametrize(
    ("rank", "targets", "message"),
    [
        (0, (), "rank of LoRA is 0; it must be a whole number from 1"),
        (2**62, (), "rank of LoRA is 4611686018427387904"),
        (1000, (), r"rank of LoRA is 1000 but .* maps"),
        (2, ("k_prj",), "no linear map of a block is called 'k_prj'.*Did you mean k_proj"),
    ],
)
def test_impossible_adaptations_are_refused_before_anything_changes(
    rank: int, targets: tuple[str, ...], message: str
) -> None:
    model = llama()
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(WorkloadError, match=message):
        add_lora(model, rank=rank, targets=targets)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(parameter.requires_grad for parameter in model.parameters())


EXPERTS = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_narrow_maps_get_the_rank_of_the_wide_ones_as_peft_has_it() -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = transformers.Qwen2MoeConfig(**EXPERTS, **sizes, shared_expert_intermediate_size=24)
    model = transformers.Qwen2MoeForCausalLM(config)
    targets = ["q_proj", "shared_expert_gate"]
    other = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=4, target_modules=targets))
    paths = add_lora(model, rank=4, targets=targets)
    assert len(paths) == 4
    shapes = [p.shape for p in model.parameters() if p.requires_grad]
    assert (1, 4) in shapes
    assert shapes == [p.shape for p in other.parameters() if p.requires_grad]
    model(**token_batches(1)[0]).loss.backward()


def test_a_router_that_gives_more_than_a_map_is_none() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"intermediate_size_mlp": 24, "num_local_experts": 4, "head_dim": 8}
    model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**EXPERTS, **sizes, pad_token_id=0))
    paths = add_lora(model, rank=2)
    assert paths
    assert not any(path.endswith("router") for path in paths)
    batch = {name: value % 64 for name, value in token_batches(1)[0].items()}
    model(**batch).loss.backward()


def test_patterns_that_name_nothing_are_refused() -> None:
    with pytest.raises(WorkloadError, match=r"no parameter is called 'model.embed_token'.*model.embed_tokens"):
        freeze(llama(), ["model.embed_token"])
    with pytest.raises(WorkloadError, match="leaves no parameter to train"):
        freeze(llama(), ["*"])


def test_adapted_models_train() -> None:
    model, batch = llama(), token_batches(1)[0]
    add_lora(model, rank=2)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    assert copy.deepcopy(model)(**batch).loss.item() == model(**batch).loss.item()


def test_adapted_models_follow_a_plan_bit_for_bit() -> None:
    """Frozen weights are gathered and have no state on the host; the matrices beside them are stepped there."""
    model, batch = llama(), token_batches(1)[0]
    add_lora(model, rank=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    workload = traced(model)
    layout = build_layout(workload.parameters, num_blocks=workload.num_blocks, chunk_bytes=8_000)
    plan = Plan(
        workload_id=workload.identity,
        chunk_bytes=8_000,
        n_persist=1,
        n_buffer=layout.min_buffers(1) + 1,
        n_checkpoint=2,
    )
    reference = uncached(copy.deepcopy(model))
    optimizer = adamw([{"params": [p for p in reference.parameters() if p.requires_grad]}])
    expected = []
    for _ in range(3):
        loss = reference(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    losses = []
    with carry_out(model, plan, workload, optimizer=adamw) as training:
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            training.step()
            losses.append(loss.item())
    assert training.num_cpu_adam_steps > 0
    assert losses == expected
    weights = snapshot(reference)
    assert [name for name, tensor in snapshot(model).items() if not torch.equal(tensor, weights[name])] == []
    whole = traced(llama())
    state, full_state = (state_bytes(stepped_of(one.parameters), Optimizer.ADAMW) for one in (workload, whole))
    assert state < full_state / 4


def test_autocast_computes_in_another_type_than_it_trains() -> None:
    """Parameters, their gradients and so the masters stay as they are; products and what they save are narrower."""
    plain, cast = (
        workload_of_configuration(
            CONFIGURATION, name="x", batch_size=2, sequence_length=8, dtype="float32", options=options
        )
        for options in (TrainingOptions(), TrainingOptions(autocast=DType.BFLOAT16))
    )
    assert cast.identity == plain.identity
    assert {parameter.dtype for parameter in cast.parameters} == {DType.FLOAT32}
    types = [
        {op.dtype for op in w.profile_of(0).forward.operations if op.name in ("mm", "addmm")} for w in (plain, cast)
    ]
    assert types == [{DType.FLOAT32}, {DType.BFLOAT16}]
    gradients = [w.profile_of(0).backward.gradient_bytes for w in (plain, cast)]
    assert gradients[0] == gradients[1] > 0
    with pytest.raises(WorkloadError, match="autocast to float64 is not known"):
        workload_of_configuration(
            CONFIGURATION, name="x", batch_size=1, sequence_length=8, options=TrainingOptions(autocast=DType.FLOAT64)
        )

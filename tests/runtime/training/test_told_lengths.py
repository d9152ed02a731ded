"""A kernel that is told where samples end, as flash-attn's is, traced and carried out on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from protwin.runtime import CpuDevice, trace
from protwin.shared.schema.workload import OperationClass, Phase, Workload
from tests.proof_size import some_quick
from tests.runtime.equality import random_plans, trained
from tests.runtime.models import Case, llama, uncached
from tests.runtime.packed import ends_of, packed_batch

LENGTHS = (5, 9, 10)
HEADS, WIDTH = 4, 8
KERNEL = "told_lengths"


@torch.library.custom_op("flash_attn::_flash_attn_varlen_test", mutates_args=())
def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int, causal: bool
) -> torch.Tensor:
    """(tokens, heads, width) in and out, each sample by itself."""
    lengths = cu_seqlens_q.diff().tolist()
    parts = zip(*(tensor.split(lengths) for tensor in (q, k, v)), strict=True)
    return torch.cat([one_sample(*part, causal) for part in parts])


def one_sample(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    of_heads = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    return functional.scaled_dot_product_attention(*of_heads, is_causal=causal)[0].transpose(0, 1).contiguous()


@torch.library.custom_op("flash_attn::_flash_attn_varlen_test_backward", mutates_args=())
def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, causal: bool
) -> list[torch.Tensor]:
    lengths = cu_seqlens_q.diff().tolist()
    parts = zip(*(tensor.split(lengths) for tensor in (dout, q, k, v)), strict=True)
    gradients = [gradients_of(*(tensor.transpose(0, 1) for tensor in part), causal) for part in parts]
    return [torch.cat(of_samples).contiguous() for of_samples in zip(*gradients, strict=True)]


def gradients_of(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> list[torch.Tensor]:
    """(heads, tokens, width) each, of one sample; (tokens, heads, width) out."""
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
    weights = scores.softmax(-1)
    toward = dout @ v.mT
    of_scores = weights * (toward - (toward * weights).sum(-1, keepdim=True)) * scale
    return [found.transpose(0, 1) for found in (of_scores @ k, of_scores.mT @ q, weights.mT @ dout)]


@forward.register_fake
def _(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@backward.register_fake
def _(_: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *__: Any) -> list[torch.Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, _, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return *backward(gradient.contiguous(), *ctx.saved_tensors, ctx.causal), None, None, None


forward.register_autograd(_backward, setup_context=_setup)


def attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **told: Any
) -> tuple[torch.Tensor, None]:
    """As transformers calls attention: (1, heads, tokens, width)."""
    assert attention_mask is None
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    flat = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]
    return forward(*flat, told["cu_seq_lens_q"], told["max_length_q"], True)[None], None


@pytest.fixture(autouse=True)
def kernel() -> Iterator[None]:
    transformers.AttentionInterface.register(KERNEL, attend)
    yield
    del transformers.AttentionInterface._global_mapping[KERNEL]


build = partial(llama, num_layers=3, attn_implementation=KERNEL)


def batch_of(lengths: tuple[int, ...]) -> dict[str, Any]:
    return packed_batch(lengths) | ends_of(lengths)


def attention(workload: Workload, phase: str) -> int:
    found: Phase = getattr(workload.profiles[1], phase)
    return sum(op.flops * op.count for op in found.operations if op.operation_class is OperationClass.ATTENTION)


def test_plans_train_as_the_plain_loop() -> None:
    case = Case(build, tuple(batch_of(lengths) for lengths in (LENGTHS, (10, 5, 9), (1, 3, 20), (8, 8, 8))))
    for plan in random_plans(case.workload, 2, seed=3):
        outcome = trained(case, plan, CpuDevice())
        assert outcome.losses == case.plain_with(plan.micro_batches, plan.max_gradient_norm).losses
        assert outcome.different == []


def test_samples_are_apart() -> None:
    model, batch = uncached(build()), batch_of(LENGTHS)
    together = model(**batch).logits[0]
    alone = [
        model(**(batch_of((len(one),)) | {"input_ids": one[None]})).logits[0]
        for one in batch["input_ids"][0].split(LENGTHS)
    ]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


@some_quick("device", ["cpu", "meta"], quick=1)
def test_arithmetic_is_the_samples_sum_and_no_mask_is_there(device: str) -> None:
    """Two products of each pair forward, five backward, half of them under the causal mask."""
    model = copy.deepcopy(build()).to(device)
    found = trace(model, batch_of(LENGTHS), repeats=0)
    pairs = sum(length**2 for length in LENGTHS)
    assert attention(found, "forward") == 2 * 2 * HEADS * pairs * WIDTH // 2
    assert attention(found, "backward") == 5 * 2 * HEADS * pairs * WIDTH // 2
    assert found.packing is not None
    assert (found.packing.squares, found.packing.is_masked) == (pairs, False)
    assert found.quadratic is None
    assert found.prologue_forward.net_bytes == trace(model, batch_of((24,)), repeats=0).prologue_forward.net_bytes

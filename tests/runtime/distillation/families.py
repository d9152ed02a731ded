"""Tiny teachers of many families, each with a student that is narrower inside its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

SEED = 0
VOCABULARY = 64
LAYERS = 3

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
NARROW: dict[str, Any] = {"num_key_value_heads": 1, "intermediate_size": 24}
"""What the student has instead."""


class NoFeedForward(nn.Module):
    """In the place of a block's feed-forward part: it adds nothing."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Zeros of the same shape."""
        return torch.zeros_like(hidden)


@dataclass(frozen=True)
class Family:
    """How to build teacher and student, what to feed the teacher, and where the blocks of both are."""

    teacher: Callable[[], nn.Module]
    student: Callable[[], nn.Module]
    blocks: tuple[str, ...]
    makes_points: bool = False
    """Whether the teacher is fed points in place of tokens."""

    def batches(self, number: int, *, seed: int = 1) -> list[dict[str, torch.Tensor]]:
        """So many batches."""
        generator = torch.Generator().manual_seed(seed)
        if self.makes_points:
            return [{"points": torch.randn(6, 5, generator=generator)} for _ in range(number)]
        found = []
        for _ in range(number):
            tokens = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
            found.append({"input_ids": tokens})
        return found


def build(make: Callable[..., Any], config: Callable[..., Any], settings: dict[str, Any], seed: int) -> nn.Module:
    """A model of that configuration with random weights."""
    torch.manual_seed(seed)
    return make(config(**settings)).eval()


def cut(make: Callable[[], nn.Module], *, absent: str | None = None, frozen: str | None = None) -> nn.Module:
    """A student with a block whose feed-forward part is absent, and one in which nothing is trained."""
    student = make()
    if absent is not None:
        parent, _, name = absent.rpartition(".")
        setattr(student.get_submodule(parent), name, NoFeedForward())
    if frozen is not None:
        student.get_submodule(frozen).requires_grad_(False)
    return student


def causal(
    make: Any, config: Any, *, teacher: dict[str, Any] = COMMON, narrow: dict[str, Any] = NARROW, **cuts: str
) -> Family:
    """A family of transformers with its blocks in ``model.layers``."""
    return Family(
        partial(build, make, config, teacher, SEED),
        partial(cut, partial(build, make, config, teacher | narrow, SEED + 1), **cuts),
        tuple(f"model.layers.{layer}" for layer in range(LAYERS)),
    )


class DictBlock(nn.Module):
    """A residual block that gives a dict, with a tensor beside that nobody learns from."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.unused = nn.Parameter(torch.randn(7))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """(batch, width) in; (batch, width) and (batch, inner) out."""
        inner = torch.tanh(self.up(self.norm(hidden)) * scale)
        return {"hidden": hidden + self.down(inner), "inner": inner}


class DictModel(nn.Module):
    """No configuration; its blocks take and give what they like."""

    def __init__(self, inner: int, width: int = 24) -> None:
        super().__init__()
        self.entry = nn.Linear(5, width)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor(1.25))
        self.stack = nn.ModuleList(DictBlock(width, inner) for _ in range(LAYERS))
        self.exit = nn.Linear(width, 3)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """(batch, 5) to (batch, 3)."""
        hidden, scale = self.entry(points), self.scale * points.shape[0]
        for block in self.stack:
            hidden = block(hidden, scale=scale)["hidden"]
        return self.exit(hidden)


def _dicts(inner: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return DictModel(inner).eval()


GPT2: dict[str, Any] = {
    "n_embd": 32,
    "initializer_range": 0.2,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": VOCABULARY,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
JAMBA: dict[str, Any] = COMMON | {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "mamba_d_state": 4,
    "mamba_d_conv": 2,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
}


def families() -> dict[str, Family]:
    """By name."""
    t = transformers
    layer = "model.layers"
    return {
        "llama": causal(t.LlamaForCausalLM, t.LlamaConfig, absent=f"{layer}.1.mlp"),
        "qwen2": causal(t.Qwen2ForCausalLM, t.Qwen2Config, frozen=f"{layer}.1"),
        "qwen3": causal(t.Qwen3ForCausalLM, t.Qwen3Config, teacher=COMMON | {"head_dim": 8}, frozen=f"{layer}.0"),
        "mistral": causal(t.MistralForCausalLM, t.MistralConfig, teacher=COMMON | {"sliding_window": 6}),
        "mixtral": causal(
            t.MixtralForCausalLM,
            t.MixtralConfig,
            teacher=COMMON | {"num_local_experts": 4},
            narrow=NARROW | {"num_local_experts": 2},
        ),
        "gpt2": Family(
            partial(build, t.GPT2LMHeadModel, t.GPT2Config, GPT2, SEED),
            partial(build, t.GPT2LMHeadModel, t.GPT2Config, GPT2 | {"n_inner": 40}, SEED + 1),
            tuple(f"transformer.h.{index}" for index in range(LAYERS)),
        ),
        "jamba": causal(t.JambaForCausalLM, t.JambaConfig, teacher=JAMBA),
        "dicts": Family(
            partial(_dicts, 40, SEED),
            partial(_dicts, 16, SEED + 1),
            tuple(f"stack.{index}" for index in range(LAYERS)),
            makes_points=True,
        ),
    }

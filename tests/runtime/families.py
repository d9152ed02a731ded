"""Tiny models of many families, each with a batch of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import transformers
from torch import nn

from tests.runtime.models import SEED, STEPS, Case, frozen, three_groups

WIDTH = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
LATIN = {"vocab_size": 64, "max_position_embeddings": 64}


@dataclass(frozen=True)
class Family:
    """How to build a model, what to feed it, and where its blocks are."""

    build: Callable[[], nn.Module]
    batch: dict[str, torch.Tensor]
    blocks: tuple[str, ...]


def _names(*rows: tuple[str, int]) -> tuple[str, ...]:
    return tuple(f"{path}.{index}" for path, length in rows for index in range(length))


def _bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**WIDTH, **LATIN))


def _t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32, num_layers=3, num_decoder_layers=2, num_heads=2, d_ff=48, d_kv=16, vocab_size=64
    )
    config.decoder_start_token_id = config.pad_token_id
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(**WIDTH, image_size=16, patch_size=8, num_labels=3)
    return transformers.ViTForImageClassification(config)


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **WIDTH, **LATIN, num_key_value_heads=2, num_local_experts=4, output_router_logits=True
    )
    return transformers.MixtralForCausalLM(config)


def _bart() -> nn.Module:
    config = transformers.BartConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        **LATIN,
    )
    return transformers.BartForConditionalGeneration(config)


def _gemma2() -> nn.Module:
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**WIDTH, **LATIN, num_key_value_heads=1, head_dim=16)
    )


def _qwen2() -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**WIDTH, **LATIN, num_key_value_heads=1))


def _mistral() -> nn.Module:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**WIDTH, **LATIN, num_key_value_heads=1, sliding_window=6)
    )


def families() -> dict[str, Family]:
    """Encoders, decoders, both together, images, mixtures of experts."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(5, 60, (2, 10), generator=generator)
    images = torch.randn(2, 3, 16, 16, generator=generator)
    pairs = {"input_ids": tokens, "labels": tokens.clone()}
    return {
        "bert": Family(_bert, {"input_ids": tokens, "labels": torch.tensor([0, 1])}, _names(("bert.encoder.layer", 3))),
        "t5": Family(_t5, pairs, _names(("encoder.block", 3), ("decoder.block", 2))),
        "vit": Family(_vit, {"pixel_values": images, "labels": torch.tensor([0, 2])}, _names(("vit.layers", 3))),
        "mixtral": Family(_mixtral, pairs, _names(("model.layers", 3))),
        "bart": Family(_bart, pairs, _names(("model.encoder.layers", 2), ("model.decoder.layers", 2))),
        "gemma2": Family(_gemma2, pairs, _names(("model.layers", 3))),
        "qwen2": Family(_qwen2, pairs, _names(("model.layers", 3))),
        "mistral": Family(_mistral, pairs, _names(("model.layers", 3))),
    }


# -- to be trained like any other case -------------------------------------------------------------------------------

FROZEN = {
    "bert, frozen embeddings and a block": ("bert", ("bert.embeddings", "bert.encoder.layer.1.")),
    "t5, frozen encoder": ("t5", ("encoder.block",)),
    "vit, frozen attention": ("vit", ("vit.layers.0.attention", "vit.layers.2.attention")),
    "mixtral, frozen experts": ("mixtral", ("model.layers.1.mlp",)),
    "qwen2, frozen prologue": ("qwen2", ("model.embed_tokens", "model.layers.0.")),
}
"""Families with parameters that are not trained, among trained ones of the same chunks."""


@lru_cache
def family_cases(steps: int = STEPS) -> dict[str, Case]:
    """Every family in three parameter groups, and some of them partly frozen."""
    found = {}
    kinds: list[tuple[str, str, tuple[str, ...]]] = [(name, name, ()) for name in families()]
    kinds += [(name, family, prefixes) for name, (family, prefixes) in FROZEN.items()]
    for name, kind, prefixes in kinds:
        family = families()[kind]
        batches = [_varied(family.batch, step) for step in range(steps)]
        found[name] = Case(partial(_built, family.build, prefixes), batches, groups=three_groups)
    return found


def _built(build: Callable[[], nn.Module], prefixes: tuple[str, ...]) -> nn.Module:
    torch.manual_seed(SEED)
    return frozen(build(), *prefixes) if prefixes else build()


def _varied(batch: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Another batch of the same shapes for every step: other tokens, turned images, labels that take turns."""
    made: dict[int, torch.Tensor] = {}
    for tensor in batch.values():
        is_tokens = tensor.dtype == torch.int64 and tensor.dim() == 2
        made[id(tensor)] = (tensor - 5 + 7 * step) % 55 + 5 if is_tokens else tensor.roll(step, dims=-1)
    return {name: made[id(tensor)] for name, tensor in batch.items()}

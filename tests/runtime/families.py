"""Tiny models of many families, each with a batch of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import nn

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


def families() -> dict[str, Family]:
    """Encoders, decoders, both together, images, mixtures of experts."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(5, 60, (2, 10), generator=generator)
    images = torch.randn(2, 3, 16, 16, generator=generator)
    pairs = {"input_ids": tokens, "labels": tokens}
    return {
        "bert": Family(_bert, {"input_ids": tokens, "labels": torch.tensor([0, 1])}, _names(("bert.encoder.layer", 3))),
        "t5": Family(_t5, pairs, _names(("encoder.block", 3), ("decoder.block", 2))),
        "vit": Family(_vit, {"pixel_values": images, "labels": torch.tensor([0, 2])}, _names(("vit.layers", 3))),
        "mixtral": Family(_mixtral, pairs, _names(("model.layers", 3))),
        "bart": Family(_bart, pairs, _names(("model.encoder.layers", 2), ("model.decoder.layers", 2))),
        "gemma2": Family(_gemma2, pairs, _names(("model.layers", 3))),
    }

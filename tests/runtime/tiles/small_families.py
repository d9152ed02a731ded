"""Causal language models of transformers' own families, with small random configurations."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

WORDS, MOST_PARAMETERS = 96, 20_000_000
SMALL: Final[dict[str, Any]] = {
    **dict.fromkeys(("vocab_size",), WORDS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "d_inner", "d_ff"), 48),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "d_kv", "d_head"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop"), 0.0),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
"""What many configurations call the same sizes."""


class NotBuiltError(Exception):
    """There is no model of a family that is small, or that trains."""


class _TooLongError(Exception):
    pass


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def small(name: str) -> nn.Module:
    """A model of that family; raises NotBuiltError if there is none of this size."""
    try:
        with within(20):
            kind = CONFIG_MAPPING[name]
            known = kind()
            config = kind(**{key: value for key, value in SMALL.items() if hasattr(known, key)})
            build = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in build(config).parameters())
            if size > MOST_PARAMETERS:
                raise NotBuiltError(f"{size:,} parameters are the least that it could be given")
            torch.manual_seed(0)
            return build(config).eval()
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {error}"[:200]) from error

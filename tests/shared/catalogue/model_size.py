"""How many parameters a model has, from its configuration alone: the catalogue's figures are held against it.

Independent of any implementation: the counts follow from the architectures' papers.  Every linear map counts its
matrix and its bias, every normalization its scale (and shift, for layer normalization), tied embeddings once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final


def num_parameters_of(config: Mapping[str, Any]) -> int | None:
    """Scalars of the model that a Hugging Face configuration describes, as it is trained; None for unknown families.

    ``config`` must give the sizes of its family.
    """
    count = COUNTS.get(config["model_type"])
    return count(config) if count is not None else None


def _count_llama(config: Mapping[str, Any]) -> int:
    """Gated MLP, root-mean-square normalization, grouped-query attention, rotary positions.

    Sources: Llama (arXiv 2302.13971), GQA (arXiv 2305.13245); Qwen2 adds biases to query, key and value (arXiv
    2407.10671), Qwen3 normalizes query and key per head instead (arXiv 2505.09388).
    """
    model_type = config["model_type"]
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or hidden // num_heads
    query, key_value = num_heads * head_dim, num_kv_heads * head_dim
    attention = 2 * hidden * query + 2 * hidden * key_value
    if model_type == "qwen2":
        attention += query + 2 * key_value
    elif model_type in ("llama", "qwen3") and config.get("attention_bias"):
        attention += query + 2 * key_value + hidden
    if model_type == "qwen3":
        attention += 2 * head_dim
    intermediate = config["intermediate_size"]
    mlp = 3 * hidden * intermediate
    if model_type == "llama" and config.get("mlp_bias"):
        mlp += 2 * intermediate + hidden
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    return int(embeddings + config["num_hidden_layers"] * (attention + mlp + 2 * hidden) + hidden)


def _count_gpt2(config: Mapping[str, Any]) -> int:
    """Learned positions, layer normalization, biases everywhere.  Source: Radford et al. (2019), section 2.3."""
    hidden = config["n_embd"]
    intermediate = config.get("n_inner") or 4 * hidden
    attention = _linear(hidden, 3 * hidden) + _linear(hidden, hidden)
    mlp = _linear(hidden, intermediate) + _linear(intermediate, hidden)
    tokens = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings", True) else 2)
    positions = config["n_positions"] * hidden
    return int(tokens + positions + config["n_layer"] * (attention + mlp + 4 * hidden) + 2 * hidden)


def _count_opt(config: Mapping[str, Any]) -> int:
    """As GPT-2, with two more positions, and embeddings that may be narrower.  Source: OPT (arXiv 2205.01068)."""
    hidden, intermediate = config["hidden_size"], config["ffn_dim"]
    embedded = config.get("word_embed_proj_dim") or hidden
    normalization = 2 * hidden
    block = 4 * _linear(hidden, hidden) + _linear(hidden, intermediate) + _linear(intermediate, hidden)
    tokens = config["vocab_size"] * embedded * (1 if config.get("tie_word_embeddings", True) else 2)
    projections = 2 * hidden * embedded if embedded != hidden else 0
    positions = (config["max_position_embeddings"] + 2) * hidden
    ends_normalized = config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm", False)
    blocks = config["num_hidden_layers"] * (block + 2 * normalization)
    return int(tokens + projections + positions + blocks + (normalization if ends_normalized else 0))


def _count_mixtral(config: Mapping[str, Any]) -> int:
    """As Llama, with several gated MLPs and a router over them.  Source: Mixtral (arXiv 2401.04088), section 2."""
    hidden, num_experts = config["hidden_size"], config["num_local_experts"]
    more = (num_experts - 1) * 3 * hidden * config["intermediate_size"] + num_experts * hidden
    return int(_count_llama(config) + config["num_hidden_layers"] * more)


def _count_gemma2(config: Mapping[str, Any]) -> int:
    """As Llama, normalized also behind attention and MLP; embeddings are tied.  Source: Gemma 2 (arXiv 2408.00118)."""
    tied = {"tie_word_embeddings": config.get("tie_word_embeddings", True)}
    return int(_count_llama({**config, **tied}) + config["num_hidden_layers"] * 2 * config["hidden_size"])


def _count_t5(config: Mapping[str, Any]) -> int:
    """Encoder and decoder with relative positions of the first block of each, scales without shifts, no biases.

    The head is tied to the embeddings, as published for the first release.  Source: T5 (arXiv 1910.10683), section 2.1.
    """
    hidden, num_heads = config["d_model"], config["num_heads"]
    attention = 4 * hidden * num_heads * config["d_kv"] + hidden
    is_gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    mlp = (3 if is_gated else 2) * hidden * config["d_ff"] + hidden
    num_encoding = config["num_layers"]
    num_decoding = config.get("num_decoder_layers") or num_encoding
    positions = 2 * config.get("relative_attention_num_buckets", 32) * num_heads
    blocks = num_encoding * (attention + mlp) + num_decoding * (2 * attention + mlp)
    return int(config["vocab_size"] * hidden + blocks + positions + 2 * hidden)


def _count_bert(config: Mapping[str, Any]) -> int:
    """Three embeddings, layer normalization behind each part, and the head that predicts masked words.

    Source: BERT (arXiv 1810.04805), section 3; the head's matrix is the embeddings'.
    """
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tables = (vocab + config["max_position_embeddings"] + config.get("type_vocab_size", 2)) * hidden
    head = _linear(hidden, hidden) + 2 * hidden + vocab
    return int(tables + 2 * hidden + config["num_hidden_layers"] * _encoder_block(config) + head)


def _count_vit(config: Mapping[str, Any]) -> int:
    """Patches as tokens behind one for the class, learned positions, a linear classifier.

    Source: Vision Transformer (arXiv 2010.11929), section 3.1.
    """
    hidden, patch = config["hidden_size"], config["patch_size"]
    num_positions = (config["image_size"] // patch) ** 2 + 1
    tables = hidden + num_positions * hidden + _linear(patch * patch * config.get("num_channels", 3), hidden)
    head = 2 * hidden + _linear(hidden, config.get("num_labels", 2))
    return int(tables + config["num_hidden_layers"] * _encoder_block(config) + head)


def _encoder_block(config: Mapping[str, Any]) -> int:
    """Attention and MLP with biases, two layer normalizations.  Source: Vaswani et al. (arXiv 1706.03762)."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    mlp = _linear(hidden, intermediate) + _linear(intermediate, hidden)
    return int(4 * _linear(hidden, hidden) + mlp + 4 * hidden)


def _linear(num_in: int, num_out: int) -> int:
    return num_in * num_out + num_out


COUNTS: Final[Mapping[str, Callable[[Mapping[str, Any]], int]]] = {
    "llama": _count_llama,
    "mistral": _count_llama,
    "qwen2": _count_llama,
    "qwen3": _count_llama,
    "phi3": _count_llama,
    "mixtral": _count_mixtral,
    "gemma2": _count_gemma2,
    "t5": _count_t5,
    "bert": _count_bert,
    "vit": _count_vit,
    "gpt2": _count_gpt2,
    "opt": _count_opt,
}
"""By ``model_type``."""

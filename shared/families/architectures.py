"""Sizes of the models of one architecture: what their configurations differ in, and what they run alike.

[Note: Sizes]
Models of one architecture run one program: the same operators in the same order.  What an operator reads, writes and
computes is a product of the batch's dims and of the model's sizes.  Sizes are taken so that none is the product of
others: of the width, that part which falls to a head; of the heads, those that share keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_HEAD_DIMS: Final = 8
"""Heads' features are counted by so many: other widths of heads run other kernels of attention."""
_Sizes = dict[str, int]


@dataclass(frozen=True, slots=True)
class _Fields:
    """What configurations of one architecture call their sizes."""

    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    ffn: str = "intermediate_size"
    vocab: str = "vocab_size"
    kv_heads: str | None = None
    """Of architectures whose heads may share keys and values, and whose heads may be wider than their part."""
    others: tuple[tuple[str, str], ...] = ()
    """(size, field)"""


_SHARING_KEYS: Final = _Fields(kv_heads="num_key_value_heads")
_EXPERTS: Final = (("experts", "num_local_experts"), ("experts_per_token", "num_experts_per_tok"))
_POSITIONS: Final = (("positions", "max_position_embeddings"),)
_ARCHITECTURES: Final[Mapping[str, _Fields]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3"), _SHARING_KEYS),
    "mixtral": _Fields(kv_heads="num_key_value_heads", others=_EXPERTS),
    "gpt2": _Fields("n_embd", "n_head", "n_inner", others=(("positions", "n_positions"),)),
    "opt": _Fields(ffn="ffn_dim", others=_POSITIONS),
    "bert": _Fields(others=_POSITIONS),
}


_SAME_PROGRAM: Final = {"mistral": "llama"}
"""Architectures that run the program of another one where no window slides."""


def program_of(config: Mapping[str, Any]) -> str | None:
    """What the program is called that a ``config.json`` describes; None if nothing is known of its sizes."""
    model_type = config.get("model_type")
    if model_type not in _ARCHITECTURES:
        return None
    sizes = sizes_of(config)
    if sizes is None:
        return None
    name = _SAME_PROGRAM.get(str(model_type), str(model_type))
    return f"{name}-ungrouped" if sizes.get("queries_per_kv_head") == 1 else name


def sizes_of(config: Mapping[str, Any]) -> _Sizes | None:
    """The sizes of the model that a ``config.json`` describes; None if they are not known, or no whole numbers."""
    fields = _ARCHITECTURES.get(str(config.get("model_type")))
    if fields is None:
        return None
    hidden, heads = config.get(fields.hidden), config.get(fields.heads)
    if not (isinstance(hidden, int) and isinstance(heads, int) and heads > 0) or hidden % heads:
        return None
    own_dim = config.get("head_dim") if fields.kv_heads is not None else None
    head_dim = own_dim or hidden // heads
    found: dict[str, Any]
    if fields.kv_heads is None:
        found = {"heads": heads}
    else:
        kv_heads = config.get(fields.kv_heads) or heads
        if heads % kv_heads:
            return None
        found = {
            "kv_heads": kv_heads,
            "queries_per_kv_head": heads // kv_heads,
            "hidden_per_head": hidden // heads,
        }
    if head_dim % _HEAD_DIMS:
        return None
    found |= {
        "head_dim_eighths": head_dim // _HEAD_DIMS,
        "ffn": config.get(fields.ffn) or 4 * hidden,
        "vocab": config.get(fields.vocab),
        **{size: config.get(field) for size, field in fields.others},
    }
    return found if all(isinstance(size, int) and size > 0 for size in found.values()) else None


def resized(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The configuration of a model like that of ``config`` with other sizes, named as ``sizes_of`` names them.

    One whose every head has keys of its own stays so.
    """
    fields = _ARCHITECTURES[str(config["model_type"])]
    head_dim = _HEAD_DIMS * sizes["head_dim_eighths"]
    changed: dict[str, Any] = {fields.ffn: sizes["ffn"], fields.vocab: sizes["vocab"]}
    if fields.kv_heads is None:
        changed |= {fields.heads: sizes["heads"], fields.hidden: sizes["heads"] * head_dim}
        changed |= {"word_embed_proj_dim": changed[fields.hidden]} if "word_embed_proj_dim" in config else {}
    else:
        heads = sizes["kv_heads"] * sizes["queries_per_kv_head"]
        changed |= {fields.kv_heads: sizes["kv_heads"], fields.heads: heads, "head_dim": head_dim}
        changed |= {fields.hidden: heads * sizes["hidden_per_head"]}
    changed |= {field: sizes[size] for size, field in fields.others}
    # Words that a small vocabulary does not have.
    left_out = ("bos_token_id", "eos_token_id", "n_ctx")
    changed |= {"pad_token_id": 0} if config.get("pad_token_id") is not None else {}
    return {name: value for name, value in config.items() if name not in left_out} | changed

"""Which model of the catalogue a configuration of one's own is, whatever it calls itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .models import model_configuration, model_names

_NAMELESS: Final = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "name_or_path",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "initializer_factor",
        "init_std",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "pretraining_tp",
        "max_window_layers",
        "original_max_position_embeddings",
        "auto_map",
        "task_specific_params",
        "_attn_implementation_autoset",
    }
)
"""Keys that change neither a model's operations nor their sizes."""
_POSITIONS: Final = "max_position_embeddings"
"""The longest sequence: a size where positions are learnt, and no more than a limit where they are rotations."""
_HEADS: Final = ("hidden_size", "num_attention_heads", "head_dim")


def same_model(configuration: Mapping[str, Any]) -> str | None:
    """The catalogue's name of the model whose operations a ``config.json`` describes; None if there is none.

    Every key that both have is to be the same, and what one of them has alone is to say no.
    """
    for name in model_names():
        if _is_same(configuration, model_configuration(name).config):
            return name
    return None


def _is_same(own: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    ignored = _NAMELESS | {_POSITIONS} if "rope_theta" in known else _NAMELESS
    keys = (own.keys() | known.keys()) - ignored
    return all(_agree(key, own, known) for key in keys)


def _agree(key: str, own: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    if key in own and key in known:
        return bool(own[key] == known[key])
    value = own.get(key, known.get(key))
    if key == _HEADS[2]:
        sizes = [known.get(name, own.get(name)) for name in _HEADS[:2]]
        return all(isinstance(size, int) for size in sizes) and value == sizes[0] // sizes[1]
    return not value

"""What a model's configuration must say before anything is built from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..basics.errors import FileError
from ..schema.workload import DType
from .model_size import FAMILIES

_COUNTS: Final = ("num_hidden_layers", "n_layer", "num_layers", "num_attention_heads", "n_head", "num_heads")
_OPTIONAL: Final = ("num_key_value_heads", "head_dim", "n_inner", "d_kv")
"""Sizes that published configurations leave null: the family derives them."""
_SIZES: Final = (
    *_COUNTS,
    *_OPTIONAL,
    "vocab_size",
    "hidden_size",
    "n_embd",
    "d_model",
    "intermediate_size",
    "ffn_dim",
    "d_ff",
    "max_position_embeddings",
    "n_positions",
    "word_embed_proj_dim",
    "num_local_experts",
    "num_experts_per_tok",
    "type_vocab_size",
    "image_size",
    "patch_size",
    "num_channels",
)
_MAX_COUNT: Final = 100_000
_MAX_SIZE: Final = 2**31 - 1
_TRAINABLE: Final = (DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)


def check_model_configuration(config: Mapping[str, Any], *, origin: str) -> None:
    """Raise FileError if ``config`` describes no model; the message names the field, its value and its bound.

    ``origin`` names the configuration in messages.  Fields that this release does not know pass unchecked.
    """
    if not config:
        raise FileError(f"{origin} is empty, expected a model configuration with a field model_type.")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        found = "has no field model_type" if "model_type" not in config else f"has model_type {model_type!r}"
        raise FileError(
            f"{origin} {found}, so it is no model configuration. Pass the config.json that lies beside a model's "
            f"weights on the Hugging Face hub."
        )
    for complaint in _complaints(config, prefix=""):
        raise FileError(f"{origin} describes no {model_type} model: {complaint}")


def _complaints(config: Mapping[str, Any], *, prefix: str) -> Iterator[str]:
    """What is wrong with ``config``, one sentence each, fields named with ``prefix``."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    required = family.sizes if family is not None else ()
    for field in required:
        if config.get(field) is None:
            yield f"{prefix}{field} is missing. State it; the architecture has no size of its own."
    for field in _SIZES:
        value = config.get(field)
        # Models of other families have lists here, one size per layer.
        if field not in config or (value is None and field not in required) or (family is None and _is_list(value)):
            continue
        bound = _MAX_COUNT if field in _COUNTS else _MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= bound:
            yield f"{prefix}{field} is {_shown(value)} but must be a whole number from 1 to {bound}."
    yield from _head_complaints(config, prefix=prefix, is_rotary=family is not None and family.is_rotary)
    yield from _part_complaints(config, prefix=prefix)
    yield from _value_complaints(config, prefix=prefix)
    for name, part in config.items():
        if name.endswith("_config") and isinstance(part, Mapping):
            yield from _complaints(part, prefix=f"{prefix}{name}.")


def _head_complaints(config: Mapping[str, Any], *, prefix: str, is_rotary: bool) -> Iterator[str]:
    for hidden_field, heads_field in (("hidden_size", "num_attention_heads"), ("n_embd", "n_head")):
        hidden, num_heads = config.get(hidden_field), config.get(heads_field)
        if not isinstance(hidden, int) or not isinstance(num_heads, int):
            continue
        has_own_head_dim = any(config.get(field) is not None for field in config if "head_dim" in field)
        if hidden % num_heads and not has_own_head_dim:
            yield (
                f"{prefix}{heads_field} {num_heads} does not divide {prefix}{hidden_field} {hidden}. "
                f"Choose a divisor, or state head_dim."
            )
        head_dim = config["head_dim"] if isinstance(config.get("head_dim"), int) else hidden // num_heads
        if is_rotary and head_dim % 2:
            yield (
                f"a head has {head_dim} dims ({prefix}{hidden_field} {hidden} over {prefix}{heads_field} {num_heads}, "
                f"or head_dim), but rotary positions need an even number."
            )
    num_heads, num_kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(num_heads, int) and isinstance(num_kv_heads, int) and num_heads % num_kv_heads:
        yield (
            f"{prefix}num_key_value_heads {num_kv_heads} does not divide {prefix}num_attention_heads {num_heads}. "
            f"Query heads share key-value heads in equal groups."
        )


def _part_complaints(config: Mapping[str, Any], *, prefix: str) -> Iterator[str]:
    """Experts and patches: parts that must not be more or larger than the whole."""
    num_experts, num_chosen = config.get("num_local_experts"), config.get("num_experts_per_tok")
    if isinstance(num_experts, int) and isinstance(num_chosen, int) and num_chosen > num_experts:
        yield f"{prefix}num_experts_per_tok {num_chosen} exceeds {prefix}num_local_experts {num_experts}. Lower it."
    image, patch = config.get("image_size"), config.get("patch_size")
    if isinstance(image, int) and isinstance(patch, int) and image < patch:
        yield f"{prefix}patch_size {patch} exceeds {prefix}image_size {image}. Lower it."


def _value_complaints(config: Mapping[str, Any], *, prefix: str) -> Iterator[str]:
    for field in ("dtype", "torch_dtype"):
        value = config.get(field)
        if isinstance(value, str) and value.removeprefix("torch.") not in (*_TRAINABLE, "auto"):
            yield f"{prefix}{field} is {value!r}; parameters are trained as {', '.join(_TRAINABLE)}."
    yield from _nan_complaints(config, prefix=prefix)


def _nan_complaints(config: Mapping[str, Any], *, prefix: str) -> Iterator[str]:
    for field, value in config.items():
        if isinstance(value, float) and math.isnan(value):
            yield f"{prefix}{field} is NaN, which is no number."
        elif isinstance(value, Mapping) and not field.endswith("_config"):
            yield from _nan_complaints(value, prefix=f"{prefix}{field}.")


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _shown(value: object) -> str:
    return f"{value!r:.60}"

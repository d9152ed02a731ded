"""What transformers would not refuse about a model's configuration, or not by the name of a field.

A size that is missing it takes from its own default model, NaN it computes with, 0 it divides by, and a million blocks
it builds.  Everything else it refuses itself when the model is traced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..basics.errors import FileError
from ..phases.quantization import QuantizedType

_ATTENTION: Final = ("num_hidden_layers", "num_attention_heads")
_LLAMA: Final = ("vocab_size", "hidden_size", "intermediate_size", *_ATTENTION)
_GROUPED: Final = (*_LLAMA, "num_key_value_heads")
REQUIRED_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "llama": _LLAMA,
    "mistral": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": (*_GROUPED, "head_dim"),
    "phi3": _LLAMA,
    "mixtral": (*_GROUPED, "num_local_experts", "num_experts_per_tok"),
    "gemma2": (*_GROUPED, "head_dim"),
    "t5": ("vocab_size", "d_model", "d_ff", "d_kv", "num_heads", "num_layers"),
    "bert": (*_LLAMA, "max_position_embeddings"),
    "vit": ("hidden_size", "intermediate_size", *_ATTENTION, "image_size", "patch_size"),
    "gpt2": ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"),
    "opt": ("vocab_size", "hidden_size", "ffn_dim", *_ATTENTION, "max_position_embeddings"),
}
"""Sizes that a configuration must give, by ``model_type``: all that its family does not derive from others."""
_COUNTS: Final = frozenset({*_ATTENTION, "n_layer", "num_layers", "n_head", "num_heads"})
_DERIVED: Final = (
    "num_key_value_heads",
    "head_dim",
    "n_inner",
    "word_embed_proj_dim",
    "type_vocab_size",
    "num_channels",
)
_SIZES: Final = tuple(dict.fromkeys((*(field for sizes in REQUIRED_SIZES.values() for field in sizes), *_DERIVED)))
_QUANTIZATION_FIELDS: Final = ("quantization_config", "compression_config")
"""The second is what compressed-tensors called it before."""
_MAX_COUNT: Final = 100_000
_MAX_SIZE: Final = 2**31 - 1


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
    quantization = quantization_complaint(config)
    if quantization is not None:
        raise FileError(f"{origin} {quantization}")
    for complaint in _complaints(config, prefix=""):
        raise FileError(f"{origin} describes no {model_type} model: {complaint}")


def quantization_complaint(config: Mapping[str, Any], *, prefix: str = "") -> str | None:
    """What to say of a configuration of quantized weights, which transformers would build as if they were not.

    None if it names none, or null.  Fields within ``text_config`` and the like count as well.
    """
    for field in _QUANTIZATION_FIELDS:
        stated = config.get(field)
        if stated is None:
            continue
        kind = _quantization(stated) if isinstance(stated, Mapping) else f"{stated!r:.40}"
        option = _option_of(stated) if isinstance(stated, Mapping) else None
        if option is not None:
            return (
                f"has a {prefix}{field} ({kind}): its weights are quantized. To train adapters beside them, remove the "
                f"field and add {option} and --lora-rank 16; without these the question is about its weights in 16 "
                f"bits (--dtype float16)."
            )
        return (
            f"has a {prefix}{field} ({kind}): its weights are quantized, and protwin neither predicts nor trains such. "
            f"Take the configuration of the model that they were quantized from, or remove the field to ask about its "
            f"weights in 16 bits (--dtype bfloat16)."
        )
    parts = ((name, part) for name, part in config.items() if name.endswith("_config") and isinstance(part, Mapping))
    found = (quantization_complaint(part, prefix=f"{prefix}{name}.") for name, part in parts)
    return next((complaint for complaint in found if complaint is not None), None)


def _option_of(stated: Mapping[str, Any]) -> str | None:
    """How a base that is packed so is asked about; None if it cannot be."""
    kind = {4: QuantizedType.GPTQ, 8: QuantizedType.GPTQ_8BIT}.get(stated.get("bits", 0))
    size = stated.get("group_size")
    if stated.get("quant_method") != "gptq" or kind is None or size not in kind.blocksizes or stated.get("desc_act"):
        return None
    return f"--quantize {kind} --quantization-blocksize {size}"


def _quantization(stated: Mapping[str, Any]) -> str:
    """The method, and what older files of bitsandbytes say in its place."""
    method = stated.get("quant_method")
    bits = next((f"{width} bits" for width in (4, 8) if stated.get(f"load_in_{width}bit")), None)
    if bits is None and isinstance(stated.get("bits"), int):
        bits = f"{stated['bits']} bits"
    named = method if isinstance(method, str) else "bitsandbytes" if bits is not None else "of no known method"
    return f"{named:.40}, {bits}" if bits is not None else f"{named:.40}"


def _complaints(config: Mapping[str, Any], *, prefix: str) -> Iterator[str]:
    """What is wrong with ``config``, one sentence each, fields named with ``prefix``."""
    model_type = config.get("model_type")
    required = REQUIRED_SIZES.get(model_type) if isinstance(model_type, str) else None
    for field in required or ():
        if config.get(field) is None:
            yield f"{prefix}{field} is missing. State it; the architecture has no size of its own."
    for field in _SIZES:
        value = config.get(field)
        # Published configurations leave null what is derived; other families have lists, one size per block.
        if value is None or (required is None and (isinstance(value, list | tuple | dict) or _is_absent(field, value))):
            continue
        bound = _MAX_COUNT if field in _COUNTS else _MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= bound:
            yield f"{prefix}{field} is {value!r:.60} but must be a whole number from 1 to {bound}."
    num_heads, num_kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(num_heads, int) and isinstance(num_kv_heads, int) and num_heads % num_kv_heads:
        yield (
            f"{prefix}num_key_value_heads {num_kv_heads} does not divide {prefix}num_attention_heads {num_heads}. "
            f"Query heads share key-value heads in equal groups."
        )
    for part_field, whole_field in (("num_experts_per_tok", "num_local_experts"), ("patch_size", "image_size")):
        chosen, whole = config.get(part_field), config.get(whole_field)
        if isinstance(chosen, int) and isinstance(whole, int) and chosen > whole:
            yield f"{prefix}{part_field} {chosen} exceeds {prefix}{whole_field} {whole}. Lower it."
    yield from _nan_complaints(config, prefix=prefix)
    for name, part in config.items():
        if name.endswith("_config") and isinstance(part, Mapping):
            yield from _complaints(part, prefix=f"{prefix}{name}.")


def _is_absent(field: str, value: object) -> bool:
    """Whether a family says by 0 that it has no such part (DeBERTa has no types of tokens)."""
    return field in ("type_vocab_size", "head_dim") and value == 0


def _nan_complaints(config: Mapping[str, Any], *, prefix: str) -> Iterator[str]:
    for field, value in config.items():
        if isinstance(value, float) and math.isnan(value):
            yield f"{prefix}{field} is NaN, which is no number."
        elif isinstance(value, Mapping) and not field.endswith("_config"):
            yield from _nan_complaints(value, prefix=f"{prefix}{field}.")

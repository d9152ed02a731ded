"""Configurations of transformers' families made tiny: few layers, few heads, little vocabulary, small images.

What a family calls its fields is read off their names.  A width that several parts share stays the same in all of them:
each is multiplied by what leaves its part two heads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from typing import Any, Final

from transformers import CONFIG_MAPPING

from protwin.runtime.model.configurations import quiet

VOCABULARY: Final = 512
KNOWN: Final[dict[str, dict[str, Any]]] = {
    "qwen2_vl": {"vision_config.hidden_size": 256},
    "qwen2_5_vl": {"vision_config.out_hidden_size": 256},
    "qwen3_vl": {"vision_config.out_hidden_size": 256},
    "qwen3_5": {"vision_config.out_hidden_size": 256},
    "qwen3_vl_moe": {"vision_config.out_hidden_size": 256},
    "blip-2": {"image_token_index": 500},
    "llava_next": {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
    "llava_onevision": {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
    "voxtral": {"audio_token_id": 500},
    "gemma3": {"mm_tokens_per_image": 4, "text_config.head_dim": 64, "text_config.sliding_window": 16},
}
"""What no name of a field tells: sizes of one part that another part's follow from."""
_LAYERS: Final = re.compile(r"(^|_)layers$|^n_layer$|^depth$|^num_blocks$|^num_hidden_blocks$|^num_hidden_groups$")
_HEADS: Final = re.compile(r"(^|_)heads?$|^num_kv_heads$|^n_head_kv$")
_FFN: Final = re.compile(r"intermediate_size$|ffn_dim$|^mlp_dim$|^d_ff$|^n_inner$|^ffn_hidden_size$|inner_dim$")
_WIDTH: Final = re.compile(r"hidden_size$|^d_model$|^n_embd$|embed_dim$|^dim$|^width$|hidden_dim$|^decoder_hidden$")
_NO_WIDTH: Final = re.compile(
    r"position|vocab|token|theta|window|image|max_|length|rate|bins|_id$|index|codebook_size|num_|scale|frames|patch"
    r"|head_dim|rank|kernel|stride|buckets"
)
_EXPERTS: Final = re.compile(r"^(n_routed|num|num_local|moe_num|n)_experts$")
_CHOSEN: Final = re.compile(r"experts_per_tok$|^moe_topk$|^moe_k$|^top_k_experts$|^num_selected_experts$")
_CHANCES: Final = re.compile(r"layer_?drop$|^mask_(time|feature)_prob$|^drop_path_rate$")
_TOKEN: Final = re.compile(r"token_(id|index|ids)$|_token$|^(image|audio|video)_(start|end)_id$")
_INDEXES: Final = re.compile(r"indexes$|indices$|layer_ids$|_layer_idx$")


@dataclass(frozen=True)
class Size:
    """How much of a configuration is made smaller: a family that does not take the one takes the other."""

    narrow: bool = True
    short_ffn: bool = True
    small_images: bool = True


SIZES: Final = (
    Size(),
    Size(small_images=False),
    Size(short_ffn=False),
    Size(short_ffn=False, small_images=False),
    Size(narrow=False, short_ffn=False, small_images=False),
)


def tiny_configurations(model_type: str, **changes: Any) -> Iterator[dict[str, Any]]:
    """The family's own configuration made smaller in several ways, the smallest first; none if it has none itself."""
    try:
        with quiet():
            full = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    except Exception:
        return
    for size in SIZES:
        made = _Shrinking(size, full).of(full)
        for unwanted in ("dtype", "torch_dtype", "transformers_version", "architectures", "quantization_config"):
            made.pop(unwanted, None)
        if made.get("pad_token_id", 0) is None:
            made["pad_token_id"] = 0
        for path, value in KNOWN.get(model_type, {}).items():
            *parts, last = path.split(".")
            reduce(lambda at, part: at.setdefault(part, {}), parts, made)[last] = value
        yield made | {"model_type": model_type} | changes


@dataclass
class _Shrinking:
    size: Size
    full: Mapping[str, Any]
    tokens: dict[int, int] = field(default_factory=dict)
    """Ids beyond the small vocabulary, and what stands for them."""

    def __post_init__(self) -> None:
        self.narrowed: dict[int, Fraction] = {}
        """By width, what it is multiplied with; the same wherever the width occurs."""
        if self.size.narrow:
            for part in _parts(self.full):
                self._narrow(part)

    def _narrow(self, part: Mapping[str, Any]) -> None:
        """Leave two heads, and as much less width."""
        heads = [v for k, v in part.items() if _HEADS.search(k) and "kv" not in k and "key" not in k and type(v) is int]
        factor = Fraction(2, max(heads)) if heads and max(heads) > 2 else Fraction(1, 2 if heads else 4)
        for key, value in part.items():
            if _WIDTH.search(key) and type(value) is int and value >= 64 and (value * factor).denominator == 1:
                self.narrowed.setdefault(value, factor)

    def _factor(self, part: Mapping[str, Any]) -> Fraction:
        """Of a part's heads: that of its width."""
        widths = [self.narrowed[v] for k, v in part.items() if _WIDTH.search(k) and v in self.narrowed]
        return widths[0] if widths else Fraction(1)

    def of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        counts = {v for k, v in config.items() if _LAYERS.search(k) and type(v) is int and v > 2}
        return {key: self._value(key, value, counts, config) for key, value in config.items()}

    def _value(self, key: str, value: Any, counts: set[int], config: Mapping[str, Any]) -> Any:
        if isinstance(value, dict):
            return self.of(value)
        if isinstance(value, list):
            return self._list(key, value, counts, config)
        if type(value) is float and _CHANCES.search(key):
            return 0.0
        if type(value) is not int:
            return value
        return self._number(key, value, config)

    def _number(self, key: str, value: int, config: Mapping[str, Any]) -> int:
        if _TOKEN.search(key):
            return self._token(value)
        if key in ("vocab_size", "text_vocab_size", "entity_vocab_size") and value > VOCABULARY:
            return VOCABULARY
        if _LAYERS.search(key):
            return min(value, 2)
        if key == "first_k_dense_replace":
            return min(value, 1)
        if _EXPERTS.search(key):
            return min(value, 4)
        if _CHOSEN.search(key):
            return min(value, 2)
        if key in ("n_group", "topk_group", "num_expert_groups"):
            return 1
        if key in ("num_queries", "num_query_tokens", "n_queries"):
            return min(value, 8)
        if _HEADS.search(key):
            return max(1, int(value * self._factor(config)))
        if _FFN.search(key) and self.size.short_ffn:
            return min(value, 64)
        if self.size.small_images:
            patch = config.get("patch_size")
            if key == "image_size" and isinstance(patch, int) and value > 4 * patch:
                return 4 * patch
            if key == "max_source_positions" and value > 40:
                return 40
        if value in self.narrowed and not _NO_WIDTH.search(key):
            return int(value * self.narrowed[value])
        return value

    def _list(self, key: str, value: list[Any], counts: set[int], config: Mapping[str, Any]) -> list[Any]:
        if _TOKEN.search(key) and all(type(each) is int for each in value):
            return [self._token(each) for each in value]
        if key == "depths":
            return [min(each, 2) for each in value]
        if _INDEXES.search(key) and counts and all(type(each) is int for each in value):
            return list(dict.fromkeys(min(each, 1) for each in value))
        if len(value) in counts:
            value = value[:2]
        return [self.of(each) if isinstance(each, dict) else each for each in value]

    def _token(self, value: int) -> int:
        if value < VOCABULARY - 64:
            return value
        return self.tokens.setdefault(value, VOCABULARY - 1 - len(self.tokens))


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _parts(value)

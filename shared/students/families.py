"""Families of models that students are made of: what their configurations call things, and where a block has them.

Sources: the configurations and models of transformers 5 (``models/<family>/modeling_<family>.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ..basics.errors import WorkloadError
from ..basics.suggestions import did_you_mean


@dataclass(frozen=True, slots=True)
class Family:
    """Names of one family: of fields of its configuration, and of modules of its blocks."""

    blocks: str = "model.layers"
    """Path of the list of blocks in the model with its head."""
    num_blocks: str = "num_hidden_layers"
    hidden_size: str = "hidden_size"
    num_heads: str = "num_attention_heads"
    num_key_value_heads: str | None = "num_key_value_heads"
    """None: every head has a key and a value of its own."""
    intermediate_size: str = "intermediate_size"
    num_experts: str | None = None
    """None: no block has experts."""
    attention: str = "self_attn"
    attention_norm: str = "input_layernorm"
    ffn: str = "mlp"
    ffn_norm: str = "post_attention_layernorm"
    mamba: str | None = None
    router: str = "gate"
    """Of experts, within the FFN."""

    attention_period: tuple[int, int] | None = None
    """Of hybrids that attend in every so many blocks: period and offset where the configuration states none."""
    expert_period: tuple[int, int] | None = None
    """Of families with experts in every so many blocks, the same."""

    def is_attention(self, configuration: Mapping[str, Any], block: int) -> bool:
        """Whether block ``block`` attends; otherwise it has a state-space mixer."""
        if self.mamba is None:
            return True
        if self.attention_period is None:
            return block in (configuration.get("attn_layer_indices") or ())
        return _is_on(configuration, "attn_layer", self.attention_period, block)

    def has_experts(self, configuration: Mapping[str, Any], block: int) -> bool:
        """Whether tokens of block ``block`` choose among experts."""
        if self.num_experts is None or self.expert_period is None:
            return self.num_experts is not None
        is_on = _is_on(configuration, "expert_layer", self.expert_period, block)
        return is_on and int(configuration[self.num_experts]) > 1


def _is_on(configuration: Mapping[str, Any], field: str, default: tuple[int, int], block: int) -> bool:
    period, offset = (configuration.get(f"{field}_{part}") for part in ("period", "offset"))
    return block % int(period or default[0]) == int(default[1] if offset is None else offset)


_HYBRID: Final = Family(ffn="feed_forward", ffn_norm="pre_ff_layernorm", mamba="mamba")
_LLAMA: Final = Family()
FAMILIES: Final[Mapping[str, Family]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": Family(num_experts="num_local_experts"),
    "gpt2": Family(
        blocks="transformer.h",
        num_blocks="n_layer",
        hidden_size="n_embd",
        num_heads="n_head",
        num_key_value_heads=None,
        intermediate_size="n_inner",
        attention="attn",
        attention_norm="ln_1",
        ffn="mlp",
        ffn_norm="ln_2",
    ),
    "bamba": _HYBRID,
    "jamba": replace(
        _HYBRID, num_experts="num_experts", router="router", attention_period=(8, 4), expert_period=(2, 1)
    ),
}
"""By ``model_type``."""
STUDENT_FAMILY: Final = "student_family"
"""Field of configurations whose ``model_type`` is none of these: the family whose names of modules the model has."""


def family_of(configuration: Mapping[str, Any], name: str) -> Family:
    """The family of a configuration; ``name`` is the model's in messages.  Raises WorkloadError if there is none."""
    model_type = configuration.get(STUDENT_FAMILY, configuration.get("model_type"))
    if model_type not in FAMILIES:
        raise WorkloadError(
            f"{name} is of family {model_type!r}, which protwin makes no students of. "
            f"{did_you_mean(str(model_type), FAMILIES)}"
        )
    return FAMILIES[str(model_type)]

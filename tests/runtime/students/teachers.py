"""Small teachers of every family that students are made of, and batches for them."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from typing import Any, Final

import torch

from protwin.runtime.model.configurations import build_model
from protwin.shared.students.student import Student

_LLAMA: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_HYBRID: Final = {"pad_token_id": None, "mamba_d_state": 4, "mamba_expand": 2}
CONFIGURATIONS: Final[dict[str, dict[str, Any]]] = {
    "llama": _LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "mistral": _LLAMA | {"model_type": "mistral", "tie_word_embeddings": True},
    "qwen2": _LLAMA | {"model_type": "qwen2"},
    "qwen3": _LLAMA | {"model_type": "qwen3", "head_dim": 6},
    "mixtral": _LLAMA | {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "bamba": _LLAMA
    | _HYBRID
    | {"model_type": "bamba", "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_chunk_size": 4},
    "jamba": _LLAMA
    | _HYBRID
    | {
        "model_type": "jamba",
        "num_experts": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_offset": 0,
    },
}
DENSE: Final = [name for name in CONFIGURATIONS if name not in ("mixtral", "jamba")]


def make_teacher(name: str, dtype: torch.dtype = torch.float64, **changed: Any) -> Any:
    """A model in evaluation mode none of whose parameters has a special value, such as biases of zero."""
    torch.manual_seed(7)
    # float64 is no type to train in; the model is made in float32 and widened.
    model = build_model(CONFIGURATIONS[name] | changed, name, torch.float32, device="cpu")
    # torch multiplies groups of matrices in narrower types alone.
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return model.to(dtype).eval()


@lru_cache
def teacher_of(name: str) -> Any:
    """The same, made once: tests do not change it."""
    return make_teacher(name)


def student_of(text: str = "") -> Student:
    return Student.from_mapping(tomllib.loads(f'kind = "student"\nschema_version = 1\n{text}'), origin="student.toml")


def batches(count: int = 2, length: int = 9) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(0, 61, (2, length), generator=made)} for _ in range(count)]


def logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**batch, use_cache=False).logits
    return found

"""Tensors of attention that grow with the square of the sequence: sizes by hand, by autograd, and by polynomials."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MistralConfig, MistralForCausalLM

from protwin.runtime import trace
from protwin.runtime.hooks.square_tensors import SquareTensors
from protwin.runtime.polynomials.families import family_of_configuration
from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.catalogue.models import has_flash_attention, model_configuration, model_names
from protwin.shared.phases.quadratic import attention_words
from protwin.shared.schema.workload import QuadraticMemory, Workload
from tests.runtime.models import VOCABULARY, llama
from tests.runtime.packed import ends_of, packed_batch

BATCH, HEADS, LAYERS, LENGTH = 2, 4, 3, 300
SQUARE = LENGTH**2
FLOAT = 4


def tokens(batch: int = BATCH, length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def mistral(window: int) -> nn.Module:
    """A sliding window, beyond which transformers makes a mask."""
    torch.manual_seed(0)
    return MistralForCausalLM(
        MistralConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            sliding_window=window,
        )
    )


def deepseek() -> nn.Module:
    """Keys and values of all heads side by side are as wide as 288 tokens are long."""
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            first_k_dense_replace=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=32,
            qk_rope_head_dim=8,
            v_head_dim=40,
            vocab_size=VOCABULARY,
        )
    )


def seen(lasting: int, kept_by_one: int, *, has_kernel: bool) -> tuple[int, int, int, bool]:
    return lasting, LAYERS * kept_by_one, kept_by_one, has_kernel


PACKED = (100, 150, 50)
CASES: dict[str, tuple[Any, dict[str, Any], tuple[int, int, int, bool] | None]] = {
    "fused": (lambda: llama(num_layers=LAYERS), tokens(), None),
    # A mask of numbers for every sample, and the probabilities that the softmax keeps for each head.
    "eager": (
        lambda: llama(num_layers=LAYERS, attn_implementation="eager"),
        tokens(),
        seen(BATCH * SQUARE * FLOAT, BATCH * HEADS * SQUARE * FLOAT, has_kernel=False),
    ),
    "within the window": (lambda: mistral(301), tokens(), None),
    # One truth value for all samples; each call makes numbers of it, for each sample, and keeps them.
    "beyond the window": (lambda: mistral(200), tokens(), seen(SQUARE, BATCH * SQUARE * FLOAT, has_kernel=True)),
    "packed": (
        lambda: llama(num_layers=LAYERS),
        packed_batch(PACKED),
        seen(SQUARE, SQUARE * FLOAT, has_kernel=True),
    ),
    # As many features as tokens.
    "fused, as wide as long": (lambda: llama(num_layers=LAYERS, hidden_size=320), tokens(length=320), None),
    "fused, heads side by side as wide as long": (deepseek, tokens(length=288), None),
    "eager, as wide as long": (
        lambda: llama(num_layers=LAYERS, hidden_size=320, attn_implementation="eager"),
        tokens(length=320),
        seen(BATCH * 320**2 * FLOAT, BATCH * HEADS * 320**2 * FLOAT, has_kernel=False),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes_are_those_by_hand_with_weights_and_without(name: str) -> None:
    build, batch, expected = CASES[name]
    model = build()
    for device in ("meta", "cpu"):
        workload = trace(copy.deepcopy(model).to(device), batch, repeats=0)
        found = workload.quadratic
        if expected is None:
            assert found is None
            assert words_of(workload) is None
            continue
        assert found is not None
        assert (found.lasting_bytes, found.kept_bytes, found.most_kept_bytes, found.has_kernel) == expected
        assert found.within_bytes >= found.most_kept_bytes
        assert Workload.from_mapping(workload.model_dump(mode="json") | HEAD, origin="itself") == workload


HEAD = {"kind": Workload.KIND, "schema_version": Workload.SCHEMA_VERSION}


@pytest.mark.parametrize("name", ["eager", "beyond the window", "packed"])
def test_sizes_are_those_that_autograd_saves(name: str) -> None:
    """All of them, masks that no block makes included: numbers are saved by each block, truth values by none."""
    build, batch, expected = CASES[name]
    model, saved = build(), dict[int, int]()
    model.config.use_cache = False
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape[-2:]) == (LENGTH, LENGTH):
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**batch)
    assert expected is not None
    assert sum(saved.values()) == expected[1]


def test_a_kernel_that_is_told_lengths_has_none() -> None:
    model = llama(num_layers=LAYERS).to("meta")
    assert trace(model, packed_batch(PACKED) | ends_of(PACKED), repeats=0).quadratic is None


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_hidden_layers": 3, **SMALL},
    "mistral": {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 200, **SMALL},
    "eager, wide": {
        "model_type": "llama",
        "attn_implementation": "eager",
        "num_hidden_layers": 2,
        **SMALL,
        "hidden_size": 320,
    },
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "num_hidden_layers": 2, "sliding_window": 200, **SMALL},
    "bloom": {"model_type": "bloom", "hidden_size": 320, "n_layer": 2, "n_head": 4, "vocab_size": 128},
    "t5": {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 128,
        "decoder_start_token_id": 0,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_polynomials_give_what_a_trace_gives(name: str) -> None:
    configuration = CONFIGURATIONS[name]
    family = family_of_configuration(configuration, name=name)
    for length in (256, 320):
        asked: dict[str, Any] = {"batch_size": 2, "sequence_length": length}
        assert family.at(**asked) == workload_of_configuration(configuration, name=name, **asked)
    found = family.at(batch_size=2, sequence_length=320).quadratic
    assert (found is None) == (name == "llama")


def test_masks_of_the_batch_count_and_weights_do_not() -> None:
    model = nn.Linear(LENGTH, LENGTH)
    squares = SquareTensors(model, list(tokens().values()))
    add = torch.ops.aten.add.Tensor
    squares.note(torch.ops.aten.view.default, [model.weight], model.weight.view(1, 1, LENGTH, LENGTH))
    squares.note(torch.ops.aten.zeros.default, [], torch.zeros(1, LENGTH, LENGTH))
    features = torch.zeros(1, 1, LENGTH, LENGTH)
    squares.note(torch.ops.aten.cat.default, [[features[..., 1:], features[..., :1]]], features)
    squares.note(add, [features], features)
    assert squares.total_bytes == 0
    mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    squares.note(torch.ops.aten.zeros.default, [], [mask, mask[:, 0]])
    assert squares.total_bytes == SQUARE
    added = features * 1
    squares.note(add, [features, mask], added)
    assert squares.total_bytes == SQUARE * (1 + FLOAT)
    del mask, added
    assert squares.total_bytes == 0


@pytest.mark.parametrize("origin", ["filled", "of the batch", "across", "scores"])
def test_squares_of_a_model_as_wide_as_long_come_from_squares(origin: str) -> None:
    model, mask = nn.Linear(LENGTH, LENGTH), torch.zeros(1, 1, LENGTH, LENGTH)
    squares = SquareTensors(model, [*tokens().values(), *([mask] if origin == "of the batch" else [])])
    operator, given = {
        "filled": (torch.ops.aten.full.default, []),
        "of the batch": (torch.ops.aten.mul.Tensor, [mask]),
        "across": (torch.ops.aten.sub.Tensor, [torch.zeros(LENGTH, 1), torch.zeros(LENGTH)]),
        "scores": (torch.ops.aten.bmm.default, [torch.zeros(1, LENGTH, 8), torch.zeros(1, 8, LENGTH)]),
    }[origin]
    result = torch.zeros(1, 1, LENGTH, LENGTH)
    squares.note(operator, given, result)
    assert squares.total_bytes == SQUARE * FLOAT


def words_of(workload: Workload) -> str | None:
    return attention_words(workload.quadratic, workload.model_name, workload.num_tokens // workload.num_samples)


def test_words_name_the_kernel_the_bytes_and_what_avoids_them() -> None:
    build, batch, _ = CASES["beyond the window"]
    words = words_of(trace(build().to("meta"), batch, repeats=0))
    assert words is not None
    for part in ("300 tokens", "given a mask", "87.89 KiB beside the blocks", "2.06 MiB kept", "flash_attention_2"):
        assert part in words
    assert QuadraticMemory(has_kernel=True).is_any is False


def test_flash_attention_is_advised_for_models_whose_class_has_it() -> None:
    """Of every model of the catalogue, transformers says which; T5 has none."""
    advised = {}
    for name in model_names():
        config = model_configuration(name).config
        of_class = getattr(transformers, config["architectures"][0])
        assert has_flash_attention(config) is bool(of_class._supports_flash_attn), name
        found = QuadraticMemory(kept_bytes=1, has_kernel=True)
        words = attention_words(found, name, 512, has_flash=has_flash_attention(config))
        assert words is not None
        advised[name] = "flash_attention_2" in words
    assert not advised["t5-3b"]
    assert advised["gpt2"]

"""How long samples may be for a model's rotary positions: by hand, of what models were published with."""

from __future__ import annotations

from typing import Any

import pytest

from protwin.shared.catalogue.models import model_configuration, model_names
from protwin.shared.catalogue.rotary import rotary_tokens
from protwin.shared.records.question import exceeded_tokens
from protwin.shared.workloads.source import load_workload

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 8192, "rope_theta": 1e4}, 8192),
        # Scaled already: what is published is the length after, or the length before.
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 4096, "rope_parameters": {"full": YARN, "sliding": {"rope_theta": 1}}}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, None),
        ({"text_config": {"max_position_embeddings": 4096, "rope_theta": 1e4}}, 4096),
        ({"n_positions": 2048, "rotary_dim": 64}, 2048),
        ({"max_position_embeddings": 2048, "rope_theta": 1e4, "alibi": True}, None),
        # Learned or relative positions, or none.
        ({"max_position_embeddings": 512}, None),
        ({"rope_theta": 1e4}, None),
        ({}, None),
        # What people write.
        ({"max_position_embeddings": None, "rope_theta": 1e4}, None),
        ({"max_position_embeddings": -1, "rope_theta": 1e4}, None),
        ({"max_position_embeddings": True, "rope_theta": 1e4}, None),
        ({"max_position_embeddings": 4096, "rope_theta": 1e4, "rope_scaling": "none"}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"factor": float("nan")}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"factor": float("inf")}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"factor": "2"}}, 4096),
    ],
)
def test_the_longest_sample_is_that_of_the_configuration(config: dict[str, Any], expected: int | None) -> None:
    assert rotary_tokens(config) == expected


def test_models_of_the_catalogue_reach_what_they_were_published_with() -> None:
    found = {name: rotary_tokens(model_configuration(name).config) for name in model_names()}
    for name, published in {"llama-3-8b": 8192, "llama-3.1-8b": 131072, "llama-2-7b": 4096, "phi-4": 16384}.items():
        assert found[name] == published
    assert not any(found[name] for name in ("gpt2", "opt-13b", "bert-large", "t5-base", "vit-huge"))


@pytest.mark.parametrize(
    ("sequence_length", "packed_lengths", "expected"),
    [(8192, None, None), (8193, None, 8192), (16384, "8192,8192", None), (16384, "4096,12288", 8192)],
)
def test_samples_that_are_longer_are_told(
    sequence_length: int, packed_lengths: str | None, expected: int | None
) -> None:
    workload = load_workload("llama-3-8b", batch_size=1, sequence_length=sequence_length, packed_lengths=packed_lengths)
    assert workload.rotary_tokens == 8192
    assert exceeded_tokens(workload) == expected

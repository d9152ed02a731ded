"""A configuration of the catalogue is found whatever it calls itself, and none that differs in anything that counts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from protwin.shared.catalogue.models import model_configuration, model_names
from protwin.shared.catalogue.same_model import same_model


def renamed(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same model as somebody else saves it."""
    names = {"_name_or_path": "mine", "transformers_version": "9.9", "torch_dtype": "float32", "use_cache": False}
    return {**dict(rng.sample(sorted(config.items()), len(config))), **names, "bos_token_id": 7, "mlp_bias": False}


@pytest.mark.parametrize("name", model_names())
def test_every_model_is_found_and_no_other_size_of_it(name: str) -> None:
    rng = random.Random(name)
    config = renamed(model_configuration(name).config, rng)
    found = same_model(config)
    assert found is not None
    assert _sizes(found) == _sizes(name), "models of several names may have one configuration"
    for key in rng.sample([key for key in config if key in _SIZES], 3):
        assert same_model(config | {key: config[key] + 1}) is None, key
    assert same_model(config | {"attention_chunk_size": 64}) is None
    assert same_model(config | {"architectures": ["OtherForSequenceClassification"]}) is None


_WORDS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size num_key_value_heads n_embd n_head "
    "n_layer d_model d_ff num_layers num_heads ffn_dim n_positions patch_size image_size"
)
_SIZES = _WORDS.split()


def _sizes(name: str) -> dict[str, Any]:
    config = model_configuration(name).config
    return {key: config[key] for key in _SIZES if key in config}

"""Configurations that cannot be built, which the catalogue's check leaves to transformers, end in one message."""

from __future__ import annotations

from typing import Any

import pytest

from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.basics.errors import WorkloadError
from protwin.shared.catalogue.model_check import check_model_configuration

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 7, "n_positions": 128}


@pytest.mark.filterwarnings("default")  # transformers' own
@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        (GPT2, "divisible by num_heads"),
        (LLAMA | {"head_dim": 15}, "refuses"),  # rotary positions turn pairs of dims
        (LLAMA | {"hidden_size": 60}, "refuses"),
        (LLAMA | {"torch_dtype": "int8"}, "dtype 'int8' cannot be trained"),
    ],
    ids=["heads", "head_dim", "hidden_size", "dtype"],
)
def test_what_transformers_refuses_is_one_message(configuration: dict[str, Any], message: str) -> None:
    check_model_configuration(configuration, origin="test")
    with pytest.raises(WorkloadError, match=message):
        workload_of_configuration(configuration, name="test", batch_size=1, sequence_length=16, dtype=None)

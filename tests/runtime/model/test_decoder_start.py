"""An encoder-decoder whose configuration does not say what its decoder begins with gets one message."""

from __future__ import annotations

from typing import Any

import pytest

from protwin.runtime.tracing.configurations import workload_of_configuration
from protwin.shared.basics.errors import WorkloadError
from tests.proof_size import some_quick

T5 = {"model_type": "t5", "d_model": 32, "num_layers": 2, "num_heads": 2, "d_ff": 48, "d_kv": 16, "vocab_size": 64}
BART = {
    "model_type": "bart",
    "d_model": 32,
    **{f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in (("layers", 2), ("ffn_dim", 48))},
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 1,
    "decoder_start_token_id": None,
}


def traced_blocks(configuration: dict[str, Any]) -> int:
    return workload_of_configuration(configuration, name="x", batch_size=1, sequence_length=8).num_blocks


@pytest.mark.parametrize(("configuration", "padding"), [(T5, 0), (BART, 1)], ids=["t5", "bart"])
def test_without_a_first_token_the_field_is_named(configuration: dict[str, Any], padding: int) -> None:
    with pytest.raises(WorkloadError, match="has no decoder_start_token_id") as refused:
        traced_blocks(configuration)
    assert f"pad_token_id = {padding})" in str(refused.value)


@some_quick("configuration", [T5, BART], quick=1, ids=["t5", "bart"])
def test_with_one_it_is_traced(configuration: dict[str, Any]) -> None:
    assert traced_blocks(configuration | {"decoder_start_token_id": 0}) == 4


def test_a_family_that_needs_none_is_traced_without() -> None:
    assert traced_blocks(BART | {"model_type": "mbart"}) == 4

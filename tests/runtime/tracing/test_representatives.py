"""Of a row of equal blocks only a few are traced; tracing all of them gives the same workload."""

from __future__ import annotations

import pytest

from protwin.runtime.tracing import fake_subject
from protwin.runtime.tracing.configurations import workload_of_configuration
from tests.proof_size import some_quick

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "dtype": "bfloat16",
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 7, "n_head": 4, "n_positions": 32, "vocab_size": 100}


@some_quick("configuration", [LLAMA, GPT2], quick=1, ids=lambda c: str(c["model_type"]))
def test_representatives_stand_for_all_blocks(
    configuration: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block's profile, and everything outside the blocks, is that of the whole row's trace."""
    shortened = workload_of_configuration(configuration, name="x", batch_size=2, sequence_length=16)
    called: list[bool] = []
    monkeypatch.setattr(fake_subject, "keep_representatives", lambda *_: called.append(True))
    whole = workload_of_configuration(configuration, name="x", batch_size=2, sequence_length=16)
    assert called, "the whole row was to be traced"
    assert shortened.num_blocks == whole.num_blocks == 7
    for block in range(7):
        assert shortened.profile_of(block) == whole.profile_of(block)
    for part in ("prologue_forward", "epilogue_forward", "epilogue_backward", "prologue_backward", "parameters"):
        assert getattr(shortened, part) == getattr(whole, part)

"""What cannot be trained on rows of tokens is refused before anything of them is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from protwin.runtime.commands.run_data import RunSource
from protwin.shared.basics.errors import WorkloadError
from tests.shared.small_models import chain

CHOICE = RunSource(data=[Path("missing.jsonl")], tokenizer=Path("missing"), weights=None, seed=0)
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_a_model_that_sees_what_follows_is_refused() -> None:
    with torch.device("meta"):
        twin = BertForMaskedLM(BertConfig(vocab_size=64, **SHAPE))
    with pytest.raises(WorkloadError, match="BertForMaskedLM is no causal language model"):
        CHOICE.read(twin, chain(1), print)


def test_a_batch_with_more_than_tokens_and_labels_is_refused() -> None:
    workload = chain(1).model_copy(update={"batch_shapes": {"input_ids": (1, 8), "position_ids": (1, 8)}})
    with torch.device("meta"):
        twin = LlamaForCausalLM(LlamaConfig(vocab_size=64, **SHAPE))
    with pytest.raises(WorkloadError, match="made of input_ids, position_ids"):
        CHOICE.read(twin, workload, print)

"""Packed batches: their lengths, and everything that contradicts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from protwin.runtime import trace
from protwin.runtime.data.packed_batches import packing_of_batch
from protwin.shared.basics.errors import WorkloadError
from tests.runtime.models import VOCABULARY, llama
from tests.runtime.packed import ends_of, packed_batch, within_samples

LENGTHS = (5, 9, 10)
ROW = sum(LENGTHS)


class Named(nn.Module):
    """Nothing but the name of its attention."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.config = type("Config", (), {"_attn_implementation": attention})()


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.sampled_from(["sdpa", "flash_attention_2"]))
def test_lengths_are_read_off_positions_and_ends_alike(lengths: list[int], attention: str) -> None:
    batch = packed_batch(lengths)
    squares = sum(length**2 for length in lengths)
    for given_ends in ({}, ends_of(lengths)):
        found = packing_of_batch(Named(attention), batch | given_ends)
        assert found is not None
        assert (found.row_tokens, found.squares, found.longest) == (sum(lengths), squares, max(lengths))
        assert found.is_masked == (attention == "sdpa")


def test_rows_of_one_sample_are_not_packed() -> None:
    tokens = torch.zeros(2, 6, dtype=torch.long)
    whole = torch.arange(6).expand(2, 6)
    assert packing_of_batch(Named("sdpa"), {"input_ids": tokens, "position_ids": whole}) is None
    padded = torch.tensor([[1, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    assert (
        packing_of_batch(Named("sdpa"), {"input_ids": tokens, "position_ids": padded, "attention_mask": mask}) is None
    )
    assert packing_of_batch(Named("sdpa"), {"input_ids": tokens, "attention_mask": mask}) is None


def test_a_mask_that_keeps_samples_apart_is_taken() -> None:
    allowed = within_samples(LENGTHS)[None, None]
    added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    for mask in (allowed, added, added.bfloat16()):
        found = packing_of_batch(Named("sdpa"), packed_batch(LENGTHS) | {"attention_mask": mask})
        assert found is not None
        assert found.squares == sum(length**2 for length in LENGTHS)


SEEING = within_samples(LENGTHS)[None, None].clone()
SEEING[0, 0, 7, 3] = True
"""Token 7, of sample 1, sees token 3, of sample 0."""

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": torch.ones(1, ROW)}, r"takes each row for one sample.*Leave attention_mask out"),
    (
        {"attention_mask": torch.tril(torch.ones(1, 1, ROW, ROW)).bool()},
        "lets token 5 of sample 1 see token 0 of sample 0",
    ),
    ({"attention_mask": SEEING}, "lets token 7 of sample 1 see token 3 of sample 0"),
    ({"attention_mask": torch.zeros(1, 1, ROW, ROW)}, "of sample 0 see token 5 of sample 1"),
    (ends_of(LENGTHS[:2]), r"cu_seq_lens_q ends at 14, but the batch has 24 tokens.*end it at 24"),
    (ends_of((9, 5, 10)), "tells samples of 9, 5, 10 tokens, but position_ids begin anew after 5, 9, 10"),
    (ends_of(LENGTHS) | {"cu_seq_lens_k": ends_of((9, 5, 10))["cu_seq_lens_k"]}, "differ"),
    (ends_of(LENGTHS) | {"max_length_q": 9}, "max_length_q is 9, but a sample has 10 tokens"),
    (ends_of(LENGTHS) | {"cu_seq_lens_q": torch.tensor([0, 14, 5, 24])}, "must begin with 0 and ascend"),
    (ends_of(LENGTHS) | {"cu_seq_lens_q": torch.tensor([5, 14, 24])}, "must begin with 0 and ascend"),
    ({"cu_seq_lens_q": torch.tensor([0, 5, 14, 24])}, "not cu_seq_lens_k, max_length_q, max_length_k"),
]


@pytest.mark.parametrize(("more", "message"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_contradictions_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        packing_of_batch(Named("flash_attention_2"), packed_batch(LENGTHS) | more)


def test_lengths_that_attention_passes_over_are_refused() -> None:
    batch = packed_batch(LENGTHS) | ends_of(LENGTHS)
    del batch["position_ids"]
    assert packing_of_batch(Named("flash_attention_2"), batch) is not None
    model = llama(num_layers=2)
    with pytest.raises(WorkloadError, match="sdpa attention passes it over"):
        trace(model, batch, repeats=0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_class_that_makes_no_mask_of_positions_is_refused(device: str) -> None:
    config = BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCABULARY
    )
    model = BertForMaskedLM(config).to(device)
    with pytest.raises(WorkloadError, match="BertForMaskedLM makes no mask of position_ids"):
        trace(model, packed_batch(LENGTHS), repeats=0)

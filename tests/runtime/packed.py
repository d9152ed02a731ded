"""Packed batches for tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from tests.runtime.models import VOCABULARY

IGNORED = -100


def packed_batch(lengths: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """One row of samples end to end; no sample is asked for the first token of the next."""
    tokens = torch.randint(0, VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[0, [0, *accumulate(lengths[:-1])]] = IGNORED
    return {"input_ids": tokens, "labels": labels, "position_ids": positions_of(lengths)}


def positions_of(lengths: Sequence[int]) -> torch.Tensor:
    """(1, tokens), from 0 on in each sample."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def ends_of(lengths: Sequence[int]) -> dict[str, torch.Tensor | int]:
    """What flash attention is told of samples."""
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(lengths), "max_length_k": max(lengths)}


def within_samples(lengths: Sequence[int]) -> torch.Tensor:
    """(tokens, tokens): whether a token may see another, an earlier one of its own sample or itself."""
    blocks = [torch.tril(torch.ones(length, length, dtype=torch.bool)) for length in lengths]
    return torch.block_diag(*blocks).bool()

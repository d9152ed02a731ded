"""Batches follow from data and seed alone, hold every document once an epoch, and are found again anywhere."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protwin.runtime.data.documents import Document
from protwin.runtime.data.sources import NOT_LEARNED, PackedSource, num_learned

LENGTH = 12
PADDING = 0


def source(lengths: list[int], *, batch_size: int = 2, seed: int = 0) -> PackedSource:
    """Documents that no two tokens are alike in, each ending with ``PADDING``; every third token is not learned."""
    documents, first = [], 1
    for length in lengths:
        tokens = np.array([*range(first, first + length - 1), PADDING], dtype=np.int32)
        flags = np.array([place > 0 and (first + place) % 3 != 0 for place in range(length)])
        flags[-1] = True
        documents.append(Document(tokens, flags, "here"))
        first += length - 1
    return PackedSource(documents, batch_size, LENGTH, PADDING, seed)


def sequences_of(found: PackedSource, num_batches: int, num_before: int = 0) -> list[tuple[list[int], list[int]]]:
    return [
        (tokens.tolist(), labels.tolist())
        for batch in islice(found.batches(num_before), num_batches)
        for tokens, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]


LENGTHS = st.lists(st.integers(2, LENGTH), min_size=1, max_size=20)


@given(LENGTHS, st.integers(1, 4), st.integers(0, 5))
def test_every_epoch_holds_every_document_once(lengths: list[int], batch_size: int, seed: int) -> None:
    found = source(lengths, batch_size=batch_size, seed=seed)
    ends = [found.num_sequences(epochs) for epochs in (1, 2)]
    rows = sequences_of(found, -(-ends[1] // batch_size))[: ends[1]]
    expected = Counter(token for document in found.documents for token in document.tokens.tolist() if token)
    for epoch in (rows[: ends[0]], rows[ends[0] :]):
        assert Counter(token for tokens, _ in epoch for token in tokens if token) == expected
    for tokens, labels in rows:
        # By hand: a token's label is the token, unless it begins a document, is not learned, or pads.
        ending = max(place for place, token in enumerate(tokens) if token)  # the last token but the end's
        for place, (token, label) in enumerate(zip(tokens, labels, strict=True)):
            begins = place == 0 or tokens[place - 1] == PADDING
            is_end = token == PADDING and not begins and place <= ending + 1
            is_learned = is_end or (token != PADDING and not begins and token % 3 != 0)
            assert label == (token if is_learned else NOT_LEARNED)


@given(LENGTHS, st.integers(1, 3), st.integers(0, 12))
def test_any_batch_is_found_again(lengths: list[int], batch_size: int, num_before: int) -> None:
    found = source(lengths, batch_size=batch_size)
    assert sequences_of(found, num_before + 3)[num_before * batch_size :] == sequences_of(found, 3, num_before)


def test_order_follows_from_the_seed_and_the_epoch() -> None:
    orders = [source([5] * 30, seed=seed).order(epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert source([5] * 30).order(1) == orders[1]


@given(LENGTHS)
def test_evaluation_sees_everything_once(lengths: list[int]) -> None:
    found = source(lengths, batch_size=3)
    batches = list(found.in_file_order())
    assert sum(num_learned(batch) for batch in batches) == sum(int(d.is_learned.sum()) for d in found.documents)
    assert all(len(batch["input_ids"]) == 3 for batch in batches[:-1])


def test_identity_is_of_everything_that_batches_follow_from() -> None:
    base = source([4, 5])
    others = [source([4, 5], seed=1), source([5, 4]), source([4, 5, 2])]
    longer = PackedSource(base.documents, 2, LENGTH + 1, PADDING, 0)
    changed = Document(base.documents[0].tokens, ~base.documents[0].is_learned, "here")
    relabelled = PackedSource([changed, base.documents[1]], 2, LENGTH, PADDING, 0)
    found = [tuple(one.identity.values()) for one in (base, *others, longer, relabelled)]
    assert len(set(found)) == len(found)
    assert source([4, 5], batch_size=1).identity == base.identity


@pytest.mark.parametrize("counts", [(3, 3), (1, 7, 2)])
def test_micro_batches_add_up_to_the_mean_of_all_tokens(counts: tuple[int, ...]) -> None:
    """Against the mean of one long row of losses."""
    losses = torch.rand(sum(counts))
    batches = [{"labels": torch.tensor([[NOT_LEARNED] + [1] * n + [NOT_LEARNED] * (9 - n)])} for n in counts]
    means = [part.mean() for part in losses.split(list(counts))]
    divisors = source([4]).divisors(batches)
    added = sum(mean / divisor for mean, divisor in zip(means, divisors, strict=True))
    assert float(added) == pytest.approx(float(losses.mean()))

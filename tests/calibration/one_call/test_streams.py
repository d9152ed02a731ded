"""Whatever holds data gives the same batches, and finds its place again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from protwin.calibration.one_call.streams import BatchStream, LoaderStream, PackedStream, StreamShape, stream_of
from protwin.shared import FileError, ProtwinError
from tests.runtime.models import token_batches
from tests.runtime.small_language import make_tokenizer, write_rows

TEXTS = ["the loss falls", "every block runs once in a step", "and then the loss falls"] * 4
ROWS: list[dict[str, Any]] = [{"text": text} for text in TEXTS]
TEXT = StreamShape(batch_size=2, sequence_length=24, tokenizer=make_tokenizer())


def flat(batches: Any) -> list[torch.Tensor]:
    return [tensor for batch in batches for tensor in (batch.values() if isinstance(batch, dict) else batch)]


def same(first: Any, second: Any) -> bool:
    one, other = flat(first), flat(second)
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def tables(folder: Path) -> dict[str, Any]:
    """The same rows in every form."""
    found: dict[str, Any] = {"rows.jsonl": write_rows(folder / "rows.jsonl", ROWS)}
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    found["rows.parquet"] = str(folder / "rows.parquet")
    found["several"] = [write_rows(folder / "one.jsonl", ROWS[:5]), write_rows(folder / "two.jsonl", ROWS[5:])]
    return found


def test_rows_of_every_form_give_the_same_batches(tmp_path: Path) -> None:
    streams = {name: stream_of(data, TEXT) for name, data in tables(tmp_path).items()}
    expected = list(islice(streams["rows.jsonl"].batches(), 7))
    assert len(flat(expected)) == 14
    assert expected[0]["input_ids"].shape == (2, 24)  # type: ignore[call-overload, index]
    for stream in list(streams.values())[1:]:
        assert same(islice(stream.batches(), 7), expected)
        assert stream.num_batches(1) == streams["rows.jsonl"].num_batches(1)


def test_a_table_of_text_is_packed_and_one_of_numbers_is_put_together(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    stream = stream_of(datasets.Dataset.from_list(ROWS), TEXT)
    file = stream_of(write_rows(tmp_path / "rows.jsonl", ROWS), TEXT)
    assert same(islice(stream.batches(), 3), islice(file.batches(), 3))
    numbers = datasets.Dataset.from_list([{"input_ids": [n, n + 1], "labels": [n, n + 1]} for n in range(6)])
    batch = stream_of(numbers, StreamShape(batch_size=3)).example()
    assert isinstance(batch, dict)
    assert batch["input_ids"].shape == (3, 2)
    assert torch.equal(batch["input_ids"], batch["labels"])


def test_a_text_is_cut_and_every_token_but_the_first_of_a_stretch_is_learned(tmp_path: Path) -> None:
    text = " ".join(TEXTS)
    (tmp_path / "book.txt").write_text(text)
    stream = stream_of(tmp_path / "book.txt", TEXT)
    assert isinstance(stream, PackedStream)
    tokenizer = make_tokenizer()
    tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    documents = stream.source.documents
    assert np.concatenate([document.tokens for document in documents]).tolist() == tokens
    assert all(len(document.tokens) == 24 for document in documents[:-1])
    assert sum(int(document.is_learned.sum()) for document in documents) == len(tokens) - len(documents)


def _loaders() -> dict[str, Any]:
    rows = TensorDataset(torch.arange(10).float()[:, None])
    own = torch.Generator().manual_seed(5)
    return {
        "shared states": DataLoader(rows, batch_size=3, shuffle=True),
        "generator of its own": DataLoader(rows, batch_size=3, shuffle=True, generator=own),
        "list": token_batches(4),
        "dataset": rows,
    }


@pytest.mark.parametrize("name", list(_loaders()))
@pytest.mark.parametrize("done", [0, 1, 3, 4, 6, 9])
def test_a_stream_goes_on_where_it_was(name: str, done: int) -> None:
    """Random draws of a training in between belong to it, and are put back by its checkpoint."""

    def made() -> BatchStream:
        return stream_of(_loaders()[name], StreamShape(batch_size=3))

    def trained(batches: Any, number: int) -> list[Any]:
        return [(batch, torch.rand(2)) for batch in islice(batches, number)]

    torch.manual_seed(3)
    stream = made()
    batches = stream.batches()
    trained(batches, done)
    position, states = stream.position, torch.get_rng_state()
    expected = trained(batches, 6)

    torch.manual_seed(77)
    again = made()
    again.example()
    torch.set_rng_state(states)
    again.go_to(position)
    found = trained(again.batches(), 6)
    assert same([batch for batch, _ in found], [batch for batch, _ in expected])
    assert same([[draw] for _, draw in found], [[draw] for _, draw in expected])
    wrong = trained(made().batches(), 6)
    assert done == 0 or name in ("list", "dataset") or not same([b for b, _ in wrong], [b for b, _ in expected])


def test_an_example_changes_nothing_that_follows() -> None:
    for name in _loaders():
        torch.manual_seed(3)
        expected = list(islice(stream_of(_loaders()[name], StreamShape(batch_size=3)).batches(), 5))
        torch.manual_seed(3)
        stream = stream_of(_loaders()[name], StreamShape(batch_size=3))
        assert same([stream.example()], expected[:1])
        assert same(islice(stream.batches(), 5), expected)
    iterator = iter(token_batches(3))
    stream = stream_of(iterator, StreamShape())
    assert same([stream.example()], token_batches(1))
    assert same(stream.batches(), token_batches(3))


def test_ranks_share_the_batches_of_files(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    alone = list(islice(stream_of(path, TEXT).batches(), 6))
    ranks = [
        stream_of(path, StreamShape(batch_size=2, sequence_length=24, tokenizer=TEXT.tokenizer, rank=r, num_ranks=2))
        for r in range(2)
    ]
    first, second = (list(islice(stream.batches(), 3)) for stream in ranks)
    assert same([batch for pair in zip(first, second, strict=True) for batch in pair], alone)


def test_ranks_that_share_sequences_have_their_groups_batches(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a plan says what stays"}] * 5 + [{"text": "chunks go"}] * 9)
    found = []
    for rank, shared in (*((rank, 2) for rank in range(4)), *((group, 1) for group in range(2))):
        stream = stream_of(path, replace(TEXT, rank=rank, num_ranks=4 // (3 - shared)))
        stream.share(shared)
        found.append([batch["input_ids"].tolist() for batch in islice(stream.batches(), 3)])  # type: ignore[call-overload, index]
    assert found[0] == found[1] == found[4]
    assert found[2] == found[3] == found[5]
    assert found[0] != found[2]


def test_ranks_that_all_share_sequences_have_the_same_samples() -> None:
    samples = TensorDataset(torch.arange(9))
    found: list[list[list[int]]] = []
    for rank in range(2):
        stream = stream_of(samples, StreamShape(batch_size=2, rank=rank, num_ranks=2, sequence_ranks=2, seed=3))
        stream.share(2)
        batches: Iterator[Any] = stream.batches()
        found.append([batch[0].tolist() for batch in islice(batches, 9)])
    assert found[0] == found[1]
    for epoch in (found[0][:4], found[0][4:8]):
        assert len({number for batch in epoch for number in batch}) == 8


def test_what_gives_no_batches_is_refused(tmp_path: Path) -> None:
    stream = stream_of(token_batches(2), StreamShape())
    for position in (None, {"batches": 3}, {"epoch": 0, "batch": 2}):
        with pytest.raises(FileError, match=r"not saved by protwin\.train"):
            stream.go_to(position)
    longer = stream_of(token_batches(5), StreamShape())
    list(islice(longer.batches(), 4))
    stream.go_to(longer.position)
    with pytest.raises(FileError, match="at batch 4 of an epoch, but the data have 2"):
        next(stream.batches())
    with pytest.raises(FileError, match="iterated anew"):
        LoaderStream(iter(token_batches(2))).go_to(longer.position)
    text = stream_of(write_rows(tmp_path / "rows.jsonl", ROWS), TEXT)
    with pytest.raises(FileError, match="these data and this seed"):
        text.go_to({**text.position, "seed": 4})
    (tmp_path / "rows.csv").write_text("text\na\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    for path, message in (
        ("rows.csv", r"ends in \.csv"),
        ("broken.parquet", "Parquet|pyarrow"),
        ("no.txt", "does not exist"),
    ):
        with pytest.raises(FileError, match=message):
            stream_of(tmp_path / path, TEXT)
    with pytest.raises(ProtwinError, match="a tokenizer is given"):
        stream_of(token_batches(2), TEXT)
    for shared in (1, 2):
        with pytest.raises(ProtwinError, match="DistributedSampler"):
            stream_of(TensorDataset(torch.ones(4, 1)), StreamShape(batch_size=2, num_ranks=4, sequence_ranks=shared))

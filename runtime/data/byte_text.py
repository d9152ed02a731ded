"""Real text that every Python installation has, as batches of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch

from ...shared.basics.errors import FileError, WorkloadError
from ..model.heads import Head, Labels, reads_more_than_text

_NUM_BYTES: Final = 256


def python_reference() -> bytes:
    """The language reference, as ``help()`` shows it (``pydoc_data.topics``)."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def read_text(path: Path | None) -> bytes:
    """The bytes of a text file, or the language reference.  Raises FileError."""
    if path is None:
        return python_reference()
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error}.") from error


def byte_batches(
    text: bytes, *, batch_size: int, sequence_length: int, num_batches: int | None, seed: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """``num_batches`` batches of stretches of ``text`` at random places, for a causal language model; None: endless.

    ``input_ids`` and ``labels`` have shape (batch_size, sequence_length), bytes as tokens; the model shifts labels.
    Raises FileError if the text is shorter than one sequence.
    """
    if len(text) < sequence_length:
        raise FileError(f"the text has {len(text)} bytes; a sequence of {sequence_length} needs at least as many.")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    for _ in count() if num_batches is None else range(num_batches):
        starts = torch.randint(0, len(text) - sequence_length + 1, (batch_size,), generator=generator)
        rows = torch.stack([tokens[start : start + sequence_length] for start in starts.tolist()]).long()
        yield {"input_ids": rows, "labels": rows.clone()}


def head_batches(
    model: Any, text: bytes, *, batch_size: int, sequence_length: int, num_batches: int | None, seed: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """``num_batches`` batches of ``text`` as the head of ``model``, a model of transformers, is trained on.

    None of them: endless.  Of a vocabulary of fewer than 256 tokens, bytes are tokens modulo its size.  Labels that are
    no tokens follow from the tokens (``Labels.read_off``).  Raises FileError as ``byte_batches``, and WorkloadError if
    the model reads no text.
    """
    reads = getattr(model, "main_input_name", "input_ids")
    if reads != "input_ids" or reads_more_than_text(model):
        reads = "images or sounds beside text" if reads == "input_ids" else reads
        raise WorkloadError(
            f"{type(model).__name__} reads {reads}, and text is all that there is to train on. Train it with batches "
            f"of its own (protwin.runtime.carry_out)."
        )
    labels = Labels.of(model)
    choices = (labels.num_choices,) if labels.head is Head.CHOICES else ()
    num_rows = batch_size * labels.num_choices
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", _NUM_BYTES)
    for batch in byte_batches(
        text, batch_size=num_rows, sequence_length=sequence_length, num_batches=num_batches, seed=seed
    ):
        tokens = batch["input_ids"].reshape(batch_size, *choices, sequence_length) % vocabulary
        yield {"input_ids": tokens} | labels.read_off(tokens)

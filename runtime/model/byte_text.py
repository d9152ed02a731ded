"""Real text that every Python installation has, as batches of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ...shared.basics.errors import FileError


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
    text: bytes, *, batch_size: int, sequence_length: int, num_batches: int, seed: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """``num_batches`` batches of stretches of ``text`` at random places, for a causal language model.

    ``input_ids`` and ``labels`` have shape (batch_size, sequence_length), bytes as tokens; the model shifts labels.
    Raises FileError if the text is shorter than one sequence.
    """
    if len(text) < sequence_length:
        raise FileError(f"the text has {len(text)} bytes; a sequence of {sequence_length} needs at least as many.")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_batches):
        starts = torch.randint(0, len(text) - sequence_length + 1, (batch_size,), generator=generator)
        rows = torch.stack([tokens[start : start + sequence_length] for start in starts.tolist()]).long()
        yield {"input_ids": rows, "labels": rows.clone()}

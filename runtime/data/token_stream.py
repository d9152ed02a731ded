"""A stream of tokens, cut into sequences of one length: what is trained on where no token is special."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import torch

from ...shared.basics.errors import FileError
from .documents import Tokens
from .sources import Batch, DataSource


@dataclass(frozen=True)
class TokenStream(DataSource):
    """Neighbouring stretches of a stream, each one sequence, shuffled anew in every epoch.

    Documents follow each other, so that attention reaches across their borders, as in pre-training.
    """

    tokens: Tokens
    """(n,)."""
    batch_size: int
    sequence_length: int
    seed: int
    name = "data"

    def __post_init__(self) -> None:
        """Raise FileError unless there is a sequence."""
        if not self.num_sequences:
            raise FileError(
                f"there are {len(self.tokens):,} tokens, and a sequence has {self.sequence_length:,}. Give more text, "
                f"or shorter sequences."
            )

    @property
    def num_sequences(self) -> int:
        """Of one epoch; tokens that fill none are left out."""
        return len(self.tokens) // self.sequence_length

    @property
    def digest(self) -> str:
        """A hash of the sequences, whatever their order."""
        used = self.tokens[: self.num_sequences * self.sequence_length]
        return hashlib.sha256(f"{self.sequence_length} ".encode() + used.astype("<i4").tobytes()).hexdigest()

    @property
    def identity(self) -> Mapping[str, int | str]:
        """Seed and sequences."""
        return {"seed": self.seed, "tokens": self.digest}

    def batches(self, num_before: int) -> Iterator[Batch]:
        """Epochs follow each other without a gap: a batch may hold the end of one and the beginning of the next."""
        places = self._places(num_before * self.batch_size)
        while True:
            yield self._batch(list(islice(places, self.batch_size)))

    def in_order(self, num_batches: int) -> Iterator[Batch]:
        """At most ``num_batches``, of different sequences, in the stream's order; the last one may be smaller."""
        for begin in range(0, min(self.num_sequences, num_batches * self.batch_size), self.batch_size):
            yield self._batch(range(begin, min(begin + self.batch_size, self.num_sequences)))

    def _places(self, num_before: int) -> Iterator[int]:
        """Of sequences, after the first ``num_before``."""
        first, within = divmod(num_before, self.num_sequences)
        for epoch in count(first):
            yield from np.random.default_rng((self.seed, epoch)).permutation(self.num_sequences)[within:].tolist()
            within = 0

    def _batch(self, places: Sequence[int]) -> Batch:
        """``input_ids``, (sequences, sequence_length)."""
        length = self.sequence_length
        rows = np.stack([self.tokens[place * length : (place + 1) * length] for place in places])
        return {"input_ids": torch.from_numpy(rows.astype(np.int64))}

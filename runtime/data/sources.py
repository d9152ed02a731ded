"""Where batches come from, so that any of them can be found again: what a run trains on and goes on with."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Final

import numpy as np
import torch

from .byte_text import head_batches
from .documents import Document
from .packing import pack

NOT_LEARNED: Final = -100
"""The label that losses leave out (``torch.nn.functional.cross_entropy``)."""
Batch = dict[str, torch.Tensor]


class DataSource(ABC):
    """Batches in an order that follows from the data and a seed alone."""

    name: str
    """What it is, for messages."""

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, int | str]:
        """What the order of batches follows from."""

    @abstractmethod
    def batches(self, num_before: int) -> Iterator[Batch]:
        """Batches without end, after the first ``num_before`` of them."""

    def divisors(self, batches: Sequence[Batch]) -> list[float]:
        """What the mean loss of each micro-batch of a step is divided by, so that they add up to the step's mean.

        The number of micro-batches, unless some have more labels than others.
        """
        return [float(len(batches))] * len(batches)


@dataclass(frozen=True)
class TextSource(DataSource):
    """Stretches of a text at random places, bytes as tokens."""

    model: Any
    """A model of transformers, for whose head labels are made."""
    text: bytes
    batch_size: int
    sequence_length: int
    seed: int
    name = "text"

    @property
    def identity(self) -> Mapping[str, int | str]:
        """Seed and text."""
        return {"seed": self.seed, "text": hashlib.sha256(self.text).hexdigest()}

    def batches(self, num_before: int) -> Iterator[Batch]:
        """Drawn again rather than kept: their places follow from the seed."""
        endless = head_batches(
            self.model,
            self.text,
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            num_batches=None,
            seed=self.seed,
        )
        return islice(endless, num_before, None)


@dataclass(frozen=True)
class PackedSource(DataSource):
    """Documents, shuffled anew and packed into sequences in every epoch.

    Within a sequence a document follows another one's last token.  Attention reaches back across that border, as in
    pre-training on packed text; the loss does not: the first token of a document is not learned.
    """

    documents: Sequence[Document]
    batch_size: int
    sequence_length: int
    padding: int
    """The token behind the last document of a sequence; it is not learned."""
    seed: int
    weighs_tokens: bool = True
    """Whether every learned token counts alike in a step; else every batch does, as DistributedDataParallel has it."""
    name = "data"

    @property
    def identity(self) -> Mapping[str, int | str]:
        """Seed, sequence length, the tokens of all documents with which of them are learned, and how they count."""
        digest = hashlib.sha256(f"{self.sequence_length} {self.padding}".encode())
        for document in self.documents:
            digest.update(len(document.tokens).to_bytes(8, "little"))
            digest.update(document.tokens.tobytes())
            digest.update(document.is_learned.tobytes())
        weighting = {} if self.weighs_tokens else {"loss_weighting": "batches"}
        return {"seed": self.seed, "data": digest.hexdigest(), **weighting}

    def order(self, epoch: int) -> list[int]:
        """The documents' places, as ``epoch`` goes through them."""
        shuffled: list[int] = np.random.default_rng((self.seed, epoch)).permutation(len(self.documents)).tolist()
        return shuffled

    def packed(self, order: Sequence[int]) -> list[list[int]]:
        """The documents of every sequence."""
        return pack([len(document.tokens) for document in self.documents], order, self.sequence_length)

    def num_sequences(self, epochs: int) -> int:
        """Sequences of the first ``epochs``."""
        return sum(len(self.packed(self.order(epoch))) for epoch in range(epochs))

    def batches(self, num_before: int) -> Iterator[Batch]:
        """Epochs follow each other without a gap: a batch may hold the end of one and the beginning of the next."""
        sequences = self._sequences(num_before * self.batch_size)
        while True:
            yield self._batch(list(islice(sequences, self.batch_size)))

    def in_file_order(self) -> Iterator[Batch]:
        """Every document once, in its own order; the last batch may be smaller."""
        packed = self.packed(range(len(self.documents)))
        for begin in range(0, len(packed), self.batch_size):
            yield self._batch(packed[begin : begin + self.batch_size])

    def divisors(self, batches: Sequence[Batch]) -> list[float]:
        """By learned tokens: every one of them counts alike, in whichever micro-batch it is; or every batch does."""
        if not self.weighs_tokens:
            return [float(len(batches))] * len(batches)
        learned = [num_learned(batch) for batch in batches]
        return [sum(learned) / own for own in learned]

    def _sequences(self, num_before: int) -> Iterator[list[int]]:
        for epoch in count():
            packed = self.packed(self.order(epoch))
            yield from packed[num_before:]
            num_before = max(0, num_before - len(packed))

    def _batch(self, sequences: Sequence[Sequence[int]]) -> Batch:
        """``input_ids`` and ``labels``, (sequences, sequence_length)."""
        tokens = torch.full((len(sequences), self.sequence_length), self.padding)
        labels = torch.full((len(sequences), self.sequence_length), NOT_LEARNED)
        for row, sequence in enumerate(sequences):
            at = 0
            for place in sequence:
                document = self.documents[place]
                end = at + len(document.tokens)
                own = torch.from_numpy(document.tokens.astype(np.int64))
                tokens[row, at:end] = own
                labels[row, at:end] = torch.where(torch.from_numpy(document.is_learned), own, NOT_LEARNED)
                at = end
        return {"input_ids": tokens, "labels": labels}


def num_learned(batch: Batch) -> int:
    """Labels of a batch that count in its loss; nothing comes before the first of a row."""
    return int((batch["labels"][:, 1:] != NOT_LEARNED).sum())

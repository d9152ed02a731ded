"""What ``train`` is given as data, as batches that follow each other and can be found again after a resume.

[Note: The order of a loader]
A loader that shuffles draws the order of an epoch when it is iterated, from torch's random state or from a generator of
its own.  So an epoch is found again by the states at its beginning: they are put back, the loader is iterated anew, and
the batches that were trained on are passed over.  The states of the present are then put back over those.  States are
kept as arrays: where the CPU is the device, tensors count as memory of the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ...runtime.checkpoints.random_states import random_states, set_random_states
from ...runtime.data.documents import Document, RowTokenizer, check_lengths, load_tokenizer
from ...runtime.data.json_lines import Form
from ...runtime.data.row_files import check_row_file, documents_of_file, rows_of_table
from ...runtime.data.sources import PackedSource, num_learned
from ...runtime.model.batches import Batch, batch_shapes
from ...shared.basics.errors import FileError, ProtwinError

_HOST = torch.device("cpu")


class BatchStream(ABC):
    """Batches of one rank, one after another."""

    @abstractmethod
    def example(self) -> Batch:
        """The first batch; what follows is as if nobody had asked."""

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Batches from where it is, over epochs without end, or until there are no more."""

    def share(self, sequence_ranks: int) -> None:
        """So many neighbours among the ranks share each sequence.

        Whoever gives batches by rank gives all of them the same.
        """
        del sequence_ranks

    @abstractmethod
    def num_batches(self, epochs: int) -> int | None:
        """Batches of so many epochs; None where nobody can say."""

    @abstractmethod
    def once(self) -> Iterator[Batch]:
        """Every batch of an epoch in order, for an evaluation."""

    @abstractmethod
    def weight(self, batch: Batch) -> int:
        """How much the mean loss of ``batch`` counts beside those of other batches."""

    @property
    @abstractmethod
    def weighs(self) -> bool:
        """Whether micro-batches of a step count by ``weight``; else each counts alike."""

    @property
    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Where it is, for a checkpoint."""

    @abstractmethod
    def go_to(self, position: Any) -> None:
        """Go on from ``position``.  Raises FileError if it is one of other data."""


@dataclass
class LoaderStream(BatchStream):
    """What an iterable gives: a loader, a list, or an iterator, which has one epoch."""

    data: Iterable[Batch]
    _epoch: int = field(default=0, init=False)
    _in_epoch: int = field(default=0, init=False)
    _states: dict[str, Any] | None = field(default=None, init=False)
    """At the beginning of the epoch."""
    _skips: int = field(default=0, init=False)
    _own_states: Any = field(default=None, init=False)
    """Of generators of its own, at the checkpoint that is resumed from."""
    weighs = False

    def example(self) -> Batch:
        """Of an iterator, which cannot be asked twice, it is put back."""
        if isinstance(self.data, Iterator):
            first: Batch | None = next(self.data, None)
            if first is not None:
                self.data = chain([first], self.data)
        else:
            states = self._random_states()
            first = next(iter(self.data), None)
            self._set_random_states(states)
        if first is None:
            raise FileError("the data hold no batch. Give one at least.")
        if not batch_shapes(first):
            raise ProtwinError(
                f"a batch of the data is a {type(first).__name__} without tensors. Give batches as the model is called "
                f"with: mappings, sequences or tensors; with a tokenizer=, rows of text too."
            )
        return first

    def batches(self) -> Iterator[Batch]:
        """An epoch after the other."""
        while True:
            if self._skips:
                now = self._random_states()
                assert self._states is not None
                self._set_random_states(self._states)
                iterator = iter(self.data)
                passed = sum(1 for _ in islice(iterator, self._skips))
                if passed < self._skips:
                    raise FileError(
                        f"the checkpoint is at batch {self._skips} of an epoch, but the data have {passed}. Give the "
                        f"data that it was trained on."
                    )
                self._skips = 0
                self._set_random_states(now | {"own": self._own_states})
            else:
                self._states, self._in_epoch = self._random_states(), 0
                iterator = iter(self.data)
            seen = self._in_epoch
            for batch in iterator:
                self._in_epoch += 1
                yield batch
            if self._in_epoch == seen and not seen:
                return
            self._epoch += 1
            self._in_epoch = 0
            if isinstance(self.data, Iterator):
                return

    def num_batches(self, epochs: int) -> int | None:
        """By ``len``, where there is one."""
        if not isinstance(self.data, Sized):
            return None
        try:
            return epochs * len(self.data)
        except TypeError:  # a loader of an IterableDataset
            return None

    def once(self) -> Iterator[Batch]:
        """As it is iterated; random states are put back, so that training does not depend on evaluations."""
        states = self._random_states()
        yield from self.data
        self._set_random_states(states)

    def weight(self, batch: Batch) -> int:
        """Every batch counts by its samples."""
        shapes = batch_shapes(batch)
        return next(iter(shapes.values()))[0] if shapes else 1

    @property
    def position(self) -> dict[str, Any]:
        """The epoch, where in it, and the random states that its order follows from."""
        states = _each(self._states, np.ndarray, torch.from_numpy) if self._in_epoch else None
        own = [generator.get_state() for generator in self._generators()]
        return {"epoch": self._epoch, "batch": self._in_epoch, "states": states, "own": own}

    def go_to(self, position: Any) -> None:
        """As of [Note: The order of a loader]."""
        if not isinstance(position, dict) or position.keys() != {"epoch", "batch", "states", "own"}:
            raise FileError("the checkpoint was not saved by protwin.train with batches of an iterable.")
        if isinstance(self.data, Iterator):
            raise FileError(
                "an iterator cannot be found again after a resume. Give the data as a loader or a list, which can be "
                "iterated anew."
            )
        if len(position["own"]) != len(self._generators()):
            raise FileError(
                f"the checkpoint was saved with {len(position['own'])} generators of the loader, and it has "
                f"{len(self._generators())}. Give the loader that it was trained on."
            )
        self._own_states = _as_arrays(position["own"])
        for generator, state in zip(self._generators(), position["own"], strict=True):
            generator.set_state(state)
        self._epoch, self._in_epoch = position["epoch"], position["batch"]
        self._states, self._skips = _as_arrays(position["states"]), self._in_epoch

    def _random_states(self) -> dict[str, Any]:
        own = [generator.get_state() for generator in self._generators()]
        states: dict[str, Any] = _as_arrays({"shared": random_states(_HOST), "own": own})
        return states

    def _set_random_states(self, states: dict[str, Any]) -> None:
        states = _each(states, np.ndarray, torch.from_numpy)
        set_random_states(states["shared"], _HOST)
        for generator, state in zip(self._generators(), states["own"], strict=True):
            generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        """Those of the loader and its sampler, each once."""
        found: dict[int, torch.Generator] = {}
        for owner in (self.data, getattr(self.data, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
        return list(found.values())


def _as_arrays(value: Any) -> Any:
    return _each(value, torch.Tensor, lambda tensor: tensor.numpy().copy())


def _each(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """``value`` with everything of ``kind`` within it changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {name: _each(one, kind, change) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_each(one, kind, change) for one in value)
    return value


@dataclass
class PackedStream(BatchStream):
    """Documents in packed sequences: each of ``num_ranks`` ranks, or groups of them, takes every so many-th batch."""

    source: PackedSource
    rank: int = 0
    num_ranks: int = 1
    _done: int = field(default=0, init=False)
    """Batches of this rank."""
    weighs = True

    def example(self) -> Batch:
        """The first batch of this rank."""
        return next(self._own(0))

    def batches(self) -> Iterator[Batch]:
        """Epochs follow each other without a gap."""
        for batch in self._own(self._done):
            self._done += 1
            yield batch

    def _own(self, done: int) -> Iterator[Batch]:
        return islice(self.source.batches(done * self.num_ranks), self.rank, None, self.num_ranks)

    def share(self, sequence_ranks: int) -> None:
        """They take the same batches."""
        self.rank //= sequence_ranks
        self.num_ranks //= sequence_ranks

    def num_batches(self, epochs: int) -> int:
        """The last one of a rank is filled up from the next epoch."""
        return -(-self.source.num_sequences(epochs) // (self.source.batch_size * self.num_ranks))

    def once(self) -> Iterator[Batch]:
        """In the order of the files."""
        return self.source.in_file_order()

    def weight(self, batch: Batch) -> int:
        """Every token that is learned counts alike."""
        assert isinstance(batch, dict)
        return num_learned(batch)

    @property
    def position(self) -> dict[str, Any]:
        """Batches of all ranks, and what their order follows from."""
        return {"batches": self._done * self.num_ranks, **self.source.identity}

    def go_to(self, position: Any) -> None:
        """Go on after so many batches."""
        if not isinstance(position, dict) or {**position, "batches": 0} != {"batches": 0, **self.source.identity}:
            raise FileError("the checkpoint was not saved by protwin.train with these data and this seed.")
        self._done = int(position["batches"]) // self.num_ranks


@dataclass(frozen=True, kw_only=True)
class StreamShape:
    """How batches are made of rows and samples."""

    batch_size: int | None = None
    sequence_length: int | None = None
    tokenizer: Any = None
    """A tokenizer of transformers, or the folder of one."""
    seed: int = 0
    rank: int = 0
    num_ranks: int = 1
    sequence_ranks: int = 1
    """Neighbouring ranks that share each sequence, and have the same batches."""


def stream_of(data: Any, shape: StreamShape) -> BatchStream:
    """``data`` as batches.

    A path, or several, of JSON Lines, Parquet or text, and a table of ``datasets`` with columns of text, are tokenized
    and packed; samples of a ``torch.utils.data.Dataset``, and rows of a table with columns of numbers, are put together
    in batches of ``batch_size``, shuffled by ``seed``; anything else gives batches itself.  Raises FileError if rows
    are none, ProtwinError if a size or the tokenizer is missing.
    """
    if isinstance(data, str | Path):
        return _packed([Path(data)], shape)
    if isinstance(data, Sequence) and data and all(isinstance(one, str | Path) for one in data):
        return _packed([Path(one) for one in data], shape)
    if _is_table(data):
        if any(all(column in data.column_names for column in form.columns) for form in Form):
            return _packed(data, shape)
        return LoaderStream(_loader(data.with_format("torch"), shape))
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return LoaderStream(_loader(data, shape))
    if shape.tokenizer is not None:
        raise ProtwinError(
            f"a tokenizer is given, but the data are a {type(data).__name__}, which holds batches. Leave it out, or "
            f"give files or a table of text."
        )
    if isinstance(data, Mapping) or not isinstance(data, Iterable) or isinstance(data, torch.Tensor):
        raise ProtwinError(
            f"the data are a {type(data).__name__}. Give batches that can be iterated over, a DataLoader, a Dataset, "
            f"or the path of a file."
        )
    return LoaderStream(data)


def _is_table(data: Any) -> bool:
    """Whether it is a ``datasets.Dataset``, which need not be installed to know."""
    return hasattr(data, "column_names") and hasattr(data, "with_format") and isinstance(data, Sized)


def _loader(samples: Any, shape: StreamShape) -> DataLoader[Any]:
    if shape.batch_size is None:
        raise ProtwinError("batch_size is missing: how many samples of the data are one batch. State it.")
    if shape.num_ranks > shape.sequence_ranks:
        raise ProtwinError(
            f"{shape.num_ranks} ranks would train on the same samples. Give each rank a DataLoader with a "
            f"DistributedSampler."
        )
    generator = torch.Generator().manual_seed(shape.seed)
    return DataLoader(samples, batch_size=shape.batch_size, shuffle=True, drop_last=True, generator=generator)


def _packed(data: Any, shape: StreamShape) -> PackedStream:
    if isinstance(data, list):
        for path in data:
            check_row_file(path)
    missing = [name for name in ("batch_size", "sequence_length", "tokenizer") if getattr(shape, name) is None]
    if missing:
        names = " and ".join([", ".join(missing[:-1]), missing[-1]] if missing[1:] else missing)
        are, them = ("are", "them") if missing[1:] else ("is", "it")
        raise ProtwinError(
            f"{names} {are} missing: rows of text are tokenized, and packed into sequences. State {them}."
        )
    assert shape.batch_size is not None
    assert shape.sequence_length is not None
    folder = Path(str(getattr(shape.tokenizer, "name_or_path", shape.tokenizer)))
    is_folder = isinstance(shape.tokenizer, str | Path)
    tokenizer = load_tokenizer(folder) if is_folder else shape.tokenizer
    if tokenizer.eos_token_id is None:
        raise FileError("the tokenizer has no eos_token, which ends every document. Set it.")
    rows = RowTokenizer(tokenizer, folder)
    found: list[Document]
    if isinstance(data, list):
        length = shape.sequence_length
        found = [one for path in data for one in documents_of_file(path, tokenizer, rows, length)]
    else:
        found = rows.documents(rows_of_table(data, "the table"))
    documents = [document for document in found if document.is_learned.any()]
    if not documents:
        raise FileError("no row of the data has a token to learn. Give rows that are not empty.")
    check_lengths(documents, shape.sequence_length)
    source = PackedSource(documents, shape.batch_size, shape.sequence_length, int(tokenizer.eos_token_id), shape.seed)
    return PackedStream(source, shape.rank, shape.num_ranks)

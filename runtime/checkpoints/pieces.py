"""Tensors of a checkpoint in stretches: the files of torch.distributed.checkpoint, written and read stretch by stretch.

[Note: Numbered scalars]
A rank has stretches of parameters, which begin and end anywhere.  So every tensor is flat in the files: its scalars are
numbered as they lie in memory, and a piece of the file is named by the number of its first scalar.  What pads a shard
is no scalar of any tensor, and is not written.  Shapes and strides are noted once, beside the pieces.

[Note: One piece at a time]
torch's own ``FileSystemWriter.write_data`` keeps every tensor that it has written until its file is complete, each a
copy if it is a view of something larger, as all parts of chunks are.  That would hold a rank's optimizer state twice.
``_Writer`` therefore writes the same format item by item, so that one copy of one piece exists at a time.  The reader
is torch's, which loads one piece at a time too.

[Note: Reading without running code]
The index of the files (``.metadata``) is a pickle, and unpickling may call anything.  It is read by an unpickler that
knows the few classes of such an index and refuses all others.
"""

from __future__ import annotations

import io
import os
import pickle
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .files import packed_in, save_to, sync
from .manifest import INDEX


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring scalars of a tensor ([Note: Numbered scalars])."""

    name: str
    begin: int
    """The number of the first one."""
    count: int
    whole: int
    """How many the tensor has."""
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    """Gives them, (count,), when they are written."""


def stretch_of(name: str, begin: int, scalars: torch.Tensor, whole: int) -> Stretch:
    """The stretch that ``scalars`` (n,) are, from number ``begin`` on of ``whole``."""
    return Stretch(name, begin, scalars.numel(), whole, scalars.dtype, lambda: scalars)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A stretch to be read."""

    name: str
    begin: int
    into: torch.Tensor
    """(n,), on any device: gets the scalars from number ``begin`` on."""


# -- writing ---------------------------------------------------------------------------------------------------------


class PieceWriter:
    """Writes one rank's pieces, and those that it has as others have them if nobody else does."""

    def __init__(self, folder: Path, stretches: Iterable[Stretch], values: Mapping[str, Callable[[], Any]]) -> None:
        """``values`` give what is no stretch, by name: anything that ``torch.load`` reads back as weights alone."""
        self._planner = _SavePieces(stretches, values)
        self._writer = _Writer(folder)
        self._metadata: Metadata | None = None

    def plan(self) -> SavePlan:
        """What this rank could write."""
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def write(self, rank: int, plans: Sequence[SavePlan]) -> list[WriteResult]:
        """Write this rank's share of ``plans``, those of all ranks; pieces that several have are written by one.

        Raises OSError, and ValueError if pieces overlap or leave scalars out.
        """
        shares, self._metadata = self._planner.create_global_plan(list(plans))
        share = self._writer.prepare_global_plan(shares)[rank]
        return self._writer.write_data(share, self._planner).wait()

    def finish(self, results: Sequence[list[WriteResult]]) -> None:
        """Write the index, after all ranks have written; ``results`` are theirs.  Raises OSError."""
        assert self._metadata is not None
        self._writer.finish(self._metadata, list(results))


def write_pieces(folder: Path, of_ranks: Sequence[Sequence[Stretch]], values: Mapping[str, Callable[[], Any]]) -> None:
    """Write all ranks' pieces from one process, one piece at a time, and the index.  Raises OSError."""
    planner = _SavePieces([stretch for of_rank in of_ranks for stretch in of_rank], values)
    writer = _Writer(folder)
    plans = [SavePlan([_write_item(stretch) for stretch in of_rank]) for of_rank in of_ranks]
    plans[0] = SavePlan([*plans[0].items, *_value_items(values)])
    shares, metadata = planner.create_global_plan(plans)
    results = [writer.write_data(share, planner).wait() for share in writer.prepare_global_plan(shares)]
    writer.finish(metadata, results)


class _SavePieces(DefaultSavePlanner):
    def __init__(self, stretches: Iterable[Stretch], values: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._stretches = {(found.name, found.begin): found for found in stretches if found.count or not found.whole}
        self._values = values

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(stretch) for stretch in self._stretches.values()]
        return SavePlan([*items, *_value_items(self._values)])

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name, offset = write_item.index.fqn, write_item.index.offset
        if write_item.type is WriteItemType.BYTE_IO:
            return packed_in(self._values[name](), f"the optimizer's state ({name})")
        assert offset is not None
        return self._stretches[name, offset[0]].read()


def _value_items(names: Iterable[str]) -> list[WriteItem]:
    return [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in names]


def _write_item(stretch: Stretch) -> WriteItem:
    piece = ChunkStorageMetadata(offsets=torch.Size([stretch.begin]), sizes=torch.Size([stretch.count]))
    described = TensorWriteData(piece, TensorProperties(dtype=stretch.dtype), torch.Size([stretch.whole]))
    return WriteItem(MetadataIndex(stretch.name, piece.offsets), WriteItemType.SHARD, tensor_data=described)


class _Writer(FileSystemWriter):
    """See [Note: One piece at a time]."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # As prepare_global_plan has it: one file per rank.
        name = f"{plan.storage_data.prefix}0.distcp"
        results = []
        with (Path(self.path) / name).open("wb") as stream:
            for item in plan.items:
                begin = stream.tell()
                found = planner.resolve_data(item)
                if isinstance(found, io.BytesIO):
                    stream.write(found.getbuffer())
                else:
                    _save_alone(found, stream)
                length = stream.tell() - begin
                results.append(WriteResult(item.index, length, _StorageInfo(name, begin, length)))
            sync(stream)
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def storage_meta(self) -> StorageMeta:
        # torch's has the folder that is written into, which has another name when it is complete.
        return StorageMeta()


def _save_alone(scalars: torch.Tensor, stream: io.BufferedWriter) -> None:
    """Write a tensor with as much memory as it has scalars: torch writes all that a view is one of."""
    on_host = scalars.detach().cpu()
    if on_host.untyped_storage().nbytes() != on_host.nbytes:
        on_host = on_host.clone()
    save_to(stream, on_host)


# -- reading ---------------------------------------------------------------------------------------------------------


class PieceReader:
    """Reads any stretch of any tensor, whoever wrote its pieces."""

    def __init__(self, folder: Path) -> None:
        """Read the index.  Raises OSError, and what ``READ_ERRORS`` are if it is none."""
        self._reader = _Reader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._pieces: dict[str, list[tuple[int, int]]] = {}
        self.tensors: dict[str, tuple[int, torch.dtype]] = {}
        """How many scalars each tensor has, and of which type."""
        self.values: list[str] = []
        """The names of what is no tensor."""
        for name, found in metadata.state_dict_metadata.items():
            if isinstance(found, TensorStorageMetadata):
                self.tensors[name] = found.size.numel(), found.properties.dtype
                self._pieces[name] = sorted((piece.offsets[0], piece.sizes[0]) for piece in found.chunks)
            else:
                self.values.append(name)

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Fill what is wanted.  Raises OSError, and what ``READ_ERRORS`` are."""
        items, targets = [], {}
        for stretch in wanted:
            targets[stretch.name, stretch.begin] = stretch.into
            items += self._items(stretch)
        self._reader.read_data(LoadPlan(items), _LoadPieces(targets))

    def _items(self, wanted: Wanted) -> list[ReadItem]:
        """One for every piece of the files that has some of it."""
        pieces, items = self._pieces[wanted.name], []
        end = wanted.begin + wanted.into.numel()
        place = max(0, bisect_right(pieces, wanted.begin, key=lambda piece: piece[0]) - 1)
        at = wanted.begin
        while at < end:
            begin, count = pieces[place]
            taken = min(end, begin + count) - at
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(wanted.name, [wanted.begin]),
                    dest_offsets=torch.Size([at - wanted.begin]),
                    storage_index=MetadataIndex(wanted.name, [begin]),
                    storage_offsets=torch.Size([at - begin]),
                    lengths=torch.Size([taken]),
                )
            )
            at, place = at + taken, place + 1
        return items

    def value(self, name: str) -> Any:
        """What is no tensor.  Raises OSError, and what ``READ_ERRORS`` are."""
        planner = _LoadPieces({})
        nowhere = torch.Size([])
        index = MetadataIndex(name)
        item = ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)
        self._reader.read_data(LoadPlan([item]), planner)
        return planner.values[name]


READ_ERRORS: Final = (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, IndexError, AssertionError, TypeError)
"""What reading damaged files may raise beside OSError."""


class _LoadPieces(DefaultLoadPlanner):
    def __init__(self, targets: Mapping[tuple[str, int], torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets
        self.values: dict[str, Any] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        offset = read_item.dest_index.offset
        assert offset is not None
        into = self._targets[read_item.dest_index.fqn, offset[0]]
        return into.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It is where it belongs."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / INDEX).open("rb") as stream:
            metadata = _IndexUnpickler(stream).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError("it is no index of torch.distributed.checkpoint")
        if any(
            os.path.basename(where.relative_path) != where.relative_path for where in metadata.storage_data.values()
        ):
            raise pickle.UnpicklingError("it names files of other folders")
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    """See [Note: Reading without running code]."""

    def find_class(self, module_name: str, name: str) -> Any:
        if module_name.startswith("torch.distributed.checkpoint.") and name in _CLASSES:
            return _CLASSES[name]
        if (module_name, name) in _OTHERS:
            return _OTHERS[module_name, name]
        if module_name == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module_name}.{name}")


def _member(owner: Any, name: Any) -> Any:
    """A member of an enumeration of such an index, which Python 3.11.2 names by ``getattr``; nothing else."""
    if owner is not _MEM_FORMAT_ENCODING or name not in owner.__members__:
        raise pickle.UnpicklingError("it asks for an attribute of something else than an enumeration")
    return owner[name]


_CLASSES: Final[Mapping[str, Any]] = {
    found.__name__: found
    for found in (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
        _MEM_FORMAT_ENCODING,
        _StorageInfo,
    )
}
_OTHERS: Final[Mapping[tuple[str, str], Any]] = {
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}

"""The same training in the checkpoint of another number of ranks, written one tensor at a time without any of them.

[Note: Files that are filled later]
``torch.save`` writes a file from tensors that are all in memory.  Here it gets fake ones, which have none: it leaves
room for their scalars, and says where that is when the file is read.  The scalars are written there one tensor after
the other.  The checksums of the ``zip`` file are not those of its content then; torch does not look at them, and the
manifest has a hash of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.serialization import skip_data

from ...shared.basics.errors import FileError
from ...shared.basics.progress import OnProgress
from ..checkpoints.checkpoints import has_checkpoint
from ..checkpoints.files import pack, save_to, sync
from ..checkpoints.folder import replaced_folder
from ..checkpoints.manifest import (
    CONFIGURATION,
    KNOWN,
    MANIFEST,
    OPTIMIZER,
    TRAINING,
    WEIGHTS,
    files_of,
    rank_file,
    saved_file,
)
from ..checkpoints.pieces import Stretch, write_pieces
from ..checkpoints.random_states import derived_states
from ..checkpoints.rank_checkpoint import write_manifest
from ..checkpoints.saved import COMMON, MASTER, OWN, STATE, VALUES, Saved, size_bytes_of
from ..checkpoints.saved_by_ranks import open_checkpoint
from .consolidating import bytes_of, write_safetensors


def reshard(folder: Path, into: Path, num_ranks: int, *, on_progress: OnProgress) -> None:
    """Write the checkpoint in ``folder`` to ``into`` as ``num_ranks`` ranks would have saved it; 1: as one rank does.

    Ranks that were there keep their random states and buffers; further ones have the buffers of rank 0, and random
    states that follow from its seed and their number.  If the number changes, all have the data position of rank 0.
    Every rank has all blocks: a pipeline that has saved counts as one rank, with the random states of its first stage.
    One tensor is in memory at a time.  ``into`` is there when it is complete.  Raises FileError if the checkpoint is
    damaged, or ``into`` holds anything or cannot be written.
    """
    saved = open_checkpoint(folder)
    if has_checkpoint(into):
        raise FileError(f"{into} holds something already. Name a new folder.")
    need_bytes = sum(file.size_bytes for file in saved.manifest.files.values())
    with replaced_folder(into, manifest=MANIFEST, known=KNOWN, need_bytes=need_bytes) as part:
        if num_ranks == 1:
            _write_for_one(part, saved, _Progress(saved, on_progress))
        else:
            _write_for_ranks(part, saved, num_ranks, _Progress(saved, on_progress))
        names = set(files_of(num_ranks))
        if CONFIGURATION in saved.manifest.files:
            names.add(CONFIGURATION)
            shutil.copyfile(saved.path / CONFIGURATION, part / CONFIGURATION)
            with (part / CONFIGURATION).open("rb+") as stream:
                sync(stream)
        manifest = saved.manifest
        files = {name: saved_file(part / name) for name in names}
        facts = (manifest.model_hash, manifest.model_name, manifest.step)
        write_manifest(part, *facts, files, num_ranks, manifest.left_out)


class _Progress:
    """Tells how much of all tensors was written."""

    def __init__(self, saved: Saved, tell: OnProgress) -> None:
        self._total_bytes = sum(count * dtype.itemsize for count, dtype in saved.flat.values())
        self._done_bytes = 0
        self._tell = tell

    def add(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        self._tell(self._done_bytes, self._total_bytes)


# -- for several ranks -----------------------------------------------------------------------------------------------


def _write_for_ranks(part: Path, saved: Saved, num_ranks: int, progress: _Progress) -> None:
    """Every tensor in as many stretches, equal but for one scalar."""

    def read(name: str, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        into = torch.empty(count, dtype=dtype)
        saved.read_flat(name, begin, into)
        progress.add(into.nbytes)
        return into

    of_ranks: list[list[Stretch]] = [[] for _ in range(num_ranks)]
    for name, (whole, dtype) in saved.flat.items():
        for rank, stretches in enumerate(of_ranks):
            begin, end = (edge * whole // num_ranks for edge in (rank, rank + 1))
            if begin < end or (rank == 0 and not whole):
                reading = partial(read, name, begin, end - begin, dtype)
                stretches.append(Stretch(name, begin, end - begin, whole, dtype, reading))
    names = saved.common["optimizer"]["parameters"]
    values = {VALUES + name: partial(saved.values, name) for name in names if saved.values(name)}
    write_pieces(part, of_ranks, values)
    for rank in range(num_ranks):
        pack(part / rank_file(rank), _own(saved, rank, num_ranks), "the state of a rank")
    pack(part / TRAINING, saved.common, "the scheduler's state or options of the optimizer")


def _own(saved: Saved, rank: int, num_ranks: int) -> dict[str, Any]:
    first, was = saved.of_rank(0), saved.num_replicas
    if rank < was:
        own = saved.of_rank(rank)
    else:
        own = {**first, "random": derived_states(first["random"], rank), "buffers": {}, "persistent": {}}
    return own if was == num_ranks else {**own, "data_position": first["data_position"]}


# -- for one rank ----------------------------------------------------------------------------------------------------


def _write_for_one(part: Path, saved: Saved, progress: _Progress) -> None:
    left_out = saved.manifest.left_out
    names = {name if left_out is None else left_out.short(name): name for name in saved.weights}
    described = {short: saved.weights[name] for short, name in names.items()}

    def read(name: str) -> torch.Tensor:
        progress.add(size_bytes_of(described[name]))
        return saved.weight(names[name])

    write_safetensors(part / WEIGHTS, described, read)
    _write_optimizer(part / OPTIMIZER, saved, progress)
    first = saved.of_rank(0)
    training = {**{key: saved.common[key] for key in COMMON}, **{key: first[key] for key in OWN}}
    pack(part / TRAINING, training, "the scheduler's state or data_position")


def _write_optimizer(path: Path, saved: Saved, progress: _Progress) -> None:
    """See [Note: Files that are filled later]."""
    described = saved.common["optimizer"]
    sources: dict[int, Callable[[], torch.Tensor]] = {}
    mode = FakeTensorMode()

    def later(name: str, parameter: str) -> torch.Tensor:
        with mode:
            fake = torch.empty(saved.shapes[parameter][0], dtype=saved.flat[name][1])
        sources[id(fake)] = partial(_shaped, saved, name, parameter)
        return fake

    keys: dict[str, list[str]] = {}
    for name in saved.flat:
        if name.startswith(STATE):
            _, key, parameter = name.split("/", 2)
            keys.setdefault(parameter, []).append(key)
    content = {
        **{key: described[key] for key in ("class", "groups")},
        "parameters": {
            name: {
                "state": {
                    **{key: later(f"{STATE}{key}/{name}", name) for key in keys.get(name, ())},
                    **saved.values(name),
                },
                "master": later(MASTER + name, name) if MASTER + name in saved.flat else None,
            }
            for name in described["parameters"]
        },
    }
    with path.open("wb") as stream, skip_data(materialize_fake_tensors=True):
        save_to(stream, content)
    with FakeTensorMode():
        placed = torch.load(path, weights_only=True)
    with path.open("rb+") as filled:
        for tensor, where in _pairs(content, placed):
            found = sources[id(tensor)]() if isinstance(tensor, FakeTensor) else tensor
            filled.seek(where.untyped_storage()._checkpoint_offset)
            filled.write(bytes_of(found))
            progress.add(found.nbytes)
        sync(filled)


def _shaped(saved: Saved, name: str, parameter: str) -> torch.Tensor:
    shape, strides = saved.shapes[parameter]
    flat = torch.empty(prod(shape), dtype=saved.flat[name][1])
    saved.read_flat(name, 0, flat)
    return flat.as_strided(shape, strides)


def _pairs(one: Any, other: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """The tensors of two equal nests of tables, lists and tensors."""
    if isinstance(one, torch.Tensor):
        yield one, other
    elif isinstance(one, Mapping):
        for key, value in one.items():
            yield from _pairs(value, other[key])
    elif isinstance(one, (list, tuple)):
        for value, others in zip(one, other, strict=True):
            yield from _pairs(value, others)

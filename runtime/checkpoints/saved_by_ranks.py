"""A checkpoint that several ranks saved, and opening one of either kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import nn

from ...shared.basics.errors import FileError
from ...shared.schema.workload import Workload
from ..model.strides import strided
from ..ranks.stages import StageRanks
from ..ranks.world import World
from .checkpoints import content_of
from .files import unpacked
from .folder import find_folder
from .manifest import TRAINING, Manifest, damaged, rank_file, read_manifest, verified_manifest
from .pieces import READ_ERRORS, PieceReader, Wanted
from .random_states import derived_states
from .saved import (
    COMMON,
    MASTER,
    STATE,
    VALUES,
    WEIGHT,
    Described,
    Saved,
    SavedByOne,
    WantedWeight,
    inconsistent,
    part_of,
)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Who reads a checkpoint."""

    rank: int = 0
    num_ranks: int = 1
    num_stages: int = 1
    """Neighbouring ranks that have the model between them."""

    @classmethod
    def of(cls, world: World | None, stages: StageRanks | None) -> Self:
        """This process among its ranks; None: it is alone, or there is one stage."""
        if world is None:
            return cls()
        return cls(world.rank, world.num_ranks, 1 if stages is None else stages.pipeline.num_stages)

    @property
    def replica(self) -> int:
        """The number of this rank, or of its pipeline."""
        return self.rank // self.num_stages

    @property
    def num_replicas(self) -> int:
        """Ranks, or pipelines."""
        return self.num_ranks // self.num_stages


ALONE: Final = RankPlace()
"""One rank that nobody trains with."""


def open_checkpoint(folder: str | Path, *, workload: Workload | None = None, place: RankPlace = ALONE) -> Saved:
    """The checkpoint in ``folder`` as the rank at ``place`` sees it, after its files were verified.

    Of several ranks each verifies a part of the files: all have to come this far before any goes on.  Changes nothing.
    Raises FileError if it is missing, torn, damaged, written by a newer version, or of a model other than that
    of ``workload``.
    """
    path = find_folder(folder)
    if path is None:
        raise FileError(f"{folder} does not exist, or is empty. Name the folder that was given to save().")
    try:
        # A checkpoint of one rank is small enough that each reads it all.
        manifest = read_manifest(path)
        if workload is not None and manifest.model_hash != workload.model_hash and workload.subspaces:
            _refuse_other_ratio(path, workload)
        share = {} if manifest.num_ranks == 1 else {"rank": place.rank, "num_ranks": place.num_ranks}
        model_hash = None if workload is None else workload.model_hash
        return opened(path, verified_manifest(path, model_hash, **share), place)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error}.") from error


def _refuse_other_ratio(path: Path, workload: Workload) -> None:
    """Raise FileError if a frozen factor of ``workload``, whose name it says, was saved with another rank."""
    weights = opened(path, verified_manifest(path)).weights
    for subspace in workload.subspaces:
        own = workload.parameters[subspace.frozen]
        saved = weights.get(own.name)
        if saved is not None and saved[0] != own.shape:
            raise FileError(
                f"{path} was saved with another unfreeze_rank_ratio: {own.name} is {list(saved[0])} there and "
                f"{list(own.shape)} in this model. Factorise the model with the ratio of the checkpoint."
            )


def opened(path: Path, manifest: Manifest, place: RankPlace = ALONE) -> Saved:
    """The same of files that were verified.  Raises FileError and OSError."""
    if manifest.num_ranks == 1:
        return SavedByOne(path, content_of(path, manifest), manifest, place.rank)
    return SavedByRanks(path, manifest, place)


class SavedByRanks(Saved):
    """Pieces of tensors ([Note: Numbered scalars] in ``pieces``), read one at a time."""

    def __init__(self, path: Path, manifest: Manifest, place: RankPlace) -> None:
        """Raises FileError if files contradict each other, and OSError."""
        self.path = path
        self.manifest = manifest
        with telling_damage(path):
            self._pieces = PieceReader(path)
        self._common = unpacked(path / TRAINING, is_mapped=False)
        self._num_stages = int(self._common.pop("num_stages", 1))
        if manifest.num_ranks % self._num_stages:
            raise damaged(path / TRAINING, f"{manifest.num_ranks} ranks have saved it in {self._num_stages} stages")
        rank, first = place.rank, self.of_rank(0)
        own = self.of_rank(place.replica) if 0 < place.replica < self.num_replicas else first
        try:
            self.optimizer = self.common["optimizer"]
            self._buffers = {**first["persistent"], **own["persistent"]}
            files = [self._file(other) for other in range(manifest.num_ranks)]
            positions = tuple(file["data_position"] for file in files)
            own_place = place.replica * self._num_stages if place.num_replicas == self.num_replicas else 0
            self.training = {
                **{key: self.common[key] for key in COMMON},
                "random": files[rank]["random"] if rank < len(files) else derived_states(first["random"], rank),
                "data_position": positions[own_place],
                "data_positions": positions,
                "buffers": {**first["buffers"], **own["buffers"]},
                "extra": own["extra"],
            }
            self._keys = self._state_keys()
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise inconsistent(error) from error

    @property
    def common(self) -> Mapping[str, Any]:
        """As it was saved."""
        return self._common

    @property
    def flat(self) -> dict[str, tuple[int, torch.dtype]]:
        """As in the index."""
        return self._pieces.tensors

    def read_flat(self, name: str, begin: int, into: torch.Tensor) -> None:
        """From whatever pieces there are."""
        self._read([Wanted(name, begin, into)])

    @property
    def num_replicas(self) -> int:
        """Ranks that have saved, or pipelines of such."""
        return self.manifest.num_ranks // self._num_stages

    def of_rank(self, rank: int) -> dict[str, Any]:
        """As it was saved; of a pipeline, what its ranks have saved together."""
        first, *others = (self._file(rank * self._num_stages + stage) for stage in range(self._num_stages))
        for kind in ("extra", "buffers", "persistent") if others else ():
            first[kind] = {name: value for file in (first, *others) for name, value in file[kind].items()}
        return first

    def _file(self, rank: int) -> dict[str, Any]:
        return unpacked(self.path / rank_file(rank), is_mapped=True)

    def _state_keys(self) -> dict[str, list[str]]:
        """The keys of the state that is in pieces, by parameter."""
        found: dict[str, list[str]] = {}
        for name in self._pieces.tensors:
            if name.startswith(STATE):
                _, key, parameter = name.split("/", 2)
                found.setdefault(parameter, []).append(key)
        return found

    @cached_property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """As they were saved."""
        return {name: (tuple(shape), tuple(stride)) for name, (shape, stride) in self.common["shapes"].items()}

    @property
    def weights(self) -> dict[str, Described]:
        """Their shapes and types."""
        described: dict[str, Described] = {n: (tuple(b.shape), b.dtype) for n, b in self._buffers.items()}
        for name, (shape, _) in self.shapes.items():
            described[name] = self._described(WEIGHT + name, shape)
        return described

    @property
    def masters(self) -> dict[str, Described | None]:
        """Shapes and types of those that there are."""
        return {
            name: self._described(MASTER + name, self.shapes[name][0])
            if MASTER + name in self._pieces.tensors
            else None
            for name in self.optimizer["parameters"]
        }

    def _described(self, name: str, shape: tuple[int, ...]) -> Described:
        """Of flat pieces: ``shape`` if they are as many scalars."""
        count, dtype = self._pieces.tensors[name]
        return shape if count == prod(shape) else (count,), dtype

    def weight(self, name: str) -> torch.Tensor:
        """A buffer as it is on this rank; a parameter in new memory."""
        # A checkpoint that was one rank's has buffers among the weights.
        return self._buffers[name] if name in self._buffers else self._whole(WEIGHT + name)

    def read_weights(self, wanted: Iterable[WantedWeight]) -> None:
        """Fill what is wanted."""
        direct = []
        for one in wanted:
            if self._is_numbered_as(one.name, one.parameter):
                direct.append(Wanted(WEIGHT + one.name, one.begin, one.into))
            else:
                stretch = slice(one.begin, one.begin + one.into.numel())
                one.into.copy_(part_of(self._whole(WEIGHT + one.name), one.parameter, stretch))
        self._read(direct)

    def _is_numbered_as(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether the files number the scalars of a parameter as it has them in memory."""
        return self.shapes[name][1] == parameter.stride() or parameter.dim() < 2

    def _whole(self, name: str) -> torch.Tensor:
        """A tensor in its shape."""
        shape, strides = self.shapes[_parameter_of(name)]
        flat = self._empty(name, prod(shape))
        self._read([Wanted(name, 0, flat)])
        return flat.as_strided(shape, strides)

    def state(
        self, name: str, parameter: nn.Parameter, stretch: slice | None
    ) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The state and the master."""
        names = {key: f"{STATE}{key}/{name}" for key in self._keys.get(name, ())}
        if MASTER + name in self._pieces.tensors:
            names[MASTER] = MASTER + name
        if self._is_numbered_as(name, parameter):
            begin, end = (0, parameter.numel()) if stretch is None else (stretch.start, stretch.stop)
            found = {key: self._empty(of, end - begin) for key, of in names.items()}
            self._read([Wanted(names[key], begin, into) for key, into in found.items()])
            if stretch is None:
                found = {key: strided(flat, parameter) for key, flat in found.items()}
        else:
            found = {key: part_of(self._whole(of), parameter, stretch) for key, of in names.items()}
        master = found.pop(MASTER, None)
        return {**found, **self.values(name)}, master

    def values(self, name: str) -> dict[str, Any]:
        """As they were saved."""
        if VALUES + name not in self._pieces.values:
            return {}
        with telling_damage(self.path):
            return dict(self._pieces.value(VALUES + name))

    def _empty(self, name: str, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self._pieces.tensors[name][1])

    def _read(self, wanted: Iterable[Wanted]) -> None:
        with telling_damage(self.path):
            self._pieces.read([one for one in wanted if one.into.numel()])


def _parameter_of(name: str) -> str:
    """Of a tensor's name in pieces."""
    return name.split("/", 2)[2] if name.startswith(STATE) else name.split("/", 1)[1]


@contextmanager
def telling_damage(path: Path) -> Iterator[None]:
    """Within the block, what torch says of damaged files is a FileError."""
    try:
        yield
    except READ_ERRORS as error:
        raise damaged(path, f"torch cannot read it ({type(error).__name__}: {error})") from error

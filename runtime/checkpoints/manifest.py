"""The manifest of a checkpoint: whose model it is, and size and hash of every file, so that it is whole or refused."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer

from ...shared.basics.documents import Document, FrozenModel
from ...shared.basics.errors import FileError

MANIFEST: Final = "checkpoint.json"
WEIGHTS: Final = "model.safetensors"
CONFIGURATION: Final = "config.json"
OPTIMIZER: Final = "optimizer.pt"
TRAINING: Final = "training.pt"
INDEX: Final = ".metadata"
"""torch's index of the pieces that ranks have written."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SavedFile(FrozenModel):
    """A file of a checkpoint."""

    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256


class LeftOut(FrozenModel):
    """A part of a model whose weights are not in the checkpoint: it never changes, such as a distillation's teacher."""

    part: str
    """The path of its module."""
    kept: str
    """The path of the module that is saved; files of safetensors have its names without this."""
    identity: str
    """A hash of the weights that are left out."""

    def short(self, name: str) -> str:
        """The name in files of safetensors."""
        return name.removeprefix(f"{self.kept}.")


class Manifest(Document):
    """Says that a checkpoint is complete, and of what."""

    KIND: ClassVar[str] = "checkpoint"

    model_hash: str
    """Of the model's structure, as in its workload."""
    model_name: str
    step: Annotated[int, Field(ge=0)]
    """Completed steps."""
    num_ranks: PositiveInt = 1
    """Ranks that have written it; a file says so if they are several."""
    left_out: LeftOut | None = None
    """What it does not hold, if it does not hold everything; a file says so then."""
    software: dict[str, str]
    files: dict[str, SavedFile]
    digest: str = ""
    """SHA-256 of this file with an empty digest."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if self.left_out is None:
            fields.pop("left_out", None)
        if self.num_ranks == 1:
            fields.pop("num_ranks", None)
        return fields

    def sealed(self) -> Manifest:
        """The same manifest with its digest."""
        plain = self.model_copy(update={"digest": ""})
        return plain.model_copy(update={"digest": hashlib.sha256(plain.to_json().encode()).hexdigest()})


# -- names -----------------------------------------------------------------------------------------------------------


def rank_file(rank: int) -> str:
    """The file of what one rank alone has."""
    return f"rank-{rank}.pt"


def piece_file(rank: int) -> str:
    """The file of the pieces that a rank has written; torch's reader finds it by the index."""
    return f"__{rank}_0.distcp"


def files_of(num_ranks: int) -> frozenset[str]:
    """The files that a checkpoint of so many ranks has, but for the manifest and the configuration."""
    if num_ranks == 1:
        return frozenset({WEIGHTS, OPTIMIZER, TRAINING})
    of_ranks = {name(rank) for rank in range(num_ranks) for name in (rank_file, piece_file)}
    return frozenset({TRAINING, INDEX} | of_ranks)


class _KnownNames(Collection[str]):
    """Every name that a file of a checkpoint may have, of however many ranks."""

    _FIXED: Final = files_of(1) | {MANIFEST, CONFIGURATION, INDEX}
    _OF_RANKS: Final = re.compile(r"rank-\d+\.pt|__\d+_0\.distcp", re.ASCII)

    def __contains__(self, name: object) -> bool:
        return name in self._FIXED or (isinstance(name, str) and self._OF_RANKS.fullmatch(name) is not None)

    def __iter__(self) -> Iterator[str]:
        raise TypeError("these names have no end")

    def __len__(self) -> int:
        raise TypeError("these names have no end")


KNOWN: Final[Collection[str]] = _KnownNames()


# -- verifying -------------------------------------------------------------------------------------------------------


def verified_manifest(path: Path, model_hash: str | None = None, *, rank: int = 0, num_ranks: int = 1) -> Manifest:
    """The manifest of the checkpoint in ``path``, after it and all files were verified.

    Of so many ranks each reads every n-th file; together they read all.  Raises FileError if it is torn, damaged,
    written by a newer version, or of a model other than ``model_hash``, and OSError.
    """
    manifest = read_manifest(path)
    if model_hash is not None and manifest.model_hash != model_hash:
        raise FileError(
            f"{path} was saved of another model ({manifest.model_name}): module classes, parameter names, shapes, "
            f"strides, dtypes or requires_grad differ. Build the model as it was when it was saved."
        )
    for name in check_names(path, manifest)[rank::num_ranks]:
        check_file(path, name, manifest.files[name])
    return manifest


def read_manifest(path: Path) -> Manifest:
    """The manifest alone.  Raises FileError if it is missing or damaged, and OSError."""
    if not (path / MANIFEST).exists():
        raise FileError(
            f"{path} is no complete checkpoint: {MANIFEST} is missing, which is written last. Resume from another one."
        )
    manifest = Manifest.load(path / MANIFEST)
    # Equal to what would be written: so that no byte of it can have changed.
    if manifest != manifest.sealed() or (path / MANIFEST).read_bytes() != manifest.to_json().encode():
        raise damaged(path / MANIFEST, "its digest does not fit its content")
    return manifest


def check_names(path: Path, manifest: Manifest) -> list[str]:
    """The names of all files in the order of the manifest.  Raises FileError unless all are there with their sizes."""
    names, listed = set(os.listdir(path)), set(manifest.files)
    required = files_of(manifest.num_ranks)
    if not required <= listed <= required | {CONFIGURATION}:
        raise damaged(path / MANIFEST, f"it lists {', '.join(sorted(listed))}")
    for name in sorted(listed - names):
        raise damaged(path, f"{name} is missing")
    for name in sorted(names - listed - {MANIFEST}):
        raise FileError(f"{path} holds {name}, which is not part of the checkpoint. Move it away, and resume again.")
    for name, saved in manifest.files.items():
        size_bytes = (path / name).stat().st_size
        if size_bytes != saved.size_bytes:
            raise damaged(path / name, f"it has {size_bytes} bytes of {saved.size_bytes}")
    return list(manifest.files)


def check_file(path: Path, name: str, saved: SavedFile) -> None:
    """Raise FileError unless the content of a file is as it was saved."""
    if saved_file(path / name) != saved:
        raise damaged(path / name, "its content has changed since it was saved")


def saved_file(path: Path) -> SavedFile:
    """Size and hash of a file.  Raises OSError."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return SavedFile(size_bytes=os.fstat(stream.fileno()).st_size, sha256=digest)


def damaged(path: Path, reason: str) -> FileError:
    """What is raised of a damaged file or folder."""
    return FileError(f"{path} is damaged: {reason}. Resume from another checkpoint.")

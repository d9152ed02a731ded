"""Checkpoints on disk: a folder of files, complete or refused.

| file | what it holds |
| --- | --- |
| ``model.safetensors`` | parameters and persistent buffers by their names in ``state_dict``, tied ones once |
| ``config.json`` | of a transformers model, its configuration, so that ``from_pretrained`` takes the folder |
| ``optimizer.pt`` | state of the optimizer by parameter, independent of any plan |
| ``training.pt`` | steps, scheduler, random states, data position, other buffers |
| ``checkpoint.json`` | the manifest, written last: whose model it is, and size and hash of every other file |

Nothing is unpickled but what torch's ``weights_only`` lets through.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Final

import safetensors
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file

from ...shared.basics.documents import Document, FrozenModel
from ...shared.basics.errors import FileError
from ..model.identity import software_versions
from ..model.nested_tensors import storage_bytes, tensors_in
from .folder import find_folder, replaced_folder

MANIFEST: Final = "checkpoint.json"
WEIGHTS: Final = "model.safetensors"
CONFIGURATION: Final = "config.json"
OPTIMIZER: Final = "optimizer.pt"
TRAINING: Final = "training.pt"
_REQUIRED: Final = frozenset({WEIGHTS, OPTIMIZER, TRAINING})
_KNOWN: Final = _REQUIRED | {MANIFEST, CONFIGURATION}

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SavedFile(FrozenModel):
    """A file of a checkpoint."""

    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256


class Manifest(Document):
    """Says that a checkpoint is complete, and of what."""

    KIND: ClassVar[str] = "checkpoint"

    model_hash: str
    """Of the model's structure, as in its workload."""
    model_name: str
    step: Annotated[int, Field(ge=0)]
    """Completed steps."""
    software: dict[str, str]
    files: dict[str, SavedFile]
    digest: str = ""
    """SHA-256 of this file with an empty digest."""

    def sealed(self) -> Manifest:
        """The same manifest with its digest."""
        plain = self.model_copy(update={"digest": ""})
        return plain.model_copy(update={"digest": hashlib.sha256(plain.to_json().encode()).hexdigest()})


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """What a checkpoint holds."""

    model_hash: str
    model_name: str
    step: int
    weights: Mapping[str, torch.Tensor]
    """Parameters and persistent buffers, on the host."""
    optimizer: Mapping[str, Any]
    training: Mapping[str, Any]
    configuration: str | None = None
    """JSON text, of a transformers model."""


def write_checkpoint(folder: str | Path, content: CheckpointContent) -> None:
    """Write ``content`` into ``folder``, in the place of the checkpoint that is there, once it is complete.

    Every file and folder is synced.  Raises FileError, and ``folder`` is as it was, if it cannot be written, if it
    holds anything but a checkpoint, or if ``content`` could not be read back.
    """
    # What torch.save is given is stored by storages, which may be larger than the tensors in them.
    need_bytes = sum(tensor.nbytes for tensor in content.weights.values()) + storage_bytes(
        tensors_in([content.optimizer, content.training])
    )
    with replaced_folder(folder, manifest=MANIFEST, known=_KNOWN, need_bytes=need_bytes) as part:
        _write_weights(part / WEIGHTS, content.weights)
        _pack(part / OPTIMIZER, content.optimizer, "the optimizer's state or options")
        _pack(part / TRAINING, content.training, "the scheduler's state or data_position")
        if content.configuration is not None:
            _write(part / CONFIGURATION, content.configuration.encode())
        manifest = Manifest(
            model_hash=content.model_hash,
            model_name=content.model_name,
            step=content.step,
            software=software_versions(),
            files={name: _saved_file(part / name) for name in sorted(os.listdir(part))},
        )
        _write(part / MANIFEST, manifest.sealed().to_json().encode())


def has_checkpoint(folder: str | Path) -> bool:
    """Whether there is anything to resume from in ``folder``; ``read_checkpoint`` says whether it is whole.

    Raises FileError if ``folder`` is no folder.
    """
    return find_folder(folder) is not None


def read_checkpoint(folder: str | Path, *, model_hash: str | None = None) -> CheckpointContent:
    """Read a checkpoint after every byte of it was verified; changes nothing.

    Raises FileError if it is missing, torn, damaged, written by a newer version, or of a model other than
    ``model_hash``.
    """
    path = find_folder(folder)
    if path is None:
        raise FileError(f"{folder} does not exist, or is empty. Name the folder that was given to save().")
    try:
        manifest = _verified_manifest(path, model_hash)
        configuration = path / CONFIGURATION
        return CheckpointContent(
            model_hash=manifest.model_hash,
            model_name=manifest.model_name,
            step=manifest.step,
            weights=load_file(path / WEIGHTS),
            optimizer=_unpacked(path / OPTIMIZER, is_mapped=True),
            training=_unpacked(path / TRAINING, is_mapped=False),
            configuration=configuration.read_text() if CONFIGURATION in manifest.files else None,
        )
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error}.") from error
    except safetensors.SafetensorError as error:
        raise _damaged(path / WEIGHTS, str(error)) from error


# -- verifying -------------------------------------------------------------------------------------------------------


def _verified_manifest(path: Path, model_hash: str | None) -> Manifest:
    names = set(os.listdir(path))
    if MANIFEST not in names:
        raise FileError(
            f"{path} is no complete checkpoint: {MANIFEST} is missing, which is written last. Resume from another one."
        )
    manifest = Manifest.load(path / MANIFEST)
    # Equal to what would be written: so that no byte of it can have changed.
    if manifest != manifest.sealed() or (path / MANIFEST).read_bytes() != manifest.to_json().encode():
        raise _damaged(path / MANIFEST, "its digest does not fit its content")
    if model_hash is not None and manifest.model_hash != model_hash:
        raise FileError(
            f"{path} was saved of another model ({manifest.model_name}): module classes, parameter names, shapes, "
            f"strides, dtypes or requires_grad differ. Build the model as it was when it was saved."
        )
    listed = set(manifest.files)
    if not _REQUIRED <= listed <= _KNOWN:
        raise _damaged(path / MANIFEST, f"it lists {', '.join(sorted(listed))}")
    for name in sorted(listed - names):
        raise _damaged(path, f"{name} is missing")
    for name in sorted(names - listed - {MANIFEST}):
        raise FileError(f"{path} holds {name}, which is not part of the checkpoint. Move it away, and resume again.")
    for name, saved in manifest.files.items():
        size_bytes = (path / name).stat().st_size
        if size_bytes != saved.size_bytes:
            raise _damaged(path / name, f"it has {size_bytes} bytes of {saved.size_bytes}")
    for name, saved in manifest.files.items():
        if _saved_file(path / name) != saved:
            raise _damaged(path / name, "its content has changed since it was saved")
    return manifest


def _damaged(path: Path, reason: str) -> FileError:
    return FileError(f"{path} is damaged: {reason}. Resume from another checkpoint.")


def _saved_file(path: Path) -> SavedFile:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return SavedFile(size_bytes=os.fstat(stream.fileno()).st_size, sha256=digest)


# -- files -----------------------------------------------------------------------------------------------------------


def _pack(path: Path, content: Mapping[str, Any], what: str) -> None:
    """Write torch's file format.  Raises FileError if ``weights_only`` would not read it back."""
    try:
        with path.open("wb") as stream:
            try:
                torch.save(dict(content), stream)
            except RuntimeError as error:
                # torch's writer complains of its position when it is cleared away after the stream's own error.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            _sync(stream)
        # Mapped, so that this reads no tensors.
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FileError(
            f"{what} cannot be saved so that it is safe to read back: {reason}. Give numbers, text, lists, tables and "
            f"tensors alone."
        ) from error


def _unpacked(path: Path, *, is_mapped: bool) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise _damaged(path, f"torch cannot read it ({str(error).strip().splitlines()[0]})") from error
    if not isinstance(content, dict):
        raise _damaged(path, f"it holds a {type(content).__name__}")
    return content


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        _sync(stream)


def _write_weights(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    with path.open("wb") as stream:
        mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
    try:
        # transformers refuses a file that does not name its framework.
        save_file(dict(weights), path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise _system_error(error) or error from error
    # safetensors puts a file of its own in the place, which nobody else may read.
    path.chmod(mode)
    with path.open("rb+") as stream:
        _sync(stream)


def _system_error(error: safetensors.SafetensorError) -> OSError | None:
    """The system's error that safetensors tells of in words alone; None if it tells of none."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found is not None else None


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())

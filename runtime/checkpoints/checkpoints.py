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

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file

from ...shared.basics.errors import FileError
from ..model.identity import software_versions
from ..model.nested_tensors import storage_bytes, tensors_in
from .files import pack, unpacked, write, write_weights
from .folder import find_folder, replaced_folder
from .manifest import (
    CONFIGURATION,
    KNOWN,
    MANIFEST,
    OPTIMIZER,
    TRAINING,
    WEIGHTS,
    LeftOut,
    Manifest,
    damaged,
    saved_file,
    verified_manifest,
)


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
    left_out: LeftOut | None = None
    """What it does not hold, if it does not hold everything."""


def write_checkpoint(folder: str | Path, content: CheckpointContent) -> None:
    """Write ``content`` into ``folder``, in the place of the checkpoint that is there, once it is complete.

    Every file and folder is synced.  Raises FileError, and ``folder`` is as it was, if it cannot be written, if it
    holds anything but a checkpoint, or if ``content`` could not be read back.
    """
    # What torch.save is given is stored by storages, which may be larger than the tensors in them.
    need_bytes = sum(tensor.nbytes for tensor in content.weights.values()) + storage_bytes(
        tensors_in([content.optimizer, content.training])
    )
    with replaced_folder(folder, manifest=MANIFEST, known=KNOWN, need_bytes=need_bytes) as part:
        left_out = content.left_out
        short = content.weights if left_out is None else {left_out.short(n): t for n, t in content.weights.items()}
        write_weights(part / WEIGHTS, short)
        pack(part / OPTIMIZER, content.optimizer, "the optimizer's state or options")
        pack(part / TRAINING, content.training, "the scheduler's state or data_position")
        if content.configuration is not None:
            write(part / CONFIGURATION, content.configuration.encode())
        manifest = Manifest(
            model_hash=content.model_hash,
            model_name=content.model_name,
            step=content.step,
            left_out=left_out,
            software=software_versions(),
            files={name: saved_file(part / name) for name in sorted(os.listdir(part))},
        )
        write(part / MANIFEST, manifest.sealed().to_json().encode())


def has_checkpoint(folder: str | Path) -> bool:
    """Whether there is anything to resume from in ``folder``; ``read_checkpoint`` says whether it is whole.

    Raises FileError if ``folder`` is no folder.
    """
    return find_folder(folder) is not None


def read_checkpoint(folder: str | Path, *, model_hash: str | None = None) -> CheckpointContent:
    """Read a checkpoint of one rank after every byte of it was verified; changes nothing.

    Raises FileError if it is missing, torn, damaged, written by a newer version, or of a model other than
    ``model_hash``.
    """
    path = find_folder(folder)
    if path is None:
        raise FileError(f"{folder} does not exist, or is empty. Name the folder that was given to save().")
    try:
        return content_of(path, verified_manifest(path, model_hash))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error}.") from error


def content_of(path: Path, manifest: Manifest) -> CheckpointContent:
    """Read verified files of one rank.  Raises FileError and OSError."""
    configuration, left_out = path / CONFIGURATION, manifest.left_out
    try:
        short = load_file(path / WEIGHTS)
        return CheckpointContent(
            model_hash=manifest.model_hash,
            model_name=manifest.model_name,
            step=manifest.step,
            weights=short if left_out is None else {f"{left_out.kept}.{n}": t for n, t in short.items()},
            optimizer=unpacked(path / OPTIMIZER, is_mapped=True),
            training=unpacked(path / TRAINING, is_mapped=False),
            configuration=configuration.read_text() if CONFIGURATION in manifest.files else None,
            left_out=left_out,
        )
    except safetensors.SafetensorError as error:
        raise damaged(path / WEIGHTS, str(error)) from error

"""What a checkpoint is, and whether it is whole: told without its model, and without memory for its tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import ClassVar

from ...shared.basics.documents import Document, FrozenModel
from ...shared.basics.errors import FileError
from ...shared.basics.progress import OnProgress
from ..checkpoints.folder import find_folder
from ..checkpoints.manifest import (
    MANIFEST,
    LeftOut,
    Manifest,
    SavedFile,
    check_file,
    check_names,
    read_manifest,
    saved_file,
)
from ..checkpoints.saved import MASTER, STATE, Saved, size_bytes_of
from ..checkpoints.saved_by_ranks import opened


class InspectedFile(FrozenModel):
    """A file of a checkpoint."""

    name: str
    size_bytes: int | None
    """As it is there; none if it is missing."""
    damage: str | None = None
    """What is wrong with it."""


class CheckpointReport(Document):
    """What lies in the folder of a checkpoint."""

    KIND: ClassVar[str] = "checkpoint_report"

    model_name: str
    model_hash: str
    step: int
    """Completed steps."""
    num_ranks: int
    """Ranks that have saved it."""
    left_out: LeftOut | None = None
    """What it does not hold: of a distillation, the teacher's weights."""
    software: dict[str, str]
    files: tuple[InspectedFile, ...]
    damage: str | None = None
    """What a resumption says of it; nothing if it is whole."""
    optimizer: str | None = None
    """The class of the optimizer.  This and what follows are known of a whole checkpoint alone."""
    num_parameters: int | None = None
    """Scalars of all parameters and persistent buffers."""
    weight_bytes: int | None = None
    state_bytes: int | None = None
    """Masters and state of the optimizer."""


def inspect(folder: Path, *, on_progress: OnProgress) -> CheckpointReport:
    """Read the checkpoint in ``folder`` and hash all of its files.

    Raises FileError if there is none, or if its manifest is missing or damaged.
    """
    path = find_folder(folder)
    if path is None:
        raise FileError(f"{folder} does not exist, or is empty. Name the folder of a checkpoint.")
    try:
        manifest = read_manifest(path)
        files = []
        for number, (name, saved) in enumerate(manifest.files.items()):
            files.append(_inspected(path, name, saved))
            on_progress(number + 1, len(manifest.files))
        foreign = sorted(set(os.listdir(path)) - {*manifest.files, MANIFEST})
        files += [InspectedFile(name=name, size_bytes=None, damage="not part of it") for name in foreign]
        report = CheckpointReport(
            model_name=manifest.model_name,
            model_hash=manifest.model_hash,
            step=manifest.step,
            num_ranks=manifest.num_ranks,
            left_out=manifest.left_out,
            software=manifest.software,
            files=tuple(files),
            damage=_damage(path, manifest, files),
        )
        return report if report.damage is not None else _with_content(report, opened(path, manifest))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error}.") from error


def _inspected(path: Path, name: str, saved: SavedFile) -> InspectedFile:
    if not (path / name).is_file():
        return InspectedFile(name=name, size_bytes=None, damage="missing")
    size_bytes = (path / name).stat().st_size
    if size_bytes != saved.size_bytes:
        return InspectedFile(name=name, size_bytes=size_bytes, damage=f"{size_bytes} bytes of {saved.size_bytes}")
    is_same = saved_file(path / name) == saved
    return InspectedFile(name=name, size_bytes=size_bytes, damage=None if is_same else "changed since it was saved")


def _damage(path: Path, manifest: Manifest, files: Sequence[InspectedFile]) -> str | None:
    """What a resumption says."""
    try:
        check_names(path, manifest)
        for file in files:
            if file.damage is not None:
                check_file(path, file.name, manifest.files[file.name])
    except FileError as error:
        return str(error)
    return None


def _with_content(report: CheckpointReport, saved: Saved) -> CheckpointReport:
    sizes = {name: count * dtype.itemsize for name, (count, dtype) in saved.flat.items()}
    weights = saved.weights.values()
    return report.model_copy(
        update={
            "optimizer": saved.optimizer["class"],
            "num_parameters": sum(prod(shape) for shape, _ in weights),
            "weight_bytes": sum(map(size_bytes_of, weights)),
            "state_bytes": sum(size for name, size in sizes.items() if name.startswith((MASTER, STATE))),
        }
    )

"""Traced workloads kept on disk, so that the second question about a model needs no trace and no torch.

An entry is bound to everything that it was made from; whatever is damaged, foreign or outdated is a miss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final

from ..basics.documents import Document
from ..basics.errors import FileError
from ..catalogue.own_code import OwnCode
from ..phases.packing import Packing
from ..schema.hardware import DeviceKind
from ..schema.training_options import FULL_TRAINING, TrainingOptions
from ..schema.workload import Workload
from ..students.student import Student

_SOFTWARE: Final = ("protwin", "torch", "transformers")
_MAX_ENTRIES: Final = 64
"""Kept at most; a large model's entry takes some hundred kilobytes."""


class CachedWorkload(Document):
    """One entry."""

    KIND: ClassVar[str] = "cached_workload"

    key: str
    """What it was made from (``cache_key``)."""
    checksum: str
    """Hash of the workload as JSON: a damaged figure is still a valid one."""
    workload: Workload


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """What a trace is asked for."""

    configuration: Mapping[str, Any]
    """The model's ``config.json`` in the Hugging Face form."""
    name: str
    batch_size: int
    sequence_length: int | None
    """None for models of images."""
    dtype: str | None
    """Element type of the parameters, instead of the configuration's."""
    options: TrainingOptions = FULL_TRAINING
    device_kind: DeviceKind = DeviceKind.CUDA
    """What it is to train on, where that decides which kernels run."""
    student: Student | None = None
    """What learns from the model, block by block; None: the model itself is trained."""
    code: OwnCode | None = None
    """Files that the model is made by, if these may run; None: transformers' own code makes it."""
    packing: Packing | None = None
    """The samples of each row, end to end; None: each row is one."""
    mlp_tiles: tuple[int, ...] = ()
    """Numbers of tiles beside 1 that MLPs of blocks may run in, ascending."""
    loss_tiles: tuple[int, ...] = ()
    """Numbers of tiles beside 1 that head and loss may run in, ascending."""
    sequence_ranks: tuple[int, ...] = ()
    """Numbers of ranks beside 1 that may share each sequence, ascending."""


def cache_key(request: TraceRequest) -> str:
    """Hash of everything that decides what a trace gives: the model, the shape, the software that traces."""
    facts = [
        asdict(replace(request, options=FULL_TRAINING, student=None, code=None, packing=None))
        | {"options": request.options.model_dump(mode="json")}
        | ({} if request.student is None else {"student": request.student.model_dump(mode="json")})
        | ({} if request.packing is None else {"packing": request.packing.model_dump(mode="json")})
        | ({} if request.code is None else {"code": request.code.fingerprint}),
        Workload.SCHEMA_VERSION,
        {package: _version(package) for package in _SOFTWARE},
        _tracer_fingerprint(),
    ]
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_cached(folder: Path, key: str) -> Workload | None:
    """The workload under ``key``; None if there is none, or if the entry is damaged or another one's."""
    try:
        entry = CachedWorkload.load(folder / f"{key}.json")
    except FileError:
        return None
    return entry.workload if entry.key == key and entry.checksum == _checksum(entry.workload) else None


def store_cached(folder: Path, key: str, workload: Workload) -> None:
    """Keep ``workload`` under ``key``, and no more than the newest entries.

    Raises FileError if the folder cannot be written.
    """
    entry = CachedWorkload(key=key, checksum=_checksum(workload), workload=workload)
    entry.save(folder / f"{key}.json")
    entries = [(path.stat().st_mtime_ns, path) for path in folder.glob("*.json") if path.is_file()]
    for _, path in sorted(entries, reverse=True)[_MAX_ENTRIES:]:
        path.unlink(missing_ok=True)


def _checksum(workload: Workload) -> str:
    return hashlib.sha256(workload.model_dump_json().encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _tracer_fingerprint() -> str | None:
    """Hash of the tracer's sources, which change between releases in an editable installation; imports nothing.

    Read once: a process traces with the sources that it began with.
    """
    spec = find_spec("protwin.runtime")
    if spec is None or spec.origin is None:
        return None
    digest = hashlib.sha256()
    for folder in (Path(spec.origin).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()

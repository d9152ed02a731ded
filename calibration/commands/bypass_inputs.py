"""What ``protwin bypass`` is given, before anything of it is understood.  Needs no torch.

[Note: Same files, same run]
The fingerprint of a run is of what files mean: the sizes that transformers adds to a configuration, the tokens that a
tokenizer makes of a text.  Finding that out takes seconds, or minutes for long texts.  But the same files, options and
libraries always mean the same.  So a finished run keeps a hash of them, and asking for it once more only reads files.
Weights count by their heads and by samples of their values, as in the run's own fingerprint; all else counts whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from ...shared.catalogue.models import read_model_configuration
from ...shared.catalogue.own_code import OwnCode, trusted_code
from ...shared.pipelines.pipeline import Pipeline
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import Plan
from ...shared.students.student import Student

_SOFTWARE: Final = ("protwin", "torch", "transformers", "tokenizers")
"""What decides how files are understood."""
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")
"""Ends of names of files that may be too large to be read whole."""
_WITH_HEAD: Final = ".safetensors"
_PLACES: Final = 64
_PLACE_BYTES: Final = 4096
"""How many places of a file of weights, and how much of each, tell it apart (``SavedWeights.fingerprint``)."""
_LENGTH_BYTES: Final = 8
"""With which a file of safetensors says how long its head is: names, shapes and element types of all tensors."""


@dataclass(frozen=True, kw_only=True)
class BypassInputs:
    """The files and options that the result of a run follows from."""

    teacher: Path
    trust_remote_code: bool
    """Whether code files of the teacher may run."""
    student: Path
    training: tuple[Path, ...]
    validation: tuple[Path, ...]
    """Empty: the end of the training data."""
    tokenizer: Path | None
    """None: the teacher's."""
    is_bytes: bool
    """Whether bytes are the tokens."""
    fields: Mapping[str, Any]
    """Of ``RunSettings``, as the options state them."""
    dtype: str | None
    plan: Plan | Pipeline | None
    """None: it is searched for ``hardware``."""
    hardware: Hardware | None

    def code(self) -> OwnCode | None:
        """The code that the teacher is made by.  Raises FileError as ``trusted_code`` does, and if it has no model."""
        described = read_model_configuration(self.teacher)
        return trusted_code(self.teacher, described.config, is_trusted=self.trust_remote_code)

    @cached_property
    def fingerprint(self) -> str | None:
        """Hash of all of it (Note: Same files, same run); None if a file cannot be read, which others tell of."""
        facts = {
            "fields": dict(self.fields),
            "flags": [self.trust_remote_code, self.is_bytes, self.dtype],
            "plan": None if self.plan is None else self.plan.workload_id,
            "device": None if self.hardware is None else self.hardware.device.model_dump(mode="json"),
            "software": {package: version(package) for package in _SOFTWARE},
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
        try:
            digest.update(json.dumps(Student.load(self.student).model_dump(mode="json"), sort_keys=True).encode())
            for name, paths in self._files():
                digest.update(f"\0{name} {len(paths)}\0".encode())
                for path in paths:
                    digest.update(_digest(path))
        except OSError:
            return None
        return digest.hexdigest()[:32]

    def _files(self) -> Iterator[tuple[str, list[Path]]]:
        """The files of each input.  Raises OSError if a folder cannot be read."""
        yield "training", list(self.training)
        yield "validation", list(self.validation)
        for name, folder in (("teacher", self.teacher), ("tokenizer", self.tokenizer)):
            paths = [] if folder is None else sorted(path for path in folder.iterdir() if path.is_file())
            yield f"{name} {[path.name for path in paths]}", paths


def _digest(path: Path) -> bytes:
    """Of a file.  Raises OSError if it cannot be read."""
    with path.open("rb") as stream:
        if path.suffix not in _WEIGHTS:
            return hashlib.file_digest(stream, "sha256").digest()
        size_bytes = path.stat().st_size
        digest = hashlib.sha256(f"{size_bytes} ".encode())
        if path.suffix == _WITH_HEAD:
            length = stream.read(_LENGTH_BYTES)
            digest.update(length + stream.read(min(size_bytes, int.from_bytes(length, "little"))))
        for number in range(_PLACES):
            stream.seek(size_bytes * number // _PLACES)
            digest.update(stream.read(_PLACE_BYTES))
        return digest.digest()

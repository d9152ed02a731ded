"""Weights of teacher and student in files, for models whose parameters are on the meta device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from ...shared.basics.errors import PlanError
from ..chunks.saved_weights import SavedTensor, SavedWeights
from .pairs import STUDENT, TEACHER, Pairs

Folder = str | Path | SavedWeights


@dataclass(frozen=True)
class PairWeights(SavedWeights):
    """Those of both models, or of one of them, by their names in the pairs."""

    parts: Mapping[str, SavedWeights] = field(default_factory=dict)
    """By the path of the model in the pairs."""
    has_rest: bool = False
    """Whether files also have blocks of other stages: then the whole was checked before the stage was alone."""

    def find(self, names: Iterable[str]) -> list[SavedTensor]:
        """What the files hold of a tensor that the pairs have under these names."""
        found = []
        for part, saved in self.parts.items():
            own = [name.removeprefix(f"{part}.") for name in names if name.startswith(f"{part}.")]
            found += saved.find(own)
        return found

    def fingerprint(self) -> str:
        """Of all files."""
        of_parts = {part: saved.fingerprint() for part, saved in sorted(self.parts.items())}
        return hashlib.sha256(repr(of_parts).encode()).hexdigest()[:16]

    def check(self, model: nn.Module, *, fills_all: bool) -> None:
        """``SavedWeights.check`` of each model that has files."""
        if self.has_rest:
            return
        for part, saved in self.parts.items():
            saved.check(model.get_submodule(part), fills_all=fills_all)


def pair_weights(pairs: Pairs, teacher: Folder | None, student: Folder | None) -> PairWeights | None:
    """The files that fill the models; None if both have values.

    Raises PlanError if a model on the meta device has no files, or what is given is no folder; FileError if the files
    are of another model.
    """
    parts = {}
    for part, given in ((TEACHER, teacher), (STUDENT, student)):
        if isinstance(given, SavedWeights):
            parts[part] = given
        elif isinstance(given, str | Path):
            parts[part] = SavedWeights(Path(given))
        elif given is not None:
            raise PlanError(f"{part}_weights is a {type(given).__name__}; it must be the path of a folder.")
        else:
            for name, parameter in pairs.get_submodule(part).named_parameters():
                if parameter.is_meta and not f"{part}.{name}".startswith(pairs.elsewhere):
                    raise PlanError(
                        f"parameter {name} of the {part} is on the meta device and has no values. Pass "
                        f"{part}_weights=FOLDER, the {part}'s safetensors files, or load them first."
                    )
    if not parts:
        return None
    found = PairWeights(next(iter(parts.values())).folder, parts=parts)
    found.check(pairs, fills_all=True)
    return replace(found, has_rest=bool(pairs.elsewhere))

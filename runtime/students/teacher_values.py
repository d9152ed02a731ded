"""A teacher's parameters by name: those of a model in memory, or read one by one from the files of its folder."""

from __future__ import annotations

import torch
from torch import nn

from ...shared.basics.errors import FileError, WorkloadError
from ..chunks.saved_weights import SavedWeights, names_of


class TeacherValues:
    """Values of a teacher's parameters."""

    def __init__(self, teacher: nn.Module, weights: SavedWeights | None) -> None:
        """``weights`` gives the values of parameters on the meta device.

        Raises WorkloadError if there are such and no weights, FileError if the files do not hold exactly the teacher's.
        """
        self.names = frozenset(name for name, _ in teacher.named_parameters(remove_duplicate=False))
        self._weights = weights
        self._tensors: dict[str, tuple[nn.Parameter, list[str]]] = {}
        for parameter, names in names_of(teacher.named_parameters(remove_duplicate=False)):
            self._tensors |= dict.fromkeys(names, (parameter, names))
        if weights is not None:
            weights.check(teacher, fills_all=True)
        elif absent := [name for name, (parameter, _) in self._tensors.items() if parameter.is_meta]:
            raise WorkloadError(
                f"the teacher's parameter {absent[0]} is on the meta device and has no values. Pass "
                f"weights=SavedWeights(FOLDER) to have them read, or load the teacher."
            )

    def __call__(self, name: str) -> torch.Tensor:
        """The parameter ``name``: the teacher's own, or read anew, on the host.  Raises FileError, KeyError."""
        parameter, names = self._tensors[name]
        if self._weights is None or not parameter.is_meta:
            return parameter
        value = torch.empty_like(parameter, device="cpu")
        found = self._weights.find(names)
        if not found:
            raise FileError(f"{self._weights.folder} lacks {name}. Name the teacher's folder.")
        self._weights.read(found[0], value, slice(0, value.numel()), value.view(-1))
        return value

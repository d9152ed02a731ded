"""Files of AutoGPTQ: which of them a map in its layout can be filled from as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.documents import read_mapping
from ...shared.basics.errors import FileError
from ...shared.phases.quantization import WORD_BITS
from .gptq import GptqLinear

_CONFIGURATIONS: Final = (("config.json", "quantization_config"), ("quantize_config.json", None))
"""Where a folder says how it is packed: the file, and the field of it."""
_FORMAT: Final = "gptq"
"""What the format is called whose zeros are stored less one; others store them as they are, in tensors like these."""


def check_packed_format(folder: Path) -> None:
    """Raise FileError if ``folder`` says that its maps are packed in another form than that of AutoGPTQ."""
    for name, field in _CONFIGURATIONS:
        path = folder / name
        if not path.is_file():
            continue
        found: Any = read_mapping(str(path))
        found = found if field is None else found.get(field)
        if not isinstance(found, dict):
            continue
        said = found.get("checkpoint_format", _FORMAT)
        if said != _FORMAT:
            raise FileError(
                f"{path} says that maps are packed as {said!r}, but {_FORMAT!r} is read, which stores zeros less one. "
                f"Load the model unpacked, or save it in the format {_FORMAT!r}."
            )


def check_groups(module: GptqLinear, groups: torch.Tensor, path: str) -> None:
    """Raise FileError if inputs of ``module`` at ``path`` lie in ``groups`` (inputs,) in another order than their own.

    Then another chain of operations unpacks them.
    """
    if not torch.equal(groups, torch.arange(module.in_features, dtype=groups.dtype) // module.group_size):
        raise FileError(
            f"{path}.g_idx: inputs are not in groups of {module.group_size} in their own order. Models that were "
            f"packed by the order of activations (desc_act) are not read; take one without, or load the model unpacked."
        )


def fill_shifts(module: GptqLinear) -> None:
    """Give a map without values that which no file has."""
    shifts = torch.arange(0, WORD_BITS, module.bits, dtype=torch.int32)
    module.shifts = nn.Parameter(shifts, requires_grad=False)

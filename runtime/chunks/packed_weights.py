"""Packed models from files: read tensor by tensor, packed at once, and never whole in 16 bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ...shared.basics.errors import FileError, PlanError
from ...shared.phases.quantization import Quantization
from ..model.strides import in_memory_order
from ..quantized.quantizing import chosen_maps, pack, quantization
from .meta_parameters import set_values
from .saved_weights import SavedTensor, SavedWeights, names_of, persistent_buffers


def load_quantized(
    model: nn.Module,
    weights: str | Path | None,
    to: str = "nf4",
    *,
    double: bool = False,
    blocksize: int | None = None,
    compute_dtype: torch.dtype | None = None,
    skip: Sequence[str] = (),
) -> list[str]:
    """Fill ``model``, on the meta device (``parameters_on_meta``), from a folder of safetensors, and pack it meanwhile.

    Every tensor is read by itself; the weight of a linear map is packed, as ``quantize`` does, before the next one is
    read.  So host memory holds the packed model and one weight at most.  None for ``weights``: random ones, as the
    model's own ``_init_weights`` or each module's ``reset_parameters`` draws them.  Gives the paths of the packed maps.
    Raises WorkloadError as ``quantize``, and FileError if the files are of another model, with nothing filled;
    FileError if a file cannot be read.
    """
    how = quantization(to, double=double, blocksize=blocksize)
    chosen = chosen_maps(model, how, skip=skip, compute_dtype=compute_dtype)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise PlanError(
                f"buffer {name} is on the meta device. Build the model within protwin.runtime.parameters_on_meta(), "
                f"which leaves buffers real."
            )
    if weights is None:
        _fill_at_random(model, chosen, how, compute_dtype)
        return chosen
    saved = SavedWeights(Path(weights))
    saved.check(model, fills_all=True)
    packed = {f"{path}.weight" for path in chosen}
    for parameter, names in names_of(model.named_parameters(remove_duplicate=False)):
        if parameter.is_meta and names[0] not in packed:
            set_values(parameter, _read(saved, parameter, names))
    for buffer, names in names_of(persistent_buffers(model)):
        if saved.find(names):
            buffer.copy_(_read(saved, buffer, names))
    for path in chosen:
        weight = model.get_submodule(path).weight
        assert isinstance(weight, torch.Tensor)
        names = [f"{path}.weight"]
        pack(model, path, how, compute_dtype, lambda w=weight, n=names: _read(saved, w, n))  # type: ignore[misc]
    return chosen


def _fill_at_random(
    model: nn.Module, chosen: Sequence[str], how: Quantization, compute_dtype: torch.dtype | None
) -> None:
    """Draw the weights of every module, and pack it, if it is to be, before the next one is drawn."""
    draw = getattr(model, "_init_weights", None)
    for path, module in list(model.named_modules()):
        own = [parameter for parameter in module._parameters.values() if parameter is not None and parameter.is_meta]
        for parameter in own:
            set_values(parameter, torch.zeros(parameter.shape, dtype=parameter.dtype))
        if own and draw is not None:
            draw(module)
        elif own and hasattr(module, "reset_parameters"):
            module.reset_parameters()
        if path in chosen:
            pack(model, path, how, compute_dtype)


def _read(saved: SavedWeights, like: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    held: list[SavedTensor] = saved.find(names)
    if not held:
        raise FileError(f"{saved.folder} lacks {names[0]}. Name a folder with the tensors of the model's state_dict().")
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    saved.read(held[0], like, slice(0, like.numel()), in_memory_order(made))
    return made

"""What a model is, as a hash, and with what software something was measured."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from torch import nn

from ...shared.factors.structure import ModelStructure, structure_hash
from .strides import contiguous_strides

_FILLED: Final = "_protwin_filled_buffers"
"""The attribute of a model that names the buffers that were None before it was trained by a plan."""


def note_empty_buffers(model: nn.Module) -> None:
    """Training is about to begin: buffers that are None now are not what tells ``model`` from others.

    A forward may fill them, and a model that was never run has none.
    """
    names = [f"{path}.{name}" if path else name for path, name in _empty_buffers(model)]
    if names:
        model.__dict__[_FILLED] = sorted({*model.__dict__.get(_FILLED, ()), *names})


def _empty_buffers(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        yield from ((path, name) for name, buffer in module._buffers.items() if buffer is None)


def model_hash(model: nn.Module) -> str:
    """Hash of a model's structure: module classes, parameters (name, shape, strides, dtype, trainable), buffers."""
    return structure_hash(
        [[path, type(module).__qualname__] for path, module in model.named_modules()],
        [[name, list(p.shape), str(p.dtype), p.requires_grad, *_strides(p)] for name, p in model.named_parameters()],
        buffers_of(model),
    )


def structure_of(model: nn.Module, blocks: Collection[str]) -> ModelStructure:
    """What a family keeps of the model to know its hash in factors; ``blocks``: the paths of its blocks."""
    modules = [(path, type(module).__qualname__) for path, module in model.named_modules()]
    return ModelStructure.of(modules, blocks, buffers_of(model))


def buffers_of(model: nn.Module) -> list[list[Any]]:
    """Name, shape and element type of every buffer, those aside that were None before training."""
    filled = model.__dict__.get(_FILLED, ())
    return [[name, list(b.shape), str(b.dtype)] for name, b in model.named_buffers() if name not in filled]


def _strides(parameter: nn.Parameter) -> list[list[int]]:
    """Strides that are not contiguous: other kernels run with these, and take other memory."""
    if nn.parameter.is_lazy(parameter) or parameter.stride() == contiguous_strides(parameter.shape):
        return []
    return [list(parameter.stride())]


def software_versions() -> dict[str, str]:
    """Versions of what numbers depend on."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("protwin", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

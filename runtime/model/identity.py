"""What a model is, as a hash, and with what software something was measured."""

from __future__ import annotations

import platform
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from ...shared.factors.structure import ModelStructure, structure_hash
from .strides import contiguous_strides


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
    """Name, shape and element type of every buffer."""
    return [[name, list(b.shape), str(b.dtype)] for name, b in model.named_buffers()]


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

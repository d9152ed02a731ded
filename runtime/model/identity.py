"""What a model is, as a hash, and with what software and on what machine something was measured."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .strides import contiguous_strides


def model_hash(model: nn.Module) -> str:
    """Hash of a model's structure: module classes, parameters (name, shape, strides, dtype, trainable), buffers."""
    facts: list[list[list[Any]]] = [
        [[path, type(module).__qualname__] for path, module in model.named_modules()],
        [[name, list(p.shape), str(p.dtype), p.requires_grad, *_strides(p)] for name, p in model.named_parameters()],
        [[name, list(b.shape), str(b.dtype)] for name, b in model.named_buffers()],
    ]
    return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()[:16]


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


@lru_cache(maxsize=1)
def machine_name() -> str:
    """Processor, usable cores and memory of this machine: ``"Intel Xeon ..., 2 cores, 24 GiB"``."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return f"{processor}, {num_cores()} cores, {host_memory_bytes() / 2**30:.0f} GiB"


def device_description(device: torch.device) -> str:
    """What measurements on ``device`` are filed under: the machine, and the accelerator in it."""
    return machine_name() if device.type == "cpu" else f"{torch.cuda.get_device_name(device)} in {machine_name()}"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def host_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

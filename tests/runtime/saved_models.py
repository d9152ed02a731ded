"""Models without memory, the files that fill them, and what memory is taken meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def on_meta(model: nn.Module) -> nn.Module:
    """``model`` without its weights, and with other values in its buffers."""
    for parameter in model.parameters():
        empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, empty)
    for buffer in _persistent(model):
        buffer.copy_(torch.full_like(buffer, 3))
    return model


def _persistent(model: nn.Module) -> list[torch.Tensor]:
    return [b for name, b in model.named_buffers() if name in model.state_dict()]


def save(model: nn.Module, folder: Path, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Write its ``state_dict`` as two files with an index, tied weights once, floats in ``dtype``; gives the values."""
    kept: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            values = tensor.detach().clone(memory_format=torch.contiguous_format)
            kept[name] = values.to(dtype) if dtype is not None and values.is_floating_point() else values
    names = list(kept)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: kept[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return kept


class HostPeak(TorchDispatchMode):
    """Bytes of all storages that are made within its block on this thread: now, and the most at any operation.

    Those that are files in memory are left out: the system takes them back when it is short.
    """

    def __init__(self, *there: torch.Tensor) -> None:
        """``there``: what exists before and counts too."""
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, bool]] = {}
        """Storages that may be alive, by what names each as long as somebody refers to it; whether each is a file."""
        self.peak_bytes = 0
        for tensor in there:
            self._note(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(given):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._note(leaf)
        return given

    def _note(self, tensor: torch.Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference.cdata not in self._known:
            self._known[reference.cdata] = reference, _is_mapped(tensor.untyped_storage())
            self.peak_bytes = max(self.peak_bytes, self.bytes)

    @property
    def bytes(self) -> int:
        """Of storages that are alive."""
        found = 0
        for name, (reference, is_file) in [*self._known.items()]:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._known[name]  # type: ignore[unreachable]
            elif not is_file:
                found += storage.nbytes()
        return found


def _is_mapped(storage: torch.UntypedStorage) -> bool:
    if storage.resizable():
        return False  # torch's own allocator made it.
    address = storage.data_ptr()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    for line in maps.splitlines() if ".safetensors" in maps else ():
        if line.endswith(".safetensors"):
            first, last = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
            if first <= address < last:
                return True
    return False

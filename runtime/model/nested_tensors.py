"""The tensors within nested arguments and results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN: Final = frozenset({bool, int, float, str, NoneType, torch.dtype, torch.device, torch.layout})
"""Types of most arguments of operations that are no tensors."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``: itself, or within dicts, lists, tuples and dataclasses, depth first."""
    found: list[torch.Tensor] = []
    _find(value, found)
    return iter(found)


def _find(value: Any, found: list[torch.Tensor]) -> None:
    """No generator of generators: whoever watches asks several times for each operation."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            if type(item) not in _PLAIN:
                _find(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _find(item, found)
    elif is_dataclass(value):
        for field in fields(value):
            _find(getattr(value, field.name, None), found)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory ``tensor`` has: within ``torch.vmap``, where masks are made, it is one of wrappers."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def containers_as_they_are(value: Any) -> Any:
    """``value`` with new lists, dicts and sets in the place of those that it holds; tensors and the like are the same.

    What somebody does to the old containers afterwards does not show in the new ones.
    """
    if type(value) is dict:
        return {key: containers_as_they_are(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(containers_as_they_are(item) for item in value)
    return value


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the storages of ``tensors``, each storage once."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor is not None)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def storages_in(value: Any) -> set[int]:
    """Identities of the storages of the tensors in ``value``."""
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(value) if has_storage(tensor)}


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a storage of its own, which could be copied.

    Sparse ones and wrappers have none, nor have the zeros that forward-mode AD has for what depends on nothing: theirs
    states a size and has no memory.
    """
    has_memory = tensor.layout is torch.strided and not tensor._is_zerotensor()
    return has_memory and not is_traceable_wrapper_subclass(tensor)

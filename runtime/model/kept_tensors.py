"""Tensors that modules keep in plain attributes: neither parameters nor buffers, and on the device all the same.

Hook-based ``torch.nn.utils.spectral_norm`` keeps the weight that it computed last, other modules keep rotary tables,
caches by shape, activations to look at.  They lie in attributes, or in lists, dicts and the like within these.  What
lies behind objects of any other class is not looked for here; the ledger finds it when an operation reads it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType, NoneType
from typing import Any, Final

import torch
from torch import nn

from .nested_tensors import has_storage

_OF_EVERY_MODULE: Final = frozenset(nn.Module().__dict__)
"""Attributes of ``nn.Module`` itself: its tables of parameters, buffers, submodules and hooks."""
_LEAVES: Final = frozenset({NoneType, bool, int, float, str, FunctionType, MethodType})
"""What most attributes are, and holds nothing."""
_ROWS: Final = (list, tuple, set, frozenset, deque)
_REFILLED: Final = (list, set, deque, dict, OrderedDict, defaultdict)
"""Containers that are emptied and filled again as one would expect."""


def kept_tensors(modules: Iterable[nn.Module], *, model: nn.Module | None = None) -> Iterator[torch.Tensor]:
    """The tensors in plain attributes of ``modules``, each as often as it is found.

    Parameters and buffers of ``modules``, or of the ``model`` that they belong to, are left out.
    """
    modules = list(modules)
    seen: set[int] = set()
    found = [
        tensor
        for module in modules
        for name, value in module.__dict__.items()
        if type(value) not in _LEAVES and name not in _OF_EVERY_MODULE
        for tensor in _tensors_within(value, seen)
    ]
    if not found:
        # The usual case, asked whenever a block that swaps has run: nobody has to look at the whole model.
        return
    owners = modules if model is None else model.modules()
    own = {id(tensor) for module in owners for tensor in (*module.parameters(False), *module.buffers(False))}
    for tensor in found:
        if id(tensor) not in own and has_storage(tensor):
            yield tensor


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _OF_EVERY_MODULE}


def _tensors_within(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor in a value; containers that were ``seen`` are not entered again, as some contain themselves."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts = _parts(value)
    if parts is None or id(value) in seen:
        return
    seen.add(id(value))
    for part in parts:
        yield from _tensors_within(part, seen)


def _parts(value: Any) -> list[Any] | None:
    """What a container holds, or a module that is no part of the model; None for what is neither."""
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, _ROWS):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        # Read without the code of properties, which some configurations answer with errors.
        held = getattr(value, "__dict__", None)
        return [held.get(f.name) if held is not None else getattr(value, f.name, None) for f in fields(value)]
    return None


def replace_kept_tensors(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put ``change(tensor)`` in the place of every tensor in a plain attribute of ``module``, in place."""
    for name, value in _plain_attributes(module).items():
        module.__dict__[name] = _changed(value, change, set())


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor], seen: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    parts = _parts(value)
    if parts is None or id(value) in seen or next(_tensors_within(value, set()), None) is None:
        return value
    seen.add(id(value))
    if isinstance(value, nn.Module):
        tables: list[dict[str, Any]] = [t for part in value.modules() for t in (part._parameters, part._buffers)]
        for table in tables:
            table.update({name: change(tensor) for name, tensor in table.items() if tensor is not None})
        return value
    made = [_changed(part, change, seen) for part in parts]
    if isinstance(value, dict):
        for key, part in zip(list(value), made, strict=True):
            value[key] = part
    elif isinstance(value, list | set | deque):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(made)
    elif is_dataclass(value):
        for field, part in zip(fields(value), made, strict=True):
            object.__setattr__(value, field.name, part)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*made)
    else:
        return type(value)(made)
    return value


@contextmanager
def attributes_as_found(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Let plain attributes of a model, and lists, dicts, sets and deques within them, hold afterwards what they did.

    So do hooks on forward: transformers puts some on once, and notes in an attribute that it has.

    Gives the tensors in attributes, which live as long as the block.
    """
    found = [(module, _plain_attributes(module)) for module in model.modules()]
    hooks = [(module._forward_hooks, dict(module._forward_hooks)) for module in model.modules()]
    contents: dict[int, tuple[Any, Any]] = {}
    for _, attributes in found:
        for value in attributes.values():
            _note_contents(value, contents)
    try:
        yield list(kept_tensors(model.modules()))
    finally:
        for table, before in hooks:
            for key in table.keys() - before.keys():
                del table[key]
        for container, content in contents.values():
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)
        for module, attributes in found:
            for name in _plain_attributes(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)


def _note_contents(value: Any, contents: dict[int, tuple[Any, Any]]) -> None:
    parts = _parts(value)
    if parts is None or id(value) in contents:
        return
    contents[id(value)] = (value, value.copy()) if type(value) in _REFILLED else ([], [])
    for part in parts:
        _note_contents(part, contents)

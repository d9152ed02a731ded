"""The parts of a model that PEFT made, recognised without importing it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def is_peft(part: object) -> bool:
    """Whether PEFT made the class of ``part``, or a class that it inherits from."""
    return any(found.__module__.partition(".")[0] == "peft" for found in type(part).__mro__)


def is_of(part: object, *names: str) -> bool:
    """Whether ``part`` is of a class of PEFT with one of these names, or inherits from it."""
    return any(c.__name__ in names and c.__module__.partition(".")[0] == "peft" for c in type(part).__mro__)


def peft_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All of them, with their paths."""
    for path, part in model.named_modules():
        if is_peft(part):
            yield path, part


def wrapped_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Parameters that LoRA adapts as such (``target_parameters``), each with the module that does.

    [Note: Parameters that are adapted]
    Such a module puts a parametrization on the parameter in every forward, and takes it off behind it.  torch counts
    that as changes of the parameter, whose values stay what they are.
    """
    for _, part in peft_parts(model):
        if is_of(part, "ParamWrapper"):
            wrapper: Any = part
            yield part, getattr(wrapper.get_base_layer(), wrapper.parameter_name)

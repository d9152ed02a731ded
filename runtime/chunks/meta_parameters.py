"""Parameters on the meta device, which have shapes and no memory, on their way to a chunk and back.

torch refuses ``parameter.data = x`` across that border, so that what is behind the parameter is exchanged
(``torch.utils.swap_tensors``): modules, parameter groups and users keep the same object.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...shared.basics.errors import PlanError


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the block modules are made with their parameters on the meta device and their buffers as they are.

    So ``carry_out(..., weights=FOLDER)`` finds a model without memory whose buffers have values: many are in no file.
    Other threads are not to make modules meanwhile.
    """

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        made = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        made.__class__ = type(parameter)
        made.__dict__.update(parameter.__dict__)
        return made

    # torch annotates hooks that give nothing, and takes what they give.
    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def check_exchangeable(name: str, parameter: nn.Parameter) -> None:
    """Raise PlanError if a parameter on the meta device cannot be given memory without losing something.

    Its hooks would stay behind with what it was, and torch exchanges nothing that weak references lead to.
    """
    if weakref.getweakrefs(parameter):
        raise PlanError(
            f"parameter {name} is on the meta device and cannot be given memory, since there are weak references to "
            f"it. Drop them before carry_out()."
        )
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise PlanError(
            f"parameter {name} is on the meta device and has hooks on its gradient, which would be lost when it is "
            f"given memory. Register them after carry_out()."
        )


def set_all(parameters: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    """``set_values`` for each, or for none if one of them fails."""
    before = [parameter.data for parameter in parameters]
    done: list[nn.Parameter] = []
    try:
        for parameter, value in zip(parameters, values, strict=True):
            set_values(parameter, value)
            done.append(parameter)
    except BaseException:
        for parameter, value in zip(done, before, strict=False):
            set_values(parameter, value)
        raise


def set_values(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Let ``values`` be the parameter's from now on, wherever they are.

    Raises PlanError if a parameter on the meta device is held by others than modules.
    """
    if parameter.is_meta and not values.is_meta:
        _exchange(parameter, values)
    elif values.is_meta and not parameter.is_meta:
        parameter.grad = None
        _exchange(parameter, values)
    else:
        parameter.data = values


def _exchange(parameter: nn.Parameter, values: torch.Tensor) -> None:
    # With a count of changes of its own: what is behind ``values`` is written to by gathers.
    other = nn.Parameter(values.new_empty(0), requires_grad=parameter.requires_grad)
    other.data = values
    # What is the object's own is exchanged too, and is to stay.
    other.__class__ = type(parameter)
    other.__dict__.update(parameter.__dict__)
    try:
        torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise PlanError(
            f"a parameter of shape {tuple(parameter.shape)} cannot leave the meta device, or return to it: "
            f"{str(error).splitlines()[0]}. Drop weak references to it, and what was computed from it."
        ) from error

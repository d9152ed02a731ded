"""Parameters whose memory is elsewhere: whoever reads one is told so.

[Note: Parameters that are away]
An offloaded parameter keeps its shape and has no memory while its chunk is not on the device, and torch's kernels do
not look before they read: that would end the process.  While it is away its class is therefore one that torch asks
before every operation (``__torch_function__``).  Its facts (shape, dtype, gradient, hooks) may be asked for, its values
may not.  When the chunk is back, so is the class, and operations cost what they always cost.  Autograd's own uses of
saved weights do not pass here; the schedule answers for these.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import ScheduleError
from ..model.parameters import asks_for_facts

NAME: Final = "_protwin_name"
"""Where a parameter that may be away has its name."""
_BACKWARDS: Final = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def send_away(parameter: nn.Parameter, name: str) -> None:
    """The parameter ``name`` has no memory from now on."""
    away = _away_class(type(parameter))
    if away is not None:
        parameter.__dict__[NAME] = name
        parameter.__class__ = away


def bring_back(parameter: nn.Parameter) -> None:
    """The parameter has its memory again; nothing is left of ``send_away``."""
    original = getattr(type(parameter), "_protwin_original", None)
    if original is not None:
        parameter.__class__ = original
        parameter.__dict__.pop(NAME, None)


@lru_cache
def _away_class(original: type[nn.Parameter]) -> type[nn.Parameter] | None:
    """The class of parameters that are away; None for those that are, and for those that answer torch themselves."""
    if getattr(original.__torch_function__, "__func__", original.__torch_function__) is not (
        nn.Parameter.__torch_function__
    ):
        return None
    body = {"__torch_function__": classmethod(refuse_values), "_protwin_original": original}
    return type(original.__name__, (original,), body)


def refuse_values(cls: type, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """``__torch_function__`` of a parameter that is away: facts, and no values."""
    name = getattr(function, "__name__", str(function))
    attribute = getattr(getattr(function, "__self__", None), "__name__", "")
    if name == "__set__" or asks_for_facts(function):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))
    given = [found for value in (*args, *(kwargs or {}).values()) for found in _members(value)]
    names = [found.__dict__[NAME] for found in given if isinstance(found, nn.Parameter) and NAME in found.__dict__]
    which = f"parameter {names[0]}" if names else "a parameter"
    if function in _BACKWARDS:
        raise ScheduleError(
            f"{which} was named as what gradients are taken of ({name}), but it is away and comes when loss.backward() "
            f"reaches it. Call loss.backward() alone, without inputs=."
        )
    raise ScheduleError(
        f"{which} was read ({attribute or name}) while its chunk is not on the device. A plan is being carried out: "
        f"read weights from training.state_dict() between two steps, or after close(), or keep their chunks persistent "
        f"(n_persist); train the whole model, called as model(...), no part of it and not its forward(). A training "
        f"that was lost is what protwin.runtime.training_of(model) gives."
    )


def _members(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)

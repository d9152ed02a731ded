"""Parts of a model that ``torch.compile`` or TorchScript runs, which a plan cannot follow.

[Note: Compiled parts]
A plan accounts for memory operation by operation, as a trace has seen them in eager mode.  A compiled block is one
operation: it saves other tensors for backward, and gives all gradients of the block at once.  Watching operations also
keeps PyTorch from compiling, without a word and for all later calls of that code; and the hooks of a block that is
compiled with ``Module.compile`` are compiled with it.
"""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...shared.basics.errors import ScheduleError

_ORIGINAL: Final = "_torchdynamo_orig_callable"
"""What functions have that ``torch.compile`` gave."""
_DISABLED: Final = "_torchdynamo_disable"
_METHODS: Final[WeakKeyDictionary[type, str | None]] = WeakKeyDictionary()
"""What ``_method_of`` has found.  It keeps no class alive: that of a parametrized module holds the module."""


def compiled_part(model: nn.Module) -> str | None:
    """What is compiled and what to do about it, if a part of the model is ([Note: Compiled parts])."""
    for path, module in model.named_modules():
        name = path or type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            return (
                f"{name} is TorchScript (torch.jit.script or torch.jit.trace): it takes no hooks, by which a plan "
                f"knows where the model is, and what it saves for backward, nobody has seen. Build the model with the "
                f"module that it was made of; a function may be scripted."
            )
        how = _how(module)
        if how is not None:
            return (
                f"{name} is compiled ({how}). A plan accounts for the memory of every operation, as a trace sees them "
                f"in eager mode; what compiled code saves for backward, nobody has seen. Trace and train the model "
                f"uncompiled: build it without torch.compile, or set module._compiled_call_impl = None after "
                f"module.compile(). Fused kernels that are operations of their own, such as "
                f"scaled_dot_product_attention or those of torch.library, may stay. After close() it may be compiled."
            )
    return None


def _how(module: nn.Module) -> str | None:
    """What was called on ``module``, if it is compiled."""
    if module._compiled_call_impl is not None:
        return "compile() of the module"
    if hasattr(module, "_orig_mod") and hasattr(module, "dynamo_ctx"):
        return "torch.compile of the module"
    kind: Any = type(module)
    found = next((name for name, value in vars(module).items() if _is_compiled(value)), _method_of(kind))
    return None if found is None else f"torch.compile of its {found}"


def _method_of(kind: Any) -> str | None:
    """The first compiled method of a class of modules."""
    if kind not in _METHODS:
        methods = ((name, value) for base in kind.__mro__ for name, value in vars(base).items())
        _METHODS[kind] = next((name for name, value in methods if _is_compiled(value)), None)
    return _METHODS[kind]


def _is_compiled(value: Any) -> bool:
    """Whether ``torch.compile`` gave a function; ``torch.compiler.disable`` marks those that stay eager."""
    return hasattr(value, _ORIGINAL) and not hasattr(value, _DISABLED)


def refuse_compiled_call() -> None:
    """Raise ScheduleError if the model is called by way of ``torch.compile``, which goes round its hooks."""
    # A constant to whoever traces this for compiling, so that it is refused when the traced code runs.
    if torch.compiler.is_dynamo_compiling():
        _refuse_call()


def _refuse_call() -> None:
    raise ScheduleError(
        "the model is called from compiled code (torch.compile of the model, or of the training step), which would "
        "compile what brings its weights. Call the model itself."
    )


# As torch.compiler.disable does, which would import the compiler: an error is not to be traced, but raised.
setattr(_refuse_call, _DISABLED, True)
setattr(_refuse_call, f"{_DISABLED}_msg", None)

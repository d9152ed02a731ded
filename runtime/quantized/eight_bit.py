"""Products with weights of eight bits that keep nothing of their input.

[Note: Inputs that outlive backward]
bitsandbytes' products with eight bits hold their input in a plain attribute of the graph's node, for the gradient of a
weight that has none.  Autograd does not know of it, so that it would stay on the device until the whole graph goes: as
a rule in the next iteration's forward, when the loop's variable takes the next loss.  While protwin has a model, its
products are bitsandbytes' own, operation for operation, without that attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_UNPACKING_DEVICES = ("cpu", "xpu")
"""Where bitsandbytes unpacks the weight in training; elsewhere it multiplies eight bits by eight bits."""
_as_on_cuda = False


@contextmanager
def products_as_on_cuda() -> Iterator[None]:
    """Within the block fake tensors meet the products of CUDA, without outliers of activations: these are values."""
    global _as_on_cuda
    before, _as_on_cuda = _as_on_cuda, True
    try:
        yield
    finally:
        _as_on_cuda = before


def install(module: Any) -> None:
    """Let a linear map of eight bits run the products of this module, until ``remove``."""
    module.__dict__["forward"] = partial(_forward, module)


def remove(module: Any) -> None:
    """Its own forward again."""
    del module.__dict__["forward"]


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    state = module.state
    state.is_training = module.training
    bias = module.bias if module.bias is None or module.bias.dtype == x.dtype else module.bias.to(x.dtype)
    unpacking, scaled = _products()
    is_fake = isinstance(x, FakeTensor)
    if module.training and x.device.type in _UNPACKING_DEVICES and not (is_fake and _as_on_cuda):
        made: torch.Tensor = unpacking.apply(x, module.weight, None, bias, state)
        return made
    threshold, state.threshold = state.threshold, 0.0 if is_fake else state.threshold
    try:
        made = scaled.apply(x, module.weight, None, bias, state)
    finally:
        state.threshold = threshold
    return made


@lru_cache
def _products() -> tuple[Any, Any]:
    """Both products of bitsandbytes, made to forget their input."""
    functions: Any = import_module("bitsandbytes.autograd._functions")

    class Unpacking(functions.MatMul8bitFp):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *given: Any) -> torch.Tensor:
            made: torch.Tensor = functions.MatMul8bitFp.forward(ctx, *given)
            ctx.A = None
            return made

    class Scaled(functions.MatMul8bitLt):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *given: Any) -> torch.Tensor:
            made: torch.Tensor = functions.MatMul8bitLt.forward(ctx, *given)
            if not ctx.is_empty:
                ctx.tensors, ctx.tensor_states = (None, None, None), (None, None)
            return made

    return Unpacking, Scaled

"""Products with packed weights as other releases of bitsandbytes make them, for predictions of what others run.

[Note: Inputs that products keep]
The gradient of a packed weight is never wanted, and still bitsandbytes holds what a map reads, in an attribute of the
graph's node, with four bits before 0.43.2 and with eight bits always.  Here the input is saved for backward instead,
so that it goes as the map's backward ends.  There it goes with the whole graph: later in a block's backward, where a
recomputed block has its inputs until its end, and past the step where a loop holds its loss.

[Note: Weights that are unpacked to another type]
A weight of four bits is unpacked to the type that it was packed from.  Where the map computes in another one it is cast
then: in backward with every release, in forward before 0.50.  Both copies lie there until the cast ends.
"""

from __future__ import annotations

from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn

from ...shared.phases.quantization import PackedProducts, QuantizedType
from .layers import quantization_of, quantized_layers

_MARK: Final = "_products_of_release"


def mark(model: nn.Module, products: PackedProducts) -> None:
    """Let the packed maps of ``model``, on the meta device, be traced with ``products``."""
    for layer in quantized_layers(model):
        assert layer.module.weight.is_meta, "products of other releases are predicted, and never run"
        layer.module.__dict__[_MARK] = products
        state = getattr(layer.module, "quant_state", None)
        if products.packed_from is not None and state is not None:
            state.dtype = getattr(torch, products.packed_from)


def products_of(model: nn.Module) -> PackedProducts | None:
    """Those that packed maps of ``model`` are traced with; None: those of the release that is installed."""
    found = (module.__dict__.get(_MARK) for module in model.modules())
    return next((products for products in found if products is not None), None)


def install(module: Any) -> None:
    """Let a packed map that is marked run its products, until ``remove``; others stay as they are."""
    products: PackedProducts | None = module.__dict__.get(_MARK)
    packed = quantization_of(module)
    if products is None or packed is None:
        return
    forward = module.__dict__.get("forward", type(module).forward.__get__(module))
    if packed.type is not QuantizedType.INT8 and products.casts_ahead:
        forward = partial(_casting, module)
    if products.keeps_inputs(packed.type):
        forward = partial(_keeping, forward)
    module.__dict__["forward"] = forward


def remove(module: Any) -> None:
    """Its own forward again."""
    module.__dict__.pop("forward", None)


def _keeping(forward: Any, x: torch.Tensor) -> torch.Tensor:
    kept = _Kept.apply(x)  # type: ignore[no-untyped-call]
    made: torch.Tensor = forward(kept)
    node = kept.grad_fn
    if node is not None and made.requires_grad:
        # Attributes of nodes are made anew by checkpointing that is reentrant alone: it recomputes before backward.
        made.register_hook(lambda _: _found_again(node))  # type: ignore[no-untyped-call]
    return made


def _found_again(node: Any) -> None:
    node.found = node.saved_tensors


class _Kept(torch.autograd.Function):
    """What a map reads, saved until its gradient is there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ctx.found = None
        return gradient


def _casting(module: Any, x: torch.Tensor) -> torch.Tensor:
    computed = x if module.compute_dtype is None else x.to(module.compute_dtype)
    bias = module.bias if module.bias is None else module.bias.to(computed.dtype)
    made: torch.Tensor = _casting_product().apply(computed, module.weight, None, bias, module.weight.quant_state)
    return made.to(x.dtype)


@lru_cache
def _casting_product() -> Any:
    """The product of the release that is installed, with a forward that unpacks to the state's type."""
    functions: Any = import_module("bitsandbytes.autograd._functions")
    unpacked: Any = import_module("bitsandbytes.functional").dequantize_4bit

    class Casting(functions.MatMul4Bit):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, packed: Any, _: None, bias: Any, state: Any) -> torch.Tensor:
            made = torch.nn.functional.linear(x, unpacked(packed, state).to(x.dtype), bias)
            ctx.is_empty, ctx.state, ctx.tensors = False, state, (None, packed)
            ctx.dtype_A, ctx.dtype_B, ctx.dtype_bias = x.dtype, packed.dtype, None if bias is None else bias.dtype
            return made

    return Casting

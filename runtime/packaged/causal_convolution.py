"""``causal_conv1d``: a depthwise convolution over what came before, with its activation, as one kernel each way.

Source: causal_conv1d_interface.py and cpp_functions.py of causal-conv1d 1.7.
"""

from __future__ import annotations

from typing import Any

import torch

from .launching import launch


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """``x`` (samples, channels, length) convolved with ``weight`` (channels, width), as long as it was."""
    result: torch.Tensor = _CausalConvolution.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The result, as a kernel of another package asks for it."""
    result = torch.empty_like(x)
    launch("causal_conv1d_fwd", (x, weight, bias), (result,))
    return result


def convolved_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient: torch.Tensor,
    of_x: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of ``x``, written into ``of_x`` where there is one, of the weight and of the bias."""
    of_x = torch.empty_like(x) if of_x is None else of_x
    of_weight = torch.zeros_like(weight, dtype=torch.float32)
    of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    written = [of_x, of_weight] if of_bias is None else [of_x, of_weight, of_bias]
    launch("causal_conv1d_bwd", (x, weight, bias, gradient), written)
    return of_x, of_weight.to(weight.dtype), None if bias is None or of_bias is None else of_bias.to(bias.dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """``x`` with its channels or its length side by side."""
    return x if 1 in (x.stride(1), x.stride(2)) else x.contiguous()


class _CausalConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x = strided(x)
        ctx.save_for_backward(x, weight, bias)
        return convolved(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        return convolved_backward(x, weight, bias, strided(gradient))

"""Grouped matrix products of fake tensors: how mixtures of experts run all experts at once.

torch knows their result for fake tensors in bfloat16 alone, though it computes them in every type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FakeGroupedProducts(TorchDispatchMode):
    """Gives grouped products of any type a result of the right shape; enter it within the fake mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer grouped products; hand everything else on."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and not args[0].fake_mode.in_kernel_invocation:
            # Most of what is asked while fake tensors run: the answer of their own mode, without the way there.
            return args[0].fake_device
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype is torch.bfloat16:
            return func(*args, **kwargs)
        first, second = args[0], args[1]
        offsets = args[2] if len(args) > 2 else kwargs.get("offs")
        return first.new_empty(_grouped_shape(first, second, offsets), dtype=kwargs.get("out_dtype") or first.dtype)


def _grouped_shape(first: torch.Tensor, second: torch.Tensor, offsets: torch.Tensor | None) -> tuple[int, ...]:
    """Groups are the leading dim of three-dim factors; with two two-dim ones, stretches of the dim they share."""
    rows, columns = first.shape[-2], second.shape[-1]
    if first.dim() == second.dim() == 3:
        return (first.shape[0], rows, columns)
    if first.dim() == second.dim() == 2:
        assert offsets is not None
        return (offsets.shape[0], rows, columns)
    return (rows, columns)

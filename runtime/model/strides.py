"""Strides of parameters: which ones a chunk keeps, and how one stretch of memory holds a tensor of any of them.

[Note: Strides are kept]
Which kernel torch runs depends on strides: a convolution whose weight is ``channels_last`` runs another one than with a
contiguous weight, and so does a product with a transposed weight.  Two kernels add in different orders, so the bits
differ.  A parameter therefore keeps its strides in its chunk, and with it its gradient, its master and its optimizer's
state, as in a plain loop.  A chunk has room for the scalars alone, one after the other: strides fit in if the scalars
fill a stretch of memory without holes and without meeting, in whatever order of dimensions.  PyTorch calls this
"non-overlapping and dense", and gives gradients the strides of such parameters alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether scalars of these strides fill one stretch of memory, each in a place of its own."""
    if 0 in shape:
        return True
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != reach:
            return False
        reach *= size
    return True


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor: the last dimension is the innermost one."""
    strides: list[int] = []
    reach = 1
    for size in reversed(shape):
        strides.append(reach)
        reach *= max(size, 1)
    return tuple(reversed(strides))


def unkept_strides(model: nn.Module) -> str | None:
    """What is wrong and what to do about it, if a chunk cannot keep a parameter's strides."""
    with torch._C.DisableTorchFunctionSubclass():
        for name, parameter in model.named_parameters():
            if nn.parameter.is_lazy(parameter) or is_dense(parameter.shape, parameter.stride()):
                continue
            return (
                f"parameter {name} has shape {tuple(parameter.shape)} and strides {parameter.stride()}: its scalars "
                f"share memory (expand) or leave holes in it (a slice of something wider), which a chunk has no room "
                f"for. Give it memory of its own before tracing: nn.Parameter(x.contiguous()) in its place."
            )
    return None


def strided(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view of as many scalars (n,), with the shape and the dense strides of ``like``."""
    return flat.as_strided(like.shape, like.stride())


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's scalars (n,) as they lie in memory; a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def copy_strided(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy of ``values`` with the strides of ``like``, which has their shape."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=values.dtype, device=values.device)
    return made.copy_(values)


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or one of each of its elements where a dimension repeats them (``expand``)."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor

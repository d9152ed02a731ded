"""Operations of two element types, which kernels refuse and fake tensors let pass."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..model.nested_tensors import tensors_in

_ATEN: Final = torch.ops.aten
_OF_ONE_TYPE: Final = frozenset(
    {
        _ATEN.mm,
        _ATEN.addmm,
        _ATEN.bmm,
        _ATEN.baddbmm,
        _ATEN.mv,
        _ATEN.addmv,
        _ATEN.convolution,
        _ATEN.linear,
    }
)
"""Whose floating tensors must all be of one type."""


class RefusingMixedTypes(TorchDispatchMode):
    """Raises RuntimeError, as kernels do, where products or norms are given tensors of two floating types.

    A norm may have parameters that are wider than what it is given, and no others.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The operation itself."""
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        is_norm = packet is _ATEN.native_layer_norm
        if packet in _OF_ONE_TYPE or is_norm:
            found = [tensor.dtype for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
            refused = set(found[1:]) - {found[0], *([torch.float32] if is_norm else [])} if found else set()
            if refused:
                given, others = (str(dtype).removeprefix("torch.") for dtype in (found[0], refused.pop()))
                raise RuntimeError(f"{packet} is given {given} and {others}")
        return func(*args, **kwargs)

"""Autocast around a training's forwards: none of its casts outlives one, and it must be that of the trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from ...shared.records.question import matrix_dtype, weight_dtype
from ...shared.schema.workload import DType, OperationClass, Workload

_CASTS: Final = frozenset({DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16})
"""What autocast casts between."""


def following_autocast(model: nn.Module, workload: Workload, device_type: str) -> list[Any]:
    """Handles of the hooks that end its casts with each forward, and warn once of another one than the trace's.

    A model may enter autocast within its own forward, so that what its first block runs under counts.
    """
    # As if autocast ended with the forward: what it still keeps is no part of what the plan accounts for.
    leave = model.register_forward_hook(lambda *_: torch.clear_autocast_cache())
    first = dict(model.named_modules()).get(workload.blocks[0].name, model)
    return [leave, first.register_forward_pre_hook(_looking_once(workload, device_type))]


def _looking_once(workload: Workload, device_type: str) -> Callable[..., None]:
    """A hook that looks at the first forward that is trained on."""
    is_seen = False

    def look(*_: Any) -> None:
        nonlocal is_seen
        if is_seen or not torch.is_grad_enabled():
            return
        is_seen = True
        now = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        words = why_other(workload, None if now is None else DType(str(now).removeprefix("torch.")))
        if words is not None:
            warnings.warn(words, stacklevel=2)

    return look


def why_other(workload: Workload, now: DType | None) -> str | None:
    """What is wrong if forwards run under autocast to ``now`` (None: without); None if the trace did the same.

    A workload says in what its products compute, and not why.  Where some have the type of autocast, or some weights
    that of most products, or weights are packed, which are unpacked to a type of their own, nothing is said.
    """
    traced, weights = matrix_dtype(workload), weight_dtype(workload)
    if traced not in _CASTS or now is traced or now in _product_dtypes(workload):
        return None
    if now is not None:
        return (
            f"forwards run under torch.autocast to {now}, but the products of {workload.model_name} were traced in "
            f"{traced}: the plan's memory has none of the casts, and its times are other ones. Let torch.autocast go "
            f"around trace() too, and search a plan for that workload."
        )
    if weights not in _CASTS or any(p.quantized is not None or p.dtype is traced for p in workload.parameters):
        return None
    return (
        f"forwards run without torch.autocast, but the products of {workload.model_name} were traced in {traced}, with "
        f"weights in {weights}: activations may take more memory than the plan has. Let torch.autocast go around the "
        f"forwards too, or trace without it, and search a plan for that workload."
    )


def _product_dtypes(workload: Workload) -> set[DType]:
    forwards = (workload.prologue_forward, workload.epilogue_forward, *(one.forward for one in workload.profiles))
    operations = (operation for phase in forwards for operation in phase.operations)
    return {one.dtype for one in operations if one.operation_class is OperationClass.MATMUL}

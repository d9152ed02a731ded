"""A module's forward as a function of its parameters' values: a tile's gradients reach no hook of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

TokenFunction = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
"""What a module gives for hidden states (..., hidden), with the values of its parameters."""


def casting_anew(kind: str) -> AbstractContextManager[Any]:
    """Within the block, autocast on devices of this kind is as it is, and keeps no cast.

    One that is made without a graph and kept would have none where the same weight is used again.
    """
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False)


def head_function(head: nn.Module, forward: Callable[..., Any]) -> tuple[TokenFunction, tuple[torch.Tensor, ...]]:
    """``forward`` of ``head``, which stands under another one's name, as a function of its parameters; and these.

    In place of each parameter stands a value of the same storage while it runs, so that gradients of a tile reach no
    hook of the parameter's own.
    """
    names, weights = [], []
    for name, parameter in head.named_parameters():
        names.append(f"module.{name}")
        weights.append(parameter)

    alone = _Alone(head, forward)

    def run(hidden: torch.Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = torch.func.functional_call(alone, dict(zip(names, values, strict=True)), (hidden,))
        return logits

    return run, tuple(weights)


class _Alone(nn.Module):
    """A module's forward without the module's own hooks, which fire once for all tiles."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, hidden: torch.Tensor) -> Any:
        """What the module gives."""
        return self._forward(hidden)

"""Modules in the place of a block's attention or FFN: one linear map, or nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class AbsentFfn(nn.Module):
    """Adds nothing to the residual stream."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Zeros of the input's shape, without memory of their own."""
        return _zeros(hidden_states)


class AbsentAttention(nn.Module):
    """Adds nothing to the residual stream; has no weights of attention to tell."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """Zeros of the input's shape, without memory of their own."""
        return _zeros(hidden_states), None


class LinearAttention(nn.Linear):
    """One linear map of each token by itself; has no weights of attention to tell."""

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """The mapped tokens."""
        return super().forward(hidden_states), None


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(()).expand(like.shape)

"""A block that returns more than its output."""

from __future__ import annotations

import torch
from torch import nn


class Attending(nn.Module):
    """Attention that gives its weights too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(samples, tokens, width) in and out, and (samples, tokens, tokens)."""
        weights = (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1)
        return x + weights @ self.value(x), weights

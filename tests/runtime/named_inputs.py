"""A block that is given its tensor by name."""

from __future__ import annotations

import torch
from torch import nn


class NamedInputBlock(nn.Module):
    """With dropout, so that recomputation must find its random state again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.3)

    def forward(self, *, hidden: torch.Tensor) -> torch.Tensor:
        """(n, 16) in and out."""
        return hidden + self.dropout(torch.tanh(self.linear(hidden)))

"""Tensors that a loss brings along: neither parameters, nor buffers, nor in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from protwin.runtime import trace
from protwin.shared import WorkloadError
from protwin.shared.schema.workload import Workload

WORDS = 50


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def traced(weights: torch.Tensor, device: str) -> Workload:
    """With a loss that weighs the words, by a tensor that it alone knows."""

    def loss(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten(), weight=weights)

    with torch.device(device):
        return trace(Net(), torch.zeros(2, 8, dtype=torch.long), loss=loss, repeats=0)


def test_weights_of_a_loss_are_its_own() -> None:
    """A model without memory is traced as one with weights of its own is run."""
    weights = torch.rand(WORDS)
    fake, real = traced(weights, "meta"), traced(weights, "cpu")
    for name in ("prologue_forward", "epilogue_forward", "epilogue_backward", "prologue_backward"):
        found, wanted = getattr(fake, name), getattr(real, name)
        assert (found.peak_bytes, found.net_bytes) == (wanted.peak_bytes, wanted.net_bytes), name
    assert fake.resident_bytes == real.resident_bytes


def test_what_has_no_values_and_is_nobodys_is_named() -> None:
    with pytest.raises(WorkloadError, match="no parameter, no buffer and not in the batch"):
        traced(torch.rand(WORDS, device="meta"), "meta")

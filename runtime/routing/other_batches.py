"""Other values in a batch of the same shapes, for blocks that make no choice that can be forced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ..model.batches import Batch, with_tensors

NUM_DRAWN: Final = 3
_STRUCTURE: Final = ("mask", "position", "type", "cu_", "grid", "length")
"""Parts of names of inputs whose values say where data is, and are no data."""


def other_batches(batch: Batch, *, has_other_tokens: bool = True) -> list[Batch]:
    """Batches of the same shapes: one whose data are all its first one's, and some with data drawn from its own.

    What says where data is, masks and positions, stays; without ``has_other_tokens`` all integers do.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(data: torch.Tensor) -> torch.Tensor:
        places = torch.randint(data.numel(), (data.numel(),), generator=generator).to(data.device)
        return data.detach().reshape(-1)[places].reshape(data.shape)

    def constant(data: torch.Tensor) -> torch.Tensor:
        return data.detach().reshape(-1)[:1].expand(data.numel()).reshape(data.shape).clone()

    changes = (constant, *[drawn] * NUM_DRAWN)
    return [_with_data(batch, change, has_other_tokens=has_other_tokens) for change in changes]


def _with_data(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor], *, has_other_tokens: bool) -> Any:
    def changed(name: str, value: torch.Tensor) -> torch.Tensor:
        is_data = value.dim() >= 2 and value.numel() > 0
        is_data = is_data and (has_other_tokens or value.is_floating_point())
        is_data = is_data and value.dtype is not torch.bool and not any(part in name for part in _STRUCTURE)
        return change(value) if is_data else value

    return with_tensors(batch, changed)

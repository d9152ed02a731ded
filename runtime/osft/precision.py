"""Which element types orthogonal subspace fine-tuning computes in: the one place that says so.

Factors, gradients and dense weights are stored in the model's element type.  Decompositions, projections and
reconstructions compute in float32 at least, and what they give is stored again in the type that it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """Within the block nothing is recorded for backward, and no autocast of the caller narrows products."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def computed(dtype: torch.dtype) -> torch.dtype:
    """The element type that tensors of ``dtype`` are computed with: float32, or ``dtype`` where it is wider."""
    return torch.promote_types(dtype, torch.float32)


def stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` in ``dtype``; what is beyond its range becomes the largest that it holds, infinities included."""
    if dtype == values.dtype:
        return values
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)

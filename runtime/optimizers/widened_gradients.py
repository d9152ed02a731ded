"""Gradients in the type of the weights that a step on the host steps with them.

[Note: Memory fresh from the system]
The system zeroes a page the first time that it is touched, which takes longer than the step of its scalars: widening
bfloat16 gradients into fresh tensors made CPU Adam 2.7 times as slow on one core, and more on many, which wait for each
other there.  So the place that one chunk's gradients are widened into is kept for the next chunk, and the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

_LINE_BYTES: Final = 64
"""Of a cache line: no two gradients share one."""


class WidenedGradients:
    """A place for the widened gradients of one chunk at a time; it grows to what the largest chunk needs."""

    def __init__(self) -> None:
        self._place = torch.empty(0, dtype=torch.uint8)

    def of(
        self, gradients: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Each gradient in the type of its weight: itself where it has that, else copied; good until the next call.

        Every copy has the bits and the strides of ``gradient.to(weight.dtype)``.
        """
        pairs = list(zip(gradients, weights, strict=True))
        sizes = [
            0 if gradient is None or gradient.dtype == weight.dtype else _aligned(gradient.numel() * weight.itemsize)
            for gradient, weight in pairs
        ]
        if sum(sizes) > self._place.numel():
            self._place = torch.empty(0, dtype=torch.uint8)  # given back before the larger one is taken
            self._place = torch.empty(sum(sizes), dtype=torch.uint8)
        found: list[torch.Tensor | None] = []
        start = 0
        for (gradient, weight), size_bytes in zip(pairs, sizes, strict=True):
            if gradient is None or gradient.dtype == weight.dtype:
                found.append(gradient)
                continue
            own = self._place[start : start + gradient.numel() * weight.itemsize].view(weight.dtype)
            strides = torch.empty_like(gradient, dtype=weight.dtype, device="meta").stride()
            found.append(own.as_strided(gradient.size(), strides).copy_(gradient))
            start += size_bytes
        return found


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _LINE_BYTES) * _LINE_BYTES

"""The weights of the last completed step, kept while CPU Adam is ahead of it.

[Note: Steps ahead]
CPU Adam steps a chunk as soon as its last gradients have arrived, long before the iteration is complete.  If it never
is, because memory ran out or somebody pressed Ctrl-C, these chunks are one step ahead of all others, and the model
belongs to no step.  So, where that is wanted, what a chunk held before its latest step is kept on the host and given
back in the end.  That takes as much host memory as the weights of offloaded chunks, and a copy before each of their
steps.  The optimizer's state is not kept: it ends with the training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from ..shared.layout import ChunkId
from .chunks import DeviceChunk


class LastStep:
    """What offloaded chunks held before their latest step."""

    def __init__(self) -> None:
        self._kept: dict[ChunkId, list[torch.Tensor]] = {}
        self._num_begun: Counter[ChunkId] = Counter()

    def before_step(self, chunk: DeviceChunk) -> None:
        """CPU Adam is about to step ``chunk``."""
        weights = _weights_at_home(chunk)
        kept = self._kept.setdefault(chunk.chunk.id, [])
        if not kept:
            kept += [torch.empty_like(weight) for weight in weights]
        for copy, weight in zip(kept, weights, strict=True):
            copy.copy_(weight)
        self._num_begun[chunk.chunk.id] += 1

    def take_back(self, chunks: Iterable[DeviceChunk], *, num_completed: int) -> None:
        """Give those of ``chunks`` that are ahead of ``num_completed`` iterations what they held after these."""
        with torch.no_grad():
            for chunk in chunks:
                if self._num_begun[chunk.chunk.id] > num_completed:
                    for copy, weight in zip(self._kept[chunk.chunk.id], _weights_at_home(chunk), strict=True):
                        weight.copy_(copy)
        self._kept.clear()


def _weights_at_home(chunk: DeviceChunk) -> list[torch.Tensor]:
    """The trainable parameters on the host, as the model has them."""
    pairs = zip(chunk.masters, chunk.targets, strict=True)
    return [master if target is None else target for master, target in pairs]

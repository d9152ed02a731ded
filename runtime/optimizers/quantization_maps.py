"""The pairs of maps that 8-bit state is quantized with, one pair for a chunk.

[Note: Maps of 8-bit state]
bitsandbytes gives every optimizer a pair of quantization maps, and every tensor's state refers to it.  A chunk may have
several optimizers, one for each parameter, and states that come back from a file have copies of their own.  All tensors
of a chunk share one pair here, as plans account for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def share_maps(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let 8-bit optimizers of one chunk have one pair of maps; others have none."""
    shared: dict[str, torch.Tensor] | None = None
    for optimizer in optimizers:
        maps = getattr(optimizer, "name2qmap", None)
        if maps:
            shared = maps if shared is None else shared
            optimizer.name2qmap = shared  # type: ignore[attr-defined]


def restore_maps(optimizer: torch.optim.Optimizer) -> None:
    """Let all states refer to the optimizer's pair of maps, in the place of copies."""
    maps = getattr(optimizer, "name2qmap", None)
    if not maps:
        return
    for weight, state in optimizer.state.items():
        for key, name in (("qmap1", "dynamic"), ("qmap2", "udynamic")):
            if key in state:
                maps[name] = maps[name].to(weight.device)
                state[key] = maps[name]

"""The state of a model whose weights are elsewhere, as ``state_dict()`` would give it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..chunks.placed_model import PlacedModel
from .guards import StateAccess


def state_on_host(model: nn.Module, placed: PlacedModel, access: StateAccess) -> dict[str, Any]:
    """Copies of everything that ``model.state_dict()`` holds, on the host; tied weights are one tensor.

    Offloaded chunks are read from their homes: no device memory is needed.  No step may be under way.
    """
    values: dict[int, torch.Tensor] = {}
    for chunk in placed.chunks:
        for parameter, value in zip(chunk.parameters, chunk.values().values(), strict=True):
            values[id(parameter)] = value.detach().to("cpu", copy=True)
    with access.allowed():
        # The parameters themselves, which are not read: their memory may be elsewhere.
        state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if id(value) in values:
            state[name] = values[id(value)]
        elif isinstance(value, torch.Tensor):
            state[name] = value.detach().to("cpu", copy=True)
    return state

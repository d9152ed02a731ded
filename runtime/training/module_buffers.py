"""Module buffers: on the device all the time, unlike parameters, which are placed chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def buffers_on(device: torch.device, model: nn.Module) -> Iterator[None]:
    """Within the block the model's buffers are on ``device``; afterwards back where they were, with what they hold."""
    moved = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                moved.append((module, name, buffer.device))
                module._buffers[name] = buffer.to(device)
    try:
        yield
    finally:
        for module, name, origin in moved:
            buffer = module._buffers[name]
            if buffer is not None:
                module._buffers[name] = buffer.to(origin)

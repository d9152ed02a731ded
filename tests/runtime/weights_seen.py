"""What the forward of every block reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


@contextmanager
def weights_seen(model: nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    """What every block's parameters hold when its forward begins."""
    seen: dict[str, list[torch.Tensor]] = {}

    def look(name: str, module: nn.Module, _: Any) -> None:
        for inner, parameter in module.named_parameters():
            seen.setdefault(f"{name}.{inner}", []).append(parameter.detach().clone())

    handles = [
        module.register_forward_pre_hook(partial(look, name))
        for name, module in model.named_modules()
        if name.startswith("model.layers.") and name.count(".") == 2
    ]
    yield seen
    for handle in handles:
        handle.remove()

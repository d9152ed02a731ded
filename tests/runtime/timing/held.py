"""Everything that a measurement must leave as it found it."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn


def _bits(tensor: torch.Tensor | None) -> Any:
    if tensor is None or tensor.is_meta:
        return None
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist(), tensor.shape, tensor.stride()


def _hooks(module: nn.Module) -> list[list[Any]]:
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [list(table.values()) for table in tables]


@dataclass(frozen=True)
class Held:
    """Of a model, and of the process."""

    facts: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Held:
        state = np.random.get_state()
        return cls(
            {
                "objects": [(name, id(parameter)) for name, parameter in model.named_parameters()],
                "weights": {name: _bits(parameter) for name, parameter in model.named_parameters()},
                "classes": [type(parameter) for parameter in model.parameters()],
                "places": [parameter.device for parameter in model.parameters()],
                "gradients": {name: _bits(parameter.grad) for name, parameter in model.named_parameters()},
                "buffers": {name: (id(buffer), _bits(buffer)) for name, buffer in model.named_buffers()},
                "flags": [module.training for module in model.modules()],
                "attributes": [sorted(module.__dict__) for module in model.modules()],
                "hooks": [_hooks(module) for module in model.modules()],
                "hooks of gradients": [
                    (len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ())) for p in model.parameters()
                ],
                "cache": [getattr(getattr(module, "config", None), "use_cache", None) for module in model.modules()],
                "random states": (
                    random.getstate(),
                    [part.tolist() if isinstance(part, np.ndarray) else part for part in state],  # type: ignore[unreachable]
                    _bits(torch.get_rng_state()),
                ),
                "threads": sorted(thread.name for thread in threading.enumerate()),
                "threads of torch": torch.get_num_threads(),
                "optimizer": None if optimizer is None else _state_of(optimizer),
            }
        )

    def changed(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[str]:
        """What is no longer what it was."""
        now = Held.of(model, optimizer).facts
        return [name for name, fact in self.facts.items() if now[name] != fact]


def _state_of(optimizer: torch.optim.Optimizer) -> Any:
    return [
        {name: _bits(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        for state in optimizer.state.values()
    ]

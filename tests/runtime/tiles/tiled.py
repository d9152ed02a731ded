"""Token-wise modules of several kinds, plain and in tiles, and what both do with the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from protwin.runtime.tiles.mlp import TiledModule

HIDDEN = 8
Result = dict[str, torch.Tensor | None]


class Gated(nn.Module):
    """An MLP with a gate and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, 24), nn.Linear(HIDDEN, 24, bias=False)
        self.down = nn.Linear(24, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Routed(nn.Module):
    """A mixture that gives its router's logits, for tokens laid end to end, and choices that have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 3)
        self.experts = nn.ModuleList(Gated() for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.router(x)
        weights, chosen = logits.softmax(-1).topk(2)
        mixed = sum(
            (weights * (chosen == number)).sum(-1, keepdim=True) * expert(x)
            for number, expert in enumerate(self.experts)
        )
        return mixed, logits.reshape(-1, 3), chosen


class Residual(nn.Module):
    """One that is given the residual stream by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gated()

    def forward(self, x: torch.Tensor, *, residual: torch.Tensor) -> torch.Tensor:
        return residual * self.inner(x)


class Noisy(nn.Module):
    """Dropout on the way, of which forward and backward have to agree."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = Gated(), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.drop(x)) + self.drop(x)


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def tile(module: nn.Module, num_tiles: int, kind: type[TiledModule] = TiledModule) -> None:
    module.forward = kind("mlp", module, module.forward, num_tiles).run


def results(module: nn.Module, x: torch.Tensor, *, num_backwards: int = 1, **given: torch.Tensor) -> Result:
    """Outputs and all gradients of a loss that weighs every output of every token by itself."""
    generator = torch.Generator().manual_seed(11)
    outputs: Any = ()
    for _ in range(num_backwards):
        outputs = module(x, **given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        floating = [output for output in outputs if output.is_floating_point()]
        loss = sum((output * torch.randn(output.shape, generator=generator)).sum() for output in floating)
        loss.backward()
    found: Result = {f"output {place}": output.detach() for place, output in enumerate(outputs)}
    found |= {name: parameter.grad for name, parameter in module.named_parameters()}
    return found | {"x": x.grad} | {name: tensor.grad for name, tensor in given.items()}


def worst(one: Result, other: Result) -> float:
    """The largest relative difference; infinite where one of both has no gradient, or another shape."""
    assert one.keys() == other.keys()
    found = 0.0
    for name, expected in one.items():
        got = other[name]
        if expected is None or got is None or expected.shape != got.shape:
            found = max(found, 0.0 if expected is None and got is None else float("inf"))
        else:
            scale = max(float(expected.abs().max()), 1e-30)
            found = max(found, float((expected.double() - got.double()).abs().max()) / scale)
    return found

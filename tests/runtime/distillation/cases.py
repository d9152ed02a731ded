"""A family with its data, and what its student's blocks learn alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from tests.runtime.distillation.families import Family, families
from tests.runtime.distillation.reference import Learnt, learn_alone, seen_by_teacher

STEPS = 10

Batches = Sequence[Sequence[dict[str, torch.Tensor]]]
"""Of every step, of every micro-batch."""


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW with a rate at which every step shows in every bit."""
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean of the squares.  torch's own kernel gives a scalar that keeps the memory of all squares."""
    return (output - target).square().mean()


@dataclass(frozen=True)
class Expected:
    """What the reference says of a family."""

    family: Family
    steps: Batches
    learnt: list[Learnt]


def steps_of(family: Family, micro_batches: int, steps: int = STEPS) -> Batches:
    """Batches for so many steps, no two alike."""
    row = family.batches(steps * micro_batches)
    return [row[begin : begin + micro_batches] for begin in range(0, len(row), micro_batches)]


@lru_cache
def expected(name: str, micro_batches: int = 1, steps: int = STEPS, max_norm: float | None = None) -> Expected:
    """Every block alone, by the definition."""
    family = families()[name]
    batches = steps_of(family, micro_batches, steps)
    with quiet():
        teacher, student = family.teacher(), family.student()
        seen = [[seen_by_teacher(teacher, family.blocks, batch) for batch in step] for step in batches]
        learnt = learn_alone(student, family.blocks, seen, mse, adamw, max_norm=max_norm)
        return Expected(family, batches, learnt)


def unlike(learnt: Learnt, block: nn.Module) -> list[str]:
    """Names of a block's weights that are not, bit for bit, those that it learns alone."""
    state = block.state_dict()
    assert state.keys() == learnt.weights.keys()
    return [name for name, tensor in state.items() if not torch.equal(tensor, learnt.weights[name])]


def unlike_moments(learnt: Learnt, state: Mapping[str, Mapping[str, torch.Tensor]]) -> list[str]:
    """Parameters whose optimizer state, by their names in the block, is not what the reference has."""
    assert learnt.moments.keys() <= state.keys()
    return [
        f"{key} of {name}"
        for name, moments in learnt.moments.items()
        for key, value in moments.items()
        if not torch.equal(torch.as_tensor(state[name][key]).float(), torch.as_tensor(value).float())
    ]


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, torch.Tensor]) -> list[str]:
    """Names of parameters and buffers that are not bit for bit as they were."""
    return [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block transformers says nothing of kernels that it lacks."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

"""Bypass distillation by its definition, block by block, each alone: the oracle of everything that is faster.

Nothing of the package is imported here.  The plain teacher runs whole under ``no_grad``, and hooks note what each of
its blocks is given and gives.  Then one student block after the other goes through all steps by itself: on the inputs
of its teacher's block, towards the output of that block, with an AdamW of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(student's output, teacher's output) to a scalar."""
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Seen:
    """One call of a teacher's block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: torch.Tensor


@dataclass
class Learnt:
    """What one student block has come to, alone."""

    losses: list[list[float]] = field(default_factory=list)
    """Of every step, of every micro-batch."""
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Of every step, by the names within the block; parameters without a gradient are left out."""
    is_held: list[bool] = field(default_factory=list)
    """Of every step, whether the block was not stepped."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """After the last step."""
    moments: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """The optimizer's state after the last step, by the name of the parameter: it remembers every gradient."""


def seen_by_teacher(teacher: nn.Module, blocks: Sequence[str], batch: Mapping[str, torch.Tensor]) -> list[Seen]:
    """What every block of the plain teacher is given and gives in one whole forward."""
    found: list[Seen] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found.append(Seen(detached(args), detached(kwargs), first_of(output).detach()))

    handles = [teacher.get_submodule(name).register_forward_hook(note, with_kwargs=True) for name in blocks]
    config = getattr(teacher, "config", None)
    if config is not None:
        # A cache would be one more thing that the teacher's blocks hand to each other.
        config.use_cache = False
    try:
        with torch.no_grad():
            teacher(**batch)
    finally:
        for handle in handles:
            handle.remove()
    assert len(found) == len(blocks)
    return found


def learn_alone(
    student: nn.Module,
    blocks: Sequence[str],
    seen: Sequence[Sequence[Sequence[Seen]]],
    loss: Loss,
    make_optimizer: MakeOptimizer,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    max_norm: float | None = None,
) -> list[Learnt]:
    """Every block of ``student`` trained alone.  ``seen``: of every step, of every micro-batch, of every block.

    A step minimises the mean of its micro-batches' losses.  Each forward with its loss runs within ``around``.  With
    ``max_norm``, a block's gradients are clipped to that norm, and where this is not finite the block is not stepped.
    """
    student.train()
    return [
        _learn_block(
            student.get_submodule(name),
            [[calls[block] for calls in step] for step in seen],
            loss,
            make_optimizer,
            around,
            max_norm,
        )
        for block, name in enumerate(blocks)
    ]


def _learn_block(
    block: nn.Module,
    steps: Sequence[Sequence[Seen]],
    loss: Loss,
    make_optimizer: MakeOptimizer,
    around: Callable[[], AbstractContextManager[Any]],
    max_norm: float | None,
) -> Learnt:
    learnt = Learnt()
    trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
    optimizer = make_optimizer([{"params": trained}]) if trained else None
    for calls in steps:
        losses = []
        for call in calls:
            with around():
                value = loss(first_of(block(*call.args, **call.kwargs)), call.output)
            losses.append(value.item())
            if value.requires_grad:
                (value / len(calls)).backward()
        learnt.losses.append(losses)
        learnt.gradients.append({n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None})
        if optimizer is not None:
            norm = None if max_norm is None else torch.nn.utils.clip_grad_norm_(trained, max_norm)
            learnt.is_held.append(norm is not None and not norm.isfinite())
            if not learnt.is_held[-1]:
                optimizer.step()
            optimizer.zero_grad()
    if optimizer is not None:
        learnt.moments = {name: dict(optimizer.state[p]) for name, p in block.named_parameters() if optimizer.state[p]}
    learnt.weights = {name: tensor.detach().clone() for name, tensor in block.state_dict().items()}
    return learnt


def detached(value: Any) -> Any:
    """``value`` with every tensor in it detached."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(detached(item) for item in value)
    return value


def first_of(output: Any) -> torch.Tensor:
    """The tensor that a block hands on: itself, or the first of a tuple or of a dict."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict):
        return first_of(next(iter(output.values())))
    return first_of(output[0])

"""An optimizer that a trainer has made, as a plan carries it out: what makes its like, and in which groups."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from ...shared.basics.errors import PlanError
from ...shared.schema.optimizer import Optimizer
from ..optimizers.chunk_optimizer import MakeOptimizer

_KNOWN: Final[Mapping[type[torch.optim.Optimizer], Optimizer]] = {
    torch.optim.AdamW: Optimizer.ADAMW,
    torch.optim.Adam: Optimizer.ADAM,
    torch.optim.SGD: Optimizer.SGD,
    torch.optim.Adafactor: Optimizer.ADAFACTOR,
}
NAMES: Final = ("adamw_torch", "adamw_torch_fused", "sgd")
"""``optim`` of TrainingArguments that make one of these."""


@dataclass(frozen=True, slots=True)
class MadeOptimizer:
    """What steps each chunk as the optimizer would have stepped the model."""

    name: Optimizer
    """What a plan calls it."""
    make: MakeOptimizer
    groups: Sequence[Mapping[str, Any]]
    """Torch's form of parameter groups, over the model's own parameters."""


def made_optimizer(optimizer: torch.optim.Optimizer) -> MadeOptimizer:
    """How ``optimizer``, which has done no step yet, was made.  Raises PlanError if no plan knows its class."""
    kind = type(optimizer)
    if kind not in _KNOWN:
        known = ", ".join(sorted(f"torch.optim.{one.__name__}" for one in _KNOWN))
        raise PlanError(
            f"the training makes the optimizer {kind.__module__}.{kind.__qualname__}, which no plan accounts for. "
            f"Choose one of {known}; by optim of TrainingArguments: {', '.join(NAMES)}."
        )
    if optimizer.state:
        raise PlanError(
            f"the optimizer {kind.__name__} has done steps already, and a plan begins with one that has not. Resume "
            f"from a checkpoint, or pass a new one."
        )
    taken = inspect.signature(kind.__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in taken}
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    return MadeOptimizer(_KNOWN[kind], partial(kind, **options), groups)


def refuse_optim(name: str) -> None:
    """Raise PlanError if ``optim`` of TrainingArguments names an optimizer that no plan knows."""
    if name not in NAMES:
        raise PlanError(
            f"optim is {name!r}, an optimizer that no plan accounts for under the Trainer. Choose one of "
            f"{', '.join(NAMES)}, or pass optimizers=(torch.optim.Adafactor(...), None)."
        )

"""An optimizer that a trainer has made, as a plan carries it out: what makes its like, and in which groups."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
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
NAMES: Final = (
    "adamw_torch",
    "adamw_torch_fused",
    "sgd",
    "lion_32bit",
)
"""``optim`` of TrainingArguments that make one of these."""

_MORE: Final = {
    "adafactor": ": transformers has an Adafactor of its own, which keeps other state than torch's",
}


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
    name = _KNOWN.get(kind) or (Optimizer.LION if _is_lion(optimizer) else None)
    if name is None:
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
    options = {key: value for key, value in optimizer.defaults.items() if key in taken}
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    return MadeOptimizer(name, partial(kind, **options), groups)


def _is_lion(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is Lion of bitsandbytes with a float32 moment in ordinary memory, which a plan accounts for."""
    kind, arguments = type(optimizer), getattr(optimizer, "args", None)
    if kind.__name__ != "Lion" or kind.__module__.partition(".")[0] != "bitsandbytes":
        return False
    return getattr(arguments, "optim_bits", None) == 32 and not getattr(optimizer, "is_paged", False)


def rebind(scheduler: Any, optimizer: torch.optim.Optimizer) -> list[tuple[Any, torch.optim.Optimizer]]:
    """Let ``scheduler`` of torch, and those that it is made of, set the rates of ``optimizer``; gives whose they set.

    The groups of ``optimizer`` are those of the former one, rates included.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    # torch's schedulers count the steps of their optimizer; the first of them makes it count.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return list(_rebound(scheduler, optimizer))


def _rebound(scheduler: Any, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    if hasattr(scheduler, "optimizer"):
        yield scheduler, scheduler.optimizer
        scheduler.optimizer = optimizer
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _rebound(inner, optimizer)


def refuse_optim(name: str) -> None:
    """Raise PlanError if ``optim`` of TrainingArguments names an optimizer that no plan knows."""
    if name not in NAMES:
        raise PlanError(
            f"optim is {name!r}, an optimizer that no plan accounts for under the Trainer"
            f"{_MORE.get(name, '')}. Choose one of {', '.join(NAMES)}, or pass "
            f"optimizers=(torch.optim.Adafactor(...), None)."
        )

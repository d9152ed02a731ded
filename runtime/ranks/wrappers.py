"""Wrappers of torch that train a model on several ranks themselves, which a plan does not go along with."""

from __future__ import annotations

from typing import Final

from torch import nn

from ...shared.basics.errors import PlanError

_REMEDIES: Final = {
    "DistributedDataParallel": "Pass the model within (wrapped.module)",
    "DataParallel": "Pass the model within (wrapped.module), on one device per process",
    "FullyShardedDataParallel": "Pass the model as it was before it was wrapped",
    "FSDPModule": "Pass the model as it was before fully_shard()",
}
"""What to do about each class."""


def wrapped_part(model: nn.Module) -> str | None:
    """What is wrong if torch reduces the gradients of ``model``, or of a part of it, or holds its weights in parts.

    Gradients would be averaged twice, or by nobody: weights that are shards are not those that the plan speaks of.
    None: it does not.
    """
    for path, module in model.named_modules():
        # By name: importing the classes takes longer than everything else that is checked.
        for kind in type(module).__mro__:
            if kind.__name__ in _REMEDIES and kind.__module__.startswith("torch."):
                return (
                    f"{path or 'the model'} is wrapped already: torch's {kind.__name__} averages gradients or shards "
                    f"weights itself, as the plan does. {_REMEDIES[kind.__name__]}: the plan's parallel mode does it."
                )
    return None


def check_unwrapped(model: nn.Module) -> None:
    """Raise PlanError with what ``wrapped_part`` says."""
    wrong = wrapped_part(model)
    if wrong is not None:
        raise PlanError(wrong)

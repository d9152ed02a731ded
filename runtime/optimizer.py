"""The optimizer of one chunk: a plain torch optimizer over float32 weights, on the host or on the device.

torch's fused AdamW gives the same bits for a parameter alone and among others, so chunking does not change a result.
Parameters keep their groups, and one without a gradient is left alone, exactly as the optimizer treats it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..shared.errors import PlanError

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""From parameter groups to an optimizer, such as ``partial(torch.optim.AdamW, lr=1e-4, fused=True)``."""


class ChunkOptimizer:
    """Steps some weights with the options of the groups that their parameters belong to."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        parameters: Sequence[nn.Parameter],
        options: Mapping[int, Mapping[str, Any]],
        make_optimizer: MakeOptimizer,
        *,
        targets: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Make the optimizer of ``weights``, the float32 masters of ``parameters``.

        ``options`` maps ``id(parameter)`` to its group's options; ``targets`` are narrower tensors that stepped
        weights are written to.
        """
        self._weights = list(weights)
        self._targets = list(targets) if targets is not None else [None] * len(self._weights)
        groups: dict[int, dict[str, Any]] = {}
        for weight, parameter in zip(self._weights, parameters, strict=True):
            chosen = options[id(parameter)]
            group = groups.setdefault(id(chosen), {**chosen, "params": []})
            group["params"].append(weight)
        self.optimizer = make_optimizer(list(groups.values()))

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """One step; a weight whose gradient is None is left alone."""
        with torch.no_grad():
            for weight, gradient in zip(self._weights, gradients, strict=True):
                weight.grad = gradient if gradient is None or gradient.dtype == weight.dtype else gradient.float()
            self.optimizer.step()
            for weight, target, gradient in zip(self._weights, self._targets, gradients, strict=True):
                weight.grad = None
                if target is not None and gradient is not None:
                    target.copy_(weight)

    def state_tensors(self) -> list[torch.Tensor]:
        """The optimizer's own tensors."""
        return [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]


def group_options(
    model: nn.Module, parameter_groups: Sequence[Mapping[str, Any]] | None
) -> dict[int, Mapping[str, Any]]:
    """The options of every trainable parameter by ``id``, from torch's form of parameter groups.

    None puts all into one group without options.  Raises PlanError if a trainable parameter is in no group, or any in
    two, or one that is not the model's.
    """
    every = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {id(parameter): every[id(parameter)] for parameter in model.parameters() if parameter.requires_grad}
    if parameter_groups is None:
        shared: Mapping[str, Any] = {}
        return dict.fromkeys(names, shared)
    options: dict[int, Mapping[str, Any]] = {}
    for group in parameter_groups:
        if not isinstance(group, Mapping) or "params" not in group:
            raise PlanError(
                "a parameter group is no table with 'params'. Give a list of them: [{'params': [...], 'lr': ...}, ...]."
            )
        chosen = {key: value for key, value in group.items() if key != "params"}
        members = group["params"]
        for parameter in [members] if isinstance(members, torch.Tensor) else members:
            if id(parameter) not in every:
                raise PlanError(
                    "a parameter group holds something that is no parameter of the model. Take the groups from "
                    "model.named_parameters() of the model itself."
                )
            if id(parameter) in options:
                raise PlanError(f"parameter {every[id(parameter)]} is in two parameter groups. Leave it in one.")
            options[id(parameter)] = chosen
    missing = [name for key, name in names.items() if key not in options]
    if missing:
        raise PlanError(
            f"{len(missing)} trainable parameters are in no parameter group, {missing[0]} among them. Add them, or "
            f"set requires_grad to False before tracing."
        )
    return options

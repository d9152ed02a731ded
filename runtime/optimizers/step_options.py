"""The options that each step is done with: those of the parameter groups when its iteration began.

[Note: Options of a step]
Learning-rate schedulers change the options of parameter groups between one iteration and the next, when CPU Adam of
the last iteration may still be running.  Waiting for it would undo the overlap at every step.  So the groups that a
user and a scheduler see are not those of the chunks' optimizers: when an iteration begins, their options are copied,
and every chunk's step of that iteration takes that copy when it runs.  A chunk is stepped once per iteration, in order,
so the number of its step says which copy is meant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from ...shared.basics.errors import PlanError

GroupOptions = tuple[Mapping[str, Any], ...]
"""The options of every parameter group at one moment."""
_NEVER_NEGATIVE: Final = ("lr", "eps", "weight_decay", "momentum", "lr_decay", "lambd")
_FRACTIONS: Final = ("betas",)


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """One of the user's groups."""

    parameters: tuple[nn.Parameter, ...]
    options: Mapping[str, Any]
    """As the user gave them; what is missing is the optimizer's default."""


class StepOptions:
    """The groups of a model's parameters, and the options of the steps that are still to be done."""

    def __init__(self, groups: Sequence[ParameterGroup], labels: Mapping[int, str]) -> None:
        """``labels`` are the parameters' names by ``id``, for messages."""
        self.groups = tuple(groups)
        self.defaults: dict[str, Any] = {}
        """Of the optimizer that steps them."""
        self._group_of = {id(p): index for index, group in enumerate(groups) for p in group.parameters}
        self._labels = labels
        self._filled: dict[int, dict[str, Any]] = {}
        self._latest: GroupOptions = ()
        self._planned: dict[int, GroupOptions] = {}
        self._number = 0

    def anew(self) -> StepOptions:
        """The same groups with what optimizers have filled in, for optimizers that have done no step yet."""
        found = StepOptions(self.groups, self._labels)
        found.defaults, found._filled = self.defaults, self._filled
        return found

    def group_of(self, parameter: nn.Parameter) -> int:
        """The index of a parameter's group."""
        return self._group_of[id(parameter)]

    def label_of(self, parameter: nn.Parameter) -> str:
        """A parameter's name, with its block's."""
        return self._labels.get(id(parameter), "a parameter")

    # -- defaults ----------------------------------------------------------------------------------------------------

    def note(self, indices: Sequence[int], optimizer: torch.optim.Optimizer) -> None:
        """Learn from a chunk's optimizer what it has filled in for the groups ``indices``, which are its own.

        Raises PlanError if the optimizer's groups are not those that it was given.
        """
        if len(optimizer.param_groups) != len(indices):
            raise PlanError(
                f"the optimizer made {len(optimizer.param_groups)} parameter groups of {len(indices)}. Let it keep "
                f"the groups that it is given."
            )
        self.defaults = self.defaults or optimizer.defaults
        for index, group in zip(indices, optimizer.param_groups, strict=True):
            if index not in self._filled:
                self._filled[index] = {key: value for key, value in group.items() if key != "params"}

    def filled(self, index: int) -> dict[str, Any]:
        """The options of a group with the optimizer's defaults; a copy."""
        options = self._filled.get(index) or {**self.defaults, **self.groups[index].options}
        return {key: copied(value) for key, value in options.items()}

    # -- steps (Note: Options of a step) -----------------------------------------------------------------------------

    def plan_step(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """The step of the iteration that begins is to be done with the options of ``param_groups`` as they are now.

        Raises PlanError, with nothing planned, if an option makes no sense.
        """
        if not self.equals_latest(param_groups):
            check_options(param_groups)
            self._latest = tuple(
                {key: copied(value) for key, value in group.items() if key != "params"} for group in param_groups
            )
        self._planned[self._number] = self._latest
        # Every gather of an iteration waits for its chunk's step of the one before, so no step can be two behind.
        self._planned.pop(self._number - 2, None)

    def equals_latest(self, param_groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether ``param_groups`` have the options of the step that was planned last."""
        return len(param_groups) == len(self._latest) and all(
            _equal(group, planned) for group, planned in zip(param_groups, self._latest, strict=True)
        )

    def end_step(self) -> None:
        """The iteration has ended; what is planned next is another one's step."""
        self._number += 1

    def of_step(self, number: int) -> GroupOptions | None:
        """The options of step ``number``; None if nobody planned it."""
        return self._planned.get(number)


def copied(value: Any) -> Any:
    """``value``, or a copy if it is a tensor, which torch's schedulers change in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _equal(group: Mapping[str, Any], planned: Mapping[str, Any]) -> bool:
    keys = group.keys() - {"params"}
    return keys == planned.keys() and all(_same(group[key], planned[key]) for key in keys)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        # The planned one is a copy of a tensor, never the tensor itself; anything else is not changed in place.
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


def check_options(param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise PlanError unless rates and the like are finite and at least 0, and betas below 1."""
    for index, group in enumerate(param_groups):
        for key in _NEVER_NEGATIVE:
            value = group.get(key, 0.0)
            # Some optimizers take a pair, such as Adafactor, whose first eps may be left to it.
            values = [v for v in value if v is not None] if isinstance(value, tuple) else [value]
            if not all(_number(v) >= 0 for v in values):
                raise _refusal(index, key, group[key], "finite and at least 0")
        for key in _FRACTIONS:
            for beta in group.get(key, ()):
                if not 0 <= _number(beta) < 1:
                    raise _refusal(index, key, group[key], "at least 0 and less than 1")


def _number(value: Any) -> float:
    """``value`` as a float; NaN if it is none, or infinite."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _refusal(index: int, key: str, value: Any, bound: str) -> PlanError:
    name = "learning rate" if key == "lr" else key
    shown = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return PlanError(
        f"{name} {shown!r} of parameter group {index} is not {bound}. Nothing was stepped with it: set another, and "
        f"look at the scheduler if it came from one."
    )

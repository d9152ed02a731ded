"""The loss that a Trainer computes, as a trace wants it: what the model is called with, and what follows its output.

[Note: The model that answers]
``compute_loss(model, inputs)`` of a Trainer calls the model itself, and makes a loss of the output: by label smoothing,
by a function of the user's, by a whole class of losses in TRL.  A trace wants the two apart.  So ``compute_loss`` is
given something in the model's place, twice.  The first hears what it is called with.  The second answers with the
output that the model has given to the trace.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ...shared.basics.errors import WorkloadError
from ..model.batches import Batch, Loss
from ..model.nested_tensors import tensors_in

Compute = Callable[[Any, dict[str, Any]], torch.Tensor]
"""The loss of (model, inputs)."""


class _Heard(Exception):
    """Ends ``compute_loss`` where it calls the model."""


class AnsweringModel:
    """Stands for ``model``: its attributes and its class, and another answer to a call."""

    def __init__(self, model: nn.Module, answer: Callable[..., Any]) -> None:
        self.__dict__["_model"] = model
        self.__dict__["_answer"] = answer

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The model's: who asks what kind of model it is gets the same answer."""
        return type(self.__dict__["_model"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What was to be answered."""
        return self.__dict__["_answer"](*args, **kwargs)


def call_and_loss(model: nn.Module, inputs: Mapping[str, Any], compute: Compute) -> tuple[Batch, Loss]:
    """What ``compute`` calls the model with, and what it makes of the output.  See [Note: The model that answers].

    Raises WorkloadError if it calls the model without a name for each argument, or not at all.
    """
    heard: list[dict[str, Any]] = []

    def hear(*args: Any, **kwargs: Any) -> Any:
        if args:
            raise WorkloadError(
                f"compute_loss() calls the model with {len(args)} arguments without names, which no plan is made for. "
                f"Name them, or pass batch= and loss=."
            )
        heard.append(kwargs)
        raise _Heard

    with suppress(_Heard):
        compute(AnsweringModel(model, hear), dict(inputs))
    if not heard:
        raise WorkloadError("compute_loss() does not call the model that it is given: there is nothing to plan.")

    def loss(output: Any, batch: Any) -> torch.Tensor:
        fake = next((tensor for tensor in tensors_in(output) if isinstance(tensor, FakeTensor)), None)
        given = dict(inputs) if fake is None else {name: _faked(value, fake) for name, value in inputs.items()}
        outputs = [output]

        def answer(*_: Any, **__: Any) -> Any:
            if not outputs:
                raise WorkloadError(
                    "compute_loss() calls the model a second time for one batch, and in a plan every forward has its "
                    "backward. Choose a loss of one call: SFTTrainer makes a second one for label_smoothing_factor "
                    "and compute_loss_func, and trainers with a reference model do."
                )
            return outputs.pop()

        return compute(AnsweringModel(model, answer), given)

    return heard[0], loss


def _faked(value: Any, fake: FakeTensor) -> Any:
    return fake.fake_mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def with_own_notes(trainer: Any) -> Any:
    """A copy of ``trainer`` that shares everything with it but what it notes of the steps: lists, tables, its state."""
    found = copy.copy(trainer)
    for name, value in vars(trainer).items():
        found.__dict__[name] = copy.copy(value) if name in ("state", "control") else _own(value)
    return found


def _own(value: Any) -> Any:
    if isinstance(value, dict):
        made = copy.copy(value)
        for key in made:
            made[key] = _own(made[key])
        return made
    if type(value) in (list, set):
        return copy.copy(value)
    return value

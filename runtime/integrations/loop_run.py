"""What is wished of the plan of somebody's loop, and the trainings that carry the plan out in it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from ...shared.basics.errors import PlanError
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload
from ..devices.device import TrainingDevice
from ..model.batches import Batch, Loss
from ..planning.planned import Planned
from ..planning.request import PlanRequest, Tell
from ..ranks.own_device import device_of_rank
from ..recording.counts import Counts
from ..training.carry_out import carry_out
from ..training.training import Training
from .refusals import refuse_shared_sequences


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the plan of somebody's loop is to be, beside what the loop itself says."""

    request: Mapping[str, Any]
    """Fields of a ``PlanRequest``; the step's are the loop's."""
    batch: Batch | None = None
    loss: Loss | None = None
    device: TrainingDevice | torch.device | str | None = None
    carrying_out: Mapping[str, Any]
    """Options of ``carry_out``."""
    tell: Tell

    def given_device(self, kind: str, local_rank: int) -> TrainingDevice:
        """The device where none is searched for: of ``kind``, unless another one is wished for."""
        if isinstance(self.device, TrainingDevice):
            return self.device
        return device_of_rank(self.device or kind, local_rank, budget_bytes=self.request.get("budget_bytes"))


def wishes_of(
    of_loop: Mapping[str, str],
    whose: str,
    batch: Batch | None,
    loss: Loss | None,
    device: TrainingDevice | torch.device | str | None,
    carrying_out: Mapping[str, Any] | None,
    tell: Tell,
    request: Mapping[str, Any],
) -> Wishes:
    """The wishes, with files read.  ``of_loop`` are fields of the request that the loop itself says, by what says them.

    Raises PlanError if one of them is wished for, ``PlanRequest`` does not know what is, or ranks are to share
    sequences.
    """
    for name in request:
        if name in of_loop:
            raise PlanError(f"{name} of {whose}'s plan is {of_loop[name]}. Set it there.")
    known = {field.name for field in fields(PlanRequest)} - of_loop.keys() - {"loss"}
    if unknown := sorted(request.keys() - known):
        raise PlanError(
            f"{unknown[0]} is nothing that a plan is searched with. Choose from {', '.join(sorted(known))}."
        )
    read = PlanRequest(**request)
    refuse_shared_sequences(read, whose)
    return Wishes(
        request={name: getattr(read, name) for name in request},
        batch=batch,
        loss=loss,
        device=device,
        carrying_out=dict(carrying_out or {}),
        tell=tell,
    )


def tell_stderr(line: str) -> None:
    """Say it on standard error."""
    print(f"protwin: {line}", file=sys.stderr)  # noqa: T201


class LoopRun:
    """What a Trainer knows of its plan: the plan once it is found, and the training while one carries it out."""

    def __init__(self, wishes: Wishes) -> None:
        self._wishes = wishes
        self.planned: Planned | None = None
        """The answer of the search, with the machine; None before the training begins, or where plan and workload were
        given."""
        self.plan: Plan | None = None
        """What is carried out; None before the training begins."""
        self.workload: Workload | None = None
        """What the plan is for."""
        self.device: TrainingDevice | None = None
        """What the plan is carried out on."""
        self.training: Training | None = None
        """What carries the plan out; None while no training runs, and the model is an ordinary one."""
        self._planned_for: tuple[Any, ...] = ()
        self._counts = Counts()
        self._peak_bytes = 0

    @property
    def counts(self) -> Counts:
        """What was moved and stepped so far, in all trainings of this Trainer."""
        return self._counts if self.training is None else self._counts + self.training.counts

    @property
    def peak_device_bytes(self) -> int:
        """Highest level of the device's memory so far (``Training.peak_device_bytes``)."""
        return max(self._peak_bytes, 0 if self.training is None else self.training.peak_device_bytes)

    def _take_over(self, model: nn.Module, ending: ExitStack, **optimizing: Any) -> Training:
        """Carry the plan out until ``ending`` is closed."""
        assert self.workload is not None
        options = {**self._wishes.carrying_out, **optimizing}
        training = carry_out(model, self.plan, self.workload, device=self.device, **options)
        ending.callback(self._ended)
        ending.push(training.__exit__)
        self.training = training
        return training

    def _ended(self) -> None:
        assert self.training is not None
        self._counts += self.training.counts
        self._peak_bytes = self.peak_device_bytes
        self.training = None

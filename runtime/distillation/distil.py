"""Carrying out a plan of bypass distillation: the one call that takes teacher and student over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, TypedDict, Unpack

import torch
from torch import nn

from ...shared.basics.errors import PlanError, ProtwinError, ScheduleError
from ...shared.schema.hardware import Disk
from ...shared.schema.plan import Plan
from ...shared.schema.workload import Workload, check_plan
from ..devices.device import TrainingDevice
from ..model.ownership import check_untaken, taken_over
from ..optimizers.chunk_optimizer import MakeOptimizer
from ..optimizers.named import named_optimizer
from ..training.assembly import TrainingSettings
from ..training.carry_out import checked_plan, device_for
from ..training.compute_lane import ComputeLane
from ..training.training import Training
from .pairs import PairLoss, Pairs, name_of_loss


class DistilOptions(TypedDict, total=False):
    """Options of ``distil`` that ``carry_out`` has too, where it says what each means."""

    optimizer: MakeOptimizer | None
    parameter_groups: Sequence[Mapping[str, Any]] | None
    device: TrainingDevice | str | None
    meter_every: int | None
    check_gradients: bool
    keep_last_step: bool
    disk_folder: str | Path | None
    stated_disk: Disk | None


def distil(
    teacher: nn.Module,
    student: nn.Module,
    plan: Plan,
    workload: Workload,
    loss: PairLoss,
    *,
    blocks: str | Sequence[str] | None = None,
    **options: Unpack[DistilOptions],
) -> Distilling:
    """Take over both models and train every block of ``student`` beside its teacher's, as ``plan`` says.

    Use the result as a context manager::

        with distil(teacher, student, plan, workload, loss) as training:
            for batch in batches:
                losses = training(**batch)
                training.step()

    ``losses`` is an (n,) tensor on the device, one loss per block; nothing waits for it.  With several micro-batches
    call the training so often before each step, which minimises the mean of their losses.  ``loss`` and ``blocks`` are
    those of ``trace_distillation``, which gives ``workload``.  Parameter groups hold what is learnt of the student.

    Afterwards the student has its new weights, and the teacher is unchanged.  Raises PlanError, before anything moves,
    if plan, workload, models and loss do not belong together, or if the plan may need more memory than the device has;
    otherwise as ``carry_out``.
    """
    found = _checked(teacher, plan, workload, loss)
    for model in (teacher, student):
        check_untaken(model)
    pairs = Pairs(teacher, student, loss, blocks=blocks, micro_batches=found.micro_batches)
    device = options.get("device")
    settings = TrainingSettings(
        optimizer=options.get("optimizer") or named_optimizer(found.optimizer),
        parameter_groups=options.get("parameter_groups"),
        device=device if isinstance(device, TrainingDevice) else device_for(pairs, device),
        meter_every=options.get("meter_every"),
        check_gradients=options.get("check_gradients", True),
        loss_scaling=None,
        keep_last_step=options.get("keep_last_step", False),
        disk_folder=options.get("disk_folder"),
        stated_disk=options.get("stated_disk"),
        follow=lambda compute: _Announcing(pairs, compute),
    )
    with ExitStack() as undo:
        undo.enter_context(pairs.learning())
        training = Distilling(pairs, found, workload, settings)
        for model in (teacher, student):
            undo.enter_context(taken_over(model, training))
        training.held = undo.pop_all()
    return training


def _checked(teacher: nn.Module, plan: Plan, workload: Workload, loss: PairLoss) -> Plan:
    """The plan with the values that a file of it would have.  Raises PlanError unless all are of one distillation."""
    found = checked_plan(teacher, plan, workload)
    if isinstance(found, ProtwinError):
        raise found
    if found is None:
        raise PlanError("plan is None, but there is one rank alone. Pass a plan.")
    check_plan(found, workload)
    if workload.distillation is None:
        raise PlanError(
            f"the workload ({workload.model_name}) is one of full training. Trace both models with "
            f"trace_distillation(teacher, student, batch, loss)."
        )
    if name_of_loss(loss) != workload.distillation.loss:
        raise PlanError(
            f"the workload was traced with the loss {workload.distillation.loss}, and this one is "
            f"{name_of_loss(loss)}. Pass the same, or trace again."
        )
    return found


class Distilling(Training):
    """Teacher and student in the hands of a schedule; called with a batch, it gives the losses of all pairs."""

    held = ExitStack()
    """Gives both models their flags back."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """(n,) the losses of one micro-batch, whose gradients are added to those of the step."""
        losses: torch.Tensor = self.model(*args, **kwargs)
        return losses

    def scale(self, loss: torch.Tensor) -> NoReturn:
        """Refused: every pair runs its own backward."""
        raise ScheduleError("losses are not scaled in a distillation: every pair runs its own backward.")

    def weigh(self, loss: torch.Tensor, num_tokens: int) -> NoReturn:
        """Refused: there is one rank, and every pair runs its own backward."""
        raise ScheduleError("losses are not weighed in a distillation: every pair runs its own backward.")

    def evaluation(self) -> NoReturn:
        """Refused so far: norms and heads of both models are no part of the schedule."""
        raise ScheduleError(
            "evaluation() within a distillation is not known yet: norms and heads are no part of its schedule. Save "
            "it (training.save), close it, evaluate both models, and resume."
        )

    def close(self) -> None:
        """As ``Training.close``; both models then have their flags and modes back."""
        try:
            super().close()
        finally:
            self.held.close()


class _Announcing:
    """Lets the compute lane hear where the pairs are."""

    def __init__(self, pairs: Pairs, compute: ComputeLane) -> None:
        self._pairs = pairs
        pairs.listener = compute

    def remove(self) -> None:
        """Announce nothing any more."""
        self._pairs.listener = None

    def forget(self) -> None:
        """A forward that was given up has left no hooks behind."""

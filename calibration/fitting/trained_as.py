"""How a model is trained while it is measured, as a command or a program says it.  Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ...shared.basics.errors import PlanError
from ...shared.phases.tiling import LossHead
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.training_options import FULL_TRAINING, TrainingOptions
from ...shared.students.student import Student


@dataclass(frozen=True, kw_only=True)
class TrainedAs:
    """How a model is trained while it is measured."""

    options: TrainingOptions = FULL_TRAINING
    optimizer: Optimizer = Optimizer.ADAMW
    device_budget_bytes: int | None = None
    """What the device may hold, which it enforces; None: the whole model is there."""
    student: Student | None = None
    """What learns from the model, block by block; None: the model itself learns."""

    @property
    def loss_head(self) -> LossHead:
        """How the loss is made of hidden states."""
        return self.options.loss_head or LossHead.EAGER

    def check(self, num_ranks: int) -> None:
        """Raise PlanError if it contradicts itself, or ``num_ranks`` cannot measure it."""
        if self.student is not None:
            if num_ranks > 1:
                raise PlanError(
                    f"a student is measured on one rank alone, and {num_ranks} are asked for. Leave out --ranks, or "
                    f"--student."
                )
            if replace(self, student=None) != TRAINED_WHOLE:
                raise PlanError(
                    "a student is measured as it is distilled, with AdamW and everything on the device. Leave out "
                    "--student, or --device-budget, --lora-rank, --unfreeze-rank-ratio, --freeze, --autocast, "
                    "--loss and --optimizer."
                )
        if self.device_budget_bytes is not None and num_ranks > 1:
            raise PlanError(
                f"a device budget is kept by one rank alone, and {num_ranks} are asked for. Leave out --ranks, or "
                f"--device-budget."
            )


TRAINED_WHOLE: Final = TrainedAs()

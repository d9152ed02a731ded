"""How a model is trained while it is measured, as the options of ``calibrate`` and ``validate`` say it.  No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...shared.cli.loss_options import check_whole_loss
from ...shared.cli.options import DeviceBudget, OptimizerName
from ...shared.cli.training_choice import TrainingChoice
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import TrainingMethod
from ...shared.students.student import Student
from ..fitting.trained_as import TrainedAs


@dataclass(frozen=True, kw_only=True)
class MeasuredTraining:
    """Within which budget, how, and stepped by what; see [Note: Groups of options] in ``option_groups.py``."""

    device_budget_bytes: DeviceBudget = None
    training: TrainingChoice
    optimizer: OptimizerName = None

    def trained_as(self, method: TrainingMethod | None, student: Path | None) -> TrainedAs:
        """With the student of a file, if one is named.  Raises ProtwinError if options contradict each other."""
        check_whole_loss(self.training.loss)
        return TrainedAs(
            options=self.training.options(method),
            optimizer=self.optimizer or Optimizer.ADAMW,
            device_budget_bytes=self.device_budget_bytes,
            student=None if student is None else Student.load(student),
        )

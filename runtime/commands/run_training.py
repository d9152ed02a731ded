"""The loop of ``protwin run``: a plan carried out on data, from the first step or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...shared.basics.errors import PlanError
from ...shared.basics.progress import progress_bar
from ...shared.schema.hardware import Disk
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ..data.sources import Batch, DataSource, PackedSource, num_learned
from ..devices.device import TrainingDevice
from ..optimizers.named import named_optimizer
from ..training.carry_out import carry_out
from ..training.training import Training
from .learning_rates import LearningRates
from .run_checkpoints import RunCheckpoints
from .run_record import check_record, missing_for_record

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunExtent:
    """How far is trained, at which rate, and when training pauses."""

    steps: int
    """With those before the checkpoint that is resumed."""
    rates: LearningRates
    evaluate_every: int | None
    wants_record: bool
    """Whether training is refused where it would give no record."""
    saves: bool
    """Whether the model is written at the end: then a checkpoint of the last step is enough."""


@dataclass(frozen=True, slots=True)
class DiskChoice:
    """The folder of chunks that the plan has on a disk."""

    folder: Path
    stated: Disk | None
    """What the plan was predicted with, where that is named."""


@dataclass(frozen=True, slots=True)
class RunTraining:
    """What is trained on data."""

    plan: Plan
    workload: Workload
    extent: RunExtent
    source: DataSource
    evaluation: PackedSource | None
    checkpoints: RunCheckpoints
    disk: DiskChoice | None = None

    def run(self, model: nn.Module, device: TrainingDevice, tell: Tell) -> Record | None:
        """Train ``model``, which is ordinary again afterwards, and ``tell`` how its loss went.

        Gives the measured Record; None if the steps were too few for one, which is told.  Raises ProtwinError if the
        plan, the checkpoint or the device refuse.
        """
        make_optimizer = named_optimizer(self.plan.optimizer, lr=self.extent.rates.peak)
        disk = self.disk
        on_disk: dict[str, Any] = {} if disk is None else {"disk_folder": disk.folder, "stated_disk": disk.stated}
        with (
            progress_bar("training") as report,
            carry_out(model, self.plan, self.workload, optimizer=make_optimizer, device=device, **on_disk) as training,
        ):
            num_batches = self.checkpoints.resume(training, self.source)
            done, steps = training.num_steps, self.extent.steps
            if done == steps and self.extent.saves:
                tell(f"the checkpoint is at step {done}, the last")
                return None
            if done >= steps:
                raise PlanError(f"the checkpoint is at step {done} already; --steps is {steps}. Raise it.")
            if self.extent.wants_record:
                check_record(steps, self.pauses, done)
            if done == 0:
                self._evaluate(training, tell)
            batches, losses = self.source.batches(num_batches), []
            for step in range(done + 1, steps + 1):
                training.set_learning_rate(self.extent.rates.at(step - 1, steps))
                losses.append(self._step(training, batches))
                report(step, steps)
                num_batches += self.plan.micro_batches
                is_last = step == steps
                self.checkpoints.after_step(training, self.source, num_batches=num_batches, is_last=is_last)
                if is_last or (self.extent.evaluate_every is not None and step % self.extent.evaluate_every == 0):
                    self._evaluate(training, tell)
            tell(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} over {len(losses)} steps")
            missing = missing_for_record(steps, self.pauses, done)
            if missing is not None and not self.extent.wants_record:
                tell(f"no times: {missing}")
                return None
            return training.record()

    @property
    def pauses(self) -> dict[str, int | None]:
        """Steps between two pauses, by option."""
        return {"--checkpoint-every": self.checkpoints.every, "--evaluate-every": self.extent.evaluate_every}

    def _step(self, training: Training, batches: Iterator[Batch]) -> float:
        """One step; gives its mean loss."""
        of_step = list(islice(batches, self.plan.micro_batches))
        losses = []
        for batch, divisor in zip(of_step, self.source.divisors(of_step), strict=True):
            loss = training.model(**_on(training.device, batch)).loss
            if divisor != 1:
                loss = loss / divisor
            loss.backward()
            losses.append(loss.detach())
        training.step()
        return torch.stack(losses).float().sum().item()

    def _evaluate(self, training: Training, tell: Tell) -> None:
        """The mean loss of all learned tokens that are evaluated on, dropout off."""
        if self.evaluation is None:
            return
        total, num_tokens = 0.0, 0
        with training.evaluation():
            training.model.eval()
            for batch in self.evaluation.in_file_order():
                own = num_learned(batch)
                total += training.model(**_on(training.device, batch)).loss.item() * own
                num_tokens += own
            training.model.train()
        tell(f"step {training.num_steps}: evaluation loss {total / num_tokens:.4f}")


def _on(device: TrainingDevice, batch: Batch) -> Batch:
    return {name: tensor.to(device.torch_device) for name, tensor in batch.items()}

"""The loop of ``protwin run``: a plan carried out on data, from the first step or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ...shared.basics.errors import PlanError
from ...shared.basics.progress import no_progress, progress_bar
from ...shared.schema.hardware import Disk
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ..data.sources import Batch, DataSource, PackedSource, num_learned
from ..devices.device import TrainingDevice
from ..optimizers.named import named_optimizer
from ..ranks.world import exchanged
from ..recording.replanning import Replan
from ..training.carry_out import carry_out
from ..training.training import Training
from .learning_rates import LearningRates
from .run_checkpoints import RunCheckpoints
from .run_ranks import ALONE, FACTORISING_TIMEOUT_S, RunRank
from .run_record import check_record, missing_for_record
from .run_weights import BuiltModel

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
class ReplanChoice:
    """When a better plan is looked for, and by whom."""

    after: int
    """Steps."""
    replanner: Callable[[Workload, int | None], Replan]
    """From the workload and the bytes that the device has, None: no limit is known."""


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
    rank: RunRank = ALONE
    replan: ReplanChoice | None = None

    def run(self, built: BuiltModel, device: TrainingDevice, tell: Tell) -> Record | None:
        """Train the model, which is ordinary again afterwards, and ``tell`` how its loss went.

        Gives the measured Record; None if the steps were too few for one, which is told.  Raises ProtwinError if the
        plan, the checkpoint or the device refuse.
        """
        with (
            progress_bar("training") if self.rank.speaks else nullcontext(no_progress) as report,
            self._begun(built, device) as training,
        ):
            num_batches = self.checkpoints.resume(training, self.source)
            done, steps = training.num_steps, self.extent.steps
            if done == steps and self.extent.saves:
                tell(f"the checkpoint is at step {done}, the last")
                return None
            if done >= steps:
                raise PlanError(f"the checkpoint is at step {done} already; --steps is {steps}. Raise it.")
            if self.extent.wants_record:
                check_record(steps, self.pauses, done + self.begins_anew)
            if done == 0:
                self._evaluate(training, tell)
            batches, losses = self.source.batches(num_batches), []
            for step in range(done + 1, steps + 1):
                training.set_learning_rate(self.extent.rates.at(step - 1, steps))
                losses.append(self._step(training, batches))
                report(step, steps)
                num_batches += self.plan.num_batches
                is_last = step == steps
                self.checkpoints.after_step(training, self.source, num_batches=num_batches, is_last=is_last)
                if is_last or (self.extent.evaluate_every is not None and step % self.extent.evaluate_every == 0):
                    self._evaluate(training, tell)
            losses = _mean_over_ranks(training, losses)
            tell(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} over {len(losses)} steps")
            missing = missing_for_record(steps, self.pauses, done + self.begins_anew)
            if missing is not None and not self.extent.wants_record:
                tell(f"no times: {missing}")
                return None
            return training.record()

    def _begun(self, built: BuiltModel, device: TrainingDevice) -> Training:
        disk = self.disk
        chosen: dict[str, Any] = {} if disk is None else {"disk_folder": disk.folder, "stated_disk": disk.stated}
        if self.workload.subspaces and built.weights is not None:
            # Ranks decompose weights while they fill their chunks.
            chosen |= {"rank_timeout_s": FACTORISING_TIMEOUT_S}
        if self.replan is not None:
            replanner = self.replan.replanner(self.workload, device.limit_bytes)
            chosen |= {"replan_after": self.replan.after, "replan": replanner}
        return carry_out(
            built.model,
            self.plan,
            self.workload,
            optimizer=named_optimizer(self.plan.optimizer, lr=self.extent.rates.peak),
            device=device,
            weights=built.weights,
            **chosen,
        )

    @property
    def begins_anew(self) -> int:
        """Steps after which what was measured may count no longer: the plan may change."""
        return 0 if self.replan is None else self.replan.after

    @property
    def pauses(self) -> dict[str, int | None]:
        """Steps between two pauses, by option."""
        return {"--checkpoint-every": self.checkpoints.every, "--evaluate-every": self.extent.evaluate_every}

    def _step(self, training: Training, batches: Iterator[Batch]) -> float:
        """One step; gives its mean loss, of which that of all ranks is the mean again.

        Every rank goes through the same batches and takes each ``num_ranks``-th of them, so that the data are those of
        one rank with as many more micro-batches, whatever the number of ranks; ranks that share sequences take the same
        ones.  It also knows how many learned tokens
        the others have, and weighs its own by them: the mean over ranks is the mean over tokens.
        """
        of_ranks = list(islice(batches, self.plan.num_batches))
        num_groups = self.plan.num_ranks // self.plan.sequence_ranks
        divisors = [divisor / num_groups for divisor in self.source.divisors(of_ranks)]
        own = slice(self.rank.rank // self.plan.sequence_ranks, None, num_groups)
        losses = []
        for batch, divisor in zip(of_ranks[own], divisors[own], strict=True):
            loss = training.model(**_on(training.device, batch)).loss
            if divisor != 1:
                loss = loss / divisor
            loss.backward()
            losses.append(loss.detach())
        training.step()
        return torch.stack(losses).float().sum().item()

    def _own_of(self, evaluation: PackedSource) -> Iterator[tuple[Batch, bool]]:
        """The rank's batches, and whether each counts: all ranks run equally many, since they gather chunks together.

        Where batches are left over for some ranks alone, the others run the last one too.
        """
        batches = list(evaluation.in_file_order())
        for begin in range(0, len(batches), self.plan.num_ranks // self.plan.sequence_ranks):
            place = begin + self.rank.rank // self.plan.sequence_ranks
            yield batches[min(place, len(batches) - 1)], place < len(batches)

    def _evaluate(self, training: Training, tell: Tell) -> None:
        """The mean loss of all learned tokens that are evaluated on, dropout off."""
        if self.evaluation is None:
            return
        total, num_tokens = 0.0, 0
        with training.evaluation():
            training.model.eval()
            for batch, counts in self._own_of(self.evaluation):
                own = num_learned(batch)
                loss = training.model(**_on(training.device, batch)).loss.item()
                if counts:
                    total += loss * own
                    num_tokens += own
            training.model.train()
        if training.world is not None:
            total, num_tokens = map(sum, zip(*exchanged(training.world, (total, num_tokens)), strict=True))
        tell(f"step {training.num_steps}: evaluation loss {total / num_tokens:.4f}")


def _mean_over_ranks(training: Training, losses: list[float]) -> list[float]:
    """Of every step."""
    if training.world is None:
        return losses
    return [sum(of_step) / len(of_step) for of_step in zip(*exchanged(training.world, losses), strict=True)]


def _on(device: TrainingDevice, batch: Batch) -> Batch:
    return {
        name: value.to(device.torch_device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }

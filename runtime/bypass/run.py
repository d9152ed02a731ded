"""A bypass run from its folder to the finished student: checked first, begun or gone on with, trained, saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ...shared.basics.errors import PlanError, WorkloadError
from ...shared.compile.compile import compile_schedule
from ...shared.pipelines.pipeline import Pipeline
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
from ...shared.schema.plan_check import check_plan
from ...shared.schema.workload import Workload
from ..checkpoints.manifest import CONFIGURATION
from ..chunks.saved_weights import SavedWeights
from ..devices.device import TrainingDevice
from ..distillation.block_losses import block_loss
from ..distillation.distil import Distilling, distil
from ..optimizers.named import check_runs_on, named_optimizer
from ..runs.run_folder import RunFolder, told_complete
from ..runs.run_settings import RunSettings, student_identity
from ..students.activation_statistics import activation_statistics
from ..students.saving import save_student
from ..students.student_model import make_student
from ..training.guards import check_devices, check_disk_folder
from .data import BypassData
from .interruption import Interruption
from .loop import BypassLoop
from .ranks import BypassRanks
from .teacher import TeacherFolder

OnProgress = Callable[[int, int], None]
_WITH_BETAS = (Optimizer.ADAMW, Optimizer.ADAM, Optimizer.ADAMW_BF16, Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT)
"""Optimizers that have ``betas`` as AdamW does."""


@dataclass(frozen=True, kw_only=True)
class BypassRun:
    """What is asked for, and how it is carried out."""

    path: Path
    """Of the run's folder."""
    settings: RunSettings
    teacher: TeacherFolder
    data: BypassData
    workload: Workload
    """Of every block of the student learning beside the teacher's."""
    plan: Callable[[], Plan | Pipeline]
    """Finds the plan, once it is needed.  Raises ProtwinError."""
    num_ranks: int = 1
    """Those of the plan, of which this process is one."""
    device: Callable[[], TrainingDevice]
    """Finds the device."""
    tokenizer: Any | None = None
    """Saved beside the model."""
    inputs: str | None = None
    """Hash of the files and options that all of this was made of (``RunState.inputs``)."""
    disk_folder: Path | None = None
    """Where the plan's chunks on a disk lie."""
    look: Callable[[Distilling], None] | None = None
    """Sees the training when all steps are done."""

    def carry_out(self, tell: Callable[[str], None], on_progress: OnProgress) -> Path:
        """Train, from where the folder has come to; gives the folder of the finished model.

        A run that is complete already is told of, and left as it is.  Everything is checked before anything is
        written.  Raises ProtwinError, and RunInterruptedError, once all is saved, after Ctrl-C.

        Of several ranks all call it, with a folder that all of them see; rank 0 writes and tells.  Ctrl-C ends them in
        the middle of a step: the run goes on from its newest checkpoint.
        """
        with BypassRanks.joined(self.num_ranks) as ranks:
            return self._carried_out(ranks, tell if ranks.speaks else _tell_nobody, on_progress)

    def _carried_out(self, ranks: BypassRanks, tell: Callable[[str], None], on_progress: OnProgress) -> Path:
        folder = ranks.agreed(lambda: RunFolder.checked(self.path, self.settings, inputs=self.inputs))
        if ranks.decided(lambda: folder.is_complete):
            tell(told_complete(self.path, folder.model_path))
            return folder.model_path
        ranks = replace(ranks, plan=ranks.agreed(self.plan))
        device, teacher, weights, student = ranks.agreed(lambda: self._made(ranks))
        folder = ranks.decided(lambda: RunFolder.begin(self.path, self.settings, inputs=self.inputs))
        if not ranks.decided(lambda: (folder.model_path / CONFIGURATION).is_file()):
            ranks.let_go(teacher, student)
            # The same numbers wherever the run began; those of a checkpoint take their place.
            torch.manual_seed(self.settings.seed + ranks.rank)
            # torchrun's agent sends ranks a second signal soon, so that none has the time to complete its step.
            waiting = Interruption() if ranks.world is None else nullcontext(Interruption())
            with waiting as interruption, self._begun(teacher, weights, student, ranks.plan, device) as training:
                loop = BypassLoop(
                    folder=folder,
                    training=training,
                    teacher=teacher,
                    student=student,
                    source=self.data.source(self.settings),
                    validation=self.data.batches_to_validate(self.settings),
                    tell=tell,
                    on_progress=on_progress,
                    interruption=interruption,
                    around=self._around(device),
                    look=self.look,
                    ranks=ranks,
                )
                loop.run()

            def save() -> None:
                ranks.fill(student, lambda: loop.ended_with)
                save_student(
                    folder.model_path,
                    student,
                    self.settings.student,
                    teacher.config,
                    tokenizer=self.tokenizer,
                    code_folder=None if self.teacher.code is None else self.teacher.path,
                )

            ranks.decided(save)
        ranks.decided(folder.finish)
        tell(f"saved in {folder.model_path}")
        return folder.model_path

    def _around(self, device: TrainingDevice) -> Callable[[], AbstractContextManager[Any]]:
        """What forwards run within."""
        if self.settings.autocast is None:
            return nullcontext
        return partial(torch.autocast, device.torch_device.type, dtype=getattr(torch, self.settings.autocast))

    def _made(self, ranks: BypassRanks) -> tuple[TrainingDevice, Any, SavedWeights | None, Any]:
        """The device, the teacher, the files that its weights are still in, and the student."""
        device = self._checked_device(ranks)
        teacher, weights = self.teacher.built(str(self.settings.dtype))
        return device, teacher, weights, self._student(teacher, weights)

    def _checked_device(self, ranks: BypassRanks) -> TrainingDevice:
        """The device, which can carry its plan out.  Raises ProtwinError unless plan, workload and settings agree."""
        plan, workload = ranks.of_stage(self.workload)
        check_plan(plan, workload)
        for option, of_plan, own in (
            ("micro-batches", plan.micro_batches * ranks.num_replicas, self.settings.micro_batches),
            ("max-gradient-norm", plan.max_gradient_norm, self.settings.max_gradient_norm),
            ("optimizer", plan.optimizer, self.settings.optimizer),
        ):
            if of_plan != own:
                raise PlanError(
                    f"the run has --{option} {own}, and the plan {of_plan}. Search a plan for this run, or give the "
                    f"run what the plan has."
                )
        if set(self.workload.batch_shapes) != {"input_ids"}:
            raise WorkloadError(
                f"the workload's batch is made of {', '.join(self.workload.batch_shapes)}, but a bypass run gives "
                f"input_ids alone. Trace the teacher from its configuration."
            )
        check_disk_folder(plan, self.disk_folder)
        device = self.device()
        check_runs_on(plan.optimizer, device.torch_device)
        check_devices(compile_schedule(plan, workload), [device.limit_bytes])
        return device

    def _student(self, teacher: Any, weights: SavedWeights | None) -> Any:
        """Made of the teacher, in training mode."""
        settings = self.settings
        statistics = None
        if student_identity(settings.student, settings.teacher_configuration)["is_measured"]:
            batches = islice(self.data.source(settings).batches(0), settings.statistics_batches)
            # Whatever lies in files: all of it runs.
            whole = teacher if weights is None else self.teacher.load(str(settings.dtype))
            statistics = activation_statistics(whole, batches)
        made = make_student(teacher, settings.student, statistics=statistics, weights=weights, seed=settings.seed)
        return made.train()

    def _begun(
        self, teacher: Any, weights: SavedWeights | None, student: Any, plan: Any, device: TrainingDevice
    ) -> Distilling:
        settings = self.settings
        options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        if settings.optimizer in _WITH_BETAS:
            options["betas"] = settings.betas
        loss = block_loss(settings.student.loss)
        made = partial(distil, teacher, student, plan, self.workload, loss, device=device, teacher_weights=weights)
        return made(optimizer=named_optimizer(settings.optimizer, **options), disk_folder=self.disk_folder)


def _tell_nobody(line: str) -> None:
    """Another rank tells."""

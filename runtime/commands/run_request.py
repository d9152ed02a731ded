"""What ``protwin run`` was asked for, from the plan to the finished model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...shared.basics.errors import PlanError, ProtwinError
from ...shared.cli.options import cache_folder, warn
from ...shared.compile.compile import compile_schedule
from ...shared.schema.hardware import DeviceKind
from ...shared.schema.plan import Plan
from ...shared.schema.plan_check import check_plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...shared.workloads.check import has_kernels_of_gpus, option_words
from ...shared.workloads.dtypes import TRAINABLE
from ...shared.workloads.source import WorkloadRequest, resolve_workload
from ..checkpoints.published import check_free, save_published
from ..data.sources import DataSource, PackedSource
from ..optimizers.named import check_runs_on
from ..training.consensus import check_ranks_on
from ..training.guards import check_devices, check_disk_folder
from .run_budget import check_budget
from .run_checkpoints import RunCheckpoints
from .run_data import RunSource
from .run_model import RunModel
from .run_options import TEXT_STEPS, DeviceChoice, ExtentChoice, Shape
from .run_ranks import ALONE, RunRank, note_accepted
from .run_record import check_record
from .run_training import DiskChoice, ReplanChoice, RunExtent, RunTraining


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """One run."""

    plan: Plan
    workload: Workload | None
    """What the plan is for; None: it follows from the model and the shape, as in the search."""
    shape: Shape
    model: RunModel
    data: RunSource
    extent: ExtentChoice
    checkpoints: RunCheckpoints
    save: Path | None
    device: DeviceChoice
    disk: DiskChoice | None
    replan: ReplanChoice | None
    wants_record: bool
    rank: RunRank = ALONE

    def carry_out(self, tell: Callable[[str], None]) -> tuple[Workload, Record | None]:
        """Train, and write what is to be written; gives the plan's workload and the measured Record, if there is one.

        Everything is checked before it costs anything: options, plan, configuration, data, and at last the weights.
        Raises ProtwinError.
        """
        self._check()
        note_accepted(os.environ)
        workload = self.workload or self._traced()
        self._check_workload(workload)
        twin = self.model.twin(workload)
        found = self.data.read(twin, workload, tell)
        extent = RunExtent(
            steps=self.extent.steps or self._num_steps(found.source, workload),
            rates=self.extent.rates,
            evaluate_every=self.data.evaluate_every,
            wants_record=self.wants_record,
            saves=self.save is not None,
        )
        training = RunTraining(
            self.plan,
            workload,
            extent,
            found.source,
            found.evaluation,
            self.checkpoints,
            self.disk,
            self.rank,
            self.replan,
        )
        if self.wants_record:
            check_record(extent.steps, training.pauses, training.begins_anew)
        device = self.device.at_hand(self.rank.local_rank)
        check_ranks_on(self.plan, device.torch_device)
        check_runs_on(self.plan.optimizer, device.torch_device)
        check_devices(compile_schedule(self.plan, workload), [device.limit_bytes])
        built = self.model.build(twin, workload, self.plan)
        if built.was_whole:
            tell(f"transformers converts the weights in {self.model.weights}: the model was loaded whole first")
        record = training.run(built, device, tell)
        if self.model.cache is not None:
            tell(f"{self.model.cache}")
        if self.save is not None and self.rank.speaks:
            save_published(self.save, built.model, found.tokenizer, base=str(self.model.weights or self.model.named))
            tell(f"saved in {self.save}")
        return workload, record

    def _check(self) -> None:
        """Raise ProtwinError if the options contradict each other, or what is there already."""
        check_disk_folder(self.plan, None if self.disk is None else self.disk.folder)
        self.data.check()
        self.checkpoints.check()
        if self.save is None:
            return
        check_free(self.save)
        if self.model.options.lora is not None and self.model.options.osft is not None:
            raise ProtwinError(
                "--save writes an adapter beside a base model, or a whole model; low-rank matrices and factorised maps "
                "together are neither. Leave out --save, or one of --lora-rank and --unfreeze-rank-ratio."
            )
        if self.checkpoints.folder is not None:
            one, other = self.save.resolve(), self.checkpoints.folder.resolve()
            if one == other or one in other.parents or other in one.parents:
                raise ProtwinError(
                    f"--save {self.save} and --checkpoint {self.checkpoints.folder} need folders of their own, neither "
                    f"within the other. Name another one."
                )

    def _traced(self) -> Workload:
        """The workload of the shape that was asked for, in the element type that the plan is for.

        A search may have chosen another one than the published, for its machine; the plan's identity tells which.
        """
        found = None
        for dtype in (self.shape.dtype,) if self.shape.dtype is not None else (None, *TRAINABLE):
            asked = WorkloadRequest(
                self.model.named,
                batch_size=self.shape.batch_size,
                sequence_length=self.shape.sequence_length,
                dtype=dtype,
                options=self.model.options,
                device_kind=DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU,
                mlp_tiles=(self.plan.mlp_tiles,),
                loss_tiles=(self.plan.loss_tiles,),
            )
            workload = resolve_workload(asked, cache=cache_folder(), warn=warn if self.rank.speaks else _warn_nobody)
            found = found or workload
            if workload.identity == self.plan.workload_id:
                return workload
        assert found is not None
        return found

    def _check_workload(self, workload: Workload) -> None:
        """Raise PlanError if the plan is for another workload, shape or element type."""
        check_plan(self.plan, workload)
        if has_kernels_of_gpus(workload) and not torch.cuda.is_available() and self.rank.speaks:
            warn(
                f"the workload of {workload.model_name} holds dropout, attention or norms as GPUs run them, with "
                f"masks of one byte for each element and no probabilities. The CPU, which is the device here, keeps "
                f"more, so that the peak may exceed what is guaranteed. Leave --workload out, and the model is traced "
                f"for the CPU."
            )
        for words in option_words(workload) if self.rank.speaks else ():
            warn(words)
        for option, asked, planned in (
            ("--batch-size", self.shape.batch_size, workload.num_samples),
            ("--sequence-length", self.shape.sequence_length, workload.num_tokens // workload.num_samples),
            ("--dtype", self.shape.dtype, str(workload.compute_dtype)),
        ):
            if asked is not None and asked != planned:
                raise PlanError(
                    f"{option} is {asked}, but the plan's workload has {planned}. Search a plan with {option} {asked}, "
                    f"or pass {option} {planned}."
                )
        if self.workload is None:
            check_budget(self.plan, workload, self.device.budget_bytes)

    def _num_steps(self, source: DataSource, workload: Workload) -> int:
        """Of as many epochs as are asked for, the last step filled up from the next epoch."""
        if not isinstance(source, PackedSource):
            return TEXT_STEPS
        of_step = workload.num_samples * self.plan.num_batches
        return -(-source.num_sequences(self.extent.epochs or 1) // of_step)


def _warn_nobody(message: str) -> None:
    """Another rank warns of the same."""

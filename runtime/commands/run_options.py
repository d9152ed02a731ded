"""Options of ``protwin run``, in groups; some are of other commands too.  Needs no torch to be imported."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ...shared.basics.errors import PlanError, ProtwinError
from ...shared.cli.options import (
    BatchSize,
    DeviceBudget,
    DTypeName,
    FrozenParts,
    LossName,
    MethodName,
    OptimizerName,
    SequenceLength,
    rate_option,
)
from ...shared.cli.training_choice import ImageChoice, PackingChoice, ScaledLora, SubspaceChoice, trained
from ...shared.schema.plan import Plan, TrainingMethod
from ...shared.schema.training_options import OsftOptions, TrainingOptions
from ...shared.workloads.dtypes import choose_dtype
from ..recording.replanning import LEAST_STEPS
from .learning_rates import LearningRates

if TYPE_CHECKING:
    from ..devices.device import TrainingDevice

TEXT_STEPS: Final = 10
"""Steps of training on text, where nothing else is asked for."""


class LossWeighting(StrEnum):
    """What counts alike in the loss of a step."""

    TOKENS = "tokens"
    """Every learned token, in whichever micro-batch and on whichever rank it is."""
    BATCHES = "batches"
    """Every micro-batch of every rank, as DistributedDataParallel has it."""


PlanPath = Annotated[Path, typer.Option("--plan", metavar="FILE", dir_okay=False, help="What to carry out.")]
ReplanAfter = Annotated[
    int | None,
    typer.Option(
        "--replan-after",
        metavar="N",
        min=LEAST_STEPS,
        help="Search again after N steps with what they have measured, and go on by a better plan.",
    ),
]
RankCount = Annotated[
    int | None,
    typer.Option("--ranks", metavar="N", min=1, help="Start the plan's ranks on this machine, by torchrun."),
]
OptionalModel = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="NAME|FILE", help="A model of the catalogue, or a config.json, with random weights."
    ),
]
SaveFolder = Annotated[
    Path | None,
    typer.Option("--save", metavar="FOLDER", file_okay=False, help="Write the finished model or adapter here."),
]
DiskFolder = Annotated[
    Path | None,
    typer.Option("--disk-folder", metavar="FOLDER", file_okay=False, help="Where the plan's chunks on a disk lie."),
]
StatedMachine = Annotated[
    str | None,
    typer.Option("--hardware", metavar="NAME|FILE", help="What the plan was made for: a slower disk is told of."),
]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a search was asked about besides the model; see [Note: Groups of options] in ``option_groups.py``."""

    batch_size: BatchSize = None
    sequence_length: SequenceLength = None
    dtype: DTypeName = None

    @property
    def checked(self) -> Shape:
        """With the element type's own name.  Raises ProtwinError if it is none that trains."""
        return self if self.dtype is None else replace(self, dtype=str(choose_dtype(None, self.dtype, None).dtype))


@dataclass(frozen=True, kw_only=True)
class ModelOfPlan:
    """What is trained, and the workload that the plan is for."""

    workload: Annotated[
        Path | None,
        typer.Option(
            "--workload",
            metavar="FILE",
            dir_okay=False,
            help="The workload that the plan is for; without it, --batch-size and --sequence-length as in the search.",
        ),
    ] = None
    model: OptionalModel = None
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            metavar="FOLDER",
            file_okay=False,
            help="A model to fine-tune: config.json and safetensors files.",
        ),
    ] = None

    def check(self) -> None:
        """Raise ProtwinError unless one model is named."""
        if (self.model is None) == (self.weights is None):
            given = "both are given" if self.model is not None else "neither is given"
            raise ProtwinError(
                f"--weights FOLDER is a model to fine-tune, --model NAME one with random weights, and {given}. Give "
                f"one."
            )

    @property
    def named(self) -> str:
        """What its configuration is found by: a folder may be called like a model of the catalogue."""
        if self.weights is not None:
            return str(self.weights / "config.json")
        assert self.model is not None, "the command has seen to it"
        return self.model


@dataclass(frozen=True, kw_only=True)
class TrainingOfPlan:
    """How the model of a plan is trained."""

    lora: ScaledLora
    packed: PackingChoice
    method: MethodName = None
    subspaces: SubspaceChoice
    osft_cache: Annotated[
        Path | None,
        typer.Option(
            "--osft-cache", metavar="FOLDER", file_okay=False, help="Keep factorised weights here, and read those kept."
        ),
    ] = None
    frozen: FrozenParts = None
    loss: LossName = None
    pictures: ImageChoice

    def options(self, plan: Plan) -> TrainingOptions:
        """Raises ProtwinError if they make no sense together, or are not those of the plan's method."""
        osft = self._factorised(plan)
        self._check_cache(osft)
        quantized, images = self.packed.options(), self.pictures.options()
        return trained(self.lora.options(), quantized, osft, images, frozen=self.frozen, loss=self.loss)

    def _factorised(self, plan: Plan) -> OsftOptions | None:
        """What is factorised for the plan.  Raises ProtwinError if the options are not those of its method."""
        method, found = self.method, self.subspaces.options(self.method)
        if method not in (None, plan.method):
            raise PlanError(f"the plan is one of method {plan.method}, and --method is {method}. Leave it out.")
        if found is not None and plan.method is not TrainingMethod.OSFT:
            raise PlanError(
                f"the plan is one of method {plan.method}. Leave out --unfreeze-rank-ratio, or name another plan."
            )
        if found is None and plan.method is TrainingMethod.OSFT:
            raise PlanError(
                f"the plan is one of method {plan.method}. Say the ratio that it was searched with: "
                f"--unfreeze-rank-ratio 0.25."
            )
        return found

    def _check_cache(self, osft: OsftOptions | None) -> None:
        """Raise ProtwinError if there is nothing to keep, or nowhere to."""
        folder = self.osft_cache
        if folder is None:
            return
        if osft is None:
            raise ProtwinError(
                f"--osft-cache {folder} keeps factorised weights, and none are factorised. Leave it out, or name a "
                f"plan of method osft."
            )
        taken = next((path for path in (folder, *folder.parents) if path.exists()), None)
        if taken is not None and not taken.is_dir():
            raise ProtwinError(f"--osft-cache {folder}: {taken} is a file. Name a folder.")


@dataclass(frozen=True, kw_only=True)
class DataChoice:
    """What is trained on and evaluated on."""

    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            metavar="FILE.jsonl",
            dir_okay=False,
            help="Rows with messages, with prompt and completion, or with text (repeatable).",
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", metavar="FOLDER", file_okay=False, help="The tokenizer; by default that of --weights."
        ),
    ] = None
    evaluation: Annotated[
        Path | None,
        typer.Option(
            "--evaluation", metavar="FILE.jsonl", dir_okay=False, help="Rows whose loss is told, not trained on."
        ),
    ] = None
    evaluate_every: Annotated[
        int | None, typer.Option("--evaluate-every", min=1, metavar="N", help="Evaluate every N steps too.")
    ] = None
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", dir_okay=False, help="Text to train on; by default Python's reference."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ExtentChoice:
    """How far is trained, with which optimizer, at which rates."""

    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", metavar="N", min=1, help=f"Steps to train, instead of {TEXT_STEPS}, or of one epoch of --data."
        ),
    ] = None
    epochs: Annotated[
        int | None, typer.Option("--epochs", metavar="N", min=1, help="Times to go through --data, instead of --steps.")
    ] = None
    optimizer: OptimizerName = None
    rates: LearningRates
    loss_weighting: Annotated[
        LossWeighting,
        typer.Option(
            "--loss-weighting", help="What counts alike in the loss of a step, on all ranks: tokens or batches."
        ),
    ] = LossWeighting.TOKENS

    def check(self, *, has_data: bool) -> None:
        """Raise ProtwinError if options contradict each other."""
        if self.steps is not None and self.epochs is not None:
            raise ProtwinError("--steps and --epochs both say how far to train. Give one of them.")
        if self.epochs is not None and not has_data:
            raise ProtwinError("--epochs needs --data FILE.jsonl: text has no end. Give --steps.")
        if not math.isfinite(self.rates.peak):
            raise ProtwinError(f"--learning-rate {self.rates.peak} is not finite. Give a rate such as 1e-4.")


@dataclass(frozen=True, kw_only=True)
class CheckpointChoice:
    """Where checkpoints go, and whether one is gone on from."""

    folder: Annotated[
        Path | None,
        typer.Option("--checkpoint", metavar="FOLDER", file_okay=False, help="Save here after the last step."),
    ] = None
    every: Annotated[
        int | None, typer.Option("--checkpoint-every", min=1, metavar="N", help="Save every N steps too.")
    ] = None
    """Steps between two; None saves after the last alone."""
    is_resuming: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from what is in the folder of --checkpoint; --steps counts those before it too."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """The device's budget, and the rates of its links."""

    budget_bytes: DeviceBudget = None
    host_to_device_bytes_per_s: Annotated[
        float | None,
        typer.Option(
            "--host-to-device",
            parser=rate_option,
            metavar="RATE",
            help="Throttle copies to a CPU as the device (12GB/s).",
        ),
    ] = None
    device_to_host_bytes_per_s: Annotated[
        float | None,
        typer.Option("--device-to-host", parser=rate_option, metavar="RATE", help="Throttle copies from it (12GB/s)."),
    ] = None

    def at_hand(self, local_rank: int = 0) -> TrainingDevice:
        """The CUDA device of this number where there are any, else the CPU as a device.  Raises ProtwinError."""
        import torch

        from ..devices.cpu_device import CpuDevice
        from ..ranks.own_device import device_of_rank

        if torch.cuda.is_available():
            if self.host_to_device_bytes_per_s is not None or self.device_to_host_bytes_per_s is not None:
                raise ProtwinError(
                    "a CUDA device's link cannot be throttled. Leave out --host-to-device, --device-to-host."
                )
            return device_of_rank("cuda", local_rank, budget_bytes=self.budget_bytes)
        return CpuDevice(
            self.budget_bytes,
            host_to_device_bytes_per_s=self.host_to_device_bytes_per_s,
            device_to_host_bytes_per_s=self.device_to_host_bytes_per_s,
        )

"""Options of ``protwin run`` alone.  Needs no torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from ...shared.cli.options import rate_option
from ..recording.replanning import LEAST_STEPS

TEXT_STEPS: Final = 10
"""Steps of training on text, where nothing else is asked for."""


class Schedule(StrEnum):
    """How the learning rate goes on after its warm-up."""

    CONSTANT = "constant"
    """As it is."""
    LINEAR = "linear"
    """Down to 0 at the last step, in a line."""
    COSINE = "cosine"
    """Down to 0 at the last step, along half a wave."""


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
WorkloadPath = Annotated[
    Path | None,
    typer.Option(
        "--workload",
        metavar="FILE",
        dir_okay=False,
        help="The workload that the plan is for; without it, --batch-size and --sequence-length as in the search.",
    ),
]
OptionalModel = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="NAME|FILE", help="A model of the catalogue, or a config.json, with random weights."
    ),
]
WeightsFolder = Annotated[
    Path | None,
    typer.Option(
        "--weights", metavar="FOLDER", file_okay=False, help="A model to fine-tune: config.json and safetensors files."
    ),
]
DataPaths = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        metavar="FILE.jsonl",
        dir_okay=False,
        help="Rows with messages, with prompt and completion, or with text (repeatable).",
    ),
]
EvaluationPath = Annotated[
    Path | None,
    typer.Option("--evaluation", metavar="FILE.jsonl", dir_okay=False, help="Rows whose loss is told, not trained on."),
]
EvaluateEvery = Annotated[
    int | None, typer.Option("--evaluate-every", min=1, metavar="N", help="Evaluate every N steps too.")
]
TokenizerFolder = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FOLDER", file_okay=False, help="The tokenizer; by default that of --weights."),
]
TextPath = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", dir_okay=False, help="Text to train on; by default Python's reference."),
]
LossWeightingName = Annotated[
    LossWeighting,
    typer.Option("--loss-weighting", help="What counts alike in the loss of a step, on all ranks: tokens or batches."),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", metavar="N", min=1, help=f"Steps to train, instead of {TEXT_STEPS}, or of one epoch of --data."
    ),
]
Epochs = Annotated[
    int | None, typer.Option("--epochs", metavar="N", min=1, help="Times to go through --data, instead of --steps.")
]
LearningRate = Annotated[float, typer.Option("--learning-rate", metavar="RATE", min=0.0, help="Rate of the optimizer.")]
ScheduleName = Annotated[Schedule, typer.Option("--schedule", help="How the rate goes on after the warm-up.")]
WarmupSteps = Annotated[
    int, typer.Option("--warmup-steps", metavar="N", min=0, help="Steps in which the rate rises from 0, in a line.")
]
CheckpointFolder = Annotated[
    Path | None,
    typer.Option("--checkpoint", metavar="FOLDER", file_okay=False, help="Save here after the last step."),
]
CheckpointEvery = Annotated[
    int | None, typer.Option("--checkpoint-every", min=1, metavar="N", help="Save every N steps too.")
]
ResumeFlag = Annotated[
    bool, typer.Option("--resume", help="Go on from the checkpoint; --steps counts those before it too.")
]
SaveFolder = Annotated[
    Path | None,
    typer.Option("--save", metavar="FOLDER", file_okay=False, help="Write the finished model or adapter here."),
]
FactorFolder = Annotated[
    Path | None,
    typer.Option(
        "--osft-cache", metavar="FOLDER", file_okay=False, help="Keep factorised weights here, and read those kept."
    ),
]
DiskFolder = Annotated[
    Path | None,
    typer.Option("--disk-folder", metavar="FOLDER", file_okay=False, help="Where the plan's chunks on a disk lie."),
]
StatedMachine = Annotated[
    str | None,
    typer.Option("--hardware", metavar="NAME|FILE", help="What the plan was made for: a slower disk is told of."),
]
HostToDevice = Annotated[
    float | None,
    typer.Option(
        "--host-to-device", parser=rate_option, metavar="RATE", help="Throttle copies to a CPU as the device (12GB/s)."
    ),
]
DeviceToHost = Annotated[
    float | None,
    typer.Option("--device-to-host", parser=rate_option, metavar="RATE", help="Throttle copies from it (12GB/s)."),
]

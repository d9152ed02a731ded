"""Options of ``protwin bypass`` alone.  Needs no torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ...shared.basics.errors import ProtwinError
from ...shared.cli.options import count_option
from ...shared.schema.workload import DType

NO_LIMIT = "none"


class Keep(StrEnum):
    """Which weights a run ends with."""

    BEST = "best"
    """Those of the validation with the lowest loss."""
    FINAL = "final"
    """Those of the last step."""


def norm_option(text: str) -> float:
    """The norm of an option's value, infinite for ``none``; raises typer.BadParameter, which names the option."""
    try:
        found = float("inf") if text == NO_LIMIT else float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise typer.BadParameter(f"{text!r} is neither a positive number nor {NO_LIMIT}.")
    return found


def limit_of(norm: float | None, otherwise: float | None) -> float | None:
    """The limit that an option's value means: None for no limit; ``otherwise`` where it was left out."""
    if norm is None:
        return otherwise
    return None if norm == float("inf") else norm


def autocast_of(name: str | None) -> DType | None:
    """The element type that forwards compute in; None: that of the weights.  Raises ProtwinError unless it is known."""
    if name is None or name == DType.BFLOAT16:
        return None if name is None else DType.BFLOAT16
    raise ProtwinError(
        f"--autocast {name} is no element type that a bypass run computes in. Give bfloat16; float16 needs losses that "
        f"are scaled, as protwin.runtime.distil(..., loss_scaling=LossScaling()) does."
    )


def check_parts(**fracs: float) -> None:
    """Raise ProtwinError if a fraction is none, NaN among them."""
    for name, frac in fracs.items():
        if not 0 <= frac <= 1:
            raise ProtwinError(f"--{name.replace('_', '-')} {frac} is no fraction. Give a number from 0 to 1.")


Teacher = Annotated[
    Path,
    typer.Option(
        "--teacher", metavar="FOLDER", file_okay=False, help="What teaches: config.json, safetensors, a tokenizer."
    ),
]
StudentFile = Annotated[
    Path,
    typer.Option("--student", metavar="FILE", dir_okay=False, help="How the student differs (student.toml)."),
]
TokenBudgetSize = Annotated[
    int,
    typer.Option("--tokens", parser=count_option, metavar="N", help="How many tokens to train on (50M, 2e9)."),
]
BypassData = Annotated[
    list[Path],
    typer.Option(
        "--data",
        metavar="FILE",
        dir_okay=False,
        help="Text to train on, or rows of JSON Lines in a file that ends in .jsonl (repeatable).",
    ),
]
ValidationData = Annotated[
    list[Path] | None,
    typer.Option(
        "--validation",
        metavar="FILE",
        dir_okay=False,
        help="Text to validate on (repeatable), instead of the end of --data.",
    ),
]
RunFolderPath = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="FOLDER", file_okay=False, help="The run's folder; of a sweep, that of its runs'."
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", dir_okay=False, help="What to carry out, instead of a plan searched now."),
]
SearchedMachine = Annotated[
    str | None,
    typer.Option("--hardware", metavar="NAME|FILE", help="The machine to search a plan for, instead of --plan."),
]
SweepFile = Annotated[
    Path | None,
    typer.Option(
        "--sweep",
        metavar="FILE",
        dir_okay=False,
        help="Several runs: a TOML file whose [[run]] tables say what differs.",
    ),
]
TokenizerPath = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FOLDER", file_okay=False, help="The tokenizer; by default the teacher's."),
]
ByteTokens = Annotated[
    bool, typer.Option("--byte-tokens", help="Take bytes for tokens: the teacher has no tokenizer, and reads bytes.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the code files that the teacher's config.json names (auto_map)."),
]
BypassAutocast = Annotated[
    str | None, typer.Option("--autocast", metavar="NAME", help="Compute in this element type, by autocast (bfloat16).")
]
BypassBatchSize = Annotated[int, typer.Option("--batch-size", metavar="N", min=1, help="Samples per micro-batch.")]
BypassLength = Annotated[int, typer.Option("--sequence-length", metavar="N", min=1, help="Tokens per sample.")]
BypassMicroBatches = Annotated[
    int | None,
    typer.Option("--micro-batches", metavar="N", min=1, help="Micro-batches per step: the plan's, or else 1."),
]
BlockNorm = Annotated[
    float | None,
    typer.Option(
        "--max-gradient-norm",
        parser=norm_option,
        metavar="NORM|none",
        help="Limit of the norm of each block's gradients: the plan's, or else 1.",
    ),
]
PeakRate = Annotated[float, typer.Option("--learning-rate", metavar="RATE", min=0.0, help="At the warm-up's end.")]
LeastRate = Annotated[float, typer.Option("--least-rate", metavar="FRACTION", help="What it falls to, of its peak.")]
Warmup = Annotated[float, typer.Option("--warmup", metavar="FRACTION", help="Part of all steps in which it rises.")]
WeightDecay = Annotated[float, typer.Option("--weight-decay", metavar="RATE", min=0.0, help="Of the optimizer.")]
DataSeed = Annotated[
    int, typer.Option("--data-seed", metavar="N", min=0, max=2**63 - 1, help="Seed of the order of the data.")
]
KeptName = Annotated[Keep, typer.Option("--keep", help="Which weights the run ends with.")]
ValidateEvery = Annotated[
    int | None, typer.Option("--validate-every", metavar="N", min=1, help="Validate every N steps too.")
]
ValidationBatches = Annotated[
    int, typer.Option("--validation-batches", metavar="N", min=1, help="Micro-batches to validate on, at most.")
]
StatisticsBatches = Annotated[
    int, typer.Option("--statistics-batches", metavar="N", min=1, help="Micro-batches that pruning looks at.")
]
SaveEvery = Annotated[int | None, typer.Option("--save-every", metavar="N", min=1, help="Save every N steps too.")]
LogEvery = Annotated[int, typer.Option("--log-every", metavar="N", min=1, help="Steps between two reports.")]

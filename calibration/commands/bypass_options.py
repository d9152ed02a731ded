"""Options of ``protwin bypass`` alone.  Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ...shared.basics.errors import ProtwinError
from ...shared.cli.options import DTypeName, OptimizerName, Seed, count_option
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
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


@dataclass(frozen=True, kw_only=True)
class BypassFiles:
    """What a run reads; see [Note: Groups of options] in ``shared/cli/option_groups.py``."""

    teacher: Annotated[
        Path,
        typer.Option(
            "--teacher", metavar="FOLDER", file_okay=False, help="What teaches: config.json, safetensors, a tokenizer."
        ),
    ]
    student: Annotated[
        Path,
        typer.Option("--student", metavar="FILE", dir_okay=False, help="How the student differs (student.toml)."),
    ]
    tokens: Annotated[
        int,
        typer.Option("--tokens", parser=count_option, metavar="N", help="How many tokens to train on (50M, 2e9)."),
    ]
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            metavar="FILE",
            dir_okay=False,
            help="Text to train on, or rows of JSON Lines in a file that ends in .jsonl (repeatable).",
        ),
    ]
    validation: Annotated[
        list[Path] | None,
        typer.Option(
            "--validation",
            metavar="FILE",
            dir_okay=False,
            help="Text to validate on (repeatable), instead of the end of --data.",
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="FOLDER", file_okay=False, help="The tokenizer; by default the teacher's."),
    ] = None
    is_bytes: Annotated[
        bool,
        typer.Option("--byte-tokens", help="Take bytes for tokens: the teacher has no tokenizer, and reads bytes."),
    ] = False
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run the code files that the teacher's config.json names (auto_map)."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class BypassSteps:
    """How a run trains, and how often it looks up; fields are called as those of ``RunSettings`` that they become."""

    micro_batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Samples per micro-batch.")
    ] = 1
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", metavar="N", min=1, help="Tokens per sample.")
    ] = 2048
    micro_batches: Annotated[
        int | None,
        typer.Option("--micro-batches", metavar="N", min=1, help="Micro-batches per step: the plan's, or else 1."),
    ] = None
    dtype: DTypeName = None
    autocast: Annotated[
        str | None,
        typer.Option("--autocast", metavar="NAME", help="Compute in this element type, by autocast (bfloat16)."),
    ] = None
    optimizer: OptimizerName = None
    max_gradient_norm: Annotated[
        float | None,
        typer.Option(
            "--max-gradient-norm",
            parser=norm_option,
            metavar="NORM|none",
            help="Limit of the norm of each block's gradients: the plan's, or else 1.",
        ),
    ] = None
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", metavar="RATE", help="At the warm-up's end; above 0.")
    ] = 1e-4
    least_rate_frac: Annotated[
        float, typer.Option("--least-rate", metavar="FRACTION", help="What it falls to, of its peak.")
    ] = 1e-5
    warmup_frac: Annotated[
        float, typer.Option("--warmup", metavar="FRACTION", help="Part of all steps in which it rises.")
    ] = 0.05
    weight_decay: Annotated[
        float, typer.Option("--weight-decay", metavar="RATE", min=0.0, help="Of the optimizer.")
    ] = 0.1
    seed: Seed = 0
    data_seed: Annotated[
        int, typer.Option("--data-seed", metavar="N", min=0, max=2**63 - 1, help="Seed of the order of the data.")
    ] = 0
    kept_weights: Annotated[Keep, typer.Option("--keep", help="Which weights the run ends with.")] = Keep.BEST
    validate_every: Annotated[
        int | None, typer.Option("--validate-every", metavar="N", min=1, help="Validate every N steps too.")
    ] = None
    validation_batches: Annotated[
        int, typer.Option("--validation-batches", metavar="N", min=1, help="Micro-batches to validate on, at most.")
    ] = 8
    statistics_batches: Annotated[
        int, typer.Option("--statistics-batches", metavar="N", min=1, help="Micro-batches that pruning looks at.")
    ] = 8
    save_every: Annotated[
        int | None, typer.Option("--save-every", metavar="N", min=1, help="Save every N steps too.")
    ] = None
    log_every: Annotated[int, typer.Option("--log-every", metavar="N", min=1, help="Steps between two reports.")] = 5

    def check(self) -> None:
        """Raise ProtwinError if numbers are no rates, or no fractions."""
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate) and math.isfinite(self.weight_decay)):
            raise ProtwinError(
                f"--learning-rate {self.learning_rate} and --weight-decay {self.weight_decay} must be finite, and the "
                f"rate positive."
            )
        for option, frac in (("--least-rate", self.least_rate_frac), ("--warmup", self.warmup_frac)):
            if not 0 <= frac <= 1:  # NaN among them
                raise ProtwinError(f"{option} {frac} is no fraction. Give a number from 0 to 1.")

    def fields(self, plan: Plan | None, num_tokens: int) -> dict[str, Any]:
        """Of ``RunSettings``: what is left out is as the plan has it, if there is one.  Raises ProtwinError."""
        found = {**vars(self), "num_tokens": num_tokens, "autocast": autocast_of(self.autocast)}
        del found["dtype"]
        return found | {
            "micro_batches": self.micro_batches or (1 if plan is None else plan.micro_batches * plan.num_ranks),
            "optimizer": self.optimizer or (Optimizer.ADAMW if plan is None else plan.optimizer),
            "max_gradient_norm": limit_of(self.max_gradient_norm, 1.0 if plan is None else plan.max_gradient_norm),
            "kept_weights": self.kept_weights.value,
        }

"""Options of the search commands that say what a step is."""

from __future__ import annotations

from typing import Annotated

import typer

from ..shared.errors import PlanError
from .space import LARGEST_KNOB
from .step_rule import MOST_MICRO_BATCHES

AllowedSwaps = Annotated[
    list[int] | None,
    typer.Option(
        "--n-swap", min=0, max=LARGEST_KNOB, help="Allow this number of swapped blocks (repeatable); 0 unless given."
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option("--micro-batches", min=1, max=MOST_MICRO_BATCHES, help="Forwards and backwards per step."),
]
MaxGradientNorm = Annotated[
    float | None,
    typer.Option("--max-gradient-norm", metavar="NORM", help="Limit of the norm of all gradients together."),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        "--global-batch",
        min=1,
        max=10**9,
        help="Samples per step: search the size of the micro-batch too, over all divisors.",
    ),
]
WhatIfFlag = Annotated[
    bool, typer.Option("--what-if", help="Search again for machines with more, less or faster parts.")
]


def check_batch(global_batch: int | None, batch_size: int | None, micro_batches: int | None) -> None:
    """Raise PlanError if a global batch is asked for together with what it decides."""
    given = {"--batch-size": batch_size, "--micro-batches": micro_batches}
    for option, value in given.items():
        if global_batch is not None and value is not None:
            raise PlanError(
                f"--global-batch {global_batch} has the size and the number of micro-batches searched, but "
                f"{option} {value} fixes one of them. Leave one of the two options out."
            )

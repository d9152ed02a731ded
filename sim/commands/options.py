"""Options of the search commands that say what a step is."""

from __future__ import annotations

from itertools import zip_longest
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from ...shared.basics.errors import PlanError
from ..space.space import LARGEST_KNOB
from ..space.step_spec import MOST_MICRO_BATCHES

USUAL: Final = "usual"
"""Stands for the questions that --what-if asks where it names none."""

AllowedSwaps = Annotated[
    list[int] | None,
    typer.Option(
        "--n-swap",
        metavar="N",
        min=0,
        max=LARGEST_KNOB,
        help="Allow this number of swapped blocks (repeatable); 0 unless given.",
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        "--micro-batches", metavar="N", min=1, max=MOST_MICRO_BATCHES, help="Forwards and backwards per step."
    ),
]
MaxGradientNorm = Annotated[
    float | None,
    typer.Option("--max-gradient-norm", metavar="NORM", help="Limit of the norm of all gradients together."),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        "--global-batch",
        metavar="N",
        min=1,
        max=10**9,
        help="Samples per step: search the size of the micro-batch too, over all divisors.",
    ),
]
WhatIfQuestions = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        metavar="[PART|CHANGE]",
        help="Search again with another part (rtx-4090, pcie5-x16), with changes as --set takes them, or, with nothing "
        "named, with more, less or faster parts (repeatable).",
    ),
]


class WhatIfCommand(TyperCommand):
    """A command whose ``--what-if`` needs no value: alone it stands for the usual questions."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As its base does, with the value that is left out filled in."""
        filled = []
        for this, following in zip_longest(args, args[1:]):
            filled.append(this)
            if this == "--what-if" and (following is None or following.startswith("-")):
                filled.append(USUAL)
        return super().parse_args(ctx, filled)


def check_batch(global_batch: int | None, batch_size: int | None, micro_batches: int | None) -> None:
    """Raise PlanError if a global batch is asked for together with what it decides."""
    given = {"--batch-size": batch_size, "--micro-batches": micro_batches}
    for option, value in given.items():
        if global_batch is not None and value is not None:
            raise PlanError(
                f"--global-batch {global_batch} has the size and the number of micro-batches searched, but "
                f"{option} {value} fixes one of them. Leave one of the two options out."
            )

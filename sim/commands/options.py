"""Options that several commands of this folder share: what a step is, and which ranks take it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from ...shared.answers.search_result import BatchSearchResult, Goal, Risk
from ...shared.basics.errors import PlanError, ProtwinError
from ...shared.cli.options import MethodName as MethodName
from ...shared.cli.options import count_option
from ...shared.methods.runtime_profile import MOST_METRICS, Runtime, RuntimeProfile
from ...shared.schema.workload import DType
from ..searching.confidence import DEFAULT_MARGIN_FRAC
from ..space.step_spec import MOST_MICRO_BATCHES

MOST_SAMPLES: Final = 10**9
"""Of a step."""

MicroBatches = Annotated[
    int | None,
    typer.Option(
        "--micro-batches", metavar="N", min=1, max=MOST_MICRO_BATCHES, help="Forwards and backwards per step."
    ),
]
MaxGradientNorm = Annotated[
    float | None,
    typer.Option(
        "--max-gradient-norm",
        metavar="NORM",
        help="Limit of the norm of all gradients together; of each student block's, with --method bypass.",
    ),
]
GlobalBatchSize = Annotated[
    int | None,
    typer.Option(
        "--global-batch",
        metavar="N",
        min=1,
        max=MOST_SAMPLES,
        help="Samples per step: search the size of the micro-batch too, over all divisors.",
    ),
]
WhatIfQuestions = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        metavar="[PART|CHANGE]",
        help="Search again with another part (rtx-4090, pcie5-x16), with changes as --set takes them, with another "
        "method (optimizer=adamw-8bit, host-gradients=float32, lora=16, max-gradient-norm=none, sequence-length=8192, "
        "batch-size=4), or, with nothing named, with more, less or faster parts (repeatable).",
    ),
]
Margin = Annotated[
    float | None,
    typer.Option(
        "--margin",
        metavar="PERCENT",
        min=0,
        max=99,
        help=f"Share of the device's memory that stays free beside the allocator's segments; "
        f"{DEFAULT_MARGIN_FRAC * 100:g} unless given.",
    ),
]
GoalName = Annotated[
    Goal,
    typer.Option(
        "--goal",
        help="What the search is for. longest-sequence and largest-batch choose --sequence-length and --batch-size; "
        "cheapest chooses how many of the machine's devices, at what --price, its file or a public list says.",
    ),
]
RiskName = Annotated[
    Risk,
    typer.Option(
        "--risk",
        help="What is to be short: mean is the predicted time, high the upper end of its interval, for a plan whose "
        "time is less uncertain.",
    ),
]
BaselinePlans = Annotated[
    list[Path] | None,
    typer.Option("--baseline", metavar="FILE", help="Lay this plan beside the recommended one (repeatable)."),
]


class ReducedAs(StrEnum):
    """Element types that gradients are reduced in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def _bucket_scalars(text: str) -> int:
    return 0 if text.strip() == "0" else count_option(text)


class WhatIfCommand(TyperCommand):
    """A command whose ``--what-if`` needs no value: alone it stands for the usual questions."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As its base does, with the value that is left out filled in."""
        filled = []
        for this, following in zip_longest(args, args[1:]):
            filled.append(this)
            if this == "--what-if" and (following is None or following.startswith("-")):
                from ..questions.what_if import USUAL

                filled.append(USUAL)
        return super().parse_args(ctx, filled)


def margin_frac_of(percent: float | None) -> float:
    """The part of the device's memory that ``--margin`` keeps free."""
    return DEFAULT_MARGIN_FRAC if percent is None else percent / 100


def check_goal(
    goal: Goal,
    *,
    batch_size: int | None,
    sequence_length: int | None,
    global_batch: int | None,
    packed_lengths: str | None = None,
) -> None:
    """Raise PlanError if a shape is given that the goal chooses."""
    chosen: dict[Goal, dict[str, int | str | None]] = {
        Goal.LONGEST_SEQUENCE: {
            "--sequence-length": sequence_length,
            "--global-batch": global_batch,
            "--packed-lengths": packed_lengths,
        },
        Goal.LARGEST_BATCH: {"--batch-size": batch_size, "--global-batch": global_batch},
    }
    for option, value in chosen.get(goal, {}).items():
        if value is not None:
            raise PlanError(f"--goal {goal} chooses the shape, but {option} {value} fixes it. Leave {option} out.")


def check_risk(risk: Risk, goal: Goal) -> None:
    """Raise PlanError if another goal than the fastest plan is to be reached by upper ends."""
    if risk is not Risk.MEAN and goal is not Goal.FASTEST:
        raise PlanError(
            f"--risk {risk} weighs the times of plans at one shape, but --goal {goal} is for something else. Leave one "
            f"of the two options out."
        )


def check_batch(global_batch: int | None, batch_size: int | None, micro_batches: int | None) -> None:
    """Raise PlanError if a global batch is asked for together with what it decides."""
    given = {"--batch-size": batch_size, "--micro-batches": micro_batches}
    for option, value in given.items():
        if global_batch is not None and value is not None:
            raise PlanError(
                f"--global-batch {global_batch} has the size and the number of micro-batches searched, but "
                f"{option} {value} fixes one of them. Leave one of the two options out."
            )


def with_run(found: BatchSearchResult, num_tokens: int | None) -> BatchSearchResult:
    """``found``, whose prediction says what training on ``num_tokens`` takes, if that is asked.

    Raises PlanError if the model's samples have no tokens.
    """
    if num_tokens is None:
        return found
    prediction = found.result.prediction.for_tokens(num_tokens)
    return found.model_copy(update={"result": found.result.model_copy(update={"prediction": prediction})})


@dataclass(frozen=True, kw_only=True)
class RuntimeChoice:
    """Who is to carry a plan out, and how; see [Note: Groups of options] in ``shared/cli/option_groups.py``."""

    runtime: Annotated[
        Runtime, typer.Option("--as", help="Who carries the plan out: other systems copy, wait and step otherwise.")
    ] = Runtime.OURS
    reduce_dtype: Annotated[
        ReducedAs | None,
        typer.Option("--reduce-dtype", help="What another system reduces gradients in; their own type without."),
    ] = None
    reentrant: Annotated[
        bool,
        typer.Option(
            "--reentrant",
            help="Checkpointed blocks are recomputed to their end, as reentrant checkpointing and PyTorch before 2.1 "
            "do: not just up to what backward reads.",
        ),
    ] = False
    loss_metrics: Annotated[
        int | None,
        typer.Option(
            "--loss-metrics",
            metavar="N",
            min=0,
            max=MOST_METRICS,
            help="Metrics that are taken from all logits of every micro-batch, each by a cross-entropy in float32: as "
            "many as the system of --as takes (composer 2, all others 0) without.",
        ),
    ] = None
    bucket_scalars: Annotated[
        int | None,
        typer.Option(
            "--bucket-scalars",
            parser=_bucket_scalars,
            metavar="N",
            help="Scalars of the flat buffer that DeepSpeed reduces gradients in (reduce_bucket_size: 5e8, 200M); 0: "
            "none; 500000000 without. It counts in memory alone.",
        ),
    ] = None
    two_buckets: Annotated[
        bool,
        typer.Option(
            "--two-buckets", help="Such a buffer is filled while another is reduced: overlap_comm of ZeRO-1 and ZeRO-2."
        ),
    ] = False
    keeps_gradients: Annotated[
        bool,
        typer.Option(
            "--keeps-gradients",
            help="Gradients are zeroed behind a step, not dropped: zero_grad(set_to_none=False), as PyTorch before "
            "2.0.",
        ),
    ] = False
    holds_inputs: Annotated[
        bool,
        typer.Option(
            "--holds-inputs",
            help="Inputs of recomputed blocks and their gradients stay until backward ends: FSDP's hooks hold them "
            "where reentrant checkpointing is around frozen blocks, as transformers has it under adapters with "
            "use_orig_params=False.",
        ),
    ] = False
    caches_keys: Annotated[
        bool,
        typer.Option(
            "--caches-keys",
            help="The model gives the keys and values of all blocks with its output (use_cache), which stay until the "
            "output goes: beside checkpointing by wrappers, which do not turn the cache off, and, with "
            "--keeps-outputs, from step to step.",
        ),
    ] = False
    foreach: Annotated[
        bool,
        typer.Option(
            "--foreach",
            help="AdamW goes over lists of tensors, as PyTorch's does on a GPU unless it is told fused=True: a step "
            "moves three times as much, and makes as many more numbers as it steps. On a CPU, where it has to be asked "
            "for, a list is gone over tensor by tensor.",
        ),
    ] = False
    expandable_segments: Annotated[
        bool,
        typer.Option(
            "--expandable-segments",
            help="The process asks PyTorch's allocator for expandable segments, as protwin run does: memory is "
            "reserved page by page.",
        ),
    ] = False

    def profile(self) -> RuntimeProfile:
        """Raises ProtwinError if the options make no sense together."""
        if self.reduce_dtype is not None and self.runtime is Runtime.OURS:
            raise ProtwinError(
                f"--reduce-dtype is {self.reduce_dtype}, but --as names nobody who casts gradients: here they are "
                f"reduced in their own type. Add --as fsdp2."
            )
        return RuntimeProfile(
            self.runtime,
            None if self.reduce_dtype is None else DType(self.reduce_dtype),
            recomputes_whole=self.reentrant,
            loss_metrics=self.loss_metrics,
            bucket_scalars=self.bucket_scalars,
            has_two_buckets=self.two_buckets,
            keeps_gradients=self.keeps_gradients,
            holds_inputs=self.holds_inputs,
            caches_keys=self.caches_keys,
            temporary_lists=1 if self.foreach else 0,
            expandable_segments=self.expandable_segments,
        )

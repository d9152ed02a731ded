"""Options that several commands of this folder share: what a step is, and which ranks take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from ...shared.answers.search_result import BatchSearchResult, Goal, Risk
from ...shared.basics.errors import PlanError, ProtwinError
from ...shared.basics.units import format_bytes
from ...shared.catalogue.machines import load_hardware, override_hardware
from ...shared.cli.options import MethodName as MethodName
from ...shared.cli.options import changes_of, count_option, warn
from ...shared.methods.runtime_profile import MOST_METRICS, Runtime, RuntimeProfile
from ...shared.phases.quadratic import attention_words
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import ParallelMode, Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Compiled, DType, Float8, Workload
from ...shared.workloads.check import narrow_words
from ...shared.workloads.dtypes import TRAINABLE
from ..searching.confidence import DEFAULT_MARGIN_FRAC
from ..space.step_spec import MOST_MICRO_BATCHES, MOST_RANKS, check_ranks

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
NumRanks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        min=1,
        max=MOST_RANKS,
        help="Devices that train together; all of the machine's with --parallel.",
    ),
]
Parallel = Annotated[
    ParallelMode | None,
    typer.Option("--parallel", help="What they do together."),
]
AsRuntime = Annotated[
    Runtime, typer.Option("--as", help="Who carries the plan out: other systems copy, wait and step otherwise.")
]


CompiledParts = Annotated[
    Compiled | None,
    typer.Option(
        "--compile",
        help="Predict the plan where torch.compile has compiled every block, or the whole model.  Protwin's runtime "
        "carries out no such plan.",
    ),
]
Float8Scaling = Annotated[
    Float8 | None,
    typer.Option(
        "--float8",
        help="Predict the plan where linear maps of blocks multiply in float8, scaled by tensors or rows (torchao, "
        "with --compile), or by the steps before (Transformer Engine).  Protwin's runtime carries out no such plan.",
    ),
]


BitsandbytesRelease = Annotated[
    str | None,
    typer.Option(
        "--bitsandbytes",
        metavar="VERSION",
        help="Predict the plan with the products of this release of bitsandbytes (0.41.1): 4-bit maps keep their input "
        "until backward before 0.43.2, 8-bit maps always.  Protwin's runtime carries out no such plan.",
    ),
]
PackedFrom = Annotated[
    str | None,
    typer.Option(
        "--packed-from",
        metavar="NAME",
        help="With --bitsandbytes: the element type that 4-bit weights had when they were packed, which they are "
        "unpacked to, and cast from, where maps compute in another one.",
    ),
]


class ReducedAs(StrEnum):
    """Element types that gradients are reduced in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Reentrant = Annotated[
    bool,
    typer.Option(
        "--reentrant",
        help="Checkpointed blocks are recomputed to their end, as reentrant checkpointing and PyTorch before 2.1 do: "
        "not just up to what backward reads.",
    ),
]
LossMetrics = Annotated[
    int | None,
    typer.Option(
        "--loss-metrics",
        metavar="N",
        min=0,
        max=MOST_METRICS,
        help="Metrics that are taken from all logits of every micro-batch, each by a cross-entropy in float32: as "
        "many as the system of --as takes (composer 2, all others 0) without.",
    ),
]


def _bucket_scalars(text: str) -> int:
    return 0 if text.strip() == "0" else count_option(text)


BucketScalars = Annotated[
    int | None,
    typer.Option(
        "--bucket-scalars",
        parser=_bucket_scalars,
        metavar="N",
        help="Scalars of the flat buffer that DeepSpeed reduces gradients in (reduce_bucket_size: 5e8, 200M); 0: none; "
        "500000000 without. It counts in memory alone.",
    ),
]
TwoBuckets = Annotated[
    bool,
    typer.Option(
        "--two-buckets", help="Such a buffer is filled while another is reduced: overlap_comm of ZeRO-1 and ZeRO-2."
    ),
]
Foreach = Annotated[
    bool,
    typer.Option(
        "--foreach",
        help="AdamW goes over lists of tensors, as PyTorch's does on a GPU unless it is told fused=True: a step moves "
        "three times as much, and makes as many more numbers as it steps. On a CPU, where it has to be asked for, a "
        "list is gone over tensor by tensor.",
    ),
]
ExpandableSegments = Annotated[
    bool,
    typer.Option(
        "--expandable-segments",
        help="The process asks PyTorch's allocator for expandable segments, as protwin run does: memory is reserved "
        "page by page.",
    ),
]
KeepsGradients = Annotated[
    bool,
    typer.Option(
        "--keeps-gradients",
        help="Gradients are zeroed behind a step, not dropped: zero_grad(set_to_none=False), as PyTorch before 2.0.",
    ),
]
ReduceDType = Annotated[
    ReducedAs | None,
    typer.Option("--reduce-dtype", help="What another system reduces gradients in; their own type without."),
]
Shards = Annotated[
    int | None,
    typer.Option(
        "--n-shard",
        metavar="N",
        min=0,
        help="Chunks, after the persistent ones, that are sharded over the devices; with --parallel sharded.",
    ),
]


ShardRanks = Annotated[
    int | None,
    typer.Option(
        "--shard-ranks",
        metavar="N",
        min=1,
        max=MOST_RANKS,
        help="Neighbouring ranks that share chunks, with replicas across such groups; with --parallel sharded.",
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
                from ..questions.what_if import USUAL

                filled.append(USUAL)
        return super().parse_args(ctx, filled)


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


def with_ranks(
    plan: Plan,
    hardware: Hardware,
    num_ranks: int | None,
    parallel: ParallelMode | None,
    n_shard: int | None = None,
    shard_ranks: int | None = None,
) -> Plan:
    """``plan`` for so many ranks, in this mode, with so many chunks sharded in such groups, the plan's own if None.

    A mode of several ranks alone takes all devices of the machine, one rank alone is single.
    Raises PlanError if ranks and mode do not agree; whether mode and shards do, compiling the plan says.
    """
    if n_shard is not None:
        plan = plan.model_copy(update={"n_shard": n_shard})
    if shard_ranks is not None:
        plan = _with_ranks(plan, hardware, num_ranks, parallel)
        return plan.model_copy(update={"shard_ranks": None if shard_ranks == plan.num_ranks else shard_ranks})
    return _with_ranks(plan, hardware, num_ranks, parallel)


def _with_ranks(plan: Plan, hardware: Hardware, num_ranks: int | None, parallel: ParallelMode | None) -> Plan:
    if num_ranks is None and parallel is None:
        return plan
    if parallel is None:
        parallel = ParallelMode.SINGLE if num_ranks == 1 else plan.parallel
    if num_ranks is None:
        num_ranks = 1 if parallel is ParallelMode.SINGLE else max(plan.num_ranks, hardware.num_devices)
    check_ranks(num_ranks, parallel)
    return plan.model_copy(update={"num_ranks": num_ranks, "parallel": parallel})


def ranks_to_search(hardware: Hardware, num_ranks: int | None, parallel: Sequence[ParallelMode]) -> int:
    """Ranks that a search asks about: as many as are named, all devices if only modes are, else one.

    Raises PlanError if the modes do not go with them.
    """
    if num_ranks is None:
        num_ranks = hardware.num_devices if any(mode is not ParallelMode.SINGLE for mode in parallel) else 1
    for mode in parallel:
        check_ranks(num_ranks, mode)
    return num_ranks


def unused_devices(hardware: Hardware, num_ranks: int) -> str | None:
    """A note on devices that nobody uses; None if all are used."""
    if num_ranks >= hardware.num_devices:
        return None
    number = "one is used" if num_ranks == 1 else f"{num_ranks} are used"
    return f"{hardware.name} has {hardware.num_devices} devices and {number}. Without --ranks, --parallel takes all."


def machine_of(name: str, changes: list[str] | None, prices: list[str] | None = None) -> Hardware:
    """The machine that ``--hardware`` names, with the changes of ``--set`` and the rent of ``--price``."""
    machine = load_hardware(name)
    wanted = changes_of(changes)
    if wanted:
        machine = override_hardware(machine, wanted)
    if prices:
        from ...shared.catalogue.prices import parse_prices, with_prices

        (machine,) = with_prices([machine], parse_prices(prices))
    return machine


def price_files(prices: list[str] | None) -> dict[str, str | Path | None]:
    """Files among the values of ``--price``, by what a message calls them."""
    return {f"--price {entry}": Path(entry) for entry in prices or () if entry.endswith((".toml", ".json"))}


def with_run(found: BatchSearchResult, num_tokens: int | None) -> BatchSearchResult:
    """``found``, whose prediction says what training on ``num_tokens`` takes, if that is asked.

    Raises PlanError if the model's samples have no tokens.
    """
    if num_tokens is None:
        return found
    prediction = found.result.prediction.for_tokens(num_tokens)
    return found.model_copy(update={"result": found.result.model_copy(update={"prediction": prediction})})


StudentPath = Annotated[
    Path | None,
    typer.Option("--student", metavar="FILE", help="What learns from the model, block by block (student.toml)."),
]


def check_budget(budget_bytes: int | None, machine: Hardware) -> None:
    """Warn of a budget that the device does not have: it is taken as asked for."""
    usable_bytes = machine.device.usable_bytes
    if budget_bytes is not None and budget_bytes > usable_bytes:
        warn(
            f"the device budget is {format_bytes(budget_bytes)} but {machine.device.name} has "
            f"{format_bytes(usable_bytes)} for training. For a larger device, use --set device.memory_bytes=SIZE."
        )


def warn_of_dtype(record: Record, hardware: Hardware) -> None:
    """Warn of an element type that the device has no matrix units for."""
    assert record.question is not None, "a prediction says what was asked"
    device, dtype = hardware.device, record.question.compute_dtype
    rate = device.matrix_flop_per_s(dtype)
    if dtype in device.peak_flop_per_s or rate is None:
        return
    faster = [known for known in TRAINABLE if device.peak_flop_per_s.get(known, 0) > rate]
    remedy = (
        f"; use --dtype {faster[0]}, which reaches {device.peak_flop_per_s[faster[0]] / 1e12:.4g} TFLOP/s"
        if faster
        else ""
    )
    warn(
        f"{device.name} has no matrix units for {dtype}: its products are predicted at {rate / 1e12:.4g} TFLOP/s, the "
        f"rate of {device.rate_dtype(dtype) or 'its vector units'}, at most{remedy}."
    )


def warn_of_attention(workload: Workload) -> None:
    """Warn of attention that takes memory with the square of the sequence."""
    words = attention_words(workload.quadratic, workload.model_name, workload.num_tokens // workload.num_samples)
    if words is not None:
        warn(words)


def warn_of_loss(workload: Workload) -> None:
    """Warn of a loss that is asked to be narrow where no logits are."""
    if (words := narrow_words(workload)) is not None:
        warn(words)


def warn_of_memory(record: Record, host_bytes: int) -> None:
    """Warn of segments or host memory that do not fit although all that the plan allocates does."""
    from ...shared.tables.memory import allocator_warning, host_warning

    for message in (allocator_warning(record), host_warning(record, host_bytes)):
        if message is not None:
            warn(message)


@dataclass(frozen=True, kw_only=True)
class RuntimeChoice:
    """Who is to carry a plan out, and how; see [Note: Groups of options] in ``shared/cli/option_groups.py``."""

    runtime: AsRuntime = Runtime.OURS
    reduce_dtype: ReduceDType = None
    reentrant: Reentrant = False
    loss_metrics: LossMetrics = None
    bucket_scalars: BucketScalars = None
    two_buckets: TwoBuckets = False
    keeps_gradients: KeepsGradients = False
    foreach: Foreach = False
    expandable_segments: ExpandableSegments = False

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
            temporary_lists=1 if self.foreach else 0,
            expandable_segments=self.expandable_segments,
        )

"""The command ``simulate``: time and memory of one plan, predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...shared.basics.documents import write_atomically
from ...shared.basics.gc_pause import gc_paused
from ...shared.basics.progress import progress_bar
from ...shared.basics.units import format_bytes
from ...shared.catalogue.rank_share import machine_of_rank
from ...shared.cli.loss_options import check_loss_of_plan
from ...shared.cli.option_groups import with_groups
from ...shared.cli.options import (
    BatchSize,
    OptimizerName,
    SequenceLength,
    TimelinePath,
    Tokens,
    command_app,
    examples,
    load_plan,
    warn,
)
from ...shared.cli.output import save
from ...shared.cli.report_options import AnswerChoice
from ...shared.compile.compile import compile_schedule
from ...shared.methods.known import method_named
from ...shared.methods.runtime_profile import OF_FLAT_PARAMETERS
from ...shared.pipelines.pipeline import Pipeline, load_plan_or_pipeline
from ...shared.schema.hardware import DeviceKind, Hardware
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.schedule import Schedule
from ..engine.simulator import simulate as simulate_plan
from ..memory.host import default_host_budget_bytes
from ..memory.libraries import collective_bytes, rank_device_bytes, rank_host_bytes
from ..memory.reserved import segment_limit_bytes
from ..operations.streams import loss_metric_bytes
from ..questions.in_tiles import AskedTiles
from ..questions.leaner_plans import Room
from ..questions.remedies import remedies
from ..searching.confidence import DEFAULT_MARGIN_FRAC
from .machine_choice import MachineChoice, RanksOfPlan, check_budget, unused_devices
from .model_choice import NamedModel, PredictedTraining
from .options import RuntimeChoice
from .pipelines import Asked, refuse, simulate_stages
from .warnings import (
    warn_of_attention,
    warn_of_cached_keys,
    warn_of_dtype,
    warn_of_held_inputs,
    warn_of_kernels,
    warn_of_memory,
    warn_of_options,
)

if TYPE_CHECKING:
    from ...shared.report.page import Report
    from ...shared.tables.table import Parts

__all__ = ["simulate"]

simulate = command_app()


@simulate.command(
    epilog=examples(
        "protwin simulate --plan plan.json --model gpt2 --hardware rtx-3090 --batch-size 8 --sequence-length 1024",
        "protwin simulate --plan plan.json --model workload.json --hardware machine.toml --output predicted.json",
        "protwin simulate --plan plan.json --model model.json --hardware h100-80gb-x8 --parallel sharded",
    )
)
@gc_paused()
@with_groups
def simulate_command(
    *,
    plan: Annotated[Path, typer.Option("--plan", metavar="FILE", help="What to simulate.")],
    named: NamedModel,
    batch_size: BatchSize = None,
    sequence_length: SequenceLength = None,
    training: PredictedTraining,
    on: MachineChoice,
    ranks: RanksOfPlan,
    carried_out: RuntimeChoice,
    optimizer: OptimizerName = None,
    tokens: Tokens = None,
    timeline: TimelinePath = None,
    answer: AnswerChoice,
) -> None:
    """Predict time and memory of one plan.

    --output writes the record, which protwin compare lays beside a measured one.  --parallel, --ranks, --n-shard and
    --shard-ranks, in place of the plan's own, ask about several devices of the machine, and --optimizer about another
    optimizer.  --as asks how long another system takes for the same plan, with its copies around collectives, --compile
    and --float8 how long it takes where torch.compile or float8 products compute it: none of these is carried out by
    protwin's own runtime.  Of a pipeline's file, every stage is simulated, and told in a row.
    """
    answer.keep_apart({"--plan": plan, **named.files, **on.files}, timeline=timeline)
    profile = carried_out.profile()
    machine = on.machine()
    loaded = load_plan_or_pipeline(plan)
    check_budget(on.device_budget_bytes, machine)
    factors = on.factors()
    casts_views = training.autocast is not None and profile.runtime in OF_FLAT_PARAMETERS
    choice = named.choice(
        replace(training, no_autocast_cache=True) if casts_views else training,
        machine,
        batch_size=batch_size,
        sequence_length=sequence_length,
        has_cache=not answer.no_cache,
        tiles=AskedTiles()
        if isinstance(loaded, Pipeline)
        else AskedTiles(mlp=(loaded.mlp_tiles,), loss=(loaded.loss_tiles,)),
        sequence_ranks=() if isinstance(loaded, Pipeline) else (loaded.sequence_ranks,),
    )
    if isinstance(loaded, Pipeline):
        others: dict[str, object] = {"--as": profile.other, "--optimizer": optimizer, "--tokens": tokens}
        others |= {"--timeline": timeline, "--report": answer.report}
        refuse({**ranks.options, **others}, "a pipeline's file")
        asked = Asked(on.device_budget_bytes, answer.output, as_json=answer.as_json)
        simulate_stages(loaded, choice.workload(), machine, factors, asked)
        return
    check_loss_of_plan(training.loss, loaded)
    chosen = ranks.taking(load_plan(plan, optimizer), machine)
    workload = choice.workload()
    with progress_bar("simulating") as on_progress:
        schedule = compile_schedule(chosen, workload, policies=profile.method(method_named(chosen.method)).policies)
        ask = partial(
            simulate_plan,
            schedule=schedule,
            runtime=profile,
            device_budget_bytes=on.device_budget_bytes,
            on_progress=on_progress,
        )
        record = ask(chosen, workload, machine, factors)
    record = record if tokens is None else record.for_tokens(tokens)
    budget_bytes = on.device_budget_bytes or rank_device_bytes(machine, chosen.num_ranks, chosen.shard_ranks)
    told = remedies(
        record,
        workload,
        machine,
        factors,
        schedule=schedule,
        room=_room(machine, chosen, budget_bytes),
        workload_at=lambda size: choice.untraced(size, sequence_length),
    )
    record = record.model_copy(update={"remedies": told})
    _warn(record, machine, budget_bytes)
    for warn_of in (warn_of_attention, warn_of_kernels, warn_of_options):
        warn_of(workload)
    warn_of_held_inputs(profile, schedule)
    warn_of_cached_keys(profile, schedule)
    if carried_out.foreach and machine.device.kind is DeviceKind.CPU:
        warn(
            "--foreach is asked about on a CPU, where PyTorch takes lists of tensors if it is told foreach=True alone, "
            "and its operations on lists go tensor by tensor: the step is predicted as a loop's, beside a list of "
            "temporaries."
        )
    if profile.num_loss_metrics:
        warn(
            f"metrics hold up to {format_bytes(loss_metric_bytes(workload))} behind each backward (all logits, their "
            f"float32 copy and its log-softmax), which the peak does not count."
        )
    save(record, answer.output)
    if timeline is not None:
        from ...shared.records.chrome_trace import chrome_trace

        write_atomically(timeline, chrome_trace({"simulated": record}, schedule=schedule))
    answer.tell(record, lambda: _tables(record), lambda: _report(record, schedule, budget_bytes))


def _warn(record: Record, machine: Hardware, budget_bytes: int) -> None:
    """Warn of what the plan leaves unused, and of what it needs and the machine lacks."""
    num_ranks = record.plan.num_ranks
    if (unused := unused_devices(machine, num_ranks)) is not None:
        warn(unused)
    if record.guaranteed_peak_device_bytes > budget_bytes:
        warn(
            f"this plan may need {format_bytes(record.guaranteed_peak_device_bytes)} of device memory but the budget "
            f"is {format_bytes(budget_bytes)}."
        )
    warn_of_dtype(record, machine)
    warn_of_memory(record, rank_host_bytes(machine, num_ranks))


def _tables(record: Record) -> Parts:
    from ...shared.tables.record import record_tables

    return record_tables(record)


def _room(machine: Hardware, plan: Plan, budget_bytes: int) -> Room:
    """What one rank may fill, with the margin that a search leaves by default."""
    own = machine_of_rank(machine, plan.num_ranks) if plan.num_ranks > 1 else machine
    beside_bytes = collective_bytes(machine, plan.num_ranks, plan.shard_ranks)
    segments_bytes = segment_limit_bytes(machine.device, beside_bytes=beside_bytes, margin_frac=DEFAULT_MARGIN_FRAC)
    return Room(budget_bytes, default_host_budget_bytes(own, budget_bytes), segments_bytes)


def _report(record: Record, schedule: Schedule, budget_bytes: int) -> Report:
    from ...shared.report.report import Facts, report

    facts = Facts(predicted=record, budget_bytes=budget_bytes, schedule=schedule)
    return report(f"{record.model_name} on {record.hardware_name}: a plan, simulated", facts)

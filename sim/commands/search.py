"""The commands of this folder: ``search``, ``simulate`` and ``hardware``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...shared.basics.documents import write_atomically
from ...shared.basics.errors import InfeasibleError
from ...shared.basics.gc_pause import gc_paused
from ...shared.basics.progress import progress_bar
from ...shared.basics.units import format_bytes
from ...shared.catalogue.machines import load_hardware, override_hardware
from ...shared.catalogue.models import model_names
from ...shared.cli.exits import report_interruption
from ...shared.cli.options import (
    AutocastName,
    BatchSize,
    CalibrationPath,
    DeviceBudget,
    DTypeName,
    FrozenParts,
    HardwareChanges,
    HardwareName,
    JsonFlag,
    LoraRank,
    LoraTargets,
    ModelName,
    NoCacheFlag,
    OutputPath,
    SequenceLength,
    TimelinePath,
    cache_folder,
    changes_of,
    command_app,
    examples,
    keep_apart,
    options_of,
    size_option,
    warn,
)
from ...shared.cli.output import show
from ...shared.cli.report_options import ReportPath, write_report
from ...shared.compile.compile import compile_schedule
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import ParallelMode, Plan
from ...shared.schema.record import Record
from ...shared.schema.schedule import Schedule
from ...shared.schema.search_result import BatchSearchResult, SearchResult
from ...shared.schema.workload import Workload
from ...shared.workloads.source import resolve_workload, saved_sizes
from ..engine.simulator import simulate as simulate_plan
from ..memory.rank_memory import rank_device_bytes, rank_host_bytes
from ..space.space import LARGEST_KNOB, SearchSpace
from ..space.step_spec import SEVERAL, StepSpec, check_shares
from .hardware import hardware
from .options import (
    USUAL,
    AllowedSwaps,
    GlobalBatch,
    MaxGradientNorm,
    MicroBatches,
    WhatIfCommand,
    WhatIfQuestions,
    check_batch,
)
from .rank_options import (
    AllowedModes,
    AllowedShards,
    NumRanks,
    Parallel,
    Shards,
    ranks_to_search,
    unused_devices,
    with_ranks,
)

if TYPE_CHECKING:
    from ...shared.report.page import Report
    from ..questions.what_if import Question, Setting

__all__ = ["hardware", "search", "simulate"]

search = command_app()
simulate = command_app()


@search.command(
    cls=WhatIfCommand,
    epilog=examples(
        "protwin search --model llama-3-8b --hardware rtx-3090 --batch-size 1 --sequence-length 2048",
        "protwin search --model workload.json --hardware machine.toml --device-budget 10GiB --output plan.json",
        "protwin search --model gpt2 --hardware rtx-3090 --batch-size 8 --sequence-length 512 --what-if rtx-4090",
        "protwin search --model llama-3-8b --hardware h100-80gb-x8 --batch-size 1 --sequence-length 2048 --ranks 8",
    ),
)
@gc_paused()
def search_command(
    model: ModelName,
    hardware: HardwareName,
    batch_size: BatchSize = None,
    sequence_length: SequenceLength = None,
    dtype: DTypeName = None,
    lora_rank: LoraRank = None,
    lora_targets: LoraTargets = None,
    frozen: FrozenParts = None,
    autocast: AutocastName = None,
    changes: HardwareChanges = None,
    device_budget_bytes: DeviceBudget = None,
    calibration: CalibrationPath = None,
    chunk_bytes: Annotated[
        list[int] | None,
        typer.Option("--chunk-bytes", parser=size_option, metavar="SIZE", help="Allow this chunk size (repeatable)."),
    ] = None,
    n_persist: Annotated[
        list[int] | None,
        typer.Option(
            "--n-persist",
            metavar="N",
            min=0,
            max=LARGEST_KNOB,
            help="Allow this number of persistent chunks (repeatable).",
        ),
    ] = None,
    n_shard: AllowedShards = None,
    n_buffer: Annotated[
        list[int] | None,
        typer.Option(
            "--n-buffer", metavar="N", min=0, max=LARGEST_KNOB, help="Allow this number of buffers (repeatable)."
        ),
    ] = None,
    prefetch_depth: Annotated[
        list[int] | None,
        typer.Option(
            "--prefetch-depth", metavar="N", min=1, max=LARGEST_KNOB, help="Allow this prefetch depth (repeatable)."
        ),
    ] = None,
    n_checkpoint: Annotated[
        list[int] | None,
        typer.Option(
            "--n-checkpoint",
            metavar="N",
            min=0,
            max=LARGEST_KNOB,
            help="Allow this number of checkpointed blocks (repeatable).",
        ),
    ] = None,
    n_swap: AllowedSwaps = None,
    micro_batches: MicroBatches = None,
    max_gradient_norm: MaxGradientNorm = None,
    global_batch: GlobalBatch = None,
    num_ranks: NumRanks = None,
    parallel: AllowedModes = None,
    questions: WhatIfQuestions = None,
    output: OutputPath = None,
    report: ReportPath = None,
    as_json: JsonFlag = False,
    no_cache: NoCacheFlag = False,
) -> None:
    """Find the fastest plan that fits a model on a machine, without the machine.

    Prints the plan, its time by phase, its memory with what is alive at the peak, what each lane does, and what is
    proven about every other plan.  --output writes the plan.  Ctrl-C ends the search with the best plan so far.
    """
    check_batch(global_batch, batch_size, micro_batches)
    keep_apart(
        {"--output": output, "--report": report},
        {"--model": model, "--hardware": hardware, "--calibration": calibration},
    )
    machine = _machine(hardware, changes)
    _check_budget(device_budget_bytes, machine)
    factors = _calibration(calibration)
    ranks = ranks_to_search(machine, num_ranks, parallel or ())
    if (unused := unused_devices(machine, ranks)) is not None:
        warn(unused)
    what_ifs = _what_ifs(questions, machine, factors)
    allowed = {
        "chunk_bytes": chunk_bytes,
        "n_persist": n_persist,
        "n_shard": n_shard,
        "n_buffer": n_buffer,
        "prefetch_depth": prefetch_depth,
        "n_checkpoint": n_checkpoint,
        "n_swap": n_swap,
    }
    space = SearchSpace.model_validate({knob: tuple(values) for knob, values in allowed.items() if values})

    def workload_at(size: int | None) -> Workload:
        return resolve_workload(
            model,
            batch_size=size,
            sequence_length=sequence_length,
            dtype=dtype,
            cache=None if no_cache else cache_folder(),
            warn=warn,
            options=options_of(lora_rank, lora_targets, frozen, autocast),
            device_kind=machine.device.kind,
        )

    modes = tuple(parallel or ()) or SEVERAL

    def setting_at(workload: Workload, mode: ParallelMode, micro_batches: int) -> Setting:
        """What is asked, once there is a workload."""
        from ..questions.what_if import Batches, Setting

        rule = StepSpec(micro_batches, max_gradient_norm, mode, ranks)
        sizes = saved_sizes(model, global_batch, ranks) if global_batch is not None else None
        batches = None if global_batch is None else Batches(workload_at, global_batch, sizes)
        budget = device_budget_bytes
        return Setting(workload, machine, factors, budget, space=space, rule=rule, modes=modes, batches=batches)

    last_mode = ParallelMode.SINGLE if ranks == 1 else modes[-1]
    with progress_bar("searching") as on_progress:
        found: SearchResult | BatchSearchResult
        asked: dict[str, Any] = {
            "device_budget_bytes": device_budget_bytes,
            "space": space,
            "max_gradient_norm": max_gradient_norm,
            "on_progress": on_progress,
            "keep_interrupted": True,
        } | ({"num_ranks": ranks, "parallel": modes} if ranks > 1 else {})
        if global_batch is None:
            workload = workload_at(batch_size)
            if what_ifs is not None:  # a question that cannot be answered is told at once
                what_ifs(setting_at(workload, last_mode, micro_batches or 1))
            try:
                search_plans = _search_of(ranks)
                result = found = search_plans(workload, machine, factors, micro_batches=micro_batches or 1, **asked)
            except InfeasibleError as error:
                setting = setting_at(workload, last_mode, micro_batches or 1)
                sized = workload_at if model in model_names() else None
                raise InfeasibleError(f"{error}{_what_fits_instead(setting, sized)}") from error
        else:
            check_shares(global_batch, ranks)
            sizes = saved_sizes(model, global_batch, ranks)
            if what_ifs is not None:
                size = sizes[0] if sizes else 1
                what_ifs(setting_at(workload_at(size), last_mode, 1))
            found = _batch_search_of(ranks)(
                workload_at, global_batch, machine, factors, micro_batch_sizes=sizes, **asked
            )
            result, workload = found.result, workload_at(found.micro_batch_size)
        is_interrupted = result.certificate.is_interrupted
        if what_ifs is not None and not is_interrupted:
            from ..questions.what_if import what_if

            setting = setting_at(workload, result.plan.parallel, result.plan.micro_batches)
            answers = what_if(setting, result.prediction.iteration_s, what_ifs(setting), on_progress=on_progress)
            result = result.model_copy(update={"what_if": answers})
            found = result if isinstance(found, SearchResult) else found.model_copy(update={"result": result})
    _warn_of_memory(result.prediction, rank_host_bytes(machine, result.plan.num_ranks))
    if not is_interrupted:
        if output is not None:
            result.plan.save(output)
        write_report(report, lambda: _search_report(found, workload))
    if as_json:
        typer.echo(found.to_json(), nl=False)
    else:
        from ...shared.tables.search import batch_tables, search_tables

        show(search_tables(found) if isinstance(found, SearchResult) else batch_tables(found))
    if is_interrupted:
        raise typer.Exit(report_interruption())


@simulate.command(
    epilog=examples(
        "protwin simulate --plan plan.json --model gpt2 --hardware rtx-3090 --batch-size 8 --sequence-length 1024",
        "protwin simulate --plan plan.json --model workload.json --hardware machine.toml --output predicted.json",
        "protwin simulate --plan plan.json --model model.json --hardware h100-80gb-x8 --parallel sharded",
    )
)
@gc_paused()
def simulate_command(
    plan: Annotated[Path, typer.Option("--plan", metavar="FILE", help="What to simulate.")],
    model: ModelName,
    hardware: HardwareName,
    batch_size: BatchSize = None,
    sequence_length: SequenceLength = None,
    dtype: DTypeName = None,
    lora_rank: LoraRank = None,
    lora_targets: LoraTargets = None,
    frozen: FrozenParts = None,
    autocast: AutocastName = None,
    changes: HardwareChanges = None,
    device_budget_bytes: DeviceBudget = None,
    calibration: CalibrationPath = None,
    num_ranks: NumRanks = None,
    parallel: Parallel = None,
    n_shard: Shards = None,
    timeline: TimelinePath = None,
    output: OutputPath = None,
    report: ReportPath = None,
    as_json: JsonFlag = False,
    no_cache: NoCacheFlag = False,
) -> None:
    """Predict time and memory of one plan.

    --output writes the record, which protwin compare lays beside a measured one.  --parallel, --ranks and --n-shard, in
    place of the plan's own, ask about several devices of the machine.
    """
    keep_apart(
        {"--output": output, "--timeline": timeline, "--report": report},
        {"--plan": plan, "--model": model, "--hardware": hardware, "--calibration": calibration},
    )
    machine = _machine(hardware, changes)
    chosen = with_ranks(Plan.load(plan), machine, num_ranks, parallel, n_shard)
    _check_budget(device_budget_bytes, machine)
    factors = _calibration(calibration)
    workload = resolve_workload(
        model,
        batch_size=batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        cache=None if no_cache else cache_folder(),
        warn=warn,
        options=options_of(lora_rank, lora_targets, frozen, autocast),
        device_kind=machine.device.kind,
    )
    with progress_bar("simulating") as on_progress:
        schedule = compile_schedule(chosen, workload)
        record = simulate_plan(chosen, workload, machine, factors, schedule=schedule, on_progress=on_progress)
    budget_bytes = device_budget_bytes or rank_device_bytes(machine, chosen.num_ranks)
    if (unused := unused_devices(machine, chosen.num_ranks)) is not None:
        warn(unused)
    if record.guaranteed_peak_device_bytes > budget_bytes:
        warn(
            f"this plan may need {format_bytes(record.guaranteed_peak_device_bytes)} of device memory but the budget "
            f"is {format_bytes(budget_bytes)}."
        )
    _warn_of_memory(record, rank_host_bytes(machine, chosen.num_ranks))
    if output is not None:
        record.save(output)
    if timeline is not None:
        from ...shared.records.chrome_trace import chrome_trace

        write_atomically(timeline, chrome_trace({"simulated": record}, schedule=schedule))
    write_report(report, lambda: _simulation_report(record, schedule, budget_bytes))
    if as_json:
        typer.echo(record.to_json(), nl=False)
    else:
        from ...shared.tables.record import record_tables

        show(record_tables(record))


def _search_of(num_ranks: int) -> Callable[..., SearchResult]:
    if num_ranks == 1:
        from ..searching.search import search

        return search
    from ..searching.rank_search import search_ranks

    return search_ranks


def _batch_search_of(num_ranks: int) -> Callable[..., BatchSearchResult]:
    if num_ranks == 1:
        from ..searching.batch_search import search_batches

        return search_batches
    from ..searching.rank_batches import search_rank_batches

    return search_rank_batches


def _what_fits_instead(setting: Setting, workload_at: Callable[[int], Workload] | None) -> str:
    """What of less or of more devices fits where the plans that were asked about do not, in words."""
    from ..questions.what_if import fewest_ranks, largest_batch

    batch_size = largest_batch(setting, workload_at) if workload_at is not None else None
    smaller = f" A batch of {batch_size} fits as things are." if batch_size is not None else ""
    num_ranks = fewest_ranks(setting) if setting.num_ranks > 1 else None
    more = f" A plan of {num_ranks} ranks fits this machine." if num_ranks is not None else ""
    return smaller + more


def _machine(name: str, changes: list[str] | None) -> Hardware:
    machine = load_hardware(name)
    wanted = changes_of(changes)
    return override_hardware(machine, wanted) if wanted else machine


def _what_ifs(
    wanted: list[str] | None, machine: Hardware, factors: Calibration | None
) -> Callable[[Setting], list[Question]] | None:
    """What is to be asked once there is a best plan; None where nothing is."""
    if not wanted:
        return None
    from ..questions.what_if import questions
    from ..questions.what_if_machines import changed_machines, part_questions

    machines = changed_machines(wanted, machine, factors)
    return lambda setting: [*(questions(setting) if USUAL in wanted else ()), *part_questions(setting, machines)]


def _check_budget(budget_bytes: int | None, machine: Hardware) -> None:
    """Warn of a budget that the device does not have: it is taken as asked for."""
    usable_bytes = machine.device.usable_bytes
    if budget_bytes is not None and budget_bytes > usable_bytes:
        warn(
            f"the device budget is {format_bytes(budget_bytes)} but {machine.device.name} has "
            f"{format_bytes(usable_bytes)} for training. For a larger device, use --set device.memory_bytes=SIZE."
        )


def _search_report(found: SearchResult | BatchSearchResult, workload: Workload) -> Report:
    from ...shared.report.report import Facts, report

    result = found if isinstance(found, SearchResult) else found.result
    facts = Facts(
        predicted=result.prediction,
        budget_bytes=result.device_budget_bytes,
        schedule=compile_schedule(result.plan, workload),
        search=found,
    )
    return report(f"{result.model_name} on {result.hardware_name}: the plan that was found", facts)


def _simulation_report(record: Record, schedule: Schedule, budget_bytes: int) -> Report:
    from ...shared.report.report import Facts, report

    facts = Facts(predicted=record, budget_bytes=budget_bytes, schedule=schedule)
    return report(f"{record.model_name} on {record.hardware_name}: a plan, simulated", facts)


def _warn_of_memory(record: Record, host_bytes: int) -> None:
    """Warn of segments or host memory that do not fit although all that the plan allocates does."""
    from ...shared.tables.memory import allocator_warning, host_warning

    for message in (allocator_warning(record), host_warning(record, host_bytes)):
        if message is not None:
            warn(message)


def _calibration(path: Path | None) -> Calibration | None:
    return Calibration.load(path) if path is not None else None

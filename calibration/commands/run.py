"""The command ``protwin run``.  torch is imported when it is called."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from ...runtime.commands.learning_rates import LearningRates
from ...runtime.commands.run_budget import check_budget, check_random_weights
from ...runtime.commands.run_options import (
    TEXT_STEPS,
    CheckpointEvery,
    CheckpointFolder,
    DataPaths,
    DeviceToHost,
    DiskFolder,
    Epochs,
    EvaluateEvery,
    EvaluationPath,
    FactorFolder,
    HostToDevice,
    LearningRate,
    LossWeighting,
    LossWeightingName,
    OptionalModel,
    PlanPath,
    RankCount,
    ReplanAfter,
    ResumeFlag,
    SaveFolder,
    Schedule,
    ScheduleName,
    StatedMachine,
    Steps,
    TextPath,
    TokenizerFolder,
    WarmupSteps,
    WeightsFolder,
    WorkloadPath,
)
from ...runtime.commands.run_ranks import has_to_start, in_one_voice, rank_at_hand, start_ranks, was_accepted
from ...runtime.commands.run_record import check_record
from ...runtime.devices.process_settings import prefer_expandable_segments
from ...shared.basics.documents import write_atomically
from ...shared.basics.errors import PlanError, ProtwinError
from ...shared.catalogue.machines import load_hardware
from ...shared.catalogue.models import load_model_configuration
from ...shared.cli.options import (
    BatchSize,
    CalibrationPath,
    DeviceBudget,
    DoubleQuantize,
    DTypeName,
    FrozenParts,
    ImageCount,
    ImageSize,
    JsonFlag,
    LoraAlpha,
    LoraDropout,
    LoraDtype,
    LoraRank,
    LoraTargets,
    LossName,
    MethodName,
    OptimizerName,
    OsftTargets,
    OutputPath,
    QuantizationBlock,
    QuantizedTo,
    QuantizeHead,
    Seed,
    SequenceLength,
    TimelinePath,
    UnfreezeRankRatio,
    UseDora,
    UseRslora,
    command_app,
    examples,
    keep_apart,
    load_plan,
)
from ...shared.cli.output import is_standard_output, tell
from ...shared.cli.output import save as save_document
from ...shared.cli.streams import say
from ...shared.cli.trained_as import check_loss_of_plan, images_of, options_of, osft_of, quantized_of
from ...shared.compile.compile import compile_schedule
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan, TrainingMethod
from ...shared.schema.record import Record
from ...shared.schema.training_options import OsftOptions
from ...shared.schema.workload import Workload
from ...shared.workloads.dtypes import choose_dtype
from ...shared.workloads.source import WorkloadRequest

__all__ = ["run"]

run = command_app()


@run.command(
    epilog=examples(
        "protwin run --plan plan.json --workload workload.json --model config.json --steps 20 --output measured.json",
        "protwin run --plan plan.json --workload workload.json --model gpt2 --checkpoint saved --checkpoint-every 100",
        "protwin run --plan plan.json --workload workload.json --weights base --data chats.jsonl --save tuned",
    )
)
@in_one_voice
def run_command(
    plan: PlanPath,
    ranks: RankCount = None,
    workload: WorkloadPath = None,
    model: OptionalModel = None,
    weights: WeightsFolder = None,
    batch_size: BatchSize = None,
    sequence_length: SequenceLength = None,
    dtype: DTypeName = None,
    lora_rank: LoraRank = None,
    lora_targets: LoraTargets = None,
    lora_alpha: LoraAlpha = None,
    use_rslora: UseRslora = False,
    lora_dropout: LoraDropout = None,
    lora_dtype: LoraDtype = None,
    use_dora: UseDora = False,
    quantized_to: QuantizedTo = None,
    double_quantize: DoubleQuantize = False,
    quantization_blocksize: QuantizationBlock = None,
    quantize_head: QuantizeHead = False,
    method: MethodName = None,
    unfreeze_rank_ratio: UnfreezeRankRatio = None,
    osft_targets: OsftTargets = None,
    osft_cache: FactorFolder = None,
    frozen: FrozenParts = None,
    loss: LossName = None,
    image_size: ImageSize = None,
    images: ImageCount = None,
    data: DataPaths = None,
    tokenizer: TokenizerFolder = None,
    evaluation: EvaluationPath = None,
    evaluate_every: EvaluateEvery = None,
    text: TextPath = None,
    steps: Steps = None,
    epochs: Epochs = None,
    optimizer: OptimizerName = None,
    learning_rate: LearningRate = 1e-4,
    schedule: ScheduleName = Schedule.CONSTANT,
    warmup_steps: WarmupSteps = 0,
    loss_weighting: LossWeightingName = LossWeighting.TOKENS,
    checkpoint: CheckpointFolder = None,
    checkpoint_every: CheckpointEvery = None,
    is_resuming: ResumeFlag = False,
    save: SaveFolder = None,
    disk_folder: DiskFolder = None,
    hardware: StatedMachine = None,
    device_budget_bytes: DeviceBudget = None,
    host_to_device: HostToDevice = None,
    device_to_host: DeviceToHost = None,
    replan_after: ReplanAfter = None,
    calibration: CalibrationPath = None,
    seed: Seed = 0,
    output: OutputPath = None,
    timeline: TimelinePath = None,
    as_json: JsonFlag = False,
) -> None:
    """Carry a plan out: fine-tune the weights of a folder on rows of JSON Lines, or try a plan with random weights.

    --weights and --data fine-tune, and --save writes a folder for from_pretrained.  --model trains random weights on
    text, bytes as tokens.  Uses the first CUDA device where there is one, with expandable segments of PyTorch's
    allocator unless PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF is set; else the CPU as a device.  --output writes
    the measured record, which protwin compare lays beside the predicted one.  --ranks starts as many processes, by
    torchrun, each with its part of the data; torchrun -m protwin run does the same.  --replan-after searches again with
    what the first steps have measured on --hardware, and goes on by a faster plan if there is one.
    """
    outputs = {"--output": output, "--timeline": timeline}
    read = {"--plan": plan, "--workload": workload, "--model": model, "--text": text, "--evaluation": evaluation}
    keep_apart(outputs, read | {f"--data {path}": path for path in data or ()}, as_json=as_json)
    _check_choices(model, weights, steps, epochs, data, learning_rate)
    pauses = {"--checkpoint-every": checkpoint_every, "--evaluate-every": evaluate_every}
    wants_record = as_json or output is not None or timeline is not None
    if wants_record and (steps is not None or not data):
        check_record(steps or TEXT_STEPS, pauses)
    asked = None if dtype is None else str(choose_dtype(None, dtype, None).dtype)
    chosen, given = _planned(plan, optimizer, workload, device_budget_bytes)
    starts = has_to_start(chosen, ranks, os.environ)
    machine = None if hardware is None else load_hardware(hardware)
    check_replan(replan_after, machine, calibration, chosen, steps)
    known = None if calibration is None else Calibration.load(calibration)
    # A folder may be called like a model of the catalogue.
    named = model if weights is None else str(weights / "config.json")
    assert named is not None
    described = load_model_configuration(named)
    osft = _factorised(chosen, method, unfreeze_rank_ratio, osft_targets)
    _check_factor_cache(osft_cache, osft)
    options = options_of(
        lora_rank,
        lora_targets,
        frozen,
        None,
        osft,
        quantized_of(quantized_to, double=double_quantize, blocksize=quantization_blocksize, head=quantize_head),
        lora_alpha=lora_alpha,
        use_rslora=use_rslora,
        lora_dropout=lora_dropout,
        lora_dtype=lora_dtype,
        use_dora=use_dora,
        images=images_of(image_size, images),
        loss=loss,
    )
    check_loss_of_plan(loss, chosen, given)
    if weights is None:
        asked_model = WorkloadRequest(
            named,
            batch_size=batch_size,
            sequence_length=sequence_length,
            dtype=asked,
            options=options,
            mlp_tiles=(chosen.mlp_tiles,),
            loss_tiles=(chosen.loss_tiles,),
        )
        check_random_weights(chosen, asked_model, described.name)

    prefer_expandable_segments(os.environ)
    if starts:
        raise typer.Exit(start_ranks(chosen.num_ranks, sys.argv[1:]))
    rank = rank_at_hand(os.environ)
    # This imports torch, which reads the settings of its allocator.
    from ...runtime.commands.run_checkpoints import RunCheckpoints
    from ...runtime.commands.run_data import DataChoice
    from ...runtime.commands.run_model import RunModel
    from ...runtime.commands.run_request import DeviceChoice, RunRequest, Shape
    from ...runtime.commands.run_training import DiskChoice, ReplanChoice
    from ...runtime.osft.cache import FactorCache

    def replanner(workload: Workload, budget_bytes: int | None) -> Callable[[Record], Plan | None]:
        from ...sim.searching.request import SearchRequest
        from ..fitting.replanning import Replanner

        assert machine is not None
        asked = SearchRequest(workload=workload, hardware=machine, calibration=known, device_budget_bytes=budget_bytes)
        return Replanner(asked)

    cache = None if osft_cache is None else FactorCache(osft_cache)
    request = RunRequest(
        plan=chosen,
        workload=given,
        shape=Shape(batch_size, sequence_length, asked),
        model=RunModel(described, named, weights, asked, options, seed, rank, cache),
        data=DataChoice(
            tuple(data or ()),
            evaluation,
            evaluate_every,
            tokenizer,
            text,
            weights,
            seed,
            loss_weighting,
            options.images,
        ),
        steps=steps,
        epochs=epochs,
        rates=LearningRates(learning_rate, schedule, warmup_steps),
        checkpoints=RunCheckpoints(
            checkpoint, checkpoint_every, is_resuming, was_accepted(os.environ), options.lora, options.quantized
        ),
        save=save,
        device=DeviceChoice(device_budget_bytes, host_to_device, device_to_host),
        disk=None if disk_folder is None else DiskChoice(disk_folder, None if machine is None else machine.disk),
        replan=None if replan_after is None else ReplanChoice(replan_after, replanner),
        wants_record=wants_record,
        rank=rank,
    )
    is_silent = as_json or is_standard_output(output) or not rank.speaks
    traced, record = request.carry_out(_tell_nobody if is_silent else say)
    if record is not None and rank.speaks:
        _give(record, traced, output, timeline, as_json=as_json)


def _planned(
    plan: Path, optimizer: Optimizer | None, workload: Path | None, device_budget_bytes: int | None
) -> tuple[Plan, Workload | None]:
    """The plan, and the workload that it is for if that is named.  Raises what ``check_budget`` and files raise."""
    chosen = load_plan(plan, optimizer)
    if workload is None:
        return chosen, None
    given = Workload.load(workload)
    check_budget(chosen, given, device_budget_bytes)
    return chosen, given


def check_replan(
    after: int | None, hardware: Hardware | None, calibration: Path | None, plan: Plan, steps: int | None
) -> None:
    """Raise ProtwinError if a plan is to be searched again, and cannot be."""
    if after is None:
        if calibration is not None:
            raise ProtwinError("--calibration is what a search knows before, and --replan-after N is missing.")
        return
    if hardware is None:
        raise ProtwinError("--replan-after searches a plan for this machine: describe it by --hardware machine.toml.")
    if plan.num_ranks > 1 or plan.n_disk_state:
        what = f"has {plan.num_ranks} ranks" if plan.num_ranks > 1 else "has chunks on a disk"
        raise ProtwinError(f"--replan-after: the plan {what}, and cannot change while it is carried out. Leave it out.")
    if steps is not None and after >= steps:
        raise ProtwinError(f"--replan-after is {after} of --steps {steps}: no step would be left. Lower it.")


def _tell_nobody(line: str) -> None:
    """Standard output is JSON alone, or another rank's."""


def _factorised(
    plan: Plan, method: TrainingMethod | None, unfreeze_rank_ratio: float | None, targets: list[str] | None
) -> OsftOptions | None:
    """What is factorised for the plan.  Raises ProtwinError if the options are not those of its method."""
    found = osft_of(method, unfreeze_rank_ratio, targets)
    if method not in (None, plan.method):
        raise PlanError(f"the plan is one of method {plan.method}, and --method is {method}. Leave it out.")
    if found is not None and plan.method is not TrainingMethod.OSFT:
        raise PlanError(
            f"the plan is one of method {plan.method}. Leave out --unfreeze-rank-ratio, or name another plan."
        )
    if found is None and plan.method is TrainingMethod.OSFT:
        raise PlanError(
            f"the plan is one of method {plan.method}. Say the ratio that it was searched with: --unfreeze-rank-ratio "
            f"0.25."
        )
    return found


def _check_factor_cache(folder: Path | None, osft: OsftOptions | None) -> None:
    """Raise ProtwinError if there is nothing to keep, or nowhere to."""
    if folder is None:
        return
    if osft is None:
        raise ProtwinError(
            f"--osft-cache {folder} keeps factorised weights, and none are factorised. Leave it out, or name a plan of "
            f"method osft."
        )
    taken = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if taken is not None and not taken.is_dir():
        raise ProtwinError(f"--osft-cache {folder}: {taken} is a file. Name a folder.")


def _check_choices(
    model: str | None,
    weights: Path | None,
    steps: int | None,
    epochs: int | None,
    data: list[Path] | None,
    learning_rate: float,
) -> None:
    """Raise ProtwinError if options contradict each other."""
    if (model is None) == (weights is None):
        given = "both are given" if model is not None else "neither is given"
        raise ProtwinError(
            f"--weights FOLDER is a model to fine-tune, --model NAME one with random weights, and {given}. Give one."
        )
    if steps is not None and epochs is not None:
        raise ProtwinError("--steps and --epochs both say how far to train. Give one of them.")
    if epochs is not None and not data:
        raise ProtwinError("--epochs needs --data FILE.jsonl: text has no end. Give --steps.")
    if not math.isfinite(learning_rate):
        raise ProtwinError(f"--learning-rate {learning_rate} is not finite. Give a rate such as 1e-4.")


def _give(record: Record, workload: Workload, output: Path | None, timeline: Path | None, *, as_json: bool) -> None:
    """Write the record where it was asked for, and show it."""
    from ...shared.records.chrome_trace import chrome_trace
    from ...shared.tables.record import record_tables

    save_document(record, output)
    if timeline is not None:
        write_atomically(timeline, chrome_trace({"measured": record}, schedule=compile_schedule(record.plan, workload)))
    tell(record, output, as_json=as_json, tables=lambda: record_tables(record))

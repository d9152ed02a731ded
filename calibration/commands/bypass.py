"""The command ``protwin bypass``.  torch is imported when it is called."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from ...runtime.commands.run_options import DeviceToHost, DiskFolder, HostToDevice, RankCount
from ...runtime.commands.run_ranks import RunRank, has_to_start, in_one_voice, rank_at_hand, start_ranks
from ...runtime.devices.process_settings import prefer_expandable_segments
from ...runtime.runs.run_folder import STATE, RunState, finished_model, told_complete
from ...shared.basics.errors import ProtwinError
from ...shared.catalogue.machines import load_hardware
from ...shared.cli.exits import report_interruption
from ...shared.cli.options import (
    CalibrationPath,
    DeviceBudget,
    DTypeName,
    JsonFlag,
    OptimizerName,
    Seed,
    command_app,
    examples,
    warn,
)
from ...shared.cli.streams import say
from ...shared.pipelines.pipeline import Pipeline, load_plan_or_pipeline
from ...shared.schema.calibration import Calibration
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
from .bypass_inputs import BypassInputs
from .bypass_options import (
    BlockNorm,
    BypassAutocast,
    BypassBatchSize,
    BypassData,
    BypassLength,
    BypassMicroBatches,
    ByteTokens,
    DataSeed,
    Keep,
    KeptName,
    LeastRate,
    LogEvery,
    PeakRate,
    PlanFile,
    RunFolderPath,
    SaveEvery,
    SearchedMachine,
    StatisticsBatches,
    StudentFile,
    SweepFile,
    Teacher,
    TokenBudgetSize,
    TokenizerPath,
    TrustRemoteCode,
    ValidateEvery,
    ValidationBatches,
    ValidationData,
    Warmup,
    WeightDecay,
    autocast_of,
    check_parts,
    limit_of,
)

__all__ = ["bypass"]

bypass = command_app()
Tell = Callable[[str], None]


@bypass.command(
    epilog=examples(
        "protwin bypass --teacher llama --student student.toml --tokens 50M --data text.jsonl --plan plan.json "
        "--output run",
        "protwin bypass --teacher llama --student student.toml --tokens 50M --data text.jsonl --hardware rtx-4090 "
        "--output runs --sweep widths.toml",
    )
)
@in_one_voice
def bypass_command(
    teacher: Teacher,
    student: StudentFile,
    tokens: TokenBudgetSize,
    data: BypassData,
    output: RunFolderPath,
    plan: PlanFile = None,
    ranks: RankCount = None,
    hardware: SearchedMachine = None,
    calibration: CalibrationPath = None,
    sweep: SweepFile = None,
    validation: ValidationData = None,
    tokenizer: TokenizerPath = None,
    is_bytes: ByteTokens = False,
    trust_remote_code: TrustRemoteCode = False,
    batch_size: BypassBatchSize = 1,
    sequence_length: BypassLength = 2048,
    micro_batches: BypassMicroBatches = None,
    dtype: DTypeName = None,
    autocast: BypassAutocast = None,
    optimizer: OptimizerName = None,
    max_gradient_norm: BlockNorm = None,
    learning_rate: PeakRate = 1e-4,
    least_rate: LeastRate = 1e-5,
    warmup: Warmup = 0.05,
    weight_decay: WeightDecay = 0.1,
    seed: Seed = 0,
    data_seed: DataSeed = 0,
    keep: KeptName = Keep.BEST,
    validate_every: ValidateEvery = None,
    validation_batches: ValidationBatches = 8,
    statistics_batches: StatisticsBatches = 8,
    save_every: SaveEvery = None,
    log_every: LogEvery = 5,
    device_budget_bytes: DeviceBudget = None,
    host_to_device: HostToDevice = None,
    device_to_host: DeviceToHost = None,
    disk_folder: DiskFolder = None,
    as_json: JsonFlag = False,
) -> None:
    """Distil a student of a teacher block by block: every block learns from the teacher's block of its place.

    The student is initialised from the teacher, trained, validated by its language-model loss, and saved in the Hugging
    Face form in the run's folder.  The same command goes on with a run that was interrupted, at any moment; with more
    --tokens it continues one that was complete.  A run that is complete is not run again.  --ranks carries out a plan
    of several ranks, or a pipeline, on this machine; torchrun -m protwin bypass does the same.
    """
    _check_choices(plan, hardware, learning_rate, weight_decay)
    check_parts(least_rate=least_rate, warmup=warmup)
    if as_json and sweep is not None:
        raise ProtwinError("--json prints what the folder of one run says of itself. Leave it out, or --sweep.")
    chosen = _chosen(plan, ranks)
    step = chosen.stages[0].plan if isinstance(chosen, Pipeline) else chosen
    inputs = BypassInputs(
        teacher=teacher,
        trust_remote_code=trust_remote_code,
        student=student,
        training=tuple(data),
        validation=tuple(validation or ()),
        tokenizer=tokenizer,
        is_bytes=is_bytes,
        fields={
            "sequence_length": sequence_length,
            "micro_batch_size": batch_size,
            "micro_batches": micro_batches or (1 if step is None else step.micro_batches * step.num_ranks),
            "num_tokens": tokens,
            "autocast": autocast_of(autocast),
            "seed": seed,
            "data_seed": data_seed,
            "optimizer": optimizer or (step.optimizer if step is not None else Optimizer.ADAMW),
            "learning_rate": learning_rate,
            "least_rate_frac": least_rate,
            "warmup_frac": warmup,
            "weight_decay": weight_decay,
            "max_gradient_norm": limit_of(max_gradient_norm, step.max_gradient_norm if step is not None else 1.0),
            "kept_weights": keep.value,
            "validate_every": validate_every,
            "validation_batches": validation_batches,
            "statistics_batches": statistics_batches,
            "save_every": save_every,
            "log_every": log_every,
        },
        dtype=dtype,
        plan=chosen,
        hardware=None if hardware is None else load_hardware(hardware),
    )
    factors = None if calibration is None else Calibration.load(calibration)
    rank = rank_at_hand(os.environ)
    tell = _tell_nobody if as_json or not rank.speaks else say
    if not _is_complete(inputs, output, sweep, tell):
        prefer_expandable_segments(os.environ)
        if chosen is not None and has_to_start(chosen, ranks, os.environ):
            raise typer.Exit(start_ranks(chosen.num_ranks, sys.argv[1:]))
        places = (device_budget_bytes, host_to_device, device_to_host)
        _carry_out(inputs, factors, places, output, sweep, disk_folder, rank, tell)
    if as_json and rank.speaks:
        say(RunState.load(output / STATE).to_json().rstrip())


def _check_choices(plan: Path | None, hardware: str | None, learning_rate: float, weight_decay: float) -> None:
    """Raise ProtwinError if options contradict each other, or numbers are no rates."""
    if (plan is None) == (hardware is None):
        given = "both are given" if plan is not None else "neither is given"
        raise ProtwinError(f"--plan FILE is what to carry out, --hardware NAME searches a plan, and {given}. Give one.")
    if not (learning_rate > 0 and math.isfinite(learning_rate) and math.isfinite(weight_decay)):
        raise ProtwinError(
            f"--learning-rate {learning_rate} and --weight-decay {weight_decay} must be finite, and the rate positive."
        )


def _chosen(path: Path | None, ranks: int | None) -> Plan | Pipeline | None:
    """What is to be carried out; None where it is to be searched.  Raises ProtwinError."""
    if path is None:
        if ranks not in (None, 1):
            raise ProtwinError(
                f"--ranks is {ranks}, and a plan is to be searched, which is one of one rank. Search a pipeline first: "
                f"protwin search --ranks {ranks} --output plan.json, then --plan plan.json."
            )
        return None
    chosen = load_plan_or_pipeline(path)
    if chosen.note is not None:
        warn(f"{path}: {chosen.note}")
    return chosen


def _is_complete(inputs: BypassInputs, output: Path, sweep: Path | None, tell: Tell) -> bool:
    """Whether the files alone say that there is nothing to do, which is then told.

    Raises FileError if the teacher has no configuration, or comes with code that is not trusted.
    """
    inputs.code()
    if sweep is not None or inputs.fingerprint is None:
        return False
    model = finished_model(output, inputs.fingerprint)
    if model is not None:
        tell(told_complete(output, model))
    return model is not None


def _carry_out(
    inputs: BypassInputs,
    calibration: Calibration | None,
    places: tuple[int | None, float | None, float | None],
    output: Path,
    sweep: Path | None,
    disk_folder: Path | None,
    rank: RunRank,
    tell: Tell,
) -> None:
    """Train what is asked for.  ``places``: the device's budget, and the bytes per second of its links."""
    # This imports torch, which reads the settings of its allocator.
    from ...runtime.bypass.interruption import RunInterruptedError
    from ...runtime.commands.run_request import DeviceChoice
    from .bypass_runs import BypassRequest, carry_out

    request = BypassRequest(
        inputs=inputs,
        calibration=calibration,
        device=DeviceChoice(*places),
        output=output,
        sweep=sweep,
        disk_folder=disk_folder,
        rank=rank,
    )
    try:
        carry_out(request.runs(), tell, speaks=rank.speaks)
    except RunInterruptedError as stopped:
        holding = f"the run after step {stopped.step}, with which the same command goes on,"
        raise typer.Exit(report_interruption(stopped.path, holding=holding)) from stopped


def _tell_nobody(line: str) -> None:
    """Standard output is JSON alone."""

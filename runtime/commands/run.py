"""The command ``protwin run``.  torch is imported when it is called."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from ...shared.basics.documents import write_atomically
from ...shared.basics.errors import PlanError, ProtwinError
from ...shared.basics.units import format_bytes, format_enough_bytes
from ...shared.catalogue.models import load_model_configuration
from ...shared.cli.options import (
    ConfigurationName,
    DeviceBudget,
    FrozenParts,
    JsonFlag,
    LoraRank,
    LoraTargets,
    OutputPath,
    Seed,
    TimelinePath,
    command_app,
    examples,
    keep_apart,
    load_plan,
    options_of,
    rate_option,
)
from ...shared.cli.output import is_standard_output, save, tell
from ...shared.cli.streams import say
from ...shared.compile.compile import compile_schedule
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ..devices.process_settings import prefer_expandable_segments
from .run_record import check_record

__all__ = ["run"]

run = command_app()

PlanPath = Annotated[Path, typer.Option("--plan", metavar="FILE", dir_okay=False, help="What to carry out.")]
WorkloadPath = Annotated[
    Path, typer.Option("--workload", metavar="FILE", dir_okay=False, help="The workload that the plan is for.")
]
Steps = Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Iterations to train.")]
LearningRate = Annotated[float, typer.Option("--learning-rate", metavar="RATE", min=0.0, help="Rate of AdamW.")]
TextPath = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", dir_okay=False, help="Text to train on; by default Python's reference."),
]
CheckpointFolder = Annotated[
    Path | None,
    typer.Option("--checkpoint", metavar="FOLDER", file_okay=False, help="Save here after the last step."),
]
CheckpointEvery = Annotated[
    int | None, typer.Option("--checkpoint-every", min=1, metavar="N", help="Save every N steps too.")
]
ResumeFlag = Annotated[
    bool, typer.Option("--resume", help="Go on from the checkpoint; --steps counts those before it too.")
]
HostToDevice = Annotated[
    float | None, typer.Option("--host-to-device", parser=rate_option, metavar="RATE", help="Throttle the CPU's link.")
]
DeviceToHost = Annotated[
    float | None, typer.Option("--device-to-host", parser=rate_option, metavar="RATE", help="Throttle the CPU's link.")
]


@run.command(
    epilog=examples(
        "protwin run --plan plan.json --workload workload.json --model config.json --steps 20 --output measured.json",
        "protwin run --plan plan.json --workload workload.json --model gpt2 --device-budget 2GiB --text book.txt",
        "protwin run --plan plan.json --workload workload.json --model gpt2 --checkpoint saved --checkpoint-every 100",
    )
)
def run_command(
    plan: PlanPath,
    workload: WorkloadPath,
    model: ConfigurationName,
    lora_rank: LoraRank = None,
    lora_targets: LoraTargets = None,
    frozen: FrozenParts = None,
    steps: Steps = 10,
    learning_rate: LearningRate = 1e-4,
    text: TextPath = None,
    checkpoint: CheckpointFolder = None,
    checkpoint_every: CheckpointEvery = None,
    is_resuming: ResumeFlag = False,
    device_budget_bytes: DeviceBudget = None,
    host_to_device: HostToDevice = None,
    device_to_host: DeviceToHost = None,
    seed: Seed = 0,
    output: OutputPath = None,
    timeline: TimelinePath = None,
    as_json: JsonFlag = False,
) -> None:
    """Carry a plan out: train a model with random weights on text, bytes as tokens, exactly as the plan says.

    Uses the first CUDA device where there is one, with expandable segments of PyTorch's allocator unless
    PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF is set; else the CPU as a device.  --output writes the measured
    record, which protwin compare lays beside the predicted one.
    """
    outputs = {"--output": output, "--timeline": timeline}
    keep_apart(outputs, {"--plan": plan, "--workload": workload, "--model": model, "--text": text}, as_json=as_json)
    if not math.isfinite(learning_rate):
        raise ProtwinError(f"--learning-rate {learning_rate} is not finite. Give a rate such as 1e-4.")
    wants_record = as_json or output is not None or timeline is not None
    if wants_record:
        check_record(steps, checkpoint_every)
    chosen, traced = load_plan(plan), Workload.load(workload)
    _check_budget(chosen, traced, device_budget_bytes)
    described = load_model_configuration(model)
    options = options_of(lora_rank, lora_targets, frozen, None)

    prefer_expandable_segments(os.environ)
    # Each of these imports torch, which reads the settings of its allocator.
    from ..model.byte_text import read_text
    from ..training.guards import check_carried_out
    from .random_model import random_model
    from .run_checkpoints import RunCheckpoints
    from .run_training import TextTraining, device_at_hand

    check_carried_out(chosen)
    content = read_text(text)
    checkpoints = RunCheckpoints(checkpoint, checkpoint_every, is_resuming, seed, content)
    checkpoints.check()
    built = random_model(described.config, described.name, str(traced.compute_dtype), seed, options)
    device = device_at_hand(device_budget_bytes, host_to_device, device_to_host)
    training = TextTraining(chosen, traced, steps, learning_rate, seed, content, checkpoints, wants_record)
    record = training.run(built, device, tell=_tell_nobody if as_json or is_standard_output(output) else say)
    if record is not None:
        _give(record, traced, output, timeline, as_json=as_json)


def _tell_nobody(line: str) -> None:
    """Standard output is JSON alone."""


def _give(record: Record, workload: Workload, output: Path | None, timeline: Path | None, *, as_json: bool) -> None:
    """Write the record where it was asked for, and show it."""
    from ...shared.records.chrome_trace import chrome_trace
    from ...shared.tables.record import record_tables

    save(record, output)
    if timeline is not None:
        write_atomically(timeline, chrome_trace({"measured": record}, schedule=compile_schedule(record.plan, workload)))
    tell(record, output, as_json=as_json, tables=lambda: record_tables(record))


def _check_budget(plan: Plan, workload: Workload, budget_bytes: int | None) -> None:
    """Raise PlanError if some timing of the plan exceeds the budget."""
    if budget_bytes is None:
        return
    schedule = compile_schedule(plan, workload)
    peak = guaranteed_device_peak(schedule)
    if peak.size_bytes > budget_bytes:
        raise PlanError(
            f"the plan's device memory may reach {format_bytes(peak.size_bytes)}, during "
            f"{schedule.tasks[peak.task].name}, but --device-budget is {format_bytes(budget_bytes)}. Search a plan for "
            f"this budget, or raise it to {format_enough_bytes(peak.size_bytes)}."
        )

"""The commands of this folder: ``trace`` and ``run``.  torch is imported when one of them is called."""

from __future__ import annotations

import math
import os
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...shared.basics.documents import write_atomically
from ...shared.basics.errors import PlanError, ProtwinError, WorkloadError
from ...shared.basics.progress import progress_bar
from ...shared.basics.units import format_bytes, format_enough_bytes
from ...shared.catalogue.models import load_model_configuration
from ...shared.cli.options import (
    AutocastName,
    ConfigurationName,
    DeviceBudget,
    DTypeName,
    FrozenParts,
    JsonFlag,
    LoraRank,
    LoraTargets,
    OutputPath,
    RequiredBatchSize,
    Seed,
    SequenceLength,
    TimelinePath,
    command_app,
    examples,
    keep_apart,
    options_of,
    rate_option,
)
from ...shared.cli.output import give, show
from ...shared.compile.compile import compile_schedule
from ...shared.schema.plan import Plan
from ...shared.schema.training_options import TrainingOptions
from ...shared.schema.workload import Workload
from ...shared.verify.guaranteed_peak import guaranteed_device_peak
from ..devices.process_settings import prefer_expandable_segments
from ..recording.timed_iterations import LEAST_EVERY, iterations_until_record
from ..training.supported import check_carried_out

if TYPE_CHECKING:
    from torch import nn

    from ..devices.device import TrainingDevice

__all__ = ["run", "trace"]

trace = command_app()
run = command_app()


@trace.command(
    epilog=examples(
        "protwin trace --model llama-3-8b --batch-size 1 --sequence-length 2048 --output workload.json",
        "protwin trace --model config.json --batch-size 4 --sequence-length 128 --real --output workload.json",
    )
)
def trace_command(
    model: ConfigurationName,
    batch_size: RequiredBatchSize,
    sequence_length: SequenceLength = None,
    dtype: DTypeName = None,
    lora_rank: LoraRank = None,
    lora_targets: LoraTargets = None,
    frozen: FrozenParts = None,
    autocast: AutocastName = None,
    is_real: Annotated[
        bool, typer.Option("--real", help="Build the model with random weights and time it on this machine.")
    ] = False,
    seed: Seed = 0,
    output: OutputPath = None,
    as_json: JsonFlag = False,
) -> None:
    """Write down what a model does in one iteration: its workload, from which everything else is answered."""
    keep_apart({"--output": output}, {"--model": model})
    described = load_model_configuration(model)
    options = options_of(lora_rank, lora_targets, frozen, autocast)
    if is_real and options.autocast is not None:
        raise ProtwinError("--real computes in the dtype of the parameters. Leave out --autocast, or trace without it.")
    if is_real:
        if sequence_length is None:
            raise ProtwinError("--sequence-length is missing, and --real runs on text. State it.")
        built = _real_model(described.config, described.name, dtype, seed, options)
        workload = _trace_real(built, described.name, batch_size, sequence_length, seed)
    else:
        from ..tracing.configurations import workload_of_configuration

        with progress_bar("tracing") as on_progress:
            workload = workload_of_configuration(
                described.config,
                name=described.name,
                batch_size=batch_size,
                sequence_length=sequence_length,
                dtype=dtype,
                options=options,
                on_progress=on_progress,
            )
    from ...shared.tables.workloads import workload_tables

    give(workload, output, as_json=as_json, tables=lambda: workload_tables(workload))


@run.command(
    epilog=examples(
        "protwin run --plan plan.json --workload workload.json --model config.json --steps 20 --output measured.json",
        "protwin run --plan plan.json --workload workload.json --model gpt2 --device-budget 2GiB --text book.txt",
        "protwin run --plan plan.json --workload workload.json --model gpt2 --checkpoint saved --checkpoint-every 100",
    )
)
def run_command(
    plan: Annotated[Path, typer.Option("--plan", metavar="FILE", dir_okay=False, help="What to carry out.")],
    workload: Annotated[
        Path, typer.Option("--workload", metavar="FILE", dir_okay=False, help="The workload that the plan is for.")
    ],
    model: ConfigurationName,
    lora_rank: LoraRank = None,
    lora_targets: LoraTargets = None,
    frozen: FrozenParts = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Iterations to train.")] = 10,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", metavar="RATE", min=0.0, help="Rate of AdamW.")
    ] = 1e-4,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", dir_okay=False, help="Text to train on; by default Python's reference."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", metavar="FOLDER", file_okay=False, help="Save here after the last step."),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option("--checkpoint-every", min=1, metavar="N", help="Save every N steps too.")
    ] = None,
    is_resuming: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint; --steps counts those before it too.")
    ] = False,
    device_budget_bytes: DeviceBudget = None,
    host_to_device: Annotated[
        float | None,
        typer.Option("--host-to-device", parser=rate_option, metavar="RATE", help="Throttle the CPU's link."),
    ] = None,
    device_to_host: Annotated[
        float | None,
        typer.Option("--device-to-host", parser=rate_option, metavar="RATE", help="Throttle the CPU's link."),
    ] = None,
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
    keep_apart(
        {"--output": output, "--timeline": timeline},
        {"--plan": plan, "--workload": workload, "--model": model, "--text": text},
    )
    if not math.isfinite(learning_rate):
        raise ProtwinError(f"--learning-rate {learning_rate} is not finite. Give a rate such as 1e-4.")
    wants_record = as_json or output is not None or timeline is not None
    if wants_record:
        _check_record(steps, checkpoint_every)
    chosen, traced = Plan.load(plan), Workload.load(workload)
    check_carried_out(chosen)
    _check_budget(chosen, traced, device_budget_bytes)
    described = load_model_configuration(model)
    samples = traced.num_samples
    # Of several choices per sample each has this length.
    length = traced.batch_shapes.get("input_ids", (samples, traced.num_tokens // samples))[-1]

    prefer_expandable_segments(os.environ)
    import torch

    from ...shared.records.chrome_trace import chrome_trace
    from ...shared.tables.record import record_tables
    from ..model.byte_text import head_batches, read_text
    from ..training.carry_out import carry_out
    from .run_checkpoints import RunCheckpoints

    content = read_text(text)
    checkpoints = RunCheckpoints(checkpoint, checkpoint_every, is_resuming, seed, content)
    checkpoints.check()
    options = options_of(lora_rank, lora_targets, frozen, None)
    built = _real_model(described.config, described.name, str(traced.compute_dtype), seed, options)
    device = _device(device_budget_bytes, host_to_device, device_to_host)
    make_optimizer = partial(torch.optim.AdamW, lr=learning_rate, fused=True)
    losses: list[float] = []
    with (
        progress_bar("training") as report,
        carry_out(built, chosen, traced, optimizer=make_optimizer, device=device) as training,
    ):
        num_batches_before = checkpoints.resume(training, learning_rate)
        done = training.num_steps
        if done >= steps:
            raise PlanError(f"the checkpoint is at step {done} already; --steps is {steps}. Raise it.")
        if wants_record:
            _check_record(steps, checkpoint_every, done)
        batches = head_batches(
            built,
            content,
            batch_size=samples,
            sequence_length=length,
            num_batches=num_batches_before + (steps - done) * chosen.micro_batches,
            seed=seed,
        )
        # Drawn again rather than kept: their places follow from the seed.
        batches = islice(batches, num_batches_before, None)
        for step in range(done + 1, steps + 1):
            of_step = []
            for batch in islice(batches, chosen.micro_batches):
                loss = built(**{name: tensor.to(device.torch_device) for name, tensor in batch.items()}).loss
                (loss / chosen.micro_batches if chosen.micro_batches > 1 else loss).backward()
                of_step.append(loss.detach())
            training.step()
            losses.append(torch.stack(of_step).mean().item())
            report(step, steps)
            num_batches = num_batches_before + len(losses) * chosen.micro_batches
            checkpoints.after_step(training, num_batches=num_batches, is_last=step == steps)
        if not as_json:
            typer.echo(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} over {len(losses)} steps")
        if not wants_record and (missing := _missing_for_record(steps, checkpoint_every, done)) is not None:
            typer.echo(f"no times: {missing}")
            return
        record = training.record()
    if output is not None:
        record.save(output)
    if timeline is not None:
        write_atomically(timeline, chrome_trace({"measured": record}, schedule=training.schedule))
    if as_json:
        typer.echo(record.to_json(), nl=False)
    else:
        show(record_tables(record))


def _check_record(steps: int, checkpoint_every: int | None, done: int = 0) -> None:
    """Raise PlanError now if training from step ``done`` on will give no record."""
    missing = _missing_for_record(steps, checkpoint_every, done)
    if missing is not None:
        raise PlanError(f"--output, --timeline and --json ask for a record, but {missing}")


def _missing_for_record(steps: int, checkpoint_every: int | None, done: int) -> str | None:
    """What a record of training from step ``done`` on is missing, and what would help; None if nothing is."""
    need = iterations_until_record(pause_every=checkpoint_every, done=done)
    if need is None:
        return (
            f"--checkpoint-every {checkpoint_every} leaves no two iterations in a row without a save before either, "
            f"which its times are taken from. Make it {LEAST_EVERY} or more, or ask for no record."
        )
    if steps - done >= need:
        return None
    after = " after the checkpoint" if done else ""
    saves = f" with --checkpoint-every {checkpoint_every}" if checkpoint_every is not None else ""
    return (
        f"{steps - done} steps{after} are too few for its times, which need {need}{saves}. Raise --steps to "
        f"{done + need}."
    )


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


def _device(
    budget_bytes: int | None, host_to_device_bytes_per_s: float | None, device_to_host_bytes_per_s: float | None
) -> TrainingDevice:
    import torch

    from ..devices.cpu_device import CpuDevice
    from ..devices.cuda_device import CudaDevice

    if torch.cuda.is_available():
        if host_to_device_bytes_per_s is not None or device_to_host_bytes_per_s is not None:
            raise ProtwinError(
                "a CUDA device's link cannot be throttled. Leave out --host-to-device, --device-to-host."
            )
        return CudaDevice(budget_bytes=budget_bytes)
    return CpuDevice(
        budget_bytes,
        host_to_device_bytes_per_s=host_to_device_bytes_per_s,
        device_to_host_bytes_per_s=device_to_host_bytes_per_s,
    )


def _real_model(
    configuration: dict[str, Any], name: str, dtype: str | None, seed: int, options: TrainingOptions
) -> nn.Module:
    """The model with random weights.  Raises WorkloadError if this machine cannot hold it."""
    import torch

    from ..devices.machine import host_memory_bytes
    from ..devices.process_settings import leave_a_core_for_lanes
    from ..model.configurations import build_model, training_dtype
    from ..tracing.configurations import apply_options, configured_model

    leave_a_core_for_lanes()
    chosen = training_dtype(configuration, dtype)
    twin = configured_model(configuration, name, dtype, options)
    need_bytes = sum(p.numel() * (p.element_size() + (12 if p.requires_grad else 0)) for p in twin.parameters())
    if need_bytes > host_memory_bytes():
        raise WorkloadError(
            f"{name} with its optimizer state needs about {format_bytes(need_bytes)} but this machine has "
            f"{format_bytes(host_memory_bytes())}. Use a smaller configuration, or trace without --real."
        )
    torch.manual_seed(seed)
    model: nn.Module = build_model(configuration, name, chosen, device="cpu")
    apply_options(model, options)
    return model


def _trace_real(model: nn.Module, name: str, batch_size: int, sequence_length: int, seed: int) -> Workload:
    from ..model.byte_text import head_batches, read_text
    from ..tracing.tracing import trace as trace_model

    batches = head_batches(
        model, read_text(None), batch_size=batch_size, sequence_length=sequence_length, num_batches=1, seed=seed
    )
    batch = next(batches)
    with progress_bar("tracing") as report:
        return trace_model(model, batch, name=name, on_progress=report)

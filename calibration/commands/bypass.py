"""The command ``protwin bypass``.  torch is imported when it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...runtime.commands.run_options import DeviceChoice, DiskFolder, RankCount
from ...runtime.commands.run_ranks import has_to_start, in_one_voice, rank_at_hand, start_ranks
from ...runtime.devices.process_settings import prefer_expandable_segments
from ...runtime.runs.run_folder import STATE, RunState, finished_model, told_complete
from ...shared.basics.errors import ProtwinError
from ...shared.catalogue.machines import load_hardware
from ...shared.cli.exits import report_interruption
from ...shared.cli.option_groups import with_groups
from ...shared.cli.options import (
    CalibrationPath,
    JsonFlag,
    command_app,
    examples,
    warn,
)
from ...shared.cli.streams import say
from ...shared.pipelines.pipeline import Pipeline, load_plan_or_pipeline
from ...shared.schema.calibration import Calibration
from ...shared.schema.plan import Plan
from .bypass_inputs import BypassInputs
from .bypass_options import BypassFiles, BypassSteps, PlanFile, RunFolderPath, SearchedMachine, SweepFile

if TYPE_CHECKING:
    from .bypass_runs import BypassRequest

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
@with_groups
def bypass_command(
    *,
    plan: PlanFile = None,
    ranks: RankCount = None,
    hardware: SearchedMachine = None,
    calibration: CalibrationPath = None,
    sweep: SweepFile = None,
    files: BypassFiles,
    output: RunFolderPath,
    steps: BypassSteps,
    device: DeviceChoice,
    disk_folder: DiskFolder = None,
    as_json: JsonFlag = False,
) -> None:
    """Distil a student of a teacher block by block: every block learns from the teacher's block of its place.

    The student is initialised from the teacher, trained, validated by its language-model loss, and saved in the Hugging
    Face form in the run's folder.  The same command goes on with a run that was interrupted, at any moment; with more
    --tokens it continues one that was complete.  A run that is complete is not run again.  --ranks carries out a plan
    of several ranks, or a pipeline, on this machine; torchrun -m protwin bypass does the same.
    """
    if (plan is None) == (hardware is None):
        given = "both are given" if plan is not None else "neither is given"
        raise ProtwinError(f"--plan FILE is what to carry out, --hardware NAME searches a plan, and {given}. Give one.")
    steps.check()
    if as_json and sweep is not None:
        raise ProtwinError("--json prints what the folder of one run says of itself. Leave it out, or --sweep.")
    chosen = _chosen(plan, ranks)
    inputs = BypassInputs(
        teacher=files.teacher,
        trust_remote_code=files.trust_remote_code,
        student=files.student,
        training=tuple(files.data),
        validation=tuple(files.validation or ()),
        tokenizer=files.tokenizer,
        is_bytes=files.is_bytes,
        fields=steps.fields(chosen.stages[0].plan if isinstance(chosen, Pipeline) else chosen, files.tokens),
        dtype=steps.dtype,
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
        # This imports torch, which reads the settings of its allocator.
        from .bypass_runs import BypassRequest

        request = BypassRequest(
            inputs=inputs,
            calibration=factors,
            device=device,
            output=output,
            sweep=sweep,
            disk_folder=disk_folder,
            rank=rank,
        )
        _carry_out(request, tell)
    if as_json and rank.speaks:
        say(RunState.load(output / STATE).to_json().rstrip())


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


def _carry_out(request: BypassRequest, tell: Tell) -> None:
    """Train what is asked for."""
    from ...runtime.bypass.interruption import RunInterruptedError
    from .bypass_runs import carry_out

    try:
        carry_out(request.runs(), tell, speaks=request.rank.speaks)
    except RunInterruptedError as stopped:
        holding = f"the run after step {stopped.step}, with which the same command goes on,"
        raise typer.Exit(report_interruption(stopped.path, holding=holding)) from stopped


def _tell_nobody(line: str) -> None:
    """Standard output is JSON alone."""

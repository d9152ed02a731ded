"""``protwin validate``: judge predictions by random plans.  torch is imported when the command is called."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ...runtime.commands.run_ranks import in_one_voice, rank_at_hand, ranks_to_measure, start_ranks
from ...shared.basics.errors import PlanError
from ...shared.basics.progress import progress_bar
from ...shared.catalogue.machines import load_hardware
from ...shared.catalogue.models import load_model_configuration
from ...shared.cli.option_groups import with_groups
from ...shared.cli.options import (
    BatchSize,
    CalibrationPath,
    DTypeName,
    HardwareName,
    JsonFlag,
    OutputPath,
    Seed,
    SequenceLength,
    command_app,
    examples,
    keep_apart,
)
from ...shared.cli.output import give
from ...shared.cli.report_options import ReportPath, write_report
from ...shared.schema.calibration import Calibration
from ...shared.schema.plan import TrainingMethod
from ..validation.factories import is_factory
from .measured_training import MeasuredTraining

__all__ = ["validate"]

validate = command_app()


@validate.command(
    epilog=examples(
        "protwin validate --model config.json --batch-size 4 --sequence-length 128 --hardware machine.toml --minutes 5",
        "protwin validate --model models.py:make --hardware machine.toml --plans 8 --report validation.html",
        "protwin validate --model config.json --batch-size 4 --sequence-length 128 --hardware machine.toml "
        "--calibration calibration.json --output validation.json",
    )
)
@in_one_voice
@with_groups
def validate_command(
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME|FILE|FILE.py:FUNCTION",
            help="A model of the catalogue, a config.json, or a function that gives (model, batch) or (model, batch, "
            "loss).",
        ),
    ],
    hardware: HardwareName,
    batch_size: BatchSize = None,
    sequence_length: SequenceLength = None,
    minutes: Annotated[
        float, typer.Option("--minutes", metavar="M", min=0, help="What all of it may take; fewer plans if need be.")
    ] = 10.0,
    plans: Annotated[int, typer.Option("--plans", metavar="N", min=3, help="Random plans to judge by.")] = 12,
    seed: Seed = 0,
    calibration: CalibrationPath = None,
    method: Annotated[
        TrainingMethod | None,
        typer.Option(
            "--method",
            metavar="NAME",
            help="Training method: full, osft, which needs --unfreeze-rank-ratio, or bypass, which needs --student.",
        ),
    ] = None,
    student: Annotated[
        Path | None,
        typer.Option("--student", metavar="FILE", help="Judge distillation into this student (student.toml)."),
    ] = None,
    measured: MeasuredTraining,
    dtype: DTypeName = None,
    disk_folder: Annotated[
        Path | None,
        typer.Option("--disk-folder", metavar="FOLDER", file_okay=False, help="Let plans have chunks on its disk."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", min=1, help="Start N processes, and judge plans of several ranks."),
    ] = None,
    output: OutputPath = None,
    report: ReportPath = None,
    as_json: JsonFlag = False,
) -> None:
    """Judge predictions for a model on this machine: random plans, predicted and measured.

    Plans that a calibration is fitted to and random plans that nothing is fitted to take turns, with random weights;
    with --calibration that one is judged, and nothing is fitted.  Says how far predicted times and peaks are off, how
    many lie in their 90 % intervals, whether plans come in their true order, what the search's pick costs over the best
    measured plan, which kinds of tasks are to blame, and how noisy the machine was.
    """
    keep_apart(
        {"--output": output, "--report": report},
        {"--model": model, "--student": student, "--hardware": hardware, "--calibration": calibration},
        as_json=as_json,
    )
    machine = load_hardware(hardware)
    judged = None if calibration is None else Calibration.load(calibration)
    if (method is TrainingMethod.BYPASS) != (student is not None) and method is not None:
        raise PlanError(
            "--method bypass distils into a student, and full training has none. Give --method bypass with --student "
            "student.toml, or leave both out."
        )
    trained_as = measured.trained_as(method, student)
    num_ranks, starts = ranks_to_measure(ranks, os.environ)
    trained_as.check(num_ranks)
    shape = _shape(model, batch_size, sequence_length, dtype)
    described = None if shape is None else load_model_configuration(model)
    if starts:
        raise typer.Exit(start_ranks(num_ranks, sys.argv[1:]))
    speaks = rank_at_hand(os.environ).speaks
    from ..validation.page import fidelity_page
    from ..validation.subjects import Asked, Configured, validate_asked
    from ..validation.tables import fidelity_tables
    from ..validation.validate import Trial

    configured: Configured | str = model
    if described is not None and shape is not None:
        configured = Configured(
            configuration=described.config,
            name=described.name,
            batch_size=shape[0],
            sequence_length=shape[1],
            dtype=dtype,
        )
    with progress_bar("validating") if speaks else nullcontext() as on_progress:
        found, _ = validate_asked(
            Asked(
                model=configured,
                hardware=machine,
                trained_as=trained_as,
                num_ranks=num_ranks,
                disk_folder=disk_folder,
                seed=seed,
            ),
            Trial(
                num_plans=plans,
                seed=seed,
                minutes=minutes,
                device_budget_bytes=measured.device_budget_bytes,
                calibration=judged,
            ),
            on_progress=on_progress,
        )
    if not speaks:
        return
    write_report(report, lambda: fidelity_page(found))
    give(found, output, as_json=as_json, tables=lambda: fidelity_tables(found))


def _shape(
    model: str, batch_size: int | None, sequence_length: int | None, dtype: str | None
) -> tuple[int, int] | None:
    """Samples and tokens of each; None where a function gives the batch.  Raises PlanError."""
    stated = {"--batch-size": batch_size, "--sequence-length": sequence_length}
    if is_factory(model):
        named = [option for option, value in {**stated, "--dtype": dtype}.items() if value is not None]
        if named:
            raise PlanError(f"{model} gives model and batch by itself. Leave out {' and '.join(named)}.")
        return None
    missing = [option for option, value in stated.items() if value is None]
    if batch_size is None or sequence_length is None:
        raise PlanError(f"{model} is a configuration without a batch. Give {' and '.join(missing)}.")
    return batch_size, sequence_length

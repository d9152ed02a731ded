"""The commands of this folder: ``calibrate`` and ``compare``.  torch is imported when the first is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...shared.basics.documents import write_atomically
from ...shared.basics.progress import progress_bar
from ...shared.catalogue.machines import load_hardware
from ...shared.catalogue.models import load_model_configuration
from ...shared.cli.options import (
    ConfigurationName,
    DTypeName,
    HardwareName,
    JsonFlag,
    OutputPath,
    RequiredBatchSize,
    RequiredSequenceLength,
    Seed,
    TimelinePath,
    command_app,
    examples,
    keep_apart,
    writable_json,
)
from ...shared.cli.output import give, show
from ...shared.cli.report_options import ReportPath, write_report
from ...shared.compile.compile import compile_schedule
from ...shared.records.chrome_trace import chrome_trace
from ...shared.records.comparison import compare_records
from ...shared.report.report import Facts
from ...shared.report.report import report as full_report
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from ...shared.tables.calibration import calibration_tables
from ...shared.tables.comparison import comparison_tables
from ...shared.tables.labels import ORIGIN_NAMES

__all__ = ["calibrate", "compare"]

calibrate = command_app()
compare = command_app()


@calibrate.command(
    epilog=examples(
        "protwin hardware probe --output machine.toml",
        "protwin calibrate --model config.json --batch-size 4 --sequence-length 128 --hardware machine.toml "
        "--workload-output workload.json --output calibration.json",
    )
)
def calibrate_command(
    model: ConfigurationName,
    batch_size: RequiredBatchSize,
    sequence_length: RequiredSequenceLength,
    hardware: HardwareName,
    dtype: DTypeName = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=2, help="Timed iterations of each plan.")] = 7,
    seed: Seed = 0,
    workload_output: Annotated[
        Path | None,
        typer.Option(
            "--workload-output", metavar="FILE", callback=writable_json, help="Write the timed workload to this file."
        ),
    ] = None,
    output: OutputPath = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine with a model: how long tasks really take, and how lanes slow each other down.

    Runs three short trainings with random weights.  The factors hold for this machine; a workload that is searched
    with them should be the timed one (--workload-output).
    """
    keep_apart({"--workload-output": workload_output, "--output": output}, {"--model": model, "--hardware": hardware})
    machine = load_hardware(hardware)
    described = load_model_configuration(model)

    from ..fitting.calibrate import calibrate_configuration

    with progress_bar("calibrating") as on_progress:
        workload, factors = calibrate_configuration(
            described.config,
            described.name,
            machine,
            batch_size=batch_size,
            sequence_length=sequence_length,
            dtype=dtype,
            steps=steps,
            seed=seed,
            on_progress=on_progress,
        )
    if workload_output is not None:
        workload.save(workload_output)
    give(factors, output, as_json=as_json, tables=lambda: calibration_tables(factors))


@compare.command(epilog=examples("protwin compare predicted.json measured.json --timeline timeline.json"))
def compare_command(
    predicted: Annotated[Path, typer.Argument(metavar="PREDICTED", dir_okay=False, help="A simulated record.")],
    measured: Annotated[Path, typer.Argument(metavar="MEASURED", dir_okay=False, help="A measured record.")],
    workload: Annotated[
        Path | None,
        typer.Option(
            "--workload", metavar="FILE", help="The plan's workload: the report then shows what tasks wait for."
        ),
    ] = None,
    timeline: TimelinePath = None,
    output: OutputPath = None,
    report: ReportPath = None,
    as_json: JsonFlag = False,
) -> None:
    """Lay two records of one plan side by side: per task kind, per lane, phases, peaks, the first task that differs."""
    keep_apart(
        {"--output": output, "--timeline": timeline, "--report": report},
        {"PREDICTED": predicted, "MEASURED": measured, "--workload": workload},
    )
    first, second = Record.load(predicted), Record.load(measured)
    comparison = compare_records(first, second)
    schedule = compile_schedule(first.plan, Workload.load(workload)) if workload is not None else None
    write_report(
        report,
        lambda: full_report(
            f"{first.model_name}: {ORIGIN_NAMES[first.origin]} beside {ORIGIN_NAMES[second.origin]}",
            Facts(predicted=first, measured=second, schedule=schedule),
        ),
    )
    if output is not None:
        comparison.save(output)
    if timeline is not None:
        labels = (str(first.origin), str(second.origin))
        if labels[0] == labels[1]:
            labels = (f"{labels[0]}, first", f"{labels[1]}, second")
        write_atomically(timeline, chrome_trace(dict(zip(labels, (first, second), strict=True)), schedule=schedule))
    if as_json:
        typer.echo(comparison.to_json(), nl=False)
    else:
        show(comparison_tables(comparison))

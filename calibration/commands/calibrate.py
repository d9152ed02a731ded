"""``protwin calibrate``: measure this machine with a model.  torch is imported when the command is called."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Final

import typer

from ...runtime.commands.run_options import OptionalModel
from ...runtime.commands.run_ranks import in_one_voice, rank_at_hand, ranks_to_measure, start_ranks
from ...shared.basics.progress import progress_bar
from ...shared.catalogue.machines import load_hardware
from ...shared.catalogue.models import load_model_configuration
from ...shared.cli.option_groups import with_groups
from ...shared.cli.options import (
    BatchSize,
    DTypeName,
    HardwareName,
    JsonFlag,
    OutputPath,
    Seed,
    SequenceLength,
    command_app,
    examples,
    keep_apart,
    writable_json,
)
from ...shared.cli.output import give
from ...shared.tables.calibration import calibration_tables
from .learning import EarlierCalibration, Forgetting, FromRecords, TrainedWorkloads, check_ways, given_options, learnt
from .measured_training import MeasuredTraining

__all__ = ["calibrate"]

calibrate = command_app()
_STEPS: Final = 7


@calibrate.command(
    epilog=examples(
        "protwin hardware probe --output machine.toml",
        "protwin calibrate --model config.json --batch-size 4 --sequence-length 128 --hardware machine.toml "
        "--workload-output workload.json --output calibration.json",
        "protwin calibrate --model config.json --batch-size 4 --sequence-length 128 --hardware machine.toml "
        "--device-budget 10GiB --lora-rank 16 --workload-output workload.json --output calibration.json",
        "protwin calibrate --from measured.json --workload workload.json --hardware machine.toml "
        "--calibration calibration.json --output newer.json",
    )
)
@in_one_voice
@with_groups
def calibrate_command(
    *,
    context: typer.Context,
    hardware: HardwareName,
    model: OptionalModel = None,
    batch_size: BatchSize = None,
    sequence_length: SequenceLength = None,
    from_records: FromRecords = None,
    workload: TrainedWorkloads = None,
    calibration: EarlierCalibration = None,
    forgetting: Forgetting = None,
    measured: MeasuredTraining,
    student: Annotated[
        Path | None,
        typer.Option("--student", metavar="FILE", help="Measure distillation into this student (student.toml)."),
    ] = None,
    dtype: DTypeName = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=2, help=f"Timed iterations of each plan ({_STEPS}).")
    ] = None,
    seed: Seed = 0,
    disk_folder: Annotated[
        Path | None,
        typer.Option("--disk-folder", metavar="FOLDER", file_okay=False, help="Measure the disk that it lies on too."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", min=1, help="Start N processes, which run plans of several ranks."),
    ] = None,
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

    Runs five short trainings with random weights, and one more with --disk-folder; with --student distillations, so
    that teachers' forwards and losses have factors of their own.  With --ranks four, by processes
    that torchrun starts, on a machine that was probed with as many.  With --device-budget up to five that never have
    more on the device, and the model stays on the host: so a model is measured that does not fit.  The factors hold for
    this machine; a workload that is searched with them should be the timed one (--workload-output).

    With --from nothing is run: records that protwin run wrote, of any models that this machine has trained, update a
    calibration, or make one where there is none.  What was known of the same kinds of tasks counts for --forgetting.
    """
    read = {f"--from {path}": path for path in from_records or ()}
    read |= {f"--workload {path}": path for path in workload or ()}
    keep_apart(
        {"--workload-output": workload_output, "--output": output},
        {"--model": model, "--student": student, "--hardware": hardware, "--calibration": calibration, **read},
        as_json=as_json,
    )
    check_ways(given_options(context), is_learning=bool(from_records))
    if from_records:
        found = learnt(from_records, workload or (), calibration, hardware, forgetting)
        give(found, output, as_json=as_json, tables=lambda: calibration_tables(found))
        return
    assert model is not None
    assert batch_size is not None
    assert sequence_length is not None
    machine = load_hardware(hardware)
    described = load_model_configuration(model)
    trained_as = measured.trained_as(None, student)

    num_ranks, starts = ranks_to_measure(ranks, os.environ)
    trained_as.check(num_ranks)
    if starts:
        raise typer.Exit(start_ranks(num_ranks, sys.argv[1:]))
    speaks = rank_at_hand(os.environ).speaks
    from ..fitting.calibrate import calibrate_configuration

    with progress_bar("calibrating") if speaks else nullcontext() as on_progress:
        traced, factors = calibrate_configuration(
            described.config,
            described.name,
            machine,
            batch_size=batch_size,
            sequence_length=sequence_length,
            dtype=dtype,
            steps=_STEPS if steps is None else steps,
            seed=seed,
            disk_folder=disk_folder,
            num_ranks=num_ranks,
            trained_as=trained_as,
            on_progress=on_progress,
        )
    if not speaks:
        return
    if workload_output is not None:
        traced.save(workload_output)
    give(factors, output, as_json=as_json, tables=lambda: calibration_tables(factors))

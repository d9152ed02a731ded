"""What ``protwin calibrate --from`` does: a calibration learns from records of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from ...shared.basics.errors import ProtwinError
from ...shared.catalogue.machines import load_hardware
from ...shared.schema.calibration import Calibration
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload

FromRecords = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="FILE",
        dir_okay=False,
        help="A measured record to learn from, in the place of short trainings (repeatable).",
    ),
]
TrainedWorkloads = Annotated[
    list[Path] | None,
    typer.Option(
        "--workload", metavar="FILE", dir_okay=False, help="With --from: a workload that was trained (repeatable)."
    ),
]
EarlierCalibration = Annotated[
    Path | None,
    typer.Option(
        "--calibration", metavar="FILE", dir_okay=False, help="With --from: what was known before; it is not changed."
    ),
]
Forgetting = Annotated[
    float | None,
    typer.Option("--forgetting", metavar="FRACTION", help="With --from: what is left of what was known (0.5)."),
]


def learnt(
    records: Sequence[Path],
    workloads: Sequence[Path],
    calibration: Path | None,
    hardware: str,
    forgetting: float | None,
) -> Calibration:
    """The calibration in the file ``calibration``, or none, with what ``records`` tell.

    Raises ProtwinError if a file cannot be read, no workload is named, and as ``updated`` does.
    """
    if not workloads:
        raise ProtwinError(
            "--from names records, and --workload is missing: the tasks of a record follow from its plan and workload. "
            "Give the file that protwin run was given."
        )
    # These import numpy and scipy.
    from ..fitting.updating import FORGETTING, paired, updated

    known = None if calibration is None else Calibration.load(calibration)
    pairs = paired([(str(path), Record.load(path)) for path in records], [Workload.load(path) for path in workloads])
    return updated(known, pairs, load_hardware(hardware), forgetting=FORGETTING if forgetting is None else forgetting)


def given_options(context: typer.Context) -> list[str]:
    """The options on the command line of the command that runs, by name."""
    found = []
    for option in context.command.params:
        source = None if option.name is None else context.get_parameter_source(option.name)
        if source is not None and source.name == "COMMANDLINE":
            found.append(option.opts[0])
    return found


def check_ways(given: Sequence[str], *, is_learning: bool) -> None:
    """Raise ProtwinError if options of the two ways to calibrate are mixed, or one is missing.

    ``is_learning``: from records; else by short trainings.
    """
    of_records = [option for option in given if option in _OF_RECORDS]
    if not is_learning and of_records:
        raise ProtwinError(f"{of_records[0]} goes with --from FILE, a record to learn from, which is missing.")
    of_trainings = [option for option in given if option not in _OF_RECORDS | _OF_BOTH]
    if is_learning and of_trainings:
        raise ProtwinError(
            f"--from learns from records of runs, and {of_trainings[0]} says what to run. Leave one of them out."
        )
    missing = [option for option in _NEEDED if option not in given]
    if not is_learning and missing:
        raise ProtwinError(f"{missing[0]} is missing: it says what to train. Or give records, --from FILE.")


_OF_RECORDS: Final = frozenset({"--from", "--workload", "--calibration", "--forgetting"})
_OF_BOTH: Final = frozenset({"--hardware", "--output", "--json"})
_NEEDED: Final = ("--model", "--batch-size", "--sequence-length")

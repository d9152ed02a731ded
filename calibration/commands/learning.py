"""What ``protwin calibrate --from`` does: a calibration learns from records of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

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


def check_learning(records: Sequence[Path] | None, learning: Mapping[str, Any], measuring: Mapping[str, Any]) -> None:
    """Raise ProtwinError if options of the two ways to calibrate are mixed, or one is missing.

    ``learning`` and ``measuring``: the values of the options of each, by name.
    """
    wrong = measuring if records else learning
    given = next((option for option, value in wrong.items() if value not in (None, [])), None)
    if records and given is not None:
        raise ProtwinError(f"--from learns from records of runs, and {given} says what to run. Leave one of them out.")
    if given is not None:
        raise ProtwinError(f"{given} goes with --from FILE, a record to learn from, which is missing.")
    if not records:
        missing = next(
            (option for option in ("--model", "--batch-size", "--sequence-length") if measuring[option] is None), None
        )
        if missing is not None:
            raise ProtwinError(f"{missing} is missing: it says what to train. Or give records, --from FILE.")

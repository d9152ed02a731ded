"""``protwin compare``: two records of one plan side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...shared.basics.documents import write_atomically
from ...shared.basics.errors import ProtwinError
from ...shared.cli.options import JsonFlag, OutputPath, TimelinePath, command_app, examples, keep_apart
from ...shared.cli.output import save, tell
from ...shared.cli.report_options import ReportPath, write_report
from ...shared.compile.compile import compile_schedule
from ...shared.records.chrome_trace import chrome_trace
from ...shared.records.comparison import compare_records
from ...shared.report.report import Facts
from ...shared.report.report import report as full_report
from ...shared.schema.record import Origin, Record
from ...shared.schema.workload import Workload
from ...shared.tables.comparison import comparison_tables
from ...shared.tables.labels import ORIGIN_NAMES

__all__ = ["compare"]

compare = command_app()


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
        as_json=as_json,
    )
    first, second = Record.load(predicted), Record.load(measured)
    if first.origin is second.origin is Origin.SIMULATED:
        raise ProtwinError(
            f"{measured} is a prediction, in the place of the measurement. Give the record that protwin run --output "
            f"wrote."
        )
    comparison = compare_records(first, second)
    schedule = compile_schedule(first.plan, Workload.load(workload)) if workload is not None else None
    write_report(
        report,
        lambda: full_report(
            f"{first.model_name}: {ORIGIN_NAMES[first.origin]} beside {ORIGIN_NAMES[second.origin]}",
            Facts(predicted=first, measured=second, schedule=schedule),
        ),
    )
    save(comparison, output)
    if timeline is not None:
        labels = (str(first.origin), str(second.origin))
        if labels[0] == labels[1]:
            labels = (f"{labels[0]}, first", f"{labels[1]}, second")
        write_atomically(timeline, chrome_trace(dict(zip(labels, (first, second), strict=True)), schedule=schedule))
    tell(comparison, output, as_json=as_json, tables=lambda: comparison_tables(comparison))

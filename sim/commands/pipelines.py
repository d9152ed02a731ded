"""Pipelines in the commands: a search over splits into stages and replicas, and the simulation of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...shared.basics.errors import PlanError
from ...shared.basics.progress import progress_bar
from ...shared.basics.units import format_bytes
from ...shared.cli.exits import report_interruption
from ...shared.cli.options import warn
from ...shared.cli.output import give, save, tell
from ...shared.pipelines.pipeline import Pipeline
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.plan import TrainingMethod
from ...shared.schema.workload import Workload
from ..engine.pipelines import simulate_pipeline
from ..memory.libraries import rank_device_bytes, rank_host_bytes
from ..questions.splits import search_splits
from ..searching.request import SearchRequest
from .machine_choice import unused_devices
from .warnings import warn_of_dtype, warn_of_memory

if TYPE_CHECKING:
    from ...shared.pipelines.prediction import PipelinePrediction
    from ...shared.tables.table import Parts


@dataclass(frozen=True)
class Asked:
    """What the user wants of a simulation beside its figures."""

    device_budget_bytes: int | None
    """Device memory that every rank may fill; None for all there is."""
    output: Path | None
    _: KW_ONLY
    as_json: bool


def may_be_pipeline(request: SearchRequest) -> bool:
    """Whether the request's ranks may have the pairs of a distillation in stages."""
    return request.step.num_ranks > 1 and request.smallest_workload().method is TrainingMethod.BYPASS


def refuse(options: Mapping[str, object], what: str) -> None:
    """Raise PlanError that names the first of ``options`` that is given: ``what`` does not know it."""
    for option, value in options.items():
        if value:
            raise PlanError(f"{option} is not known of {what}. Leave it out.")


def search_pipelines(request: SearchRequest, *, output: Path | None, as_json: bool) -> None:
    """Search the splits of a distillation, print what was found, and write the pipeline, or the plan of one stage.

    Raises what ``search_splits`` raises.
    """
    with progress_bar("searching") as on_progress:
        found = search_splits(request, on_progress=on_progress)
    _warn(found.chosen, request.hardware)
    pipeline = found.chosen.pipeline
    if found.is_interrupted:
        pipeline = pipeline.model_copy(update={"note": "Ctrl-C ended the search before all splits were looked at."})
    is_plan = pipeline.num_stages == 1 and not found.is_interrupted
    save(pipeline.stages[0].plan if is_plan else pipeline, output)

    def tables() -> Parts:
        from ...shared.pipelines.tables import split_tables

        return split_tables(found)

    tell(found, output, as_json=as_json, tables=tables)
    if found.is_interrupted:
        raise typer.Exit(report_interruption(output, None, holding="the best pipeline so far, which is not certified,"))


def simulate_stages(
    pipeline: Pipeline,
    workload: Workload,
    hardware: Hardware,
    calibration: Calibration | None,
    asked: Asked,
) -> None:
    """Simulate a pipeline and print a row per stage, and the whole.  Raises what ``simulate_pipeline`` raises."""
    if pipeline.note is not None:
        warn(pipeline.note)
    with progress_bar("simulating") as on_progress:
        prediction = simulate_pipeline(pipeline, workload, hardware, calibration, on_progress=on_progress)
    if (unused := unused_devices(hardware, pipeline.num_ranks)) is not None:
        warn(unused)
    budget_bytes = asked.device_budget_bytes or rank_device_bytes(hardware, pipeline.num_ranks)
    if prediction.peak_bytes > budget_bytes:
        warn(
            f"this pipeline may need {format_bytes(prediction.peak_bytes)} of device memory but the budget is "
            f"{format_bytes(budget_bytes)}."
        )
    _warn(prediction, hardware)

    def tables() -> Parts:
        from ...shared.pipelines.tables import prediction_tables

        return prediction_tables(prediction)

    give(prediction, asked.output, as_json=asked.as_json, tables=tables)


def _warn(prediction: PipelinePrediction, hardware: Hardware) -> None:
    record = prediction.stages[prediction.slowest].record
    warn_of_dtype(record, hardware)
    for stage in prediction.stages:
        warn_of_memory(stage.record, rank_host_bytes(hardware, prediction.pipeline.num_ranks))

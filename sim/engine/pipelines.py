"""The simulation of a pipeline: every stage by itself, and the whole at the pace of the slowest."""

from __future__ import annotations

from ...shared.basics.progress import OnProgress, no_progress
from ...shared.pipelines.pipeline import Pipeline
from ...shared.pipelines.prediction import PipelinePrediction, StagePrediction
from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import Hardware
from ...shared.schema.record import Record
from ...shared.schema.workload import Workload
from .joint_intervals import interval_of_slowest
from .simulator import simulate_drawn


def simulate_pipeline(
    pipeline: Pipeline,
    workload: Workload,
    hardware: Hardware,
    calibration: Calibration | None = None,
    *,
    on_progress: OnProgress = no_progress,
) -> PipelinePrediction:
    """What one steady-state iteration of ``workload`` does in the stages of ``pipeline``.

    Each stage is simulated with its share of the machine and with neighbours that are always ready.  No stage waits for
    one behind it, so in the steady state all take as long as the slowest.

    Raises PlanError if the pipeline belongs to another workload, otherwise as ``simulate``.
    """
    records, draws = [], []
    workloads = pipeline.workloads(workload)
    for number, (stage, own) in enumerate(zip(pipeline.stages, workloads, strict=True)):
        on_progress(number, pipeline.num_stages)
        record, of_stage = simulate_drawn(stage.plan, own, hardware, calibration)
        records.append(record)
        draws.append(of_stage)
    found = predicted_pipeline(pipeline, workloads, records)
    return found.model_copy(update={"interval_s": interval_of_slowest(draws)})


def with_interval(
    prediction: PipelinePrediction, workload: Workload, hardware: Hardware, calibration: Calibration | None
) -> PipelinePrediction:
    """A pipeline whose stages were searched, with the interval of the whole; every stage is simulated once more."""
    pipeline = prediction.pipeline
    pairs = zip(pipeline.stages, pipeline.workloads(workload), strict=True)
    draws = [simulate_drawn(stage.plan, own, hardware, calibration)[1] for stage, own in pairs]
    return prediction.model_copy(update={"interval_s": interval_of_slowest(draws)})


def predicted_pipeline(
    pipeline: Pipeline, workloads: tuple[Workload, ...], records: list[Record]
) -> PipelinePrediction:
    """The records of all stages, in order, put together."""
    return PipelinePrediction(
        pipeline=pipeline,
        stages=tuple(
            StagePrediction(
                first_pair=pipeline.first_pair(number),
                num_pairs=stage.num_pairs,
                parameter_bytes=sum(parameter.size_bytes for parameter in own.parameters),
                record=record,
            )
            for number, (stage, own, record) in enumerate(zip(pipeline.stages, workloads, records, strict=True))
        ),
    )

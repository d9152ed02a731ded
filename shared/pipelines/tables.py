"""Pipelines, what is predicted of them, and searches over splits, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from ..basics.units import format_bytes, format_number, format_seconds
from ..schema.plan import mode_words
from ..tables.labels import LANE_NAMES, NO_VALUE, bottleneck, busy_frac, format_interval_s, format_share
from ..tables.question import question_table
from ..tables.record import plan_table
from ..tables.table import Heading, Parts, Table
from .pipeline import Pipeline
from .prediction import PipelinePrediction
from .split_search import SplitOutcome, SplitSearch


def pipeline_tables(pipeline: Pipeline) -> Parts:
    """The pairs of every stage, and the knobs of its plan."""
    rows = [
        (
            str(number),
            _pairs(pipeline.first_pair(number), stage.num_pairs),
            mode_words(stage.plan.parallel, stage.plan.shard_ranks),
        )
        for number, stage in enumerate(pipeline.stages)
    ]
    stages = Table(title=_title(pipeline), columns=("stage", "pairs", "mode"), rows=rows)
    return (stages, *(plan_table(stage.plan) for stage in pipeline.stages))


def prediction_tables(prediction: PipelinePrediction) -> Parts:
    """A row per stage, and the whole; the slowest stage is marked."""
    record = prediction.stages[prediction.slowest].record
    asked = [] if record.question is None else [question_table(record.question)]
    heading = Heading(f"{record.model_name} on {record.hardware_name}: {_title(prediction.pipeline)}, predicted")
    return (heading, *asked, stage_table(prediction))


def stage_table(prediction: PipelinePrediction) -> Table:
    """What every stage holds, how long it takes, and what bounds it."""
    rows = []
    spread = format_interval_s(prediction.iteration_interval_s)
    for number, stage in enumerate(prediction.stages):
        record = stage.record
        rows.append(
            (
                str(number),
                _pairs(stage.first_pair, stage.num_pairs),
                format_bytes(stage.parameter_bytes),
                format_seconds(record.iteration_s),
                format_interval_s(record.iteration_interval_s) or NO_VALUE,
                format_bytes(record.guaranteed_peak_device_bytes),
                _busiest(prediction, number),
                "◀ slowest" if number == prediction.slowest else "",
            )
        )
    return Table(
        title="Stages",
        columns=("stage", "pairs", ">parameters", ">iteration", ">expected", ">device peak", "bottleneck", ""),
        rows=rows,
        styles={prediction.slowest: "bold"},
        notes=[
            f"All stages go at the pace of the slowest: {format_seconds(prediction.iteration_s)} per iteration"
            f"{f' (expected: {spread})' if spread else ''}, {format_number(prediction.tokens_per_s)} tokens per second."
        ],
    )


def split_tables(found: SplitSearch) -> Parts:
    """The chosen pipeline stage by stage, and what became of every number of stages."""
    return (*prediction_tables(found.chosen), split_table(found))


def split_table(found: SplitSearch) -> Table:
    """A row per number of stages; the chosen one is marked."""
    chosen = found.chosen.pipeline
    rows = []
    for split in found.splits:
        state = split.reason
        if not state:
            state = "◀ chosen" if split.num_stages == chosen.num_stages else ""
        rows.append(
            (
                str(split.num_stages),
                str(split.num_replicas),
                _numbers(split.num_pairs),
                _seconds(split),
                NO_VALUE if split.tokens_per_s is None else format_number(split.tokens_per_s),
                NO_VALUE if split.iteration_s is None else format_bytes(split.peak_bytes),
                NO_VALUE if split.bottleneck is None else LANE_NAMES[split.bottleneck],
                state,
            )
        )
    return Table(
        title=f"Ways to have {found.num_ranks:,} ranks",
        columns=(
            ">stages",
            ">replicas",
            "pairs",
            ">iteration",
            ">tokens\nper second",
            ">device\npeak",
            "bottleneck",
            "",
        ),
        rows=rows,
        styles={place: "bold" for place, split in enumerate(found.splits) if split.num_stages == chosen.num_stages},
    )


def _title(pipeline: Pipeline) -> str:
    stages = f"{pipeline.num_stages:,} stage{'s' if pipeline.num_stages > 1 else ''}"
    replicas = f", {pipeline.num_replicas:,} replicas" if pipeline.num_replicas > 1 else ""
    return f"pipeline of {stages}{replicas}"


def _pairs(first: int, number: int) -> str:
    """``"12-15"``, or ``"3"``."""
    return str(first) if number == 1 else f"{first}-{first + number - 1}"


def _numbers(num_pairs: Sequence[int]) -> str:
    """``"14 + 3 x 13"``: runs of equal numbers once."""
    runs: list[list[int]] = []
    for number in num_pairs:
        if runs and runs[-1][1] == number:
            runs[-1][0] += 1
        else:
            runs.append([1, number])
    return " + ".join(f"{count} x {number}" if count > 1 else str(number) for count, number in runs) or NO_VALUE


def _seconds(split: SplitOutcome) -> str:
    return NO_VALUE if split.iteration_s is None else format_seconds(split.iteration_s)


def _busiest(prediction: PipelinePrediction, number: int) -> str:
    record = prediction.stages[number].record
    lane = bottleneck(record)
    return NO_VALUE if lane is None else f"{LANE_NAMES[lane]} ({format_share(busy_frac(record, lane))} busy)"

"""What is predicted of a pipeline: a record of every stage, and the whole, which goes at the pace of the slowest."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from ..basics.documents import Document, FrozenModel
from ..basics.interval import Interval
from ..schema.record import Record
from .pipeline import Pipeline


class StagePrediction(FrozenModel):
    """One stage, simulated as if its neighbours were always ready."""

    first_pair: NonNegativeInt
    """Pairs of the stages before."""
    num_pairs: PositiveInt
    parameter_bytes: NonNegativeInt
    """Of all parameters of the stage, the prologue's among them."""
    record: Record
    """Of one rank; samples, operations and power of all ranks of the stage."""


class PipelinePrediction(Document):
    """What a pipeline does in the steady state, in which every stage takes as long as the slowest one."""

    KIND: ClassVar[str] = "pipeline_prediction"
    TABLES: ClassVar[str] = "pipelines.tables:prediction_tables"

    pipeline: Pipeline
    stages: tuple[StagePrediction, ...] = Field(min_length=1)
    interval_s: Interval | None = None
    """Where the time of whichever stage is slowest is expected; None in files that do not say."""

    @model_validator(mode="after")
    def _stages_are_those_of_the_pipeline(self) -> Self:
        found = [stage.num_pairs for stage in self.stages]
        if found != [stage.num_pairs for stage in self.pipeline.stages]:
            raise ValueError(f"stages: of {', '.join(map(str, found))} pairs, which are not those of the pipeline")
        return self

    @cached_property
    def slowest(self) -> int:
        """The first of the slowest stages, by its number."""
        times_s = [stage.record.iteration_s for stage in self.stages]
        return times_s.index(max(times_s))

    @property
    def iteration_s(self) -> float:
        """Seconds of one optimizer step of all stages."""
        return self.stages[self.slowest].record.iteration_s

    @property
    def iteration_interval_s(self) -> Interval | None:
        """Where the time of one optimizer step is expected.

        Of files without ``interval_s``, that of the stage that is predicted to be slowest.
        """
        return self.interval_s or self.stages[self.slowest].record.iteration_interval_s

    @property
    def num_tokens(self) -> int:
        """Tokens (or positions) of one optimizer step, of all replicas."""
        return self.stages[0].record.num_tokens

    @property
    def tokens_per_s(self) -> float:
        """Of all replicas."""
        return self.num_tokens / self.iteration_s

    @property
    def peak_bytes(self) -> int:
        """Device memory of the stage that needs most, which no timing exceeds."""
        return max(stage.record.guaranteed_peak_device_bytes for stage in self.stages)

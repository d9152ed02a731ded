"""What a search over the splits of a distillation into stages and replicas finds."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from ..basics.documents import Document, FrozenModel
from ..schema.schedule import Lane
from .prediction import PipelinePrediction


class SplitOutcome(FrozenModel):
    """The best pipeline of so many stages and replicas."""

    num_stages: PositiveInt
    num_replicas: PositiveInt
    num_pairs: tuple[PositiveInt, ...] = ()
    """Pairs of every stage; () where none fits."""
    iteration_s: PositiveFloat | None = None
    """Of the slowest stage; None where none fits."""
    tokens_per_s: PositiveFloat | None = None
    """Of all replicas; None where none fits."""
    peak_bytes: NonNegativeInt = 0
    """Device memory of the stage that needs most, which no timing exceeds."""
    bottleneck: Lane | None = None
    """The busiest lane of the slowest stage."""
    num_searches: NonNegativeInt = 0
    """Stages that plans were searched for; alike ones count once."""
    reason: str = ""
    """Why there is none."""


class SplitSearch(Document):
    """The fastest way to have a distillation on some ranks: every number of stages, with as many replicas as fit."""

    KIND: ClassVar[str] = "split_search"
    TABLES: ClassVar[str] = "pipelines.tables:split_tables"

    model_name: str
    hardware_name: str
    num_ranks: PositiveInt
    chosen: PipelinePrediction
    """The one that trains on most tokens per second, all on as many in a step; of those within the tolerance that of
    the fewest stages."""
    splits: tuple[SplitOutcome, ...] = Field(min_length=1)
    """By number of stages, the fewest first."""
    device_budget_bytes: PositiveInt
    """Device memory that every rank may fill."""
    tolerance_frac: float = Field(ge=0, lt=1)
    """No split into as many stages is faster by more, as far as a stage of more pairs is never the faster one."""
    is_interrupted: bool = False
    """Whether Ctrl-C ended the search: the pipeline is then the best so far.  A file has the field where it is true."""

    @model_validator(mode="after")
    def _chosen_is_one_of_them(self) -> Self:
        pipeline = self.chosen.pipeline
        if (pipeline.num_stages, pipeline.num_replicas) not in {(s.num_stages, s.num_replicas) for s in self.splits}:
            raise ValueError(f"chosen: {pipeline.num_stages} stages, which no split has")
        return self

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if not self.is_interrupted:
            fields.pop("is_interrupted", None)
        return fields

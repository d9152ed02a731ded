"""The pipeline: contiguous pairs of a distillation on ranks of their own, each with a plan.

[Note: Ranks as pipelines]
No student block's learning reads another one.  So a pipeline of distillation has no bubble and no way back: a stage
needs the teacher's activation before its first pair, and nothing else.

- World rank = replica * number of stages + stage.  The ranks of one pipeline are neighbours.
- Every stage runs the teacher's forward from its beginning on the same batch, so that masks, rotary tables and
  positions are made by who knows how.  Blocks before its first pair are passed over.
- The received activation is written into the prologue's hidden state, in place.  So a stage has the memory of a
  distillation of its own pairs.
- In the steady state every stage's iteration takes as long as the slowest stage's.
- Replicas of a stage train data parallel, in the parallel mode of its plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer, model_validator

from ..basics.documents import Document, FrozenModel, read_mapping
from ..basics.errors import PlanError
from ..schema.plan import Plan, TrainingMethod
from ..schema.workload import Workload
from ..workloads.stages import stage_workloads


class Stage(FrozenModel):
    """Consecutive pairs, and the plan of the ranks that have them."""

    num_pairs: PositiveInt
    """Pairs of a teacher's and a student's block."""
    plan: Plan
    """What each of these ranks does; its workload is the stage's."""


class Pipeline(Document):
    """How one distillation is trained by ranks that have contiguous pairs each (Note: Ranks as pipelines)."""

    KIND: ClassVar[str] = "pipeline"
    TABLES: ClassVar[str] = "pipelines.tables:pipeline_tables"

    workload_id: str
    """Identity of the whole distillation (``Workload.identity``)."""
    num_replicas: PositiveInt = 1
    """Pipelines side by side, each of which trains on a batch of its own; gradients are added up over them."""
    stages: tuple[Stage, ...] = Field(min_length=1)
    """In the order of the pairs; together they have all."""
    note: str | None = Field(default=None, max_length=1000)
    """What a reader should know, such as that nothing is proven about it; no part of its identity.  A file
    without a note has no such field."""

    @model_validator(mode="after")
    def _stages_agree(self) -> Self:
        first = self.stages[0].plan
        for number, stage in enumerate(self.stages):
            plan, where = stage.plan, f"stages[{number}].plan"
            if plan.method is not TrainingMethod.BYPASS:
                raise ValueError(f"{where}.method: {plan.method}; stages of a pipeline are of method bypass")
            if plan.num_ranks != self.num_replicas:
                raise ValueError(
                    f"{where}.num_ranks: {plan.num_ranks} with num_replicas {self.num_replicas}; a stage has one rank "
                    f"of every replica"
                )
            for knob in ("micro_batches", "max_gradient_norm", "optimizer"):
                if getattr(plan, knob) != getattr(first, knob):
                    raise ValueError(
                        f"{where}.{knob}: {getattr(plan, knob)}, of the first stage {getattr(first, knob)}; all "
                        f"stages do the same step"
                    )
            if plan.n_disk_state and len(self.stages) > 1:
                raise ValueError(
                    f"{where}.n_disk_state: {plan.n_disk_state}; one rank alone knows chunks on a disk. Set it to 0"
                )
        return self

    @model_serializer(mode="wrap")
    def _without_empty_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if self.note is None:
            fields.pop("note", None)
        return fields

    @property
    def num_stages(self) -> int:
        """Stages of each replica."""
        return len(self.stages)

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages and replicas."""
        return self.num_stages * self.num_replicas

    @property
    def num_pairs(self) -> int:
        """Pairs of all stages."""
        return sum(stage.num_pairs for stage in self.stages)

    def first_pair(self, stage: int) -> int:
        """Pairs of the stages before ``stage``."""
        return sum(before.num_pairs for before in self.stages[:stage])

    def stage_of(self, rank: int) -> int:
        """The stage of a rank of the world."""
        return rank % self.num_stages

    def replica_of(self, rank: int) -> int:
        """The replica of a rank of the world; its rank among those of its stage."""
        return rank // self.num_stages

    def rank_of(self, stage: int, replica: int) -> int:
        """The rank of the world that carries ``stage`` of ``replica`` out."""
        return replica * self.num_stages + stage

    @cached_property
    def identity(self) -> str:
        """Hash of the stages' plans and pairs, and of the workload that they are for."""
        facts = [self.workload_id, self.num_replicas, *((s.num_pairs, s.plan.identity) for s in self.stages)]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def workloads(self, workload: Workload) -> tuple[Workload, ...]:
        """What the ranks of every stage do, of the distillation ``workload``.

        Raises PlanError if the pipeline belongs to another workload, WorkloadError as ``stage_workload``.
        """
        self._check_workload(workload)
        found = stage_workloads(workload, [stage.num_pairs for stage in self.stages])
        self._check_stages(found)
        return found

    def _check_workload(self, workload: Workload) -> None:
        """Raise PlanError if the pipeline was made for another workload, or for other numbers of pairs."""
        if self.workload_id not in (workload.identity, workload.composed_identity):
            raise PlanError(
                f"the pipeline belongs to workload {self.workload_id}, not to {workload.identity} "
                f"({workload.model_name}). Search one for this workload, or name the one that it was made for."
            )
        if 2 * self.num_pairs != workload.num_blocks:
            raise PlanError(
                f"the pipeline's stages have {self.num_pairs} pairs but {workload.model_name} has "
                f"{workload.num_blocks // 2}. Every pair belongs to one stage."
            )

    def _check_stages(self, workloads: Sequence[Workload]) -> None:
        """Raise PlanError unless every stage's plan is one for the stage's workload."""
        for number, (stage, own) in enumerate(zip(self.stages, workloads, strict=True)):
            if stage.plan.workload_id not in (own.identity, own.composed_identity):
                raise PlanError(
                    f"the plan of stage {number} belongs to workload {stage.plan.workload_id}, not to {own.identity}, "
                    f"which has {stage.num_pairs} pairs from pair {self.first_pair(number)} on. Search it again."
                )


def load_plan_or_pipeline(path: str | Path) -> Plan | Pipeline:
    """What a plan file holds: the plan of equal ranks, or a pipeline.  Raises FileError."""
    content = read_mapping(path)
    kind = Pipeline if content.get("kind") == Pipeline.KIND else Plan
    return kind.from_mapping(content, origin=str(path))

"""The document of a pipeline: who has which rank, what belongs together, and what its tables say."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from protwin.shared.basics.errors import FileError, PlanError
from protwin.shared.pipelines.pipeline import Pipeline, Stage, load_plan_or_pipeline
from protwin.shared.schema.optimizer import Optimizer
from protwin.shared.schema.plan import ParallelMode, Plan
from protwin.shared.schema.workload import COMPOSED, Workload
from protwin.shared.workloads.stages import stage_workloads
from tests.shared.bypass_models import bypass_plan, pairs
from tests.shared.small_models import chain, plan


def pipeline(
    split: tuple[int, ...] = (2, 1), num_replicas: int = 1, workload: Workload | None = None, **knobs: object
) -> Pipeline:
    workload = workload or pairs(sum(split))
    own = {"num_ranks": num_replicas, "parallel": ParallelMode.DDP} if num_replicas > 1 else {}
    plans = [bypass_plan(stage, n_persist=5, **(own | knobs)) for stage in stage_workloads(workload, split)]
    stages = tuple(Stage(num_pairs=n, plan=made) for n, made in zip(split, plans, strict=True))
    return Pipeline(workload_id=workload.identity, num_replicas=num_replicas, stages=stages)


def test_neighbours_are_the_stages_of_one_replica() -> None:
    found = pipeline((2, 1, 1), num_replicas=2)
    assert (found.num_stages, found.num_ranks, found.num_pairs) == (3, 6, 4)
    assert [found.stage_of(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [found.replica_of(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [found.rank_of(found.stage_of(rank), found.replica_of(rank)) for rank in range(6)] == list(range(6))
    assert [found.first_pair(stage) for stage in range(3)] == [0, 2, 3]


def test_every_stage_has_the_workload_that_its_plan_was_made_for() -> None:
    found = pipeline()
    assert [own.num_blocks for own in found.workloads(pairs(3))] == [4, 2]
    with pytest.raises(PlanError, match="belongs to workload"):
        found.workloads(pairs(4))
    swapped = found.model_copy(
        update={
            "stages": tuple(s.model_copy(update={"num_pairs": n}) for s, n in zip(found.stages, (1, 2), strict=True))
        }
    )
    with pytest.raises(PlanError, match="the plan of stage 0 belongs to workload"):
        swapped.workloads(pairs(3))
    longer = found.model_copy(update={"stages": (*found.stages, found.stages[1])})
    with pytest.raises(PlanError, match="the pipeline's stages have 4 pairs but small has 3"):
        longer.workloads(pairs(3))


def test_a_pipeline_of_a_composed_distillation_goes_with_a_trace_of_it() -> None:
    """And not the other way round: a trace knows of the modules besides."""
    traced = pairs(3)
    composed = traced.model_copy(update={"model_hash": COMPOSED})
    found = pipeline(workload=composed)
    assert [own.num_blocks for own in found.workloads(traced)] == [4, 2]
    with pytest.raises(PlanError, match="belongs to workload"):
        pipeline(workload=traced).workloads(composed)


def test_a_file_is_read_as_what_it_is(tmp_path: Path) -> None:
    found, alone = pipeline(), plan(chain(1))
    found.save(tmp_path / "pipeline.json")
    alone.save(tmp_path / "plan.json")
    assert load_plan_or_pipeline(tmp_path / "pipeline.json") == found
    assert load_plan_or_pipeline(tmp_path / "plan.json") == alone
    assert "note" not in found.to_json()
    with pytest.raises(FileError, match="is a pipeline file, expected a plan file"):
        Plan.load(tmp_path / "pipeline.json")


def test_identity_is_that_of_stages_and_workload() -> None:
    found = pipeline()
    assert found.identity == pipeline().identity
    assert found.identity == found.model_copy(update={"note": "of mine"}).identity
    others = [pipeline((1, 2)), pipeline(n_buffer=2), pipeline((1, 1)), pipeline(num_replicas=2)]
    assert len({found.identity, *(other.identity for other in others)}) == 5


def test_stages_do_the_same_step_on_as_many_ranks() -> None:
    found = pipeline()

    def with_knobs(**knobs: object) -> Pipeline:
        changed = found.stages[1].model_copy(update={"plan": found.stages[1].plan.model_copy(update=knobs)})
        return Pipeline(workload_id=found.workload_id, stages=(found.stages[0], changed))

    for knobs, message in (
        ({"micro_batches": 2}, r"stages\[1\].plan.micro_batches: 2, of the first stage 1"),
        ({"optimizer": Optimizer.SGD}, r"stages\[1\].plan.optimizer: sgd, of the first stage adamw"),
        ({"num_ranks": 2, "parallel": ParallelMode.DDP}, r"stages\[1\].plan.num_ranks: 2 with num_replicas 1"),
        ({"n_disk_state": 1, "n_staging": 1}, r"stages\[1\].plan.n_disk_state: 1; one rank alone"),
    ):
        with pytest.raises(ValidationError, match=message):
            with_knobs(**knobs)
    with pytest.raises(ValidationError, match="method: full; stages of a pipeline are of method bypass"):
        Pipeline(workload_id="0", stages=(Stage(num_pairs=1, plan=plan(chain(1))),))


def test_a_pipeline_prints_its_stages() -> None:
    text = str(pipeline((2, 1), num_replicas=2))
    assert "pipeline of 2 stages, 2 replicas" in text
    assert "0-1" in text

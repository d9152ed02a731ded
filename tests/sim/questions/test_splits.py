"""Splits into stages: the best one is that of brute force, and the whole is told by its slowest stage."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import HardwareError, InfeasibleError, PlanError
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.pipelines.pipeline import Pipeline, Stage
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import ParallelMode
from protwin.shared.schema.workload import Workload
from protwin.shared.workloads.stages import stage_workloads
from protwin.sim.engine.pipelines import simulate_pipeline
from protwin.sim.engine.simulator import simulate
from protwin.sim.questions import splits
from protwin.sim.questions.splits import best_pipeline, best_split, search_splits
from protwin.sim.searching.request import Effort, GlobalBatch, SearchRequest, Step
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace
from tests.proof_size import examples
from tests.shared.bypass_models import bypass_plan, pairs
from tests.sim.fastest import fastest_request
from tests.sim.ranked_cases import RANKS, nodes
from tests.sim.searching.test_bypass import pairs as large_pairs
from tests.strategies.pairs import bypass_workloads

SMALL = SearchSpace(chunk_bytes=(100_000,), n_buffer=(1000,), prefetch_depth=(1,), n_shard=(0,))


def all_splits(num_pairs: int, num_stages: int) -> list[tuple[int, ...]]:
    """Every way to cut ``num_pairs`` pairs into contiguous stages."""
    found = []
    for cuts in combinations(range(1, num_pairs), num_stages - 1):
        ends = (*cuts, num_pairs)
        found.append(tuple(end - begin for begin, end in zip((0, *cuts), ends, strict=True)))
    return found


@given(st.integers(1, 7), st.data())
@settings(max_examples=examples(300, 14))
def test_the_slowest_stage_of_the_best_split_is_the_fastest_there_is(num_pairs: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_pairs))
    times = st.sampled_from((1.0, 1.0, 2.0, 3.5, float("inf")))
    seconds = {
        (first, number): data.draw(times)
        for number in range(1, num_pairs + 1)
        for first in range(num_pairs - number + 1)
    }

    def slowest(split: tuple[int, ...]) -> float:
        return max(seconds[sum(split[:stage]), number] for stage, number in enumerate(split))

    found_s, split = best_split(seconds, num_stages)
    every = all_splits(num_pairs, num_stages)
    assert split in every
    assert found_s == slowest(split) == min(map(slowest, every))


def request_for(
    workload: Workload, box: Hardware, num_ranks: int, tolerance_frac: float, budget_bytes: int
) -> SearchRequest:
    return fastest_request(
        workload=workload,
        hardware=box.model_copy(update={"name": workload.measured_on}),
        device_budget_bytes=budget_bytes,
        host_budget_bytes=2**40,
        space=SMALL,
        step=Step(num_ranks=num_ranks),
        effort=Effort(tolerance_frac=tolerance_frac),
    )


@given(bypass_workloads(max_pairs=4, min_pairs=2, is_even=True), nodes(), st.sampled_from((0.0, 0.005)), st.data())
@settings(max_examples=examples(60, 3), deadline=None)
def test_the_split_that_is_found_is_that_of_brute_force(
    workload: Workload, box: Hardware, tolerance_frac: float, data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(2, min(RANKS, workload.num_blocks // 2)))
    num_replicas = 2 if num_stages == 2 and data.draw(st.booleans()) else 1
    budget_bytes = data.draw(st.sampled_from((2**40, 2**40, 60_000)))
    request = request_for(workload, box, num_stages * num_replicas, tolerance_frac, budget_bytes)
    best_s = float("inf")
    for split in all_splits(workload.num_blocks // 2, num_stages):
        times = []
        for own in stage_workloads(workload, split):
            asked = replace(
                request, workload=own, step=replace(request.step, num_ranks=num_replicas, micro_batches=num_stages)
            )
            try:
                times.append(search(asked).prediction.iteration_s)
            except InfeasibleError:
                times.append(float("inf"))
        best_s = min(best_s, max(times))
    outcome, prediction = best_pipeline(request, num_stages)
    if prediction is None:
        assert best_s == float("inf")
        assert outcome.reason
        return
    assert best_s <= prediction.iteration_s <= best_s / (1 - tolerance_frac) ** 2
    assert prediction.pipeline.num_replicas == num_replicas
    again = simulate_pipeline(prediction.pipeline, workload, request.hardware)
    assert [s.record.iteration_s for s in again.stages] == pytest.approx(
        [s.record.iteration_s for s in prediction.stages]
    )
    assert prediction.iteration_s == max(stage.record.iteration_s for stage in prediction.stages)


def test_alike_stages_are_searched_once_and_few_of_all_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(splits, "search", lambda request: asked.append(request.workload.identity) or search(request))  # type: ignore[func-returns-value]
    workload = large_pairs(12)
    request = fastest_request(
        workload=workload,
        hardware=load_hardware("rtx-4090-x8"),
        space=SearchSpace(chunk_bytes=(2**28,), n_buffer=(4,), prefetch_depth=(1,)),
        step=Step(num_ranks=4),
    )
    outcome, prediction = best_pipeline(request, 4)
    assert outcome.num_pairs == (3, 3, 3, 3)
    assert outcome.num_searches == len(asked) == len(set(asked)) <= 10
    assert prediction is not None
    assert len({stage.plan.workload_id for stage in prediction.pipeline.stages}) == 4
    plans = [stage.plan.model_copy(update={"workload_id": ""}) for stage in prediction.pipeline.stages]
    assert plans[1] == plans[2]


def test_ranks_are_stages_times_replicas_and_the_fastest_of_all_is_chosen() -> None:
    """On two cards: one stage on both, data parallel, or two stages."""
    workload, box = large_pairs(4), load_hardware("rtx-4090-x8")
    space = SearchSpace(chunk_bytes=(2**28,), n_buffer=(4,), prefetch_depth=(1,))
    found = search_splits(fastest_request(workload=workload, hardware=box, space=space, step=Step(num_ranks=2)))
    assert [(split.num_stages, split.num_replicas) for split in found.splits] == [(1, 2), (2, 1)]
    rates = [split.tokens_per_s for split in found.splits]
    best = max(rate for rate in rates if rate is not None)
    assert found.chosen.tokens_per_s == pytest.approx(best, rel=found.tolerance_frac)
    for split in found.splits:
        assert split.iteration_s is not None
        # All train on the same samples in a step.
        assert split.tokens_per_s == pytest.approx(2 * workload.num_tokens / split.iteration_s)
    pipeline = best_pipeline(fastest_request(workload=workload, hardware=box, space=space, step=Step(num_ranks=2)), 2)[
        1
    ]
    assert pipeline is not None
    assert {stage.plan.micro_batches for stage in pipeline.pipeline.stages} == {2}
    assert f"{found}"


def test_a_pipeline_is_simulated_stage_by_stage() -> None:
    workload = pairs(3)
    box = load_hardware("rtx-4090-x8").model_copy(update={"name": workload.measured_on})
    first, second = stage_workloads(workload, (2, 1))
    plans = [bypass_plan(first, n_buffer=2), bypass_plan(second, n_persist=3, n_buffer=0)]
    pipeline = Pipeline(
        workload_id=workload.identity,
        stages=tuple(Stage(num_pairs=n, plan=plan) for n, plan in zip((2, 1), plans, strict=True)),
    )
    found = simulate_pipeline(pipeline, workload, box)
    records = [simulate(plan, own, box) for plan, own in zip(plans, (first, second), strict=True)]
    assert [stage.record for stage in found.stages] == records
    assert found.iteration_s == max(record.iteration_s for record in records)
    assert found.peak_bytes == max(record.guaranteed_peak_device_bytes for record in records)
    assert found.slowest == 0
    assert (found.num_tokens, found.stages[1].first_pair) == (workload.num_tokens, 2)
    with pytest.raises(HardwareError, match="2 ranks"):
        simulate_pipeline(
            pipeline, workload, load_hardware("rtx-4090").model_copy(update={"name": workload.measured_on})
        )


def test_what_no_pipeline_can_be_is_refused_by_name() -> None:
    workload, box = large_pairs(2), load_hardware("rtx-4090-x8")
    step = Step(num_ranks=2, modes=(ParallelMode.DDP,))
    several = GlobalBatch(num_samples=4, workload_at=lambda size: large_pairs(2, size))
    with pytest.raises(PlanError, match="one size of the micro-batch"):
        search_splits(fastest_request(workload=several, hardware=box, step=step))
    with pytest.raises(PlanError, match="no chunks on a disk"):
        search_splits(fastest_request(workload=workload, hardware=box, step=step, space=SearchSpace(n_disk_state=(1,))))
    why = r"no pipeline on 2 ranks fits\. With 1 stage: .* With 2 stages: some pairs fit in no stage"
    with pytest.raises(InfeasibleError, match=why):
        search_splits(fastest_request(workload=workload, hardware=box, step=step, device_budget_bytes=2**20))

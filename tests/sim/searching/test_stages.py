"""Stages of pipelines and data parallel distillations: bounded, replayed and searched like everything else."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import PlanError
from protwin.shared.catalogue.machines import load_hardware
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import ParallelMode, Plan, TrainingMethod
from protwin.shared.schema.schedule import Lane, lanes_of
from protwin.shared.schema.workload import Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.workloads.stages import stage_workload
from protwin.sim.bounds.replay import REPLAY_FRAC, Replayer, ReplayPlan
from protwin.sim.bounds.stretches import least_periods_s
from protwin.sim.bounds.throughput import Throughput
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import simulate_plan, simulate_timing
from protwin.sim.searching.request import Effort, Step
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace
from tests.proof_size import examples
from tests.shared.bypass_models import pairs
from tests.sim.bound_cases import Case
from tests.sim.fastest import fastest_request
from tests.sim.host_account import host_bytes
from tests.sim.ranked_cases import RANKS, nodes, staged_cases
from tests.strategies.pairs import bypass_workloads, stage_workloads


@given(staged_cases())
@settings(max_examples=examples(150, 6), deadline=None)
def test_bounds_never_exceed_what_they_bound_and_some_are_exact(found: Case) -> None:
    schedule = found.schedule
    peak_bytes = guaranteed_device_peak(schedule).size_bytes
    assert found.activation_bound_bytes() <= found.memory_bound_bytes() <= peak_bytes
    assert found.exact_peak_bytes() == peak_bytes
    _, timing = simulate_plan(found.plan, found.workload, found.costs, found.contention, layout=found.layout)
    replayed_s = Replayer(found.contention).periods_s([ReplayPlan(found.family(), 0, int(found.mode[0]))])[0]
    assert np.isnan(replayed_s) or replayed_s == pytest.approx(timing.iteration_s, rel=(1 - REPLAY_FRAC) / 2)
    bound_s = least_periods_s(found.family().programs(found.mode), Throughput.of(found.contention))[0, 0]
    assert found.work_bound_s() <= timing.iteration_s
    assert bound_s <= timing.iteration_s
    # What is sent and received is among the lane's work.
    durations_s = found.costs.durations_s(schedule)
    number = lanes_of(found.plan.num_ranks * found.workload.num_stages).index(Lane.COLLECTIVE)
    busy_s = sum(durations_s[task] for task in schedule.lanes[Lane.COLLECTIVE])
    assert found.family().seconds(number, 0).sum() == pytest.approx(busy_s)


@given(stage_workloads(max_pairs=3) | bypass_workloads(max_pairs=2), nodes(), st.data())
@settings(max_examples=examples(60, 5), deadline=None)
def test_a_search_of_a_stage_and_of_its_replicas_finds_what_brute_force_finds(
    workload: Workload, box: Hardware, data: st.DataObject
) -> None:
    num_ranks = data.draw(st.sampled_from([n for n in (1, 2, RANKS) if 1 < n * workload.num_stages <= RANKS] or [1]))
    mode = data.draw(st.sampled_from(list(ParallelMode)[1:])) if num_ranks > 1 else ParallelMode.SINGLE
    if num_ranks * workload.num_stages == 1 or workload.num_stages > RANKS:
        return
    box = box.model_copy(update={"name": workload.measured_on})
    space = SearchSpace(
        chunk_bytes=(512,), n_persist=(0, 2, 1000), n_shard=(0,), n_buffer=(1000,), prefetch_depth=(1, 3)
    )
    layout = layout_of(workload, 512)
    num_chunks = len(layout.chunks)
    space = space.model_copy(update={"n_persist": tuple(sorted({min(n, num_chunks) for n in (0, 2, 1000)}))})
    costs = CostModel.of(workload, box, num_ranks=num_ranks)
    contention = ContentionModel.of(box, num_ranks=num_ranks * workload.num_stages)
    outcomes = []
    assert space.n_persist is not None
    for n_persist, depth in product(space.n_persist, space.prefetch_depth):
        if mode is ParallelMode.DDP and n_persist < num_chunks:
            continue
        plan = Plan(
            workload_id=workload.identity,
            method=TrainingMethod.BYPASS,
            chunk_bytes=512,
            n_persist=n_persist,
            n_buffer=1000,
            prefetch_depth=depth,
            parallel=mode,
            num_ranks=num_ranks,
        )
        schedule = compile_schedule(plan, workload, layout)
        timing = simulate_timing(schedule, costs.durations_s(schedule), contention)
        needed_bytes = host_bytes(plan, workload, layout, schedule)
        outcomes.append((timing.iteration_s, guaranteed_device_peak(schedule).size_bytes, needed_bytes))
    budget_bytes = data.draw(st.sampled_from(sorted(device for _, device, _ in outcomes)))
    best_s = min(seconds for seconds, device, _ in outcomes if device <= budget_bytes)
    found = search(
        fastest_request(
            workload=workload,
            hardware=box,
            device_budget_bytes=max(1, budget_bytes),
            host_budget_bytes=max(host for _, _, host in outcomes),
            space=space,
            step=Step(num_ranks=num_ranks, modes=(mode,)),
            effort=Effort(tolerance_frac=0.0),
        )
    )
    assert found.prediction.iteration_s == best_s
    assert (found.plan.num_ranks, found.plan.parallel) == (num_ranks, mode)


def test_a_stage_has_its_share_of_the_machine_and_says_what_it_cannot_have() -> None:
    whole = pairs(4)
    box = load_hardware("rtx-4090-x8").model_copy(update={"name": whole.measured_on})
    stage = stage_workload(whole, 0, 1, 4)
    own, alone = CostModel.of(stage, box).hardware, CostModel.of(whole, box).hardware
    assert own.host.memory_bytes < alone.host.memory_bytes
    with pytest.raises(PlanError, match="a stage of a pipeline has no chunks on a disk"):
        search(fastest_request(workload=stage, hardware=box, space=SearchSpace(n_disk_state=(0, 1))))

"""Searches over plans that look rows up find what brute force over the simulator finds."""

from __future__ import annotations

from itertools import product

import pytest

from protwin.shared.basics.errors import PlanError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.families.shipped import shipped_family
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.workload import DType
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.simulator import simulate_timing
from protwin.sim.searching.problem import search_problem
from protwin.sim.searching.request import Effort, Step
from protwin.sim.searching.search import search
from protwin.sim.space.space import SearchSpace, Trips
from tests.proof_size import some_quick
from tests.shared.looking_up import CHUNK_BYTES, lookups
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import machine
from tests.sim.host_account import host_bytes

SPACE = SearchSpace(
    chunk_bytes=(CHUNK_BYTES, 16_384),
    n_persist=None,
    n_buffer=(1, 2, 3, 4),
    prefetch_depth=(1, 2, 3),
    n_checkpoint=(0, 1, 2),
    looks_up_rows=True,
)
"""Tables are first, so that no plan of it keeps a chunk."""


@some_quick("micro_batches", [1, 3], quick=1)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_the_search_finds_what_brute_force_finds(micro_batches: int, max_norm: float | None) -> None:
    model, box = lookups(), machine(gather_s=0.05, offload_s=0.07, cpu_adam_s=0.03)
    costs, contention = CostModel(box), ContentionModel.of(box)
    found = []
    for chunk_bytes, n_buffer, depth, n_checkpoint in product(
        (CHUNK_BYTES, 16_384), (1, 2, 3, 4), (1, 2, 3), (0, 1, 2)
    ):
        plan = Plan(
            workload_id=model.identity,
            chunk_bytes=chunk_bytes,
            n_persist=0,
            n_buffer=n_buffer,
            prefetch_depth=depth,
            n_checkpoint=n_checkpoint,
            micro_batches=micro_batches,
            max_gradient_norm=max_norm,
            looks_up_rows=True,
        )
        schedule = compile_schedule(plan, model)
        timing = simulate_timing(schedule, costs.durations_s(schedule), contention)
        needed = host_bytes(plan, model, schedule=schedule)
        found.append((timing.iteration_s, guaranteed_device_peak(schedule).size_bytes, needed, plan))
    step = Step(micro_batches=micro_batches, max_gradient_norm=max_norm)
    budgets = sorted({peak for _, peak, _, _ in found})
    for budget in (budgets[0], budgets[len(budgets) // 2], budgets[-1]):
        request = fastest_request(
            workload=model,
            hardware=box,
            space=SPACE,
            step=step,
            device_budget_bytes=budget,
            effort=Effort(tolerance_frac=0.0),
        )
        result = search(request)
        assert result.plan.looks_up_rows
        best_s = min(time_s for time_s, peak, _, _ in found if peak <= budget)
        assert result.prediction.iteration_s == pytest.approx(best_s, rel=1e-9)
    problem = search_problem(request)
    hosts = {(p.chunk_bytes, p.n_buffer): host for _, _, host, p in found}
    for number, layout in enumerate(problem.layouts):
        for row, prefix in enumerate(layout.grid.prefix):
            plan = problem.plan(number, row, 0, 0)
            expected = hosts[plan.chunk_bytes, plan.n_buffer]
            assert problem.host_bytes(number, layout.grid.prefix[row : row + 1], Trips(0))[0] == expected, (
                plan,
                prefix,
            )


def test_a_space_without_lookups_says_why() -> None:
    model = lookups().model_copy(update={"row_lookups": None})
    with pytest.raises(PlanError, match="no plan that looks rows up: small has no embedding"):
        search(fastest_request(workload=model, hardware=machine(), space=SearchSpace(looks_up_rows=True)))


def test_models_of_the_catalogue_know_their_lookups() -> None:
    """Of bert, three tables; of llama-3-8b, rows of 8 KiB in place of a table of 1 GiB."""
    bert, llama = (shipped_family(name, DType.BFLOAT16) for name in ("bert-large", "llama-3-8b"))
    assert bert is not None
    assert llama is not None
    found = bert.at(batch_size=2, sequence_length=128).row_lookups
    assert found is not None
    assert [table.num_rows for table in found.tables] == [256, 128, 256]
    workload = llama.at(batch_size=1, sequence_length=2_048)
    assert workload.row_lookups is not None
    assert workload.row_lookups.prologue_forward.looked_up_bytes == 2_048 * 4_096 * 2
    saved_bytes = workload.prologue_backward.net_bytes - workload.row_lookups.prologue_backward.net_bytes
    assert saved_bytes == (128_256 - 2_048) * 4_096 * 2

"""Every plan trains bit for bit like the plain loop, and really moves what it says it moves."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from protwin.runtime import CpuDevice
from protwin.runtime.optimizers import device_steps
from protwin.shared.schema.plan import Plan
from tests.runtime.equality import first, miscounted, offloaded_chunks, random_plans, trained
from tests.runtime.families import family_cases
from tests.runtime.models import Case, cases
from tests.strategies.plans import plans


def check(case: Case, plan: Plan) -> None:
    outcome = trained(case, plan)
    assert outcome.losses == case.plain_with(plan.micro_batches, plan.max_gradient_norm).losses
    assert outcome.different == []
    assert miscounted(case, plan, outcome) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", cases())
@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_random_plans_equal_the_plain_loop(name: str, data: st.DataObject) -> None:
    case = cases()[name]
    plan = data.draw(plans(case.workload).map(first))
    check(case, plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", family_cases())
def test_plans_of_other_families_equal_the_plain_loop(name: str) -> None:
    """In three parameter groups, partly frozen; the plan is a random one that offloads."""
    case = family_cases(2)[name]
    chosen = random_plans(case.workload, 8, seed=len(name))
    check(case, next(plan for plan in chosen if offloaded_chunks(case.workload, plan)))


def test_narrow_parameters_stepped_in_pieces_equal_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 1 000 scalars, so that the parameters of a small model have several, the last one shorter."""
    monkeypatch.setattr(device_steps, "PIECE_SCALARS", 1_000)
    case = cases()["llama in bfloat16"]
    assert any(parameter.num_elements > 1_000 for parameter in case.workload.parameters)
    plan = Plan(workload_id=case.workload.identity, chunk_bytes=2**20, n_persist=3, n_buffer=0)
    # The states of such small pieces are not accounted for.
    outcome = trained(case, plan, CpuDevice())
    assert outcome.losses == case.plain.losses
    assert outcome.different == []
    assert outcome.num_gathers == 0


def test_counts_that_are_not_those_of_the_plan_are_noticed() -> None:
    """A plan that keeps everything moves nothing, which is too little for one that offloads."""
    case = cases()["llama"]
    kept = Plan(workload_id=case.workload.identity, chunk_bytes=2**20, n_persist=3, n_buffer=0)
    outcome = trained(case, kept)
    assert miscounted(case, kept, outcome) == []
    offloading = kept.model_copy(update={"n_persist": 0, "n_buffer": 1})
    assert len(miscounted(case, offloading, outcome)) == 4
    assert len(miscounted(case, offloading.model_copy(update={"n_swap": 4}), outcome)) == 4


def test_random_plans_repeat_and_differ() -> None:
    workload = cases()["llama"].workload
    chosen = random_plans(workload, 10, seed=1)
    assert chosen == random_plans(workload, 10, seed=1)
    assert chosen != random_plans(workload, 10, seed=2)
    assert len({plan.identity for plan in chosen}) == 10

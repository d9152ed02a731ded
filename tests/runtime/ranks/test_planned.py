"""Ranks that plan together have one answer, whatever each of them has measured."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest

from protwin.runtime.planning.planned import planned
from protwin.runtime.planning.request import PlanRequest
from protwin.runtime.ranks.collective_probe import measure_collectives
from protwin.shared.basics.errors import PlanError
from protwin.shared.schema.plan import ParallelMode, Plan
from tests.runtime.models import llama, token_batches
from tests.runtime.ranks.processes import Ranks


def plan_of(rank: int, micro_batches: int) -> tuple[str, str, str, int]:
    batch = token_batches(2)[rank]
    knobs = {"n_checkpoint": 2, "chunk_bytes": 20_000}
    request = PlanRequest(probe_s=0.05, budget_bytes="300KiB", micro_batches=micro_batches, knobs=knobs)
    with patch("protwin.runtime.ranks.rank_probe.measure_collectives", partial(measure_collectives, sizes=(2**12,))):
        found = planned(llama(num_layers=2), batch, request)
    return found.plan.to_json(), found.workload.to_json(), found.hardware.name, found.plan.num_ranks


def refused(rank: int) -> str:
    """Rank 1 asks for another step than the plan's."""
    plan = Plan(workload_id="any", chunk_bytes=1, n_persist=0, n_buffer=1, num_ranks=2, parallel=ParallelMode.DDP)
    request = PlanRequest(plan=plan, micro_batches=1 + rank)
    with pytest.raises(PlanError) as caught:
        planned(llama(num_layers=2), token_batches(1)[0], request)
    return str(caught.value)


@pytest.mark.slow
def test_all_ranks_get_the_plan_of_the_first(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(plan_of, 2)
    assert first == second
    assert first[2].endswith("shared by 2 ranks")
    assert first[3] == 2


def test_what_one_rank_refuses_all_do(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(refused)
    assert first == second
    assert "micro_batches = 1, but training asks for 2" in first

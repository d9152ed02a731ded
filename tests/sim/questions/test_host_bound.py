"""Whether host memory binds, held against searches with more and with less of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protwin.shared.answers.search_result import BatchSearchResult
from protwin.shared.basics.errors import InfeasibleError
from protwin.shared.schema.hardware import DeviceKind
from protwin.shared.schema.workload import Workload
from protwin.shared.tables.answer import recommendation
from protwin.sim.questions.host_bound import _is_restricting, host_bound
from protwin.sim.searching.request import GlobalBatch, SearchRequest
from protwin.sim.searching.search import Spaces, search_batches
from protwin.sim.space.space import SearchSpace
from tests.proof_size import share
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import machine, workload
from tests.sim.searching.test_batch_search import at_size

REQUEST = fastest_request(
    workload=workload(num_blocks=4),
    hardware=machine(gather_s=0.1, offload_s=0.1, cpu_adam_s=0.1),
    space=SearchSpace(chunk_bytes=(256,)),
    device_budget_bytes=6000,
)
"""Chunks that leave the device make room for activations, which spares recomputing them."""


def answered(host_bytes: int, request: SearchRequest = REQUEST) -> tuple[SearchRequest, BatchSearchResult]:
    asked = replace(request, host_budget_bytes=host_bytes)
    return asked, search_batches(asked)


def test_it_binds_exactly_where_more_of_it_makes_a_faster_plan() -> None:
    """Every budget of the host, in steps: the search with any host memory is the oracle."""
    best_s = answered(10**9)[1].result.prediction.iteration_s
    found = set()
    for host_bytes in share(range(0, 6000, 500), 2):
        try:
            asked, answer = answered(host_bytes)
        except InfeasibleError:
            continue
        bound = host_bound(answer, asked)
        is_slower = best_s < answer.result.prediction.iteration_s * (1 - asked.effort.tolerance_frac)
        found.add(is_slower)
        assert (bound is not None) == is_slower
        if bound is not None:
            assert bound.iteration_s == best_s
            assert bound.host_bytes > host_bytes
            enough = answered(bound.host_bytes)[1].result
            assert enough.prediction.iteration_s == best_s
            told = answer.result.model_copy(update={"host_bound": bound})
            assert recommendation(told).startswith("Host memory binds: a plan that takes")
            assert "Host memory binds" not in recommendation(answer.result)
    assert found == {False, True}, "the question is no question"


def test_where_nothing_needs_more_no_second_search_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = answered(10**9)
    monkeypatch.setattr("protwin.sim.questions.host_bound.search_batches", None)
    assert host_bound(answer, asked) is None


def test_where_no_plan_beyond_the_budget_is_faster_no_second_search_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that the host holds slowly: a plan that keeps all of them needs no more, though many others do."""
    slow = replace(REQUEST, hardware=machine(gather_s=50.0, offload_s=50.0), device_budget_bytes=10**6)
    asked, answer = answered(1000, slow)
    assert answered(10**9, slow)[1].result.plan == answer.result.plan
    assert _is_restricting(asked)
    monkeypatch.setattr("protwin.sim.questions.host_bound.search_batches", None)
    assert host_bound(answer, asked) is None


def test_a_device_that_is_the_host_has_one_memory() -> None:
    request = fastest_request(workload=workload(num_blocks=4), hardware=machine(kind=DeviceKind.CPU))
    assert host_bound(search_batches(request), request) is None


def test_spaces_that_are_laid_out_already_change_no_answer() -> None:
    """Other budgets of either memory, in any order: a search that lays its spaces out anew is the oracle."""
    spaces = Spaces()
    for device_bytes, host_bytes in ((6000, 10**9), (6000, 2500), (9000, 10**9), (7000, 3500), (6000, 10**9)):
        asked = replace(REQUEST, device_budget_bytes=device_bytes, host_budget_bytes=host_bytes)
        assert search_batches(asked, spaces=spaces) == search_batches(asked)


def test_every_size_of_a_global_batch_is_made_once() -> None:
    made: list[int] = []

    def workload_at(size: int) -> Workload:
        made.append(size)
        return at_size(workload(num_blocks=4), size, 0.0)

    batch = GlobalBatch(num_samples=6, workload_at=workload_at)
    asked, answer = answered(3000, replace(REQUEST, workload=batch, device_budget_bytes=20_000))
    host_bound(answer, asked)
    assert sorted(made) == [1, 2, 3, 6]

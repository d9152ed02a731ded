"""Searches of several micro-batches: they end in time, and their certificates say how much they have proven."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from protwin.sim.searching import spent_effort
from protwin.sim.searching.branch_and_bound import BranchAndBound, run_in_turns
from protwin.sim.searching.problem import search_problem
from protwin.sim.searching.request import Effort, SearchRequest, Step
from protwin.sim.searching.search import search
from protwin.sim.searching.spent_effort import MOST_LEFT_OUT_FRAC, SpentEffort
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import machine, workload


def _request(micro_batches: int, tolerance_frac: float = 0.005) -> SearchRequest:
    """Sums of gradients that fall behind compute, so that no micro-batch is like the one before."""
    return fastest_request(
        workload=workload(6),
        hardware=machine(gather_s=0.9, offload_s=0.9, cpu_adam_s=14.0),
        step=Step(micro_batches=micro_batches),
        device_budget_bytes=8_000,
        effort=Effort(tolerance_frac=tolerance_frac),
    )


def test_a_widened_certificate_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = search(_request(3, 0.0)).prediction.iteration_s
    monkeypatch.setattr(spent_effort, "_FIRST", 1)
    monkeypatch.setattr(spent_effort, "_FURTHER", 100)
    result = search(_request(3))
    certificate = result.certificate
    assert certificate.is_certified
    assert certificate.left_out_frac is not None
    assert certificate.left_out_frac > certificate.tolerance_frac == 0.005
    assert certificate.best_iteration_s * (1 - certificate.left_out_frac) <= exact
    assert result.prediction.iteration_s * (1 - result.gap_frac) <= exact * (1 + 1e-12)
    assert certificate.shortest_possible_s <= exact
    # Plans count as equals by the tolerance that was asked for, whatever was proven.
    assert result.prediction.iteration_s <= certificate.best_iteration_s * 1.005


@pytest.mark.parametrize(("micro_batches", "tolerance_frac"), [(1, 0.005), (3, 0.0)])
def test_one_micro_batch_and_an_exact_search_prove_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, micro_batches: int, tolerance_frac: float
) -> None:
    monkeypatch.setattr(spent_effort, "_FIRST", 1)
    certificate = search(_request(micro_batches, tolerance_frac)).certificate
    assert certificate.left_out_frac == certificate.tolerance_frac == tolerance_frac


def test_the_share_that_is_left_out_doubles_and_has_an_end() -> None:
    spent = SpentEffort(widens=True)
    shares = []
    for _ in range(100):
        shares.append(spent.left_out_frac(0.005))
        spent.add_replayed(1_000, settles=True)
    assert shares[:8] == [0.005] * 8
    assert shares[8:20:4] == [0.01, 0.02, 0.04]
    assert shares == sorted(shares)
    assert shares[-1] == MOST_LEFT_OUT_FRAC


def test_a_plan_that_was_replayed_is_not_left_out_for_a_slower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a plan without a period is simulated first, for its bound is the lowest, and turns out slow."""
    monkeypatch.setattr(spent_effort, "_FIRST", 1)
    monkeypatch.setattr(spent_effort, "_FURTHER", 1)
    branch = BranchAndBound(search_problem(_request(3)), tolerance_frac=0.005)
    branch.step()
    *others, slowest = branch.replayed
    assert slowest.period_s > 1.01 * others[0].period_s
    unknown = replace(slowest, period_s=math.nan, bound_s=0.9 * others[0].bound_s)
    branch.replayed = [unknown, *others]
    run_in_turns([branch], lambda: None)
    assert branch.left_out_frac == MOST_LEFT_OUT_FRAC
    assert branch.own_best_s * (1 - 0.005) <= others[0].period_s
    assert branch.simplest_near() is not None


def test_plans_whose_micro_batches_do_not_settle_are_replayed_and_not_guessed() -> None:
    # Of 8 micro-batches 6 are kept, and the sums fall a little more behind in each: nothing repeats.
    request = _request(8)
    branch = BranchAndBound(search_problem(request), tolerance_frac=0.0)
    assert branch.problem.num_left_out == 2
    batch = branch.candidates.below(math.inf, 200)
    unsettled = np.isnan(branch._replayed_s(batch, branch.problem.family))
    assert unsettled.any()
    periods_s = branch._periods_s(batch)
    for place in np.flatnonzero(unsettled)[::8].tolist():
        candidate, period_s = batch[place], periods_s[place]
        assert period_s == pytest.approx(branch.simulate(candidate).timing.iteration_s, rel=1e-5)

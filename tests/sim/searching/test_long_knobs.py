"""The search turns the knobs of long sequences: it finds what brute force over the simulator finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import InfeasibleError, PlanError
from protwin.shared.compile.activation_levels import ActivationLevels
from protwin.shared.phases.tiling import LossTiling
from protwin.shared.schema.workload import Workload
from protwin.sim.searching import problem
from protwin.sim.searching.search import search
from protwin.sim.space.compute_table import ComputeTable, compute_table_in_tiles
from protwin.sim.space.space import SearchSpace
from tests.proof_size import examples
from tests.sim.brute_force import Case, cases_with_long_knobs
from tests.sim.fastest import fastest_request
from tests.sim.hand_made import machine, phase, workload


def _check(found: Case, share: float) -> None:
    peaks = sorted({outcome.device_bytes for outcome in found.outcomes})
    budget_bytes = peaks[round(share * (len(peaks) - 1))]
    best_s = min(outcome.iteration_s for outcome in found.feasible(budget_bytes))
    if best_s == 0:
        return
    result = found.search(budget_bytes)
    assert result.prediction.iteration_s == best_s
    chosen = next(outcome for outcome in found.outcomes if outcome.plan == result.plan)
    assert (chosen.iteration_s, chosen.device_bytes <= budget_bytes) == (best_s, True)
    assert result.gap_frac <= 1e-4


@given(cases_with_long_knobs(), st.floats(0, 1))
@settings(max_examples=examples(300, 6), deadline=None)
def test_the_search_finds_what_brute_force_finds(found: Case, share: float) -> None:
    _check(found, share)


def _with_large_epilogue(least_bytes: int, tiled_s: float = 9.0) -> Workload:
    """Its epilogue takes ``least_bytes`` at its peak, and a fifth of that in 2 tiles, which take ``tiled_s``."""
    model = workload(num_blocks=2)
    tiling = LossTiling(
        loss_tiles=2,
        epilogue_forward=phase(tiled_s, 40, least_bytes // 5),
        epilogue_backward=phase(tiled_s, -40, 60),
    )
    fields = {name: getattr(model, name) for name in Workload.model_fields}
    return Workload(**fields | {"epilogue_forward": phase(1, 40, least_bytes), "loss_tilings": (tiling,)})


def _loss_tiles(model: Workload, device_budget_bytes: int) -> int:
    request = fastest_request(
        workload=model, hardware=machine(), device_budget_bytes=device_budget_bytes, host_budget_bytes=2**30
    )
    return search(request).plan.loss_tiles


def test_the_loss_runs_in_tiles_where_it_does_not_fit_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _with_large_epilogue(100_000)
    assert _loss_tiles(model, 200_000) == 1, "whole, it is faster"
    assert _loss_tiles(model, 60_000) == 2
    with pytest.raises(InfeasibleError):
        _loss_tiles(model, 15_000)
    # A wrong variant: levels of the whole say that no plan fits.
    joined = ActivationLevels.joined

    def of_the_whole(parts: Sequence[ActivationLevels]) -> ActivationLevels:
        return joined([parts[0]] * len(parts))

    monkeypatch.setattr(ActivationLevels, "joined", of_the_whole)
    with pytest.raises(InfeasibleError):
        _loss_tiles(model, 60_000)


def test_the_loss_runs_in_tiles_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _with_large_epilogue(1000, tiled_s=0.1)
    assert _loss_tiles(model, 200_000) == 2
    # A wrong variant: seconds of the whole hide it.
    in_tiles = compute_table_in_tiles

    def of_the_whole(workloads: Sequence[Workload], *others: Any) -> ComputeTable:
        return in_tiles([workloads[0]] * len(workloads), *others)

    monkeypatch.setattr(problem, "compute_table_in_tiles", of_the_whole)
    assert _loss_tiles(model, 200_000) == 1


def test_tiles_that_nobody_traced_are_refused() -> None:
    model: Workload = workload(num_blocks=2)
    for space, knob in ((SearchSpace(mlp_tiles=3), "mlp_tiles"), (SearchSpace(loss_tiles=3), "loss_tiles")):
        with pytest.raises(PlanError, match=rf"{knob}: 3, .* knows none. Trace the model with that number"):
            search(fastest_request(workload=model, hardware=machine(), space=space))


def test_other_systems_run_the_loss_whole_beside_a_plan_in_tiles() -> None:
    model = _with_large_epilogue(1000)
    request = fastest_request(workload=model, hardware=machine(), baselines=(), space=SearchSpace(loss_tiles=2))
    result = search(request)
    assert result.plan.loss_tiles == 2
    assert result.baselines
    assert {one.plan.loss_tiles for one in result.baselines if one.plan is not None} == {1}

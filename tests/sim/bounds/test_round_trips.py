"""Bounds by what goes to the host and comes back: never above the simulator, and above the work of lanes."""

from __future__ import annotations

from hypothesis import given, settings

from tests.proof_size import examples
from tests.sim.bound_cases import Case, cases
from tests.sim.ranked_cases import ranked_cases


@given(cases() | ranked_cases())
@settings(max_examples=examples(400, 6))
def test_round_trips_never_exceed_the_simulated_period(found: Case) -> None:
    assert found.work_bound_s() <= found.round_trip_bound_s() <= found.simulated_s()

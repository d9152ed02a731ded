"""What compute pays for bytes that have just come, and for swapping: tables and replays say what the simulator does.

Bounds say no more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.compile.compile import BYPASS
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.schedule import Lane, TaskKind
from protwin.sim.bounds.replay import REPLAY_FRAC
from tests.proof_size import examples
from tests.sim.bound_cases import Case, case, cases, hand_made, on_a_machine
from tests.sim.hand_made import MACHINE, machine, plan, workload
from tests.sim.ranked_cases import ranked_cases
from tests.strategies.machines import ARRIVALS_S_PER_BYTE, READING, TIMES_S
from tests.strategies.pairs import bypass_cases


@st.composite
def pairs(draw: DrawFn) -> Case:
    """Distillations."""
    found = draw(bypass_cases(measured=None, has_disk=False))
    return draw(on_a_machine(found.workload, found.plan, found.layout, BYPASS, has_disk=False))


@st.composite
def paying(draw: DrawFn) -> Case:
    """Cases in which every kind that may read first pays for it."""
    found = draw(cases() | ranked_cases() | pairs())
    rates = {kind: draw(ARRIVALS_S_PER_BYTE) for kind in READING}
    swap_s = {kind: draw(TIMES_S) for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)}
    return with_rates(found, rates, swap_s)


def with_rates(found: Case, rates: dict[TaskKind, float], swap_s: dict[TaskKind, float] | None = None) -> Case:
    """The same at these prices of bytes, and of being a task of a block that swaps."""
    name = found.costs.hardware.name
    known = found.costs.calibration or Calibration(hardware_name=name, machine=name)
    # Of kinds without a factor, a price would be that of their like.
    factors = {kind: known.factors.get(kind, {"value": known.factor(kind)}) for kind in (*known.factors, *rates)}
    fields = known.model_dump() | {
        "factors": factors,
        "arrival_s_per_byte": rates,
        "swapping": {kind: {"seconds": one} for kind, one in (swap_s or {}).items()},
    }
    costs = replace(found.costs, calibration=Calibration.model_validate(fields))
    return case(found.workload, found.plan, found.layout, costs, found.contention, found.policies)


@given(paying())
@settings(max_examples=examples(150, 14))
def test_tables_replays_and_bounds_know_what_arrivals_cost(found: Case) -> None:
    schedule = found.schedule
    durations_s = found.costs.durations_s(schedule)
    compute_s = [durations_s[task] for task in schedule.lanes[Lane.COMPUTE]]
    # The family has a place for what this plan has no task for, of no length.
    of_family = found.family().compute_s(found.mode)[0].tolist()
    # Sums of the same terms in another order.
    assert [seconds for seconds in of_family if seconds] == pytest.approx([s for s in compute_s if s], rel=1e-12)
    simulated_s = found.simulated_s()
    assert found.work_bound_s() <= simulated_s
    assert found.time_bound_s() <= simulated_s
    assert found.round_trip_bound_s() <= simulated_s
    replayed_s = found.replayed_s()
    assert np.isnan(replayed_s) or replayed_s == pytest.approx(simulated_s, rel=(1 - REPLAY_FRAC) / 2)


def test_a_bound_that_counts_every_use_of_a_chunk_is_none() -> None:
    """The wrong variant: a chunk that survives from forward to backward is read first once, not twice."""
    model = workload(num_blocks=4)
    found = hand_made(model, plan(model, n_buffer=4), machine())
    rates = dict.fromkeys((TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.RECOMPUTE), 1.0)
    paying = with_rates(replace(found, costs=replace(found.costs, hardware=machine())), rates)
    assert paying.costs.hardware.name == MACHINE
    simulated_s, chunk_bytes = paying.simulated_s(), 256
    more_s = paying.work_bound_s() - found.work_bound_s()
    assert more_s == pytest.approx(4 * chunk_bytes, rel=1e-4)
    assert paying.work_bound_s() <= simulated_s < found.work_bound_s() + 2 * 4 * chunk_bytes

"""Bypass distillation, simulated: by the method that the plan names, and as an account by hand says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import WorkloadError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.records.memory_by_content import memory_stack
from protwin.shared.schema.hardware import Disk, Hardware
from protwin.shared.schema.schedule import Memory
from protwin.shared.tables.explain import explain_plan
from protwin.sim.engine.simulator import simulate
from tests.proof_size import examples
from tests.strategies.machines import disks, hardware
from tests.strategies.pairs import bypass_cases
from tests.strategies.plans import PlannedWorkload


@settings(max_examples=examples(200, 5), deadline=None)
@given(bypass_cases(measured=None), hardware(), disks(), st.sampled_from((1, 2, 7)))
def test_plans_are_simulated_folded_and_told(
    case: PlannedWorkload, box: Hardware, disk: Disk, micro_batches: int
) -> None:
    plan = case.plan.model_copy(update={"micro_batches": micro_batches})
    box = box.model_copy(update={"disk": disk})
    try:
        record = simulate(plan, case.workload, box)
    except WorkloadError:
        return  # nobody says how long its phases take
    schedule = compile_schedule(plan, case.workload)
    assert record.guaranteed_peak_device_bytes >= record.curve(Memory.DEVICE).peak_bytes
    whole = simulate(plan, case.workload, box, schedule=schedule)
    assert record.iteration_s == pytest.approx(whole.iteration_s, rel=1e-6)
    assert record.curve(Memory.DEVICE).peak_bytes == whole.curve(Memory.DEVICE).peak_bytes
    assert record.forward_s + record.backward_s + record.optimizer_s == pytest.approx(record.iteration_s)
    assert memory_stack(whole, schedule) is not None
    explain_plan(plan, case.workload)

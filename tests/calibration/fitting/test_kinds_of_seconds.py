"""Factors of phases that were timed say nothing of how far operations and data sheets are off, and the other way round.

The machine takes ``times`` the seconds that operations imply.  The oracle is the simulator under that truth.
"""

from __future__ import annotations

from functools import lru_cache

import pytest

from protwin.calibration.fitting.fit import Pair
from protwin.calibration.fitting.measurement_plans import bootstrap_plans
from protwin.calibration.fitting.updating import updated
from protwin.shared.basics.interval import Interval
from protwin.shared.phases.operations import Operation
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Origin
from protwin.shared.schema.workload import BlockProfile, DType, OperationClass, Phase, Workload
from protwin.sim import simulate
from protwin.sim.operations.roofline import roofline_s
from tests.calibration.fitting.test_fit import MACHINE, a_workload
from tests.calibration.fitting.test_updating import told


def of_operations(times: float, *, is_timed: bool) -> Workload:
    """Two blocks of operations; timed, each phase takes ``times`` what they imply."""

    def phase(one: Phase | None) -> Phase | None:
        if one is None or one.measured_s is None:
            return one
        work = Operation(
            name="mul",
            operation_class=OperationClass.ELEMENTWISE,
            dtype=DType.FLOAT32,
            flops=0,
            bytes_moved=round(1e10 * one.measured_s),
        )
        found = one.model_copy(update={"operations": (work,)})
        return found.model_copy(update={"measured_s": times * roofline_s(found, MACHINE.device) if is_timed else None})

    workload = a_workload(2)
    profile = workload.profiles[0]
    inner = [name for name in BlockProfile.model_fields if isinstance(getattr(profile, name), Phase)]
    ends = [name for name in Workload.model_fields if isinstance(getattr(workload, name), Phase)]
    fields = {name: getattr(workload, name) for name in Workload.model_fields}
    fields |= {name: phase(getattr(workload, name)) for name in ends}
    fields["profiles"] = (profile.model_copy(update={name: phase(getattr(profile, name)) for name in inner}),)
    return Workload(**fields | {"measured_on": MACHINE.name if is_timed else None})


def of_workload(plan: Plan, workload: Workload) -> Plan:
    return plan.model_copy(update={"workload_id": workload.identity})


@lru_cache(maxsize=16)
def known(times: float, *, is_timed: bool) -> tuple[Calibration, float]:
    """What runs on the machine tell, and the seconds of an iteration of the first plan there."""
    truth = of_operations(times, is_timed=True)
    workload = truth if is_timed else of_operations(times, is_timed=False)
    pairs = []
    for plan in bootstrap_plans(truth)[:4]:
        record = simulate(plan, truth, MACHINE)
        own = of_workload(plan, workload)
        changes = {"origin": Origin.MEASURED, "plan": own, "plan_id": own.identity}
        pairs.append(told(Pair(workload, record.model_copy(update=changes))))
    return updated(None, pairs, MACHINE), pairs[0].measured.iteration_s


def expected(times: float, calibration: Calibration, *, is_timed: bool) -> tuple[float, Interval]:
    workload = of_operations(times, is_timed=is_timed)
    plan = of_workload(bootstrap_plans(of_operations(times, is_timed=True))[0], workload)
    found = simulate(plan, workload, MACHINE, calibration)
    assert found.iteration_interval_s is not None
    return found.iteration_s, found.iteration_interval_s


@pytest.mark.parametrize("is_timed", [True, False])
@pytest.mark.parametrize("times", [0.65, 1.9])
def test_seconds_of_the_other_kind_are_as_unsure_as_their_source(times: float, is_timed: bool) -> None:
    calibration, measured_s = known(times, is_timed=is_timed)
    alike_s, alike = expected(times, calibration, is_timed=is_timed)
    assert alike_s == pytest.approx(measured_s, rel=0.05)
    other_s, other = expected(times, calibration, is_timed=not is_timed)
    # Nothing that was measured tells the two apart, so the prediction is off, and its interval has to say so.
    assert abs(other_s / measured_s - 1) > 0.25
    assert not (alike.low <= measured_s * other_s / alike_s <= alike.high)
    assert other.contains(measured_s)
    assert alike.high / alike.low < other.high / other.low / 1.5


def test_what_was_learnt_of_both_kinds_is_sure_of_neither() -> None:
    calibration, _ = known(1.9, is_timed=True)
    assert (calibration.of_timed_phases, calibration.of_modelled_phases) == (True, False)
    workload = of_operations(1.9, is_timed=False)
    timed = of_operations(1.9, is_timed=True)

    def learnt(before: Calibration, of: Workload) -> Calibration:
        plan = of_workload(bootstrap_plans(timed)[0], of)
        record = simulate(plan, of, MACHINE).model_copy(update={"origin": Origin.MEASURED})
        return updated(before, [told(Pair(of, record))], MACHINE)

    both = learnt(calibration, workload)
    again = learnt(both, timed)
    for one in (both, again):
        assert (one.of_timed_phases, one.of_modelled_phases) == (True, True)
    for is_timed in (True, False):
        _, found = expected(1.9, both, is_timed=is_timed)
        assert found.high / found.low > 2

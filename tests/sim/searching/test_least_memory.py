"""The least memory that plans of a space need, against every plan of it by itself."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.layout.layout import layout_of
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.searching.least_memory import Need, least_device, least_host, some_plan_fits
from protwin.sim.searching.problem import SearchProblem, search_problem
from tests.proof_size import examples
from tests.sim.brute_force import Case, cases, cases_with_long_knobs
from tests.sim.fastest import fastest_request
from tests.sim.host_account import host_bytes


def problem_of(found: Case, device_bytes: int, host_bytes: int) -> SearchProblem:
    """All that the workload knows and the space allows, tiles among it."""
    return search_problem(
        fastest_request(
            workload=found.workload,
            hardware=found.hardware,
            calibration=found.calibration,
            device_budget_bytes=max(1, device_bytes),
            host_budget_bytes=host_bytes,
            space=found.space,
            step=found.asked_step,
        )
    )


def limits(sizes: list[int]) -> list[int]:
    """Of all that plans need: one byte too little for any, what the least needs, some more, and as much as all need."""
    return [min(sizes) - 1, *np.quantile(sizes, (0, 0.4, 1), method="lower").tolist()]


def check(found: Case, need: Need) -> None:
    """``need`` is what its plan needs."""
    schedule = compile_schedule(need.plan, found.workload)
    assert need.device_bytes == guaranteed_device_peak(schedule).size_bytes
    assert need.host_bytes == host_bytes(
        need.plan, found.workload, layout_of(found.workload, need.plan.chunk_bytes), schedule
    )


@given(cases() | cases_with_long_knobs())
@settings(max_examples=examples(200, 8), deadline=None)
def test_it_is_that_of_some_plan_and_no_plan_needs_less(found: Case) -> None:
    """Asked of one space again and again, which keeps what it has worked out."""
    outcomes = found.outcomes
    devices, hosts = [one.device_bytes for one in outcomes], [one.host_bytes for one in outcomes]
    problem = problem_of(found, 10**12, 10**12)
    for limit in limits(hosts):
        within = [one for one in outcomes if one.host_bytes <= limit]
        need = least_device(problem, limit)
        assert (need is None) == (not within)
        if need is not None:
            check(found, need)
            assert need.device_bytes == min(one.device_bytes for one in within)
            assert need.host_bytes <= limit
    for limit in limits(devices):
        within = [one for one in outcomes if one.device_bytes <= limit]
        need = least_host(problem, limit)
        assert (need is None) == (not within)
        if need is not None:
            check(found, need)
            assert (need.host_bytes, need.device_bytes) == min((one.host_bytes, one.device_bytes) for one in within)
    for of_device, of_host in zip(limits(devices)[1:], limits(hosts)[:0:-1], strict=True):
        fits = any(one.device_bytes <= of_device and one.host_bytes <= of_host for one in outcomes)
        assert some_plan_fits(problem_of(found, of_device, of_host)) == fits

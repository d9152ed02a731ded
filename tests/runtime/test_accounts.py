"""The peak that is measured is the one that the schedule accounts for, whatever travels, at one timing of the lanes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from protwin.shared.compile import compile_schedule
from protwin.shared.schedule import Content, Schedule
from tests.runtime.accounts import BAR, MIXTURES, RESIDENCIES, error_frac, measured_peak_bytes, plan_of
from tests.runtime.eager_lanes import eager_peak
from tests.runtime.models import cases

NAMES = ("llama, groups", "gpt2 with dropout, tied", "hand-written, frozen tail")


@lru_cache
def measured_and_accounted(name: str, mixture: str, residency: str) -> tuple[int, Schedule]:
    case = cases()[name]
    plan = plan_of(case, mixture, residency)
    return measured_peak_bytes(case, plan), compile_schedule(plan, case.workload)


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("name", NAMES)
def test_the_peak_is_the_schedules_own(name: str, mixture: str, residency: str) -> None:
    measured_bytes, schedule = measured_and_accounted(name, mixture, residency)
    assert error_frac(measured_bytes, eager_peak(schedule)) == pytest.approx(0, abs=BAR)


@pytest.mark.parametrize("content", [Content.PARAMETERS, Content.GRADIENTS, Content.ACTIVATIONS, Content.SWAPPED])
def test_an_account_that_leaves_something_out_is_noticed(content: Content) -> None:
    """The wrong variant: buffers of one kind count for nothing."""
    errors = []
    for mixture, residency in (("kept", "offloaded"), ("swapped", "offloaded"), ("swapped", "persistent")):
        measured_bytes, schedule = measured_and_accounted("llama, groups", mixture, residency)
        buffers = tuple(replace(b, size_bytes=0) if b.content is content else b for b in schedule.buffers)
        errors.append(error_frac(measured_bytes, eager_peak(replace(schedule, buffers=buffers))))
    assert max(abs(error) for error in errors) > BAR

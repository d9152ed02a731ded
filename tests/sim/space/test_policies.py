"""A training method that extends a policy: the search reads its plans as the simulator and the verifier do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from protwin.shared.compile.compile import Policies, compile_schedule
from protwin.shared.compile.family import Family
from protwin.shared.compile.program import Draft, Part, TaskGroup, Work
from protwin.shared.compile.sections import FullTraining
from protwin.shared.compile.updates import Updates
from protwin.shared.schema.schedule import Lane, add_task_kind
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.bounds.exact_peaks import family_peaks
from protwin.sim.bounds.replay import Replayer, ReplayPlan
from protwin.sim.engine.simulator import MIN_ITERATIONS, simulate_timing
from protwin.sim.space.plan_family import PlanFamily
from protwin.sim.space.side_lanes import SideLanes
from protwin.sim.space.space import IntArray
from tests.proof_size import examples
from tests.sim.bound_cases import Case, cases

PAUSE = add_task_kind("pause", Lane.COMPUTE)
PAUSE_S = 0.003


class Pausing(Updates):
    """Compute rests after every backward of a block."""

    def __init__(self, family: Family, draft: Draft, sections: FullTraining) -> None:
        super().__init__(family, draft, sections)
        steps = sections.backward_step(np.arange(sections.num_blocks)).ravel()
        pauses = draft.tasks(
            TaskGroup(
                PAUSE,
                sections.end_position[steps],
                Part.LEAVES,
                Work(stated_s=PAUSE_S),
                np.zeros_like(steps),
                section=sections.step_block[steps],
                micro_batch=steps // (2 * sections.num_blocks),
            )
        )
        draft.wait(pauses, sections.step_end[steps])


POLICIES = Policies(updates=Pausing)


class PausingLanes(SideLanes):
    """The same for the search."""

    def family(self, depths: IntArray) -> PlanFamily:
        return replace(super().family(depths), policies=POLICIES)


@given(cases())
@settings(max_examples=examples(100, 30))
def test_an_added_task_is_replayed_and_its_memory_bounded_as_its_schedule_is(found: Case) -> None:
    schedule = compile_schedule(found.plan, found.workload, found.layout, policies=POLICIES)
    num_pauses = sum(task.kind is PAUSE for task in schedule.tasks)
    assert num_pauses == found.workload.num_blocks * found.plan.micro_batches
    usual = found.side_lanes()
    lanes = PausingLanes(usual.residency, usual.compute, usual.n_swap)
    family = lanes.family(np.array([found.plan.prefetch_depth]))
    assert family_peaks(family, found.mode)[0, 0] == guaranteed_device_peak(schedule).size_bytes
    timing = simulate_timing(schedule, found.costs.durations_s(schedule), found.contention, num_more_iterations=1)
    replayed_s = Replayer(found.contention).periods_s(
        [ReplayPlan(lanes, found.plan.prefetch_depth, int(found.mode[0]))]
    )
    if timing.is_steady and timing.num_iterations == MIN_ITERATIONS + 1:
        assert replayed_s[0] == pytest.approx(timing.iteration_s, rel=1e-9)
    else:
        assert np.isnan(replayed_s[0])

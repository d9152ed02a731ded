"""A training method of one's own, which no module of ``sim`` has heard of: compiled, verified, simulated, searched.

Its residency brings every chunk in two halves, and its compute rests after every backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.basics.errors import PlanError, ScheduleError
from protwin.shared.compile.compile import Policies, compile_schedule
from protwin.shared.compile.family import Family
from protwin.shared.compile.homes import Homes
from protwin.shared.compile.residency import COPIES, EXCHANGES, Residency
from protwin.shared.compile.sections import FullTraining
from protwin.shared.compile.updates import Updates
from protwin.shared.drafts.program import Draft, IntArray, Part, TaskGroup, Work
from protwin.shared.layout.keeping import Keeping
from protwin.shared.methods.full_training import FULL_TRAINING
from protwin.shared.methods.method import Method
from protwin.shared.schema.schedule import Lane, TaskKind, add_task_kind
from protwin.shared.verify.claim import Claim, check_amounts, check_earlier, chunk_of, reject
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.shared.verify.residency import check_gathers, check_one_gather
from protwin.shared.verify.rules import Rule, Stage
from protwin.shared.verify.verify import verify_schedule
from protwin.sim.bounds.exact_peaks import family_peaks
from protwin.sim.bounds.replay import REPLAY_FRAC, Replayer, ReplayPlan
from protwin.sim.bounds.stretches import least_periods_s
from protwin.sim.bounds.throughput import Throughput
from protwin.sim.engine.simulator import simulate_plan
from protwin.sim.searching.request import SearchRequest
from tests.proof_size import examples
from tests.shared.small_models import chain
from tests.sim import brute_force
from tests.sim.bound_cases import Case, cases
from tests.sim.engine.test_added_kinds import PAUSE, PAUSE_S, check_pauses
from tests.sim.hand_made import machine

SECOND_HALF = add_task_kind("second_half", Lane.H2D)
SECOND_HALF_S = 0.002


class Halves(Residency):
    def coming(self, kind: TaskKind, work: Work, stays: IntArray, *, number: int = COPIES) -> IntArray:
        if kind is not TaskKind.GATHER:
            return super().coming(kind, work, stays, number=number)
        half_bytes = np.asarray(work.moved_bytes) // 2
        firsts = super().coming(kind, Work(moved_bytes=work.moved_bytes - half_bytes), stays)
        second = Work(moved_bytes=half_bytes, stated_s=SECOND_HALF_S)
        self.halved, self.seconds = stays, super().coming(SECOND_HALF, second, stays, number=EXCHANGES)
        self.draft.wait(self.seconds, firsts)
        self.draft.wait(self.sections.step_begin[self.stays.first_step[stays]], self.seconds)
        return firsts

    def wire(self, homes: Homes, passing: IntArray) -> None:
        super().wire(homes, passing)
        self.draft.read(self.seconds, homes.parameters[self.stays.chunk[self.halved]], 0)
        self.draft.update(self.seconds, self.buffers[self.halved], 0)


class Resting(Updates):
    def __init__(self, family: Family, draft: Draft, sections: FullTraining) -> None:
        super().__init__(family, draft, sections)
        blocks = 1 + np.arange(sections.num_blocks)
        steps = sections.backward_step(blocks).ravel()
        where = {
            "section": np.tile(blocks, len(sections.micro_batch)),
            "micro_batch": steps // sections.positions.micro_steps,
        }
        rows, position = np.zeros_like(steps), sections.end_position[steps]
        pauses = draft.tasks(TaskGroup(PAUSE, position, Part.LEAVES, Work(stated_s=PAUSE_S), rows, **where))
        draft.wait(pauses, sections.step_end[steps])


def check_halves(claim: Claim) -> None:
    """A chunk comes in two halves, one after the other, both before anything is computed on it."""
    seconds = {task.writes: task for task in claim.tasks_of(SECOND_HALF)}
    gathers = [task for task in claim.tasks_of(TaskKind.GATHER) if task.chunk not in claim.host_stepped]
    if len(seconds) != len(gathers) or len(claim.tasks_of(SECOND_HALF)) != len(gathers):
        reject("not every gather has one second half")
    for gather in gathers:
        home, whole_bytes = chunk_of(claim, gather), claim.held[chunk_of(claim, gather).id].parameter_bytes
        check_one_gather(claim, gather, moved_bytes=whole_bytes - whole_bytes // 2)
        if (second := seconds.get(gather.writes)) is None or second.reads != gather.reads:
            reject(f"{gather.name} has no second half")
        if (second.chunk, second.micro_batch, second.stated_s) != (home.id, gather.micro_batch, SECOND_HALF_S):
            reject(f"{second.name} is another chunk's")
        if second.allocates or second.frees or second.section is not None or second.phase is not None:
            reject(f"{second.name} does more than copy")
        check_amounts(second, moved_bytes=whole_bytes // 2)


def check_order_of_halves(claim: Claim) -> None:
    """The second half follows the first, and everything on compute that reads the chunk follows both."""
    for second in claim.tasks_of(SECOND_HALF):
        check_earlier(claim, claim.allocating[second.writes[0]], second.id)
        for user in claim.on_compute(claim.readers[second.writes[0]]):
            check_earlier(claim, second.id, user)


RULES = FULL_TRAINING.rules
METHOD = Method(
    policies=Policies(residency=Halves, updates=Resting),
    rules=replace(
        RULES,
        sections=(*RULES.sections, Rule(Stage.PROGRAM, check_pauses, (PAUSE,))),
        residency=(
            *(rule for rule in RULES.residency if rule.check is not check_gathers),
            Rule(Stage.CHUNKS, check_halves, (TaskKind.GATHER, SECOND_HALF)),
            Rule(Stage.DATA_FLOW, check_order_of_halves),
        ),
    ),
)


@given(cases().filter(lambda case: not case.plan.n_disk))  # its gathers copy from the hosts' memory alone
@settings(max_examples=examples(100, 9), deadline=None)
def test_its_plans_are_verified_replayed_and_bounded_like_any_other(found: Case) -> None:
    schedule = compile_schedule(found.plan, found.workload, found.layout, policies=METHOD.policies)
    verify_schedule(schedule, found.plan, found.workload, found.layout, rules=METHOD.rules)
    with pytest.raises(ScheduleError):
        verify_schedule(schedule, found.plan, found.workload, found.layout)
    family = replace(found.family(), policies=METHOD.policies)
    assert family_peaks(family, found.mode)[0, 0] == guaranteed_device_peak(schedule).size_bytes
    whole: dict[str, Any] = {"layout": found.layout, "method": METHOD, "schedule": schedule}
    _, timing = simulate_plan(found.plan, found.workload, found.costs, found.contention, **whole)
    replayed_s = Replayer(found.contention).periods_s([ReplayPlan(family, 0, int(found.mode[0]))])[0]
    assert np.isnan(replayed_s) or replayed_s == pytest.approx(timing.iteration_s, rel=(1 - REPLAY_FRAC) / 2)
    bound_s = least_periods_s(family.programs(found.mode), Throughput.of(found.contention))[0, 0]
    assert 0 < bound_s <= timing.iteration_s


@given(brute_force.cases(METHOD), st.data())
@settings(max_examples=examples(100, 7), deadline=None)
def test_a_search_of_its_plans_finds_what_brute_force_finds(case: brute_force.Case, data: st.DataObject) -> None:
    budget_bytes = data.draw(st.sampled_from(sorted(outcome.device_bytes for outcome in case.outcomes)))
    best_s = min(outcome.iteration_s for outcome in case.feasible(budget_bytes))
    assert case.search(budget_bytes).prediction.iteration_s == best_s


def test_what_other_systems_keep_is_not_searched() -> None:
    """The search's account of memory has none of it: its best plan took more than the budget."""
    keeping = replace(FULL_TRAINING.policies, keeping=Keeping(holds_inputs=True))
    with pytest.raises(PlanError, match="searches do not count that"):
        SearchRequest(workload=chain(2), hardware=machine(), method=replace(FULL_TRAINING, policies=keeping))

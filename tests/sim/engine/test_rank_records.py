"""The record of unlike ranks: what each waits for the others, on one clock, in the form of a measurement."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.catalogue.machines import machine as known_machine
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.plan import ParallelMode
from protwin.shared.schema.record import Record
from protwin.shared.schema.schedule import Lane
from protwin.shared.tables.record import record_tables
from protwin.shared.tables.terminal import as_text
from protwin.sim.engine.rank_groups import RankGroup, simulate_group_timings, simulate_groups
from tests.cli.saved import decoder
from tests.proof_size import examples
from tests.sim.engine.test_rank_groups import ALONE, DURATIONS, ddp_of_two, longest_paths_s, of
from tests.strategies.plans import PlannedWorkload, parallel_workloads


def test_waits_for_a_slow_rank_by_hand() -> None:
    # As in test_rank_groups, an iteration later: the fast rank begins at 19, the slow one at 20.  The fast rank ends
    # the backward of block 1 at 25 and comes to its all-reduce, which begins at 32, when the slow rank has come.  By 35
    # both have come to the second one.
    schedule, names = ddp_of_two()
    durations = [[3.0 if t.lane is Lane.COLLECTIVE else seconds for t in schedule.tasks] for seconds in (1.0, 2.0)]
    fast, slow = simulate_group_timings(schedule, durations, [ALONE] * 2)
    assert {names[task]: seconds for task, seconds in fast.rank_waits_s.items()} == {"all_reduce chunk 1": 7.0}
    assert slow.rank_waits_s == {}


@settings(max_examples=examples(40, 6))
@given(parallel_workloads(max_blocks=3), st.data())
def test_a_group_waits_from_when_it_could_begin_until_all_can(case: PlannedWorkload, data: st.DataObject) -> None:
    """Against ends by the longest path, without a clock."""
    schedule = compile_schedule(case.plan, case.workload, case.layout)
    durations = [[data.draw(DURATIONS) for _ in schedule.tasks] for _ in range(data.draw(st.integers(1, 3)))]
    found = simulate_group_timings(schedule, durations, [ALONE] * len(durations))
    window = found[0].window
    ends = longest_paths_s(schedule, durations, found[0].num_iterations)
    program = schedule.lanes[Lane.COLLECTIVE]
    for place, task in enumerate(program):
        waits = [(window, other) for other in schedule.tasks[task].after]
        waits += [(window - 1, other) for other in schedule.tasks[task].after_previous]
        waits.append((window, program[place - 1]) if place else (window - 1, program[-1]))
        could_s = [max(ends[at, group, other] for at, other in waits if at >= 0) for group in range(len(durations))]
        for group, timing in enumerate(found):
            expected = max(could_s) - could_s[group]
            assert timing.rank_waits_s.get(task, 0.0) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_record_of_a_straggler_and_seven_others() -> None:
    model, hardware = decoder(), known_machine("a100-80gb-x8")
    knobs = of(model, ParallelMode.SHARDED, 8)
    groups = [RankGroup(7, hardware, name="even"), RankGroup(1, hardware, {Lane.COMPUTE: 1.5}, name="throttled")]
    found = simulate_groups(knobs, model, groups)
    record, (even, throttled) = found.record, found.record.ranks
    assert Record.from_mapping(json.loads(record.to_json()), origin="here") == record
    assert [(one.rank, one.num_alike, one.name) for one in record.ranks] == [(0, 7, "even"), (7, 1, "throttled")]
    assert record.rank == 7, "the slowest is the one that waits least"
    assert throttled.waited_s < even.waited_s
    for group, rank in zip(found.groups, (0, 7), strict=True):
        own = record.of_rank(rank)
        assert own.model_copy(update={"ranks": (), "rank": 0}) == group.record
    # On the common clock all begin and end a collective together, and the even ranks begin the iteration earlier.
    assert throttled.begins_s == 0 >= even.begins_s
    pairs = zip(even.tasks, throttled.tasks, strict=True)
    times = [
        (at.start_s + even.begins_s, to.start_s, at.end_s + even.begins_s, to.end_s)
        for at, to in pairs
        if at.lane is Lane.COLLECTIVE
    ]
    assert times
    for start_s, same_start_s, end_s, same_end_s in times:
        assert (start_s, end_s) == pytest.approx((same_start_s, same_end_s), abs=1e-9)
    waits = {(wait.phase, wait.for_ranks): wait.seconds for wait in even.waits or () if wait.cause is None}
    assert sum(seconds for (_, for_ranks), seconds in waits.items() if for_ranks) > 0
    assert all(for_ranks for _, for_ranks in waits), "a simulation starts a task at once: nothing else has no cause"
    assert "waiting for slower ranks" in as_text(record_tables(record.of_rank(0)))

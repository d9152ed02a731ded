"""What compute waits for: worked out by hand, and against a cause looked up instant by instant on random schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protwin.shared.compile.compile import compile_schedule
from protwin.shared.records.phase_times import phase_times_s
from protwin.shared.records.phase_waits import SpanOf, phase_waits, repeating
from protwin.shared.schema.calibration import Calibration
from protwin.shared.schema.plan import ParallelMode
from protwin.shared.schema.record import IterationPhase, PhaseWait, TaskTiming
from protwin.shared.schema.schedule import Lane, Schedule, TaskId, TaskKind
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.engine.device_memory import window_s
from protwin.sim.engine.rank_groups import simulate_group_timings
from protwin.sim.engine.simulator import simulate, simulate_timing
from protwin.sim.engine.timing import Timing
from tests.proof_size import examples
from tests.sim.hand_made import machine, plan, workload
from tests.strategies.machines import calibrations
from tests.strategies.plans import PlannedWorkload, parallel_workloads, planned_workloads

Causes = dict[tuple[IterationPhase, TaskKind | None], float]
FORWARD, BACKWARD, OPTIMIZER = IterationPhase
DURATIONS = st.floats(0, 4) | st.sampled_from((0.0, 0.5, 1.0, 2.0))
PHASE_BEFORE = {
    TaskKind.FORWARD: FORWARD,
    TaskKind.RECOMPUTE: BACKWARD,
    TaskKind.BACKWARD: BACKWARD,
    TaskKind.DEVICE_ADAM: OPTIMIZER,
}


def seconds_of(waits: Iterable[PhaseWait] | None) -> Causes:
    assert waits is not None
    return {(wait.phase, wait.cause): wait.seconds for wait in waits}


def test_a_wait_belongs_to_whatever_ran() -> None:
    """GATED_BY_CPU_ADAM of ``test_simulator.py``: from 1 to 10 s compute waits for chunk 0, stepped until 9 s and
    gathered from 9 to 10 s."""
    model = workload()
    record = simulate(plan(model, n_checkpoint=2), model, machine(cpu_adam_s=6))
    assert seconds_of(record.waits) == pytest.approx({(FORWARD, TaskKind.CPU_ADAM): 8, (FORWARD, TaskKind.GATHER): 1})
    assert record.waits_in(FORWARD)[0].cause is TaskKind.CPU_ADAM, "the longest first"
    assert record.waits_in(BACKWARD) == ()


def test_a_resident_model_waits_for_nothing() -> None:
    model = workload()
    assert simulate(plan(model, n_persist=2, n_buffer=0), model, machine()).waits == ()


# -- random schedules ------------------------------------------------------------------------------------------------


def spans_of(timing: Timing) -> SpanOf:
    def span_of(iteration: int, task: TaskId) -> tuple[float, float] | None:
        row = timing.window + iteration
        if not 0 <= row < timing.num_iterations:
            return None
        return float(timing.starts_s[row, task]), float(timing.ends_s[row, task])

    return span_of


def instant_causes(schedule: Schedule, timing: Timing) -> Causes:
    """The same by brute force: between any two events, what does the next compute task wait for at that instant?"""
    program = schedule.lanes[Lane.COMPUTE]
    begin_s, end_s = window_s(schedule, timing)
    events = sorted({*timing.starts_s.ravel().tolist(), *timing.ends_s.ravel().tolist()})
    inside = [begin_s, *(time_s for time_s in events if begin_s < time_s < end_s), end_s]
    found: Causes = {}
    for low_s, high_s in pairwise(inside):
        at_s = (low_s + high_s) / 2
        if not low_s < at_s < high_s:
            continue
        rows = [(timing.window, task) for task in program] + [(timing.window + 1, program[0])]
        if any(timing.starts_s[at] <= at_s < timing.ends_s[at] for at in rows):
            continue
        row, task = next(at for at in rows if timing.starts_s[at] > at_s)
        phase = PHASE_BEFORE[schedule.tasks[task].kind] if row == timing.window else OPTIMIZER
        key = phase, cause_at(schedule, timing, row, task, at_s)
        found[key] = found.get(key, 0.0) + high_s - low_s
    return found


def cause_at(schedule: Schedule, timing: Timing, row: int, task: TaskId, at_s: float) -> TaskKind | None:
    """What runs at this instant and holds up a task that has not started; of several, the last to end leads to it."""
    missing = [one for one in waited_for(schedule, row, task) if one[0] >= 0 and timing.ends_s[one[0], one[2]] > at_s]
    if not missing:
        return None
    last_row, _, last = max(missing, key=lambda one: (timing.ends_s[one[0], one[2]], one[1], one[2]))
    if timing.starts_s[last_row, last] <= at_s:
        return schedule.tasks[last].kind
    return cause_at(schedule, timing, last_row, last, at_s)


def waited_for(schedule: Schedule, row: int, task: TaskId) -> Iterator[tuple[int, int, TaskId]]:
    """Row, preference and id of everything that must have ended before a task starts."""
    for source in schedule.tasks[task].after:
        yield row, 2, source
    for source in schedule.tasks[task].after_previous:
        yield row - 1, 1, source
    program = schedule.lanes[schedule.tasks[task].lane]
    place = program.index(task)
    yield row - (place == 0), 0, program[place - 1]


@settings(max_examples=examples(200, 7), deadline=None)
@given(drawn=planned_workloads(4) | parallel_workloads(3), calibration=calibrations(), data=st.data())
def test_every_idle_second_of_compute_has_the_cause_of_its_instant(
    drawn: PlannedWorkload, calibration: Calibration, data: st.DataObject
) -> None:
    schedule = compile_schedule(drawn.plan, drawn.workload, drawn.layout)
    durations_s = data.draw(
        st.lists(DURATIONS, min_size=len(schedule.tasks), max_size=len(schedule.tasks)).filter(lambda all_s: sum(all_s))
    )
    num_ranks = drawn.plan.num_ranks
    contention = ContentionModel.none(num_ranks=num_ranks)
    if num_ranks == 1:
        contention = ContentionModel.of(machine(), calibration)
    timing = simulate_timing(schedule, durations_s, contention, num_more_iterations=1)
    window = window_s(schedule, timing)
    waits = phase_waits(schedule, spans_of(timing), window)
    found = seconds_of(waits)
    expected = instant_causes(schedule, timing)
    tiny_s = 1e-9 * (window[1] + 1)
    for key in {*found, *expected}:
        assert found.get(key, 0.0) == pytest.approx(expected.get(key, 0.0), rel=1e-9, abs=tiny_s), key
    assert all(cause is not None for _, cause in found), "one rank, or equal ones, have a cause for everything"
    # The parts of every phase are the phase.
    ends_s = (timing.ends_s[timing.window] - window[0]).tolist()
    forward_s, backward_s = phase_times_s(schedule, ends_s)
    phases_s = {FORWARD: forward_s, BACKWARD: backward_s}
    phases_s[OPTIMIZER] = window[1] - window[0] - forward_s - backward_s
    for phase, seconds in phases_s.items():
        busy_s = sum(
            timing.ends_s[timing.window, task] - timing.starts_s[timing.window, task]
            for task in schedule.lanes[Lane.COMPUTE]
            if PHASE_BEFORE[schedule.tasks[task].kind] is phase
        )
        waiting_s = sum(wait.seconds for wait in waits if wait.phase is phase)
        assert busy_s + waiting_s == pytest.approx(seconds, rel=1e-9, abs=tiny_s)


@settings(max_examples=examples(100, 6), deadline=None)
@given(drawn=planned_workloads(4), late=st.lists(st.floats(0, 0.5), min_size=1, max_size=7))
def test_in_a_measured_iteration_late_starts_have_no_cause(drawn: PlannedWorkload, late: list[float]) -> None:
    """Every compute task starts later than it could: what nothing explains is named as such, and the sum stays."""
    schedule = compile_schedule(drawn.plan, drawn.workload, drawn.layout)
    durations_s = [0.25 + 0.5 * (task.id % 3) for task in schedule.tasks]
    ends: dict[tuple[int, int], float] = {}
    starts: dict[tuple[int, int], float] = {}
    late_s = {task: late[place % len(late)] for place, task in enumerate(schedule.lanes[Lane.COMPUTE])}
    for row in range(40):
        for task in schedule.tasks:
            waited = [ends[at, source] for at, _, source in waited_for(schedule, row, task.id) if at >= 0]
            starts[row, task.id] = max(waited, default=0.0) + late_s.get(task.id, 0.0)
            ends[row, task.id] = starts[row, task.id] + durations_s[task.id]
    first = schedule.lanes[Lane.COMPUTE][0]
    begin_s, iteration_s = starts[38, first], starts[39, first] - starts[38, first]
    timings = [
        TaskTiming(
            task=task.id,
            name=task.name,
            kind=task.kind,
            lane=task.lane,
            start_s=starts[38, task.id] - begin_s,
            end_s=ends[38, task.id] - begin_s,
            duration_s=durations_s[task.id],
        )
        for task in schedule.tasks
    ]
    waits = phase_waits(schedule, repeating(timings, iteration_s), (0.0, iteration_s))
    busy_s = sum(durations_s[task] for task in schedule.lanes[Lane.COMPUTE])
    assert busy_s + sum(wait.seconds for wait in waits) == pytest.approx(iteration_s)
    idle_s = sum(wait.seconds for wait in waits if wait.cause is None)
    assert idle_s == pytest.approx(sum(late_s.values()), abs=1e-6), "the late starts, and nothing else"


def test_a_fast_rank_waits_for_a_slow_one() -> None:
    """Both blocks on the device, compute tasks of 1 s on one rank and 2 s on the other, all-reduces of 3 s.

    From the start of an iteration of the fast rank, which is one second before that of the slow rank: it computes for
    8 s; the slow rank comes to the all-reduces at 13 s; they last until 19 s, and Adam until 20 s.
    """
    model = workload()
    chosen = plan(model, n_persist=2, n_buffer=0).model_copy(update={"parallel": ParallelMode.DDP, "num_ranks": 2})
    schedule = compile_schedule(chosen, model)
    durations = [[3.0 if t.lane is Lane.COLLECTIVE else seconds for t in schedule.tasks] for seconds in (1.0, 2.0)]
    fast, slow = simulate_group_timings(schedule, durations, [ContentionModel.none(num_ranks=2)] * 2)
    waits = seconds_of(phase_waits(schedule, spans_of(fast), window_s(schedule, fast)))
    assert waits == pytest.approx({(OPTIMIZER, None): 5, (OPTIMIZER, TaskKind.ALL_REDUCE): 6})
    waits = seconds_of(phase_waits(schedule, spans_of(slow), window_s(schedule, slow)))
    assert waits == pytest.approx({(OPTIMIZER, TaskKind.ALL_REDUCE): 2}), "backward hides the rest"

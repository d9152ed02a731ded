"""The simulator against timelines worked out by hand, and against a plain longest path on random schedules."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from protwin.shared.basics.errors import CalibrationError, PlanError, ScheduleError, WorkloadError
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.calibration import Calibration, Contention
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.record import Origin, Record
from protwin.shared.schema.schedule import Lane, Schedule, Task, TaskId, TaskKind
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.engine.simulator import simulate, simulate_timing
from protwin.sim.engine.timing import slowest_period_s, steady_period_s
from tests.proof_size import examples
from tests.shared.faults import with_task, without
from tests.sim.hand_made import MACHINE, Seconds, assert_timeline, machine, plan, workload
from tests.sim.longest_path import longest_path_s
from tests.strategies.machines import calibrations, hardware
from tests.strategies.plans import PlannedWorkload, planned_workloads

DURATIONS = st.floats(0, 4) | st.sampled_from((0.0, 0.5, 1.0, 2.0))


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_two_persistent_blocks() -> None:
    # One lane, no gaps: 1 (prologue) + 2 * 2 (forward) + 3 + 4 (epilogue) + 2 * 5 (backward) + 1 (prologue), and
    # device Adam over both chunks, 2 * 1 792 bytes at 1 792 bytes per second: 2.  Together 25.
    model = workload(2, Seconds(forward=2.0, backward=5.0, epilogue_forward=3.0, epilogue_backward=4.0))
    record = simulate(plan(model, n_persist=2, n_buffer=0), model, machine())
    assert record.iteration_s == pytest.approx(25)
    assert_timeline(
        record,
        Lane.COMPUTE,
        [
            ("forward prologue", 0, 1),
            ("forward 0", 1, 3),
            ("forward 1", 3, 5),
            ("forward epilogue", 5, 8),
            ("backward epilogue", 8, 12),
            ("backward 1", 12, 17),
            ("backward 0", 17, 22),
            ("backward prologue", 22, 23),
            ("device_adam", 23, 25),
        ],
    )
    assert (record.forward_s, record.backward_s, record.optimizer_s) == pytest.approx((8, 15, 2))
    assert [use.num_tasks for use in record.lanes] == [9, 0, 0, 0]
    assert record.num_gathers == record.num_cpu_adam_steps == 0


# One buffer for two chunks, and links that take longer than compute.  Each chunk waits for the other to leave:
#
#   gather 0 (4)  after CPU Adam of chunk 0 in the iteration before
#   forward 0 (1), gather 1 (4) once forward 0 has freed the buffer, forward 1 (1), epilogue (1 + 1), backward 1 (2),
#   gather 0 (4) once backward 1 has freed the buffer, backward 0 (2), its gradients leave (3), CPU Adam of chunk 0 (2)
#
# That is a cycle of 4 + 1 + 4 + 1 + 2 + 2 + 4 + 2 + 3 + 2 = 25 seconds, and nothing else takes longer.  The next
# prologue starts when the gradients of chunk 0 have left, 3 seconds after backward 0.  At 0 it starts, the gather of
# chunk 0 at 2, after its CPU Adam.
LINK_BOUND = {
    Lane.COMPUTE: [
        ("forward prologue", 0, 1),
        ("forward 0", 6, 7),
        ("forward 1", 11, 12),
        ("forward epilogue", 12, 13),
        ("backward epilogue", 13, 14),
        ("backward 1", 14, 16),
        ("backward 0", 20, 22),
        ("backward prologue", 22, 23),
        ("device_adam", 23, 23),
    ],
    Lane.H2D: [("gather chunk 0", 2, 6), ("gather chunk 1", 7, 11), ("gather chunk 0", 16, 20)],
    Lane.D2H: [("gradient_offload chunk 1", 16, 19), ("gradient_offload chunk 0", 22, 25)],
    Lane.CPU_OPTIM: [("cpu_adam chunk 1", 19, 21), ("cpu_adam chunk 0", 25, 27)],
}


def test_one_buffer_and_slow_links() -> None:
    model = workload()
    record = simulate(plan(model, n_buffer=1), model, machine(gather_s=4, offload_s=3, cpu_adam_s=2))
    assert record.iteration_s == pytest.approx(25)
    for lane, expected in LINK_BOUND.items():
        assert_timeline(record, lane, expected)
    assert (record.forward_s, record.backward_s, record.optimizer_s) == pytest.approx((13, 10, 2))
    assert record.lane(Lane.H2D).busy_s == pytest.approx(12)
    assert record.lane(Lane.H2D).moved_bytes == 3 * 256
    assert (record.num_gathers, record.num_cpu_adam_steps) == (3, 2)


# Both blocks checkpointed, a buffer for each chunk, CPU Adam of 6 seconds a chunk.  From the start of a prologue:
# backward 1 ends at 17 (below), its gradients leave by 18, CPU Adam steps chunk 1 until 24 and chunk 0 until 30, which
# is 9 seconds into the next iteration: only then is chunk 0 gathered for its forward.
# The cycle: gather 0 (1), forward (1 + 1), epilogue (1 + 1), recomputation (1) and backward (2) of block 1, gradients
# (1), CPU Adam of both chunks (6 + 6): 21 seconds.
GATED_BY_CPU_ADAM = {
    Lane.COMPUTE: [
        ("forward prologue", 0, 1),
        ("forward 0", 10, 11),
        ("forward 1", 11, 12),
        ("forward epilogue", 12, 13),
        ("backward epilogue", 13, 14),
        ("recompute 1", 14, 15),
        ("backward 1", 15, 17),
        ("recompute 0", 17, 18),
        ("backward 0", 18, 20),
        ("backward prologue", 20, 21),
        ("device_adam", 21, 21),
    ],
    Lane.H2D: [("gather chunk 0", 9, 10), ("gather chunk 1", 10, 11)],
    Lane.D2H: [("gradient_offload chunk 1", 17, 18), ("gradient_offload chunk 0", 20, 21)],
    Lane.CPU_OPTIM: [("cpu_adam chunk 1", 18, 24), ("cpu_adam chunk 0", 24, 30)],
}


def test_cpu_adam_gates_the_next_iteration() -> None:
    model = workload()
    record = simulate(plan(model, n_checkpoint=2), model, machine(cpu_adam_s=6))
    assert record.iteration_s == pytest.approx(21)
    for lane, expected in GATED_BY_CPU_ADAM.items():
        assert_timeline(record, lane, expected)


# The same where compute and CPU Adam slow each other twice while both run.  From the start of a prologue, with CPU Adam
# of chunk 1 halfway:
#   0-2   prologue (1) and CPU Adam of chunk 1: half speed, so the prologue takes 2 and Adam progresses by 1
#   2-4   the last 2 seconds of CPU Adam of chunk 1, alone; compute waits for chunk 0
#   4-10  CPU Adam of chunk 0, alone
#   10-19 gather 0, forwards, epilogue, recomputation and backward of block 1, recomputation of block 0: alone; the
#         gradients of chunk 1 leave 18-19
#   19-23 backward 0 (2) beside CPU Adam of chunk 1, which progresses by 2
#   23-25 prologue (1) beside CPU Adam, which progresses by 1; then 6 - 2 - 1 = 3 seconds are left, as at the start
CONTENDED = {
    Lane.COMPUTE: [
        ("forward prologue", 0, 2),
        ("forward 0", 11, 12),
        ("forward 1", 12, 13),
        ("forward epilogue", 13, 14),
        ("backward epilogue", 14, 15),
        ("recompute 1", 15, 16),
        ("backward 1", 16, 18),
        ("recompute 0", 18, 19),
        ("backward 0", 19, 23),
        ("backward prologue", 23, 25),
        ("device_adam", 25, 25),
    ],
    Lane.H2D: [("gather chunk 0", 10, 11), ("gather chunk 1", 11, 12)],
    Lane.D2H: [("gradient_offload chunk 1", 18, 19), ("gradient_offload chunk 0", 23, 24)],
    Lane.CPU_OPTIM: [("cpu_adam chunk 1", 19, 29), ("cpu_adam chunk 0", 29, 35)],
}


def slowed(lanes: Sequence[Lane], slowdown: float) -> Calibration:
    """A calibration that knows nothing but how ``lanes`` slow each other."""
    return Calibration(
        hardware_name=MACHINE,
        machine=MACHINE,
        contention=(Contention(lanes=tuple(lanes), slowdowns=(slowdown,) * len(lanes)),),
    )


def test_lanes_that_slow_each_other_re_time_running_tasks() -> None:
    model = workload()
    calibration = slowed((Lane.COMPUTE, Lane.CPU_OPTIM), 2.0)
    record = simulate(plan(model, n_checkpoint=2), model, machine(cpu_adam_s=6), calibration)
    assert record.iteration_s == pytest.approx(25)
    for lane, expected in CONTENDED.items():
        assert_timeline(record, lane, expected)
    # A simulator without contention gives 21, one that folds the slowdown into every duration far more.
    assert record.iteration_s > simulate(plan(model, n_checkpoint=2), model, machine(cpu_adam_s=6)).iteration_s


# -- against a plain longest path ------------------------------------------------------------------------------------


def schedule_of(drawn: PlannedWorkload) -> Schedule:
    return compile_schedule(drawn.plan, drawn.workload, drawn.layout)


def draw_durations(data: st.DataObject, schedule: Schedule) -> list[float]:
    size = len(schedule.tasks)
    return data.draw(st.lists(DURATIONS, min_size=size, max_size=size))


@given(planned_workloads(), st.data())
def test_without_contention_it_is_the_longest_path(drawn: PlannedWorkload, data: st.DataObject) -> None:
    schedule = schedule_of(drawn)
    durations_s = draw_durations(data, schedule)
    timing = simulate_timing(schedule, durations_s, ContentionModel.none(), num_more_iterations=1)
    expected = longest_path_s(schedule, durations_s, timing.num_iterations)
    assert_allclose(timing.starts_s, expected.starts_s, rtol=1e-9, atol=1e-9)
    assert_allclose(timing.ends_s, expected.ends_s, rtol=1e-9, atol=1e-9)


@given(planned_workloads(), st.data())
def test_the_period_is_that_of_a_long_run(drawn: PlannedWorkload, data: st.DataObject) -> None:
    schedule = schedule_of(drawn)
    durations_s = draw_durations(data, schedule)
    timing = simulate_timing(schedule, durations_s, ContentionModel.none())
    ends_s = longest_path_s(schedule, durations_s, 40).ends_s[:, -1]
    assert timing.iteration_s == pytest.approx((ends_s[-1] - ends_s[-13]) / 12, rel=1e-5, abs=1e-9)


@given(planned_workloads(), hardware(), calibrations(), st.data())
def test_contention_never_makes_anything_earlier(
    drawn: PlannedWorkload, hardware: Hardware, calibration: Calibration, data: st.DataObject
) -> None:
    schedule = schedule_of(drawn)
    durations_s = draw_durations(data, schedule)
    contention = ContentionModel.of(hardware, calibration)
    timing = simulate_timing(schedule, durations_s, contention)
    alone = longest_path_s(schedule, durations_s, timing.num_iterations)
    assert (timing.starts_s >= alone.starts_s - 1e-9).all()
    assert (timing.ends_s >= alone.ends_s - 1e-9).all()
    # Nor can it slow a task beyond the worst slowdown that the model knows.
    worst = max(slowdown for slowdowns in contention.slowdowns.values() for slowdown in slowdowns.values())
    taken_s = timing.ends_s - timing.starts_s
    assert (taken_s <= np.array(durations_s) * worst * (1 + 1e-9) + 1e-9).all()
    assert (taken_s >= np.array(durations_s) * (1 - 1e-9) - 1e-9).all()


# -- steady state ----------------------------------------------------------------------------------------------------


def uncoupled(compute_s: float, cpu_adam_s: float) -> tuple[Schedule, list[float]]:
    """CPU Adam follows compute, and nothing waits for it."""
    tasks = (
        Task(TaskId(0), TaskKind.FORWARD),
        Task(TaskId(1), TaskKind.CPU_ADAM, after=(TaskId(0),)),
        Task(TaskId(2), TaskKind.DEVICE_ADAM),
    )
    return Schedule("", tasks, (), num_slots=0, num_blocks=1, prefetch_depth=1), [compute_s, cpu_adam_s, 0.0]


def test_a_lane_that_falls_behind_is_not_a_steady_state() -> None:
    schedule, durations_s = uncoupled(1.0, 3.0)
    timing = simulate_timing(schedule, durations_s, ContentionModel.none())
    ends_s = timing.ends_s[:, -1]
    assert np.diff(ends_s) == pytest.approx(1.0)  # the compute lane alone looks steady, at a period of 1
    assert not timing.is_steady
    assert timing.iteration_s == pytest.approx(3.0)
    schedule, durations_s = uncoupled(3.0, 1.0)
    assert simulate_timing(schedule, durations_s, ContentionModel.none()).is_steady


def test_steady_means_that_every_task_moves_by_the_period() -> None:
    first = np.array([1.0, 2.0, 5.0])
    assert steady_period_s([first, first + 5]) == pytest.approx(5)
    drifting = first + np.array([5, 5.1, 5])
    assert steady_period_s([first, drifting]) is None
    assert slowest_period_s([first, drifting]) == pytest.approx(5.1)
    alternating = [first, first + np.array([4, 4, 5]), first + 10]
    assert steady_period_s(alternating) == pytest.approx(5)  # the mean over a cycle of two
    assert steady_period_s(alternating[:2]) is None


def test_lanes_that_wait_for_each_other_are_an_error() -> None:
    tasks = (
        Task(TaskId(0), TaskKind.GATHER, after=(TaskId(1),)),
        Task(TaskId(1), TaskKind.DEVICE_ADAM, after=(TaskId(0),)),
    )
    schedule = Schedule("", tasks, (), num_slots=0, num_blocks=1, prefetch_depth=1)
    with pytest.raises(ScheduleError, match=r"device_adam, gather wait for each other"):
        simulate_timing(schedule, [1.0, 1.0], ContentionModel.none())
    backwards = replace(schedule, tasks=(Task(TaskId(0), TaskKind.FORWARD, after=(TaskId(1),)), tasks[1]))
    backwards = replace(backwards, tasks=(backwards.tasks[0], Task(TaskId(1), TaskKind.DEVICE_ADAM)))
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate_timing(backwards, [1.0, 1.0], ContentionModel.none())


# -- the record ------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(50, 6))
@given(planned_workloads(measured=None), hardware(), st.none() | calibrations())
def test_a_record_is_consistent(drawn: PlannedWorkload, hardware: Hardware, calibration: Calibration | None) -> None:
    try:
        record = simulate(drawn.plan, drawn.workload, hardware, calibration, layout=drawn.layout)
    except WorkloadError:
        assume(False)
    assert record.origin is Origin.SIMULATED
    assert [task.task for task in record.tasks] == list(range(len(record.tasks)))
    assert record.forward_s + record.backward_s + record.optimizer_s == pytest.approx(record.iteration_s, rel=1e-5)
    first = next(task for task in record.tasks if task.lane is Lane.COMPUTE)
    assert first.start_s == 0
    for task in record.tasks:
        assert task.duration_s == pytest.approx(task.end_s - task.start_s)
    for use in record.lanes:
        assert use.busy_s == pytest.approx(sum(task.duration_s for task in record.tasks if task.lane is use.lane))
        assert use.busy_s <= record.iteration_s * (1 + 1e-5)
    assert Record.from_mapping(_as_mapping(record), origin="test") == record


def _as_mapping(record: Record) -> dict[str, object]:
    return {"kind": Record.KIND, "schema_version": Record.SCHEMA_VERSION, **record.model_dump(mode="json")}


def test_a_ready_schedule_spares_compiling() -> None:
    model = workload()
    chosen = plan(model, n_buffer=1)
    schedule = compile_schedule(chosen, model)
    assert simulate(chosen, model, machine(), schedule=schedule) == simulate(chosen, model, machine())


def test_an_unsafe_schedule_is_refused() -> None:
    """A gather that does not wait for the CPU Adam of its chunk brings stale weights at some timing."""
    model = workload()
    chosen = plan(model, n_buffer=1)
    schedule = compile_schedule(chosen, model)
    gather = next(task for task in schedule.tasks if task.kind is TaskKind.GATHER)
    adam = next(task.id for task in schedule.tasks if task.kind is TaskKind.CPU_ADAM and task.chunk == gather.chunk)
    assert adam in gather.after_previous
    hasty = with_task(schedule, gather.id, after_previous=without(gather.after_previous, adam))
    with pytest.raises(ScheduleError, match="cpu_adam chunk"):
        simulate(chosen, model, machine(), schedule=hasty)


def test_noise_of_the_calibration_travels_into_the_record() -> None:
    model = workload()
    calibration = Calibration(hardware_name=MACHINE, machine=MACHINE, iteration_noise_frac=0.03)
    assert simulate(plan(model), model, machine(), calibration).iteration_noise_frac == 0.03
    assert simulate(plan(model), model, machine()).iteration_noise_frac == 0


def test_what_does_not_belong_together_is_refused() -> None:
    model = workload()
    with pytest.raises(PlanError, match="belongs to workload"):
        simulate(plan(workload(3)), model, machine())
    foreign = Calibration(hardware_name="another", machine="another")
    with pytest.raises(CalibrationError, match="made on another but the machine is slow machine"):
        simulate(plan(model), model, machine(), foreign)


def test_an_iteration_that_takes_no_time_is_refused() -> None:
    model = workload(seconds=Seconds(0, 0, 0, 0, 0, 0))
    persistent = plan(model, n_persist=2, n_buffer=0)
    schedule = compile_schedule(persistent, model)
    idle = replace(schedule, tasks=tuple(replace(task, num_stepped=0) for task in schedule.tasks))
    with pytest.raises(WorkloadError, match="nothing in the workload hand-made takes time"):
        simulate(persistent, model, machine(), schedule=idle)


# -- determinism and imports -----------------------------------------------------------------------------------------

_SIMULATE_AND_PRINT = """
from protwin.sim import simulate
from tests.sim.hand_made import machine, plan, workload
from tests.sim.engine.test_simulator import slowed
from protwin.shared.schema.schedule import Lane
model = workload(5)
chosen = plan(model, n_persist=1, n_buffer=2, n_checkpoint=2)
calibration = slowed((Lane.COMPUTE, Lane.H2D, Lane.CPU_OPTIM), 1.7)
hardware = machine(gather_s=0.7, offload_s=0.3, cpu_adam_s=1.1, host_bytes_per_s=2000.0)
print(simulate(chosen, model, hardware, calibration).to_json())
"""


def run_python(source: str, hash_seed: int = 0) -> str:
    result = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": str(hash_seed), "PATH": ""},
    )
    return result.stdout


def test_the_same_input_gives_the_same_bytes() -> None:
    first = run_python(_SIMULATE_AND_PRINT, hash_seed=1)
    assert first.startswith("{")
    assert first == run_python(_SIMULATE_AND_PRINT, hash_seed=2)


def test_importing_the_package_loads_nothing() -> None:
    loaded = run_python(
        "import sys, protwin.sim; print({name.partition('.')[0] for name in sys.modules} & "
        "{'torch', 'simpy', 'numpy', 'pydantic'})"
    )
    assert loaded.strip() == "set()"
    assert run_python("import sys; from protwin.sim import simulate; print('torch' in sys.modules)").strip() == "False"


def test_exported_names() -> None:
    names = run_python("import protwin.sim; print(protwin.sim.__all__)")
    expected = [
        "Effort",
        "GlobalBatch",
        "RankGroup",
        "SearchRequest",
        "SearchResult",
        "SearchSpace",
        "Step",
        "search",
        "search_batches",
        "search_splits",
        "simulate",
        "simulate_groups",
        "simulate_pipeline",
    ]
    assert names.strip() == str(expected)
    shadowed = "import protwin.sim.searching.search, protwin.sim; print(callable(protwin.sim.search))"
    assert run_python(shadowed).strip() == "True"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        import_name("nothing")


def import_name(name: str) -> object:
    import protwin.sim

    return getattr(protwin.sim, name)


def test_the_norm_of_nothing_waits_for_the_last_backward() -> None:
    """Everything is frozen: without that wait, its lane would go on without end while no other has begun."""
    model = workload(2)
    frozen = tuple(parameter.model_copy(update={"trainable": False}) for parameter in model.parameters)
    model = model.model_copy(update={"parameters": frozen})
    schedule = compile_schedule(plan(model).model_copy(update={"max_gradient_norm": 1.0}), model)
    (norm,) = (task for task in schedule.tasks if task.kind is TaskKind.GRADIENT_NORM)
    assert [schedule.tasks[task].name for task in norm.after] == ["backward prologue"]
    assert simulate_timing(schedule, [1.0] * len(schedule.tasks), ContentionModel.none()).iteration_s > 0

"""Intervals of times and peaks, against machines whose truth is drawn from what the calibration says of itself.

The oracle is the simulator (SimPy) under the true factors.  It knows nothing of draws, replays and quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from protwin.shared.basics.interval import Interval
from protwin.shared.compile.compile import compile_schedule
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.hardware import Hardware
from protwin.shared.schema.plan import Plan, TrainingMethod
from protwin.shared.schema.schedule import Memory, TaskKind
from protwin.shared.schema.workload import Phase, Workload
from protwin.shared.verify.guaranteed_peak import guaranteed_device_peak
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine import drawn_timings
from protwin.sim.engine.device_memory import DeviceMemory
from protwin.sim.engine.drawn_timings import DrawnTimings
from protwin.sim.engine.error_sources import ErrorModel, Source
from protwin.sim.engine.intervals import (
    SCALARS_FRAC,
    DrawnMachine,
    drawn_peaks,
    interval_of,
    log_errors,
    ratio_interval,
    time_logs,
)
from protwin.sim.engine.simulator import MIN_ITERATIONS, simulate, simulate_plan, simulate_timing
from tests.proof_size import examples
from tests.shared.bypass_models import bypass_plan, pairs
from tests.sim.hand_made import MACHINE, machine, plan, workload
from tests.strategies.machines import calibrations, hardware
from tests.strategies.plans import PlannedWorkload, planned_workloads

NUM_TRUTHS: Final = examples(1_000, 60)
FOUND = dict[TaskKind, Factor]
FACTORS: Final[FOUND] = {
    TaskKind.FORWARD: Factor(value=1.2, relative_std=0.10),
    TaskKind.RECOMPUTE: Factor(value=1.1, relative_std=0.08),
    TaskKind.BACKWARD: Factor(value=0.9, relative_std=0.12),
    TaskKind.GATHER: Factor(value=1.5, relative_std=0.20),
    TaskKind.GRADIENT_OFFLOAD: Factor(value=1.4, relative_std=0.20),
    TaskKind.CPU_ADAM: Factor(value=1.3, relative_std=0.15),
    TaskKind.DEVICE_ADAM: Factor(value=1.0, relative_std=0.10),
}
CERTAIN: Final[FOUND] = {kind: factor.model_copy(update={"relative_std": 0.0}) for kind, factor in FACTORS.items()}


def calibration(factors: FOUND, **fields: Any) -> Calibration:
    """Of the hand-made machine and model, exact but for what is given."""
    known: dict[str, Any] = {"iteration_error_frac": 0.0, "fitted_to": ("hand-made",), "num_runs": 5} | fields
    return Calibration(hardware_name=MACHINE, machine="here", factors=factors, **known)


MODEL: Final = workload(3)
PLANS: Final = (
    plan(MODEL, n_persist=3, n_buffer=0),
    plan(MODEL, n_persist=1, n_buffer=2),
    plan(MODEL, n_persist=0, n_buffer=3, prefetch_depth=2, n_checkpoint=2),
)
BOX: Final = machine(gather_s=1.3, offload_s=1.2, cpu_adam_s=2.0)


def drawn_of(chosen: Plan, known: Calibration, model: Workload = MODEL, box: Hardware = BOX) -> DrawnTimings:
    """The plan under the factors that are known; lanes that do not disturb each other."""
    costs = CostModel.of(model, box, known)
    schedule, timing = simulate_plan(chosen, model, costs, ContentionModel.none())
    return DrawnTimings(schedule, costs.durations_s(schedule), ContentionModel.none(), timing)


def interval(chosen: Plan, known: Calibration, errors: ErrorModel | None = None) -> Interval:
    drawn = drawn_of(chosen, known)
    errors = ErrorModel.of(MODEL, BOX, known) if errors is None else errors
    found = interval_of(drawn.timing.iteration_s, time_logs(drawn, DrawnMachine(errors)), errors)
    assert found is not None
    return found


def coverage(chosen: Plan, known: Calibration, found: Interval) -> float:
    """Share of machines, drawn from what ``known`` says of itself, on which a run measures a time within ``found``."""
    random = np.random.default_rng(7)
    bare = drawn_of(chosen, calibration({}))
    is_certain = all(factor.relative_std == 0 for factor in known.factors.values())
    hits = []
    for _ in range(1 if is_certain else NUM_TRUTHS):
        factors = {
            kind: factor.value * math.exp(factor.relative_std * random.standard_normal())
            for kind, factor in known.factors.items()
        }
        tasks = zip(bare.schedule.tasks, bare.durations_s.tolist(), strict=True)
        durations_s = [seconds * factors[task.kind] for task, seconds in tasks]
        true_s = simulate_timing(bare.schedule, durations_s, ContentionModel.none()).iteration_s
        num_runs = 20 * (NUM_TRUTHS if is_certain else 1)
        noise_std = 0.93 * known.iteration_noise_frac
        model_std = math.sqrt(max(0.0, (known.iteration_error_frac or 0.0) ** 2 - noise_std**2))
        errors = model_std * random.standard_t(known.num_runs, num_runs)
        errors += noise_std * random.standard_normal(num_runs)
        if MODEL.model_name not in known.fitted_to:
            errors += 0.10 * random.standard_normal(num_runs)
        hits += [found.contains(one_s) for one_s in (true_s * np.exp(errors)).tolist()]
    return sum(hits) / len(hits)


@pytest.mark.parametrize("number", range(len(PLANS)))
def test_nine_in_ten_measurements_lie_within(number: int) -> None:
    known = calibration(FACTORS, iteration_error_frac=0.05, iteration_noise_frac=0.03, fitted_to=())
    assert 0.85 <= coverage(PLANS[number], known, interval(PLANS[number], known)) <= 0.95


ONE_SOURCE: Final[dict[str, tuple[Calibration, Callable[[ErrorModel], ErrorModel]]]] = {
    "factors": (
        calibration(FACTORS),
        lambda errors: replace(errors, calibration=calibration(CERTAIN)),
    ),
    "the model's error": (
        calibration(CERTAIN, iteration_error_frac=0.1),
        lambda errors: replace(errors, plan_std=0.0),
    ),
    "few errors": (
        calibration(CERTAIN, iteration_error_frac=0.1, num_runs=1),
        # The normal distribution's quantile in the place of Student's.
        lambda errors: replace(errors, plan_freedom=None),
    ),
    "the run": (
        calibration(CERTAIN, iteration_noise_frac=0.1),
        lambda errors: replace(errors, run_std=0.0),
    ),
    "another model": (
        calibration(CERTAIN, fitted_to=("another",)),
        lambda errors: replace(errors, transfer_std=0.0),
    ),
}


@pytest.mark.parametrize("source", ONE_SOURCE)
def test_every_source_covers_what_comes_of_it_and_nothing_else_does(source: str) -> None:
    known, without = ONE_SOURCE[source]
    errors = ErrorModel.of(MODEL, BOX, known)
    assert 0.85 <= coverage(PLANS[1], known, interval(PLANS[1], known)) <= 0.95
    assert coverage(PLANS[1], known, interval(PLANS[1], known, without(errors))) < 0.85


def test_a_kind_without_runs_is_less_certain_than_its_like_and_one_without_a_like_least() -> None:
    errors = ErrorModel.of(MODEL, BOX, calibration(FACTORS))

    def std(kind: TaskKind) -> float:
        return math.hypot(*(source.log_std for source in errors.sources_of(kind)))

    assert std(TaskKind.GATHER) < std(TaskKind.ACTIVATION_FETCH) < std(TaskKind.ALL_GATHER)


def twice_as_long(content: Any) -> Any:
    """A workload, or a part of one, whose phases take twice their seconds."""
    if isinstance(content, tuple):
        return tuple(twice_as_long(one) for one in content)
    if not isinstance(content, BaseModel):
        return content
    changes = {name: twice_as_long(getattr(content, name)) for name in type(content).model_fields}
    if isinstance(content, Phase) and content.measured_s is not None:
        changes["measured_s"] = 2 * content.measured_s
    return content.model_copy(update=changes)


@pytest.mark.parametrize("method", [TrainingMethod.FULL, TrainingMethod.BYPASS])
def test_seconds_of_another_kind_are_unsure_where_phases_take_them(method: TrainingMethod) -> None:
    """Which kinds take the seconds of phases, tasks of phases that are twice as long say."""
    if method is TrainingMethod.BYPASS:
        model = pairs(3)
        chosen = bypass_plan(model)
    else:
        model = MODEL
        chosen = PLANS[2]
    schedule = compile_schedule(chosen, model)
    costs = CostModel(BOX, use_measured=True)
    known = calibration({task.kind: Factor(value=1.0, relative_std=0.1) for task in schedule.tasks})
    errors = replace(ErrorModel.of(MODEL, BOX, known), phases=(0.5, 2.0))
    longer = compile_schedule(chosen, twice_as_long(model))
    timed = {}
    for task, other in zip(schedule.tasks, longer.tasks, strict=True):
        assert task.kind is other.kind
        timed[task.kind] = timed.get(task.kind, False) or costs.task_s(other) > costs.task_s(task)
    assert {kind for kind, is_timed in timed.items() if is_timed} > {TaskKind.FORWARD, TaskKind.BACKWARD}
    for kind, is_timed in timed.items():
        highs = [source.high for source in errors.sources_of(kind)]
        assert (2.0 in highs) == is_timed, kind


def test_what_every_task_costs_alike_has_an_error_of_its_own() -> None:
    """A kind whose tasks are hardly anything but overhead, which is well known, is sure whatever its factor is."""
    alike = {"overhead_s": {TaskKind.FORWARD: 1e3}}
    unsure = CERTAIN | {TaskKind.FORWARD: Factor(value=1.0, relative_std=1.0)}
    said = {
        "of both": calibration(unsure, **alike),
        "well known": calibration(unsure, **alike, overhead_std_s={TaskKind.FORWARD: 0.0}),
        "badly known": calibration(CERTAIN, **alike, overhead_std_s={TaskKind.FORWARD: 3e2}),
    }
    widths = {}
    for name, known in said.items():
        logs = time_logs(drawn_of(PLANS[1], known), DrawnMachine(ErrorModel.of(MODEL, BOX, known)))
        widths[name] = np.ptp(logs)
    assert widths["of both"] > 1
    assert widths["well known"] < 0.02
    assert 0.5 < widths["badly known"] < widths["of both"]


def test_what_just_came_has_an_error_of_its_own() -> None:
    arrivals = {"arrival_s_per_byte": {TaskKind.FORWARD: 1e-3}}
    certain = ErrorModel.of(MODEL, BOX, calibration(CERTAIN, **arrivals))
    unsure = ErrorModel.of(
        MODEL, BOX, calibration(CERTAIN, **arrivals, arrival_std_s_per_byte={TaskKind.FORWARD: 5e-4})
    )
    chosen = PLANS[2]
    drawn = drawn_of(chosen, calibration(CERTAIN, **arrivals))
    narrow, wide = (time_logs(drawn, DrawnMachine(errors)) for errors in (certain, unsure))
    assert np.ptp(narrow) == pytest.approx(0, abs=1e-9)
    assert np.ptp(wide) > 0.01


@given(planned_workloads(max_blocks=4), hardware(), st.none() | calibrations())
@settings(max_examples=examples(200, 5))
def test_intervals_hold_the_prediction_and_peaks_stay_within_their_bounds(
    planned: PlannedWorkload, box: Hardware, known: Calibration | None
) -> None:
    box = box.model_copy(update={"name": planned.workload.measured_on})
    if known is not None:
        known = known.model_copy(update={"hardware_name": box.name})
    assume(any(planned.workload.profile_of(b).backward.measured_s for b in range(planned.workload.num_blocks)))
    record = simulate(planned.plan, planned.workload, box, known)
    times, peaks = record.iteration_interval_s, record.peak_interval_bytes
    assert times is not None
    assert peaks is not None
    assert times.contains(record.iteration_s)
    assert peaks.contains(record.peak_device_bytes)
    static_bytes = compile_schedule(planned.plan, planned.workload).static_bytes(Memory.DEVICE)
    assert static_bytes <= peaks.low <= peaks.high <= record.guaranteed_peak_device_bytes
    assert record.chance_oom is not None
    if record.guaranteed_peak_device_bytes <= box.device.usable_bytes:
        assert record.chance_oom == 0


@given(st.floats(0, 0.2), st.floats(0.01, 0.2), st.sampled_from(("plan_std", "transfer_std", "run_std")))
def test_intervals_widen_with_every_error(least: float, more: float, name: str) -> None:
    errors = ErrorModel(lanes={}, plan_std=0.02)
    narrow, wide = (log_errors(replace(errors, **{name: std})) for std in (least, least + more))
    assert np.ptp(wide) > np.ptp(narrow)
    assert np.all(narrow == -narrow[::-1]), "no error moves the interval"


def test_intervals_widen_with_every_factor() -> None:
    """Each by itself: 64 draws of several sources are correlated by chance, up to a tenth of a width."""
    for kind in (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.DEVICE_ADAM):
        widths = []
        for std in (0.0, 0.05, 0.1, 0.2):
            unsure = CERTAIN | {kind: CERTAIN[kind].model_copy(update={"relative_std": std})}
            found = interval(PLANS[0], calibration(unsure))
            widths.append(found.high - found.low)
        assert widths == sorted(set(widths))


@given(st.floats(1e-6, 1e6))
@settings(max_examples=20)
def test_intervals_scale_with_the_unit_of_time(scale: float) -> None:
    drawn = drawn_of(PLANS[1], calibration(FACTORS))
    durations_s = (drawn.durations_s * scale).tolist()
    timing = simulate_timing(drawn.schedule, durations_s, ContentionModel.none(), num_more_iterations=1)
    scaled = DrawnTimings(drawn.schedule, durations_s, ContentionModel.none(), timing)
    drawn_machine = DrawnMachine(ErrorModel.of(MODEL, BOX, calibration(FACTORS)))
    assert time_logs(scaled, drawn_machine) == pytest.approx(time_logs(drawn, drawn_machine), abs=1e-6)


# -- replays ---------------------------------------------------------------------------------------------------------


@given(planned_workloads(max_blocks=4), hardware(), st.integers(0, 2**32), st.floats(0, 2))
@settings(max_examples=examples(200, 6))
def test_a_draw_is_what_the_simulator_says_of_these_durations(
    planned: PlannedWorkload, box: Hardware, seed: int, excess: float
) -> None:
    box = box.model_copy(update={"name": planned.workload.measured_on})
    costs, contention = CostModel.of(planned.workload, box), ContentionModel.for_plan(planned.plan, box)
    schedule = compile_schedule(planned.plan, planned.workload)
    durations_s = costs.durations_s(schedule)
    timing = simulate_timing(schedule, durations_s, contention, num_more_iterations=1)
    assume(timing.iteration_s > 0)
    factors = np.exp(0.3 * np.random.default_rng(seed).standard_normal(len(durations_s)))
    other = contention.exceeding(excess)
    drawn_s = (np.array(durations_s) * factors).tolist()
    told = simulate_timing(schedule, drawn_s, other, max_iterations=MIN_ITERATIONS, num_more_iterations=1)
    drawn = DrawnTimings(schedule, durations_s, contention, timing)
    ends_s, ratio = drawn.drawn(factors, excess)
    rows = min(len(ends_s), told.num_iterations)
    assert ends_s[:rows] == pytest.approx(told.ends_s[:rows], rel=1e-6)
    found = drawn.timing_of(ends_s)
    assert found.starts_s[:rows] == pytest.approx(told.starts_s[:rows], rel=1e-6, abs=1e-9 * told.ends_s.max())
    if told.is_steady and timing.is_steady and timing.num_iterations == MIN_ITERATIONS + 1:
        assert ratio == pytest.approx(told.iteration_s / timing.iteration_s, rel=1e-5)
        if len(ends_s) == told.num_iterations:
            at = DeviceMemory(schedule, timing).at(found)
            assert at.peak_bytes == DeviceMemory(schedule, found).peak_bytes


def test_without_the_compiled_replay_draws_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_machine = DrawnMachine(ErrorModel.of(MODEL, BOX, None))
    compiled = time_logs(drawn_of(PLANS[2], calibration(FACTORS)), drawn_machine)
    monkeypatch.setattr(drawn_timings.kernels, "is_available", lambda: False)
    assert time_logs(drawn_of(PLANS[2], calibration(FACTORS)), drawn_machine) == pytest.approx(compiled, abs=1e-9)


def test_left_out_micro_batches_count_in_draws() -> None:
    """With as many of them as make the step and the first gathers nothing beside, the ratio is that of the whole."""
    known = calibration(FACTORS)
    chosen = PLANS[1].model_copy(update={"micro_batches": 12})
    folded = drawn_of(chosen, known)
    assert folded.timing.fold is not None
    schedule = compile_schedule(chosen, MODEL)
    durations_s = CostModel.of(MODEL, BOX, known).durations_s(schedule)
    timing = simulate_timing(schedule, durations_s, ContentionModel.none(), num_more_iterations=1)
    whole = DrawnTimings(schedule, durations_s, ContentionModel.none(), timing)
    drawn_machine = DrawnMachine(ErrorModel.of(MODEL, BOX, known))
    assert time_logs(folded, drawn_machine) == pytest.approx(time_logs(whole, drawn_machine), abs=2e-3)


# -- peaks -----------------------------------------------------------------------------------------------------------


def test_the_peak_of_a_plan_that_no_timing_changes_is_known_but_for_scalars() -> None:
    record = simulate(PLANS[0], MODEL, BOX, calibration(FACTORS))
    peak = record.peak_device_bytes
    assert record.peak_interval_bytes is not None
    assert record.peak_interval_bytes.low == pytest.approx(peak * (1 - SCALARS_FRAC))
    assert (
        peak <= record.peak_interval_bytes.high <= min(record.guaranteed_peak_device_bytes, peak * (1 + SCALARS_FRAC))
    )
    assert record.chance_oom == 0


def swapping() -> tuple[Workload, Plan, Hardware]:
    """Blocks whose copies take about a phase: which ends first decides what lies on the device together."""
    blocks = workload(3)
    (profile,) = blocks.profiles
    model = blocks.model_copy(update={"profiles": (profile.model_copy(update={"swappable_bytes": 900}),)})
    chosen = plan(model, n_persist=3, n_buffer=0, prefetch_depth=2).model_copy(update={"n_swap": 3})
    return model, chosen, machine(gather_s=0.3, offload_s=0.3, cpu_adam_s=0.5)


def test_a_peak_that_depends_on_timing_is_found_within_its_interval() -> None:
    model, chosen, box = swapping()
    known = calibration(FACTORS)
    drawn = drawn_of(chosen, known, model, box)
    errors = ErrorModel.of(model, box, known)
    peak_bytes = DeviceMemory(drawn.schedule, drawn.timing).peak_bytes
    guaranteed_bytes = guaranteed_device_peak(drawn.schedule).size_bytes
    peaks = drawn_peaks(drawn, drawn.schedule, errors, peak_bytes=peak_bytes, guaranteed_bytes=guaranteed_bytes)
    random = np.random.default_rng(11)
    found = []
    for _ in range(NUM_TRUTHS):
        machines = {
            source.name: source.log_std * random.standard_normal()
            for task in drawn.schedule.tasks
            for source in errors.sources_of(task.kind)
        }
        logs = np.array([sum(machines[one.name] for one in errors.sources_of(t.kind)) for t in drawn.schedule.tasks])
        logs += 0.10 * random.standard_normal(len(logs))
        durations_s = (drawn.durations_s * np.exp(logs)).tolist()
        timing = simulate_timing(drawn.schedule, durations_s, ContentionModel.none(), num_more_iterations=1)
        found.append(DeviceMemory(drawn.schedule, timing).peak_bytes)
    assert np.mean([peaks.interval.contains(size) for size in found]) >= 0.85
    # The wrong variants: the point alone, and the guarantee alone.
    assert np.mean([size == peak_bytes for size in found]) < 0.85
    assert np.mean([size == guaranteed_bytes for size in found]) < 0.85
    over = float(np.mean([size > peak_bytes for size in found]))
    assert 0 < peaks.chance_above(peak_bytes) == pytest.approx(over, abs=0.15)
    assert peaks.chance_above(guaranteed_bytes) == 0


def test_no_draw_is_above_the_guarantee_or_below_what_lies_there_for_good() -> None:
    model, chosen, box = swapping()
    known = calibration(FACTORS)
    drawn = drawn_of(chosen, known, model, box)
    errors = ErrorModel.of(model, box, known)
    peaks = drawn_peaks(drawn, drawn.schedule, errors, peak_bytes=5_000, guaranteed_bytes=5_600)
    assert set(peaks.drawn_bytes) <= {*range(5_000, 5_601)}
    assert max(peaks.drawn_bytes) == 5_600


def test_what_was_never_run_on_the_machine_has_the_range_of_the_memory_model() -> None:
    unseen = MODEL.model_copy(update={"measured_on": "another machine"})
    low, high = ErrorModel.of(unseen, BOX, None).memory
    assert low < 1 < high
    assert ErrorModel.of(MODEL, BOX, None).memory == (1.0, 1.0)


# -- two plans -------------------------------------------------------------------------------------------------------


def test_errors_that_two_plans_share_cancel() -> None:
    known = calibration(FACTORS, fitted_to=())
    errors = ErrorModel.of(MODEL, BOX, known)
    drawn_machine = DrawnMachine(errors)
    one, other = (time_logs(drawn_of(chosen, known), drawn_machine) for chosen in (PLANS[1], PLANS[2]))
    found = ratio_interval(one, other, errors, ratio=1.0)
    shuffled = np.random.default_rng(0).permutation(other)
    # The wrong variant: two machines in the place of one.
    apart = ratio_interval(one, shuffled, errors, ratio=1.0)
    assert found is not None
    assert apart is not None
    assert found.high - found.low < 0.7 * (apart.high - apart.low)
    assert ratio_interval(one, one, errors, ratio=1.0) == Interval(low=1, high=1)


def test_draws_that_say_nothing_leave_no_interval() -> None:
    errors = ErrorModel.of(MODEL, BOX, None)
    silent = np.full(64, np.nan)
    assert interval_of(1.0, silent, errors) is None
    assert ratio_interval(silent, silent, errors, ratio=2.0) is None


def test_an_interval_is_ordered() -> None:
    with pytest.raises(ValueError, match="low is 2"):
        Interval(low=2, high=1)
    assert Source("x", 0.5, 2.0).log_mean == pytest.approx(0)

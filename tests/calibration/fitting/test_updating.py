"""Records update a calibration: all of them tell, in whatever order, and a machine that has changed is followed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from protwin.calibration.fitting.fit import Pair
from protwin.calibration.fitting.measurement_plans import bootstrap_plans
from protwin.calibration.fitting.updating import paired, updated
from protwin.shared.basics.errors import CalibrationError, FileError
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.record import Origin, Record
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import BlockProfile, Workload
from protwin.shared.schema.workload import Phase as ModelPhase
from protwin.sim import simulate
from tests.calibration.fitting.test_fit import MACHINE, TRUTH, a_workload, largest_error, runs_of, true_calibration
from tests.calibration.validation.test_changes import scaled

_SOFTWARE = {"torch": "2.9"}


def told(pair: Pair, **changes: Any) -> Pair:
    """The pair as a run of ten iterations on the machine would have recorded it."""
    fields = {"machine": MACHINE.name, "software": _SOFTWARE, "num_iterations": 10, "iteration_noise_frac": 0.02}
    return replace(pair, measured=pair.measured.model_copy(update=fields | changes))


def runs(workload: Workload, truth: Calibration) -> list[Pair]:
    return [told(pair) for pair in runs_of(workload, truth)]


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """Of two models."""
    return [*runs(a_workload(), true_calibration()), *runs(a_workload(5), true_calibration())]


def an_old_calibration() -> Calibration:
    """As files of earlier versions have it: coefficients alone."""
    factors = {kind: Factor(value=2 * value, relative_std=0.01, num_pairs=50) for kind, value in TRUTH.items()}
    return Calibration(
        hardware_name=MACHINE.name,
        machine=MACHINE.name,
        software=_SOFTWARE,
        factors=factors,
        overhead_s={TaskKind.GATHER: 1e-4},
        contention=true_calibration().contention,
        fitted_to=("another",),
        num_runs=3,
    )


def figures(calibration: Calibration) -> dict[str, float]:
    found = {f"{kind} factor": factor.value for kind, factor in calibration.factors.items()}
    found |= {f"{kind} std": factor.relative_std for kind, factor in calibration.factors.items()}
    found |= {f"{kind} overhead": value for kind, value in calibration.overhead_s.items()}
    found |= {f"{kind} arrival": value for kind, value in calibration.arrival_s_per_byte.items()}
    found |= {f"{kind} swapping": mean.seconds for kind, mean in calibration.swapping.items()}
    found |= {f"{kind} swapped": mean.num_tasks for kind, mean in calibration.swapping.items()}
    return found | {"noise": calibration.iteration_noise_frac, "runs": calibration.num_runs}


@pytest.mark.slow
@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_records_at_once_or_one_after_another_tell_the_same(data: st.DataObject, pairs: list[Pair]) -> None:
    begin = data.draw(st.sampled_from([None, an_old_calibration()]))
    some = st.lists(st.sampled_from(pairs), min_size=2, max_size=5, unique_by=id)
    order = data.draw(some.flatmap(st.permutations))
    at_once = updated(begin, order, MACHINE, forgetting=1.0)
    found, left = begin, list(order)
    while left:
        cut = data.draw(st.integers(1, len(left)))
        part, left = left[:cut], left[cut:]
        found = updated(found, data.draw(st.permutations(part)), MACHINE, forgetting=1.0)
    assert found is not None
    assert figures(found) == pytest.approx(figures(at_once), rel=1e-6, abs=1e-12)
    assert set(found.fitted_to) == set(at_once.fitted_to)


def test_means_of_factors_would_depend_on_the_order(pairs: list[Pair]) -> None:
    """The wrong variant: what is kept is the estimate, and each record's own is averaged with it."""
    alone = [updated(None, [pair], MACHINE).factor(TaskKind.GATHER) for pair in pairs[:3]]
    one, other = ((alone[a] + alone[b]) / 4 + alone[c] / 2 for a, b, c in ((0, 1, 2), (2, 1, 0)))
    assert one != pytest.approx(other, rel=1e-6)


def test_records_alone_make_a_calibration(pairs: list[Pair]) -> None:
    """Contention is not known then, so that it is part of the factors: predictions are what counts."""
    found = updated(None, pairs, MACHINE)
    assert found.fitted_to == ("eight blocks",)
    assert found.num_runs == len(pairs)
    assert largest_error(updated(an_old_calibration(), pairs, MACHINE)) < 0.1
    for pair in pairs[::2]:
        predicted = simulate(pair.measured.plan, pair.workload, MACHINE, found)
        assert predicted.iteration_s == pytest.approx(pair.measured.iteration_s, rel=0.1)


def test_what_one_model_has_told_serves_another() -> None:
    lanes_alone = an_old_calibration().model_copy(update={"factors": {}, "overhead_s": {}})
    found = updated(lanes_alone, runs(a_workload(), true_calibration()), MACHINE)
    others = runs(a_workload(4), true_calibration())

    def error(pair: Pair, known: Calibration) -> float:
        predicted = simulate(pair.measured.plan, pair.workload, MACHINE, known)
        return abs(predicted.iteration_s / pair.measured.iteration_s - 1)

    assert max(error(pair, found) for pair in others) < 0.005
    assert max(error(pair, lanes_alone) for pair in others) > 0.03


def test_a_machine_that_has_changed_is_followed() -> None:
    """A link that has become half as fast, told by the runs of one plan again and again."""
    before, workload = true_calibration(), a_workload()
    slower = before.factors | {TaskKind.GATHER: Factor(value=2 * TRUTH[TaskKind.GATHER])}
    after = before.model_copy(update={"factors": slower})
    found = updated(an_old_calibration(), runs(workload, before), MACHINE)
    assert found.factor(TaskKind.GATHER) == pytest.approx(TRUTH[TaskKind.GATHER], rel=0.1)
    last = [pair for pair in runs(workload, after) if pair.measured.num_gathers > 4]
    for _ in range(5):
        found = updated(found, last[:1], MACHINE)
    assert found.factor(TaskKind.GATHER) == pytest.approx(2 * TRUTH[TaskKind.GATHER], rel=0.1)
    never = updated(an_old_calibration(), runs(workload, before), MACHINE, forgetting=1.0)
    for _ in range(5):
        never = updated(never, last[:1], MACHINE, forgetting=1.0)
    assert never.factor(TaskKind.GATHER) < 1.8 * TRUTH[TaskKind.GATHER]


def test_errors_are_those_of_what_was_said_before_learning() -> None:
    """Of a machine that is as it was they are small; where backward has become half as fast, as large as they were."""
    workload, before = a_workload(), true_calibration()
    same = updated(updated(None, runs(workload, before), MACHINE), runs(workload, before), MACHINE)
    assert same.iteration_error_frac is not None
    assert same.iteration_error_frac < 0.05
    slower = before.factors | {TaskKind.BACKWARD: Factor(value=2 * TRUTH[TaskKind.BACKWARD])}
    later = runs(workload, before.model_copy(update={"factors": slower}))
    errors = [
        simulate(r.measured.plan, workload, MACHINE, same).iteration_s / r.measured.iteration_s - 1 for r in later
    ]
    known = 0.5 * same.num_runs
    squares = known * same.iteration_error_frac**2 + sum(error**2 for error in errors)
    expected = (squares / (known + len(later))) ** 0.5
    assert updated(same, later, MACHINE).iteration_error_frac == pytest.approx(expected, rel=1e-3)
    assert expected > 2 * same.iteration_error_frac


def test_without_a_calibration_the_other_records_tell_how_far_each_plan_is_off(pairs: list[Pair]) -> None:
    """By hand: every plan predicted by a calibration of the others; one whose kinds the others lack is not asked."""
    own = pairs[: len(bootstrap_plans(a_workload()))]
    squares = []
    for left in own:
        others = [pair for pair in own if pair is not left]
        kinds = {task.kind for pair in others for task in pair.measured.tasks}
        if kinds >= {task.kind for task in left.measured.tasks}:
            predicted = simulate(left.measured.plan, left.workload, MACHINE, updated(None, others, MACHINE))
            squares.append((predicted.iteration_s / left.measured.iteration_s - 1) ** 2)
    assert len(squares) >= 2
    found = updated(None, own, MACHINE).iteration_error_frac
    assert found == pytest.approx((sum(squares) / len(squares)) ** 0.5, rel=0.02)
    assert updated(None, own[:2], MACHINE).iteration_error_frac is None


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("place", [0, 4])
def test_a_spoilt_record_is_refused_by_name(place: int, factor: float, pairs: list[Pair]) -> None:
    """Its factors would have become everybody's: so far apart plain sums were, with narrow intervals."""
    named = [replace(pair, name=f"run {number}") for number, pair in enumerate(pairs)]
    named[place] = told(named[place], **times_of(scaled(named[place].measured, factor)))
    others = len(pairs) - 1
    with pytest.raises(CalibrationError, match=rf"^run {place} took \S+ times what the other {others}") as refused:
        updated(None, named, MACHINE)
    assert float(str(refused.value).split()[3]) == pytest.approx(factor, rel=0.1)
    with pytest.raises(
        CalibrationError, match=rf"contradict each other: by one set of factors \S+( {place})? takes 3 times as"
    ):
        updated(None, [replace(pairs[place], name="good"), named[place]], MACHINE)
    # Alone it is a machine that has changed, whatever was known.
    known = updated(None, [pair for number, pair in enumerate(pairs) if number != place], MACHINE)
    assert updated(known, [named[place]], MACHINE).num_runs == len(pairs)


def test_only_those_too_far_from_what_is_left_are_named(pairs: list[Pair]) -> None:
    """Before 1.6 and 1.6 are gone, 0.68 lies as far from the middle as they do: 0.68 / 1.025 < 1 / 1.5 < 0.68 / 1."""
    factors = (0.68, 0.95, 1.0, 1.05, 1.6, 1.61)
    named = [
        replace(told(pairs[0], **times_of(scaled(pairs[0].measured, factor))), name=f"run {number}")
        for number, factor in enumerate(factors)
    ]
    with pytest.raises(CalibrationError, match=r"^run 4 took 1\.\d+ times, run 5 took 1\.\d+ times what the other 4 "):
        updated(None, named, MACHINE)


def test_models_of_very_different_sizes_do_not_contradict() -> None:
    """Of small tasks starting takes most, of large ones the work: both are the machine, and predicted as such."""
    costs = dict.fromkeys(TRUTH, 4e-3)
    truth = true_calibration().model_copy(update={"overhead_s": costs, "contention": ()})
    small, large = (of_times(a_workload(2), times) for times in (0.1, 10.0))
    both = [*runs(small, truth), *runs(large, truth)]
    found = updated(None, both, MACHINE)
    for pair in both:
        predicted = simulate(pair.measured.plan, pair.workload, MACHINE, found)
        assert predicted.iteration_s == pytest.approx(pair.measured.iteration_s, rel=0.2)


def of_times(workload: Workload, times: float) -> Workload:
    """Its phases take so many times as long."""

    def longer(phase: ModelPhase | None) -> ModelPhase | None:
        return None if phase is None else phase.model_copy(update={"measured_s": times * (phase.measured_s or 0.0)})

    ends = [name for name in Workload.model_fields if isinstance(getattr(workload, name), ModelPhase)]
    inner = [name for name in BlockProfile.model_fields if isinstance(getattr(workload.profiles[0], name), ModelPhase)]
    profiles = [
        profile.model_copy(update={name: longer(getattr(profile, name)) for name in inner})
        for profile in workload.profiles
    ]
    changed = {name: longer(getattr(workload, name)) for name in ends}
    fields = {name: getattr(workload, name) for name in Workload.model_fields}
    return Workload(**{**fields, **changed, "profiles": tuple(profiles), "model_name": f"times {times}"})


def times_of(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in ("tasks", "iteration_s", "forward_s", "backward_s", "optimizer_s")}


def changed_task(place: int, **changes: Any) -> Callable[[Record], dict[str, Any]]:
    def change(record: Record) -> dict[str, Any]:
        tasks = list(record.tasks)
        tasks[place] = tasks[place].model_copy(update=changes)
        return {"tasks": tuple(tasks)}

    return change


def jumped(record: Record, seconds: float) -> dict[str, Any]:
    """A clock that goes on from another time in the middle of the iteration."""
    half = len(record.tasks) // 2
    later = [
        timing.model_copy(update={"start_s": timing.start_s + seconds, "end_s": timing.end_s + seconds})
        for timing in record.tasks[half:]
    ]
    return {"tasks": (*record.tasks[:half], *later)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: {"tasks": ()}, "has 0 of the .* tasks of its plan; it lacks forward prologue"),
        (lambda record: {"tasks": record.tasks[:-1]}, "tasks of its plan; it lacks"),
        (changed_task(0, task=9_999), "it lacks forward prologue"),
        (changed_task(0, kind=TaskKind.GATHER), "is gather on lane compute; its plan has forward"),
        (lambda record: jumped(record, 3_600.0), "a clock jumped"),
        (lambda record: jumped(record, -3_600.0), "a clock jumped"),
        (changed_task(2, duration_s=10.0), "took 10 s, from"),
        (changed_task(2, start_s=0.0, end_s=0.5, duration_s=0.5), "lane compute is busy for"),
        (lambda record: {"iteration_s": 100 * record.iteration_s}, "whose phases take"),
        (lambda record: {"iteration_s": record.iteration_s / 100}, "whose phases take"),
    ],
)
def test_what_no_run_measures_is_refused(
    change: Callable[[Record], dict[str, Any]], message: str, pairs: list[Pair]
) -> None:
    """Tracebacks, or factors of thousands, until then."""
    wrong = replace(told(pairs[0], **change(pairs[0].measured)), name="run.json")
    with pytest.raises(CalibrationError, match=f"^run.json .*{message}"):
        updated(None, [wrong], MACHINE)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("factors", "backward", "value"), 1e300),
        (("overhead_s", "backward"), 1e300),
        (("iteration_noise_frac",), 1e300),
        (("transfer_error_frac",), 1e300),
        (("evidence", "forward", "known_values", 0), 1e300),
        (("evidence", "forward", "squares", 0), 5e-324),
        (("evidence", "forward", "squares", 0), 0.0),
        (("evidence", "forward", "squares", 1), 0.0),
        (("evidence", "forward", "products", 0), 1e9),
        (("evidence", "forward", "measured_square"), 0.0),
        (("evidence", "gather", "without_work_s"), 5.0),
        (("evidence", "forward", "run_products", 0), 0.0),
        (("evidence", "forward", "run_products", 0), -1e9),
        (("evidence", "forward", "run_products", 1), 1e9),
    ],
)
def test_sums_and_figures_that_no_runs_give_are_refused(
    place: tuple[Any, ...], value: float, pairs: list[Pair]
) -> None:
    """Tracebacks of numpy and overflows until then, in updates and in predictions."""
    content = json.loads(updated(None, pairs[:2], MACHINE).to_json())
    assert Calibration.from_mapping(json.loads(json.dumps(content)), origin="whole").num_runs == 2
    *above, last = place
    within = content
    for name in above:
        within = within[name]
    within[last] = value
    with pytest.raises(FileError, match=f"^damaged is damaged or inconsistent: {place[0]}"):
        Calibration.from_mapping(content, origin="damaged")


def test_figures_of_a_machine_that_was_probed_again_are_refused(pairs: list[Pair]) -> None:
    """Sums are of seconds by the figures of then: with others they would be of two machines."""
    found = updated(None, pairs[:2], MACHINE)
    slower = MACHINE.host_to_device.model_copy(update={"bandwidth_bytes_per_s": 5e8})
    again = MACHINE.model_copy(update={"host_to_device": slower})
    with pytest.raises(
        CalibrationError, match=r"other figures of a machine: host_to_device\.bandwidth_bytes_per_s was"
    ):
        updated(found, pairs[2:3], again)
    # A record that would be refused by itself is not judged first: another one would be refused all the same.
    with pytest.raises(CalibrationError, match="other figures of a machine"):
        updated(found, [told(pairs[2], origin=Origin.SIMULATED)], again)
    assert updated(found, pairs[2:3], MACHINE.model_copy(update={"price_usd_per_hour": 2.0})).num_runs == 3


def test_one_run_counts_once(pairs: list[Pair]) -> None:
    again = replace(told(pairs[0]), name="copy.json")
    with pytest.raises(CalibrationError, match=r"^copy.json holds the same run as the record"):
        updated(None, [pairs[0], pairs[1], again], MACHINE)


def test_kinds_that_no_record_has_stay_as_they_were() -> None:
    old = an_old_calibration()
    resident = next(pair for pair in runs(a_workload(), true_calibration()) if pair.measured.num_gathers == 0)
    found = updated(old, [resident], MACHINE)
    assert found.factors[TaskKind.GATHER] == old.factors[TaskKind.GATHER]
    assert found.overhead_s[TaskKind.GATHER] == old.overhead_s[TaskKind.GATHER]
    assert found.factor(TaskKind.FORWARD) == pytest.approx(TRUTH[TaskKind.FORWARD], rel=0.1)
    assert Calibration.from_mapping(json.loads(found.to_json()), origin="a file") == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"origin": Origin.SIMULATED}, "a predicted record"),
        ({"machine": "another machine"}, "measured on another machine, and the hardware is a machine"),
        ({"software": {"torch": "2.0"}}, "measured with torch 2.0, and what is known was with torch 2.9"),
        ({"software": {}}, "measured with torch unknown"),
        ({"num_iterations": 4}, "has 4 timed iterations; 5 are the least"),
        ({"iteration_noise_frac": 0.4}, "lie 40% apart, and 25% is the most"),
        ({"plan_id": "0"}, "the record is of plan 0, which does not belong"),
    ],
)
def test_what_says_nothing_is_refused(changes: dict[str, Any], message: str, pairs: list[Pair]) -> None:
    with pytest.raises(CalibrationError, match=message):
        updated(an_old_calibration(), [pairs[1], told(pairs[0], **changes)], MACHINE)


def test_other_refusals(pairs: list[Pair]) -> None:
    elsewhere = an_old_calibration().model_copy(update={"hardware_name": "another"})
    with pytest.raises(CalibrationError, match="the calibration is of another, and the hardware is a machine"):
        updated(elsewhere, pairs[:1], MACHINE)
    with pytest.raises(CalibrationError, match="no measured records"):
        updated(None, [], MACHINE)
    with pytest.raises(CalibrationError, match=r"forgetting is 1\.5"):
        updated(None, pairs[:1], MACHINE, forgetting=1.5)
    with pytest.raises(CalibrationError, match=r"run.json is a record of workload .* \(eight blocks\)"):
        paired([("run.json", pairs[0].measured)], [a_workload(3)])
    assert paired([("run.json", pairs[0].measured)], [a_workload(3), pairs[0].workload]) == [
        replace(pairs[0], name="run.json")
    ]

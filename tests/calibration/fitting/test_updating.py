"""Records update a calibration: all of them tell, in whatever order, and a machine that has changed is followed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from protwin.calibration.fitting.fit import Pair
from protwin.calibration.fitting.updating import paired, updated
from protwin.shared.basics.errors import CalibrationError
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.record import Origin
from protwin.shared.schema.schedule import TaskKind
from protwin.shared.schema.workload import Workload
from protwin.sim import simulate
from tests.calibration.fitting.test_fit import MACHINE, TRUTH, a_workload, largest_error, runs_of, true_calibration

_SOFTWARE = {"torch": "2.9"}


def told(pair: Pair, **changes: Any) -> Pair:
    """The pair as a run of ten iterations on the machine would have recorded it."""
    fields = {"machine": MACHINE.name, "software": _SOFTWARE, "num_iterations": 10, "iteration_noise_frac": 0.02}
    return Pair(pair.workload, pair.measured.model_copy(update=fields | changes))


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
    assert updated(None, runs(workload, before), MACHINE).iteration_error_frac is None
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
        ({"plan_id": "0"}, "a record of plan 0 does not belong"),
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
    assert paired([("run.json", pairs[0].measured)], [a_workload(3), pairs[0].workload]) == [pairs[0]]

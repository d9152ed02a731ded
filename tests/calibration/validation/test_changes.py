"""A machine that changes while predictions are judged: what is said of it, and that intervals hold nevertheless.

The machine is the simulator under a calibration that the test chose, with noise of plans, rounds and bursts; from some
moment on, in the middle of a round, some of its lanes are slower.  The truth is known, and nothing of it is told.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import pytest

from protwin.calibration.fitting.fit import fit_calibration, pairs_of
from protwin.calibration.fitting.measurement_plans import bootstrap_plans
from protwin.calibration.validation.changes import Rounds, as_it_changed, change_words, transfer_notes
from protwin.calibration.validation.drawing import Draw, draw_plans
from protwin.calibration.validation.fidelity import MachineChange
from protwin.calibration.validation.quiet import (
    quiet_record,
    quiet_seconds,
    scatter_frac,
    seconds_of,
    uncertainty_frac,
)
from protwin.shared.basics.interval import Interval
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Origin, Record
from protwin.shared.schema.schedule import Lane, TaskKind
from protwin.sim import simulate
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from protwin.sim.engine.drawn_timings import DrawnTimings
from protwin.sim.engine.error_sources import ErrorModel
from protwin.sim.engine.intervals import DrawnMachine, interval_of, time_logs
from protwin.sim.engine.simulator import simulate_plan
from tests.calibration.fitting.test_budgeted import swappable
from tests.calibration.fitting.test_fit import MACHINE, TRUTH, a_workload
from tests.proof_size import examples, some_quick

WORKLOAD: Final = swappable(a_workload(3))
LANES: Final = (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.CPU_OPTIM)
CORE: Final = {Lane.COMPUTE: 1.5, Lane.CPU_OPTIM: 1.7, Lane.H2D: 1.2, Lane.D2H: 1.2}
"""A core that another program takes."""
LINK: Final = {Lane.H2D: 2.0, Lane.D2H: 2.0}
NUM_JUDGED: Final = 8


def truth(slower: Mapping[Lane, float]) -> Calibration:
    """The machine's secret, with lanes that are slower."""
    factors = {
        kind: Factor(value=TRUTH.get(kind, 1.0) * slower.get(kind.lane, 1.0)) for kind in TaskKind if kind.lane in LANES
    }
    # Copies are a few times as long as on a machine whose link nobody notices.
    factors |= {kind: Factor(value=6 * factors[kind].value) for kind in factors if kind.lane in (Lane.H2D, Lane.D2H)}
    return Calibration(hardware_name=MACHINE.name, machine="here", factors=factors)


@lru_cache(maxsize=256)
def iteration(plan: Plan, slower: tuple[tuple[Lane, float], ...]) -> Record:
    record = simulate(plan, WORKLOAD, MACHINE, truth(dict(slower)))
    return record.model_copy(update={"origin": Origin.MEASURED})


def scaled(record: Record, factor: float) -> Record:
    """The same iteration on a machine that is slower as a whole."""
    times = ("iteration_s", "forward_s", "backward_s", "optimizer_s")
    tasks = tuple(
        one.model_copy(update={name: factor * getattr(one, name) for name in ("start_s", "duration_s", "end_s")})
        for one in record.tasks
    )
    lanes = tuple(one.model_copy(update={"busy_s": factor * one.busy_s}) for one in record.lanes)
    changed = {name: factor * getattr(record, name) for name in times}
    return record.model_copy(update={**changed, "tasks": tasks, "lanes": lanes, "iteration_noise_frac": 0.01})


@dataclass(frozen=True)
class Day:
    """One validation on a machine that changes: fitted plans have a turn by themselves, then all take turns."""

    seed: int
    num_rounds: int
    slower: Mapping[Lane, float]
    since: float
    """The round in whose course the machine changes; a fraction is a place within it."""
    until: float = math.inf

    @property
    def plans(self) -> tuple[dict[str, Plan], dict[str, Plan]]:
        """Those that are fitted to, and those that are judged."""
        fitted = bootstrap_plans(WORKLOAD)
        judged = draw_plans(WORKLOAD, Draw(seed=3), number=NUM_JUDGED, without=fitted)
        return {f"fitted {n}": plan for n, plan in enumerate(fitted)}, {f"{n}": plan for n, plan in enumerate(judged)}

    def bursts(self) -> dict[str, list[Record]]:
        chance = random.Random(self.seed)
        fitted, judged = self.plans
        found: dict[str, list[Record]] = {name: [] for name in fitted | judged}
        for number in range(self.num_rounds + 1):
            names = list(fitted if number == 0 else fitted | judged)
            chance.shuffle(names)
            pace = math.exp(0.01 * chance.gauss(0, 1))
            for place, name in enumerate(names):
                now = number + place / len(names)
                slower = self.slower if self.since <= now < self.until else {}
                burst = iteration((fitted | judged)[name], tuple(sorted(slower.items())))
                found[name].append(scaled(burst, pace * math.exp(0.01 * chance.gauss(0, 1))))
        return found


@dataclass
class Coverage:
    num_inside: int = 0
    num_all: int = 0
    num_without: int = 0
    """Inside intervals that know nothing of the change."""

    def add(self, day: Day) -> MachineChange | None:
        bursts = day.bursts()
        fitted, judged = day.plans
        pairs = [pair for name in fitted for pair in pairs_of(WORKLOAD, quiet_record(bursts[name]))]
        plain = fit_calibration(pairs, MACHINE, machine="here", software={})
        rounds = Rounds(WORKLOAD, bursts, day.num_rounds)
        known = as_it_changed(plain, rounds, fitted)
        for name, plan in judged.items():
            measured_s = quiet_seconds([seconds_of(burst) for burst in bursts[name]])
            widened, as_fitted = intervals(plan, [known, known.model_copy(update={"states": ()})])
            self.num_all += 1
            self.num_inside += widened.contains(measured_s)
            self.num_without += as_fitted.contains(measured_s)
        return rounds.change


def intervals(plan: Plan, calibrations: Sequence[Calibration]) -> list[Interval]:
    """Of the same times, by what each calibration knows of its errors."""
    costs = CostModel.of(WORKLOAD, MACHINE, calibrations[0])
    contention = ContentionModel.for_plan(plan, MACHINE, calibrations[0])
    schedule, timing = simulate_plan(plan, WORKLOAD, costs, contention)
    drawn = DrawnTimings(schedule, costs.durations_s(schedule), contention, timing)
    found = []
    for known in calibrations:
        errors = ErrorModel.of(WORKLOAD, MACHINE, known)
        found.append(interval_of(timing.iteration_s, time_logs(drawn, DrawnMachine(errors)), errors))
    assert None not in found
    return [one for one in found if one is not None]


def days(slower: Mapping[Lane, float]) -> Sequence[Day]:
    """The machine changes in the first third of few rounds, so that quiet shares are of before and of after."""
    chance = random.Random(len(slower))
    return [Day(seed, 3 + seed % 2, slower, 1 + chance.random()) for seed in range(examples(40, 4))]


@some_quick("slower", [CORE, LINK], ids=["a core", "a link"], quick=1)
def test_intervals_hold_where_the_machine_changes_while_plans_are_judged(slower: Mapping[Lane, float]) -> None:
    found = Coverage()
    for day in days(slower):
        assert found.add(day) is not None
    assert found.num_inside >= 0.85 * found.num_all, found
    # The wrong variant: intervals of the machine as the calibration knows it.
    assert found.num_without < 0.85 * found.num_all, found


def rounds_of(day: Day) -> Rounds:
    return Rounds(WORKLOAD, day.bursts(), day.num_rounds)


@pytest.mark.parametrize("num_rounds", [3, 4, 8])
def test_a_machine_that_stays_as_it_is_has_not_changed(num_rounds: int) -> None:
    day = Day(num_rounds, num_rounds, {}, math.inf)
    rounds = rounds_of(day)
    assert rounds.change is None
    known = Calibration(hardware_name=MACHINE.name, machine="here", iteration_noise_frac=0.07)
    for fitted in (None, day.plans[0]):
        assert as_it_changed(known, rounds, fitted) == known


def test_when_and_how_much_a_machine_changed_is_said() -> None:
    rounds = rounds_of(Day(2, 8, LINK, since=3.9, until=6.9))
    change = rounds.change
    assert change is not None
    assert (change.first_round, change.last_round) == (4, 6)
    assert set(change.lanes) == set(LINK)
    assert list(change.lanes.values()) == pytest.approx([2.0, 2.0], rel=0.1)
    words = change_words(change, 8)
    assert "from round 4 to 6 of 8" in words
    assert "host to device 2.0" in words
    assert "compute" not in words
    # The wrong variant: the pace of all plans together, of which most have little on the link.
    assert rounds.drift_frac < 0.1


def test_a_change_is_no_noise() -> None:
    """What is known of a plan within a state does not suffer from the other state."""
    day = Day(4, 4, LINK, since=3.0)
    rounds, bursts = rounds_of(day), day.bursts()
    changed = [name for name in day.plans[1] if scatter_frac([seconds_of(one) for one in bursts[name]]) > 0.1]
    assert changed
    for name in changed:
        assert uncertainty_frac(rounds.steady_seconds(name)) < 0.03
        # The wrong variant: bursts of both states together.
        assert uncertainty_frac([seconds_of(one) for one in bursts[name]]) > 0.05


def test_a_calibration_of_another_day_is_one_of_the_quieter_state() -> None:
    """Whether the neighbour came or went."""
    known = Calibration(hardware_name=MACHINE.name, machine="here")
    for since, until in ((4.0, math.inf), (0.0, 4.0)):
        found = as_it_changed(known, rounds_of(Day(5, 6, CORE, since, until)), None)
        of_states = sorted(state[Lane.COMPUTE] for state in found.states)
        assert of_states == pytest.approx([1.0, CORE[Lane.COMPUTE]], rel=0.05)


def test_a_judged_calibration_of_other_models_says_what_its_intervals_allow_for() -> None:
    known = Calibration(hardware_name=MACHINE.name, machine="here", fitted_to=("a", "b", "c"))
    (stated,) = transfer_notes(known, "d")
    (measured,) = transfer_notes(known.model_copy(update={"transfer_error_frac": 0.031, "num_transfers": 3}), "d")
    assert "a, b, c" in stated
    assert "10.0%" in stated
    assert "3.1%" in measured
    assert "3 models left out" in measured
    assert transfer_notes(known, "a") == []

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
from protwin.calibration.validation.changes import Rounds, as_it_changed
from protwin.calibration.validation.drawing import Draw, draw_plans
from protwin.calibration.validation.fidelity import MachineChange
from protwin.calibration.validation.quiet import quiet_record, quiet_seconds, seconds_of
from protwin.shared.schema.calibration import Calibration, Factor
from protwin.shared.schema.plan import Plan
from protwin.shared.schema.record import Origin, Record
from protwin.shared.schema.schedule import Lane, TaskKind
from protwin.sim import simulate
from tests.calibration.fitting.test_budgeted import swappable
from tests.calibration.fitting.test_fit import MACHINE, TRUTH, a_workload
from tests.proof_size import examples

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
        judged = draw_plans(WORKLOAD, Draw(seed=self.seed), number=NUM_JUDGED, without=fitted)
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
            self.num_all += 1
            self.num_inside += self._holds(plan, known, measured_s)
            self.num_without += self._holds(plan, known.model_copy(update={"states": ()}), measured_s)
        return rounds.change

    @staticmethod
    def _holds(plan: Plan, known: Calibration, measured_s: float) -> bool:
        interval = simulate(plan, WORKLOAD, MACHINE, known).iteration_interval_s
        assert interval is not None
        return interval.contains(measured_s)


def days(slower: Mapping[Lane, float]) -> Sequence[Day]:
    """The machine changes in the first third of few rounds, so that quiet shares are of before and of after."""
    chance = random.Random(len(slower))
    return [Day(seed, 3 + seed % 2, slower, 1 + chance.random()) for seed in range(examples(40, 6))]


@pytest.mark.parametrize("slower", [CORE, LINK], ids=["a core", "a link"])
def test_intervals_hold_where_the_machine_changes_while_plans_are_judged(slower: Mapping[Lane, float]) -> None:
    found = Coverage()
    for day in days(slower):
        assert found.add(day) is not None
    assert found.num_inside >= 0.85 * found.num_all, found
    # The wrong variant: intervals of the machine as the calibration knows it.
    assert found.num_without < 0.85 * found.num_all, found

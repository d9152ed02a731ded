"""Judging predictions of one model on this machine, by plans that nobody has chosen or fitted to.

Plans that a calibration is fitted to and random plans that it is judged by take turns, so that all meet the same
minutes (``turns.py``); of every plan the quiet share counts (``quiet.py``).  One of the fitted plans is the control:
how its time drifts says what the machine did meanwhile.

Several ranks judge predictions of several ranks: all of them run the same plans in the same order, and what counts is
the mean over ranks, of peaks the highest.  A task that ranks do together lasts from when its rank comes to it until it
is done: what a rank waits for the others is in it, in what factors are fitted to as in what they are judged by.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from ...runtime.model.identity import software_versions
from ...shared.basics.errors import CalibrationError
from ...shared.basics.units import format_duration
from ...shared.schema.calibration import Calibration, Contention
from ...shared.schema.optimizer import Optimizer
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from ...sim.engine.simulator import simulate
from ..fitting.fit import fit_calibration, pairs_of
from ..fitting.optimizer_costs import optimizer_costs
from ..fitting.slowdowns import measure_slowdowns
from ..fitting.subject import Subject
from .changes import Rounds, as_it_changed, change_words, transfer_notes
from .drawing import Draw, draw_plans, guaranteed_bytes, plan_words
from .fidelity import Fidelity
from .judging import Judgement
from .picks import search_picks
from .quiet import drift_frac, quiet_record, quiet_seconds, seconds_of, uncertainty_frac
from .summary import Found, summary_of
from .turns import Turns

_LEAST_ROUNDS: Final = 3
"""Fewer say nothing of how a plan scatters."""
_USUAL_ROUNDS: Final = 6
"""What time is planned for."""
_LEAST_PLANS: Final = 3
_SETTLED_FRAC: Final = 0.005
"""Uncertainty of the usual plan at which more rounds are not worth their time."""
_LARGEST_FRAC: Final = 0.10
"""Uncertainty of the usual plan beyond which nothing can be said of errors of a few percent."""
_PLAIN: Final = 4
"""Times as many plain steps as steps of one plan: all are compared with them."""
_OPTIMIZER_SECONDS: Final = 4.0
_RESERVE_FRAC: Final = 0.05
"""Of the time, beside what fitting and predicting took the first time."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """By what predictions are judged, and how long."""

    num_plans: int = 12
    """Random plans; fewer where time or budget allow no more, which is said."""
    seed: int = 0
    minutes: float | None = None
    """What all of it may take; None for as many rounds as ``most_rounds`` says."""
    most_rounds: int = 20
    """Times that every plan has its turn, at most: fewer if the measurement is certain before."""
    steps: int = 3
    """Iterations of a turn that count."""
    most_micro_batches: int = 3
    device_budget_bytes: int | None = None
    """What drawn plans and the search keep to; None: the search gets the middle of what drawn plans need."""
    slowdown_seconds: float = 10.0
    """For measuring how lanes slow each other."""
    calibration: Calibration | None = None
    """What is judged; None: one that is fitted meanwhile, to plans that take turns with the judged ones."""

    def check(self) -> None:
        """Raise CalibrationError if figures are out of range."""
        if self.minutes is not None and not self.minutes > 0:
            raise CalibrationError(f"{self.minutes:g} minutes are no time. Give 3 or more.")
        for name, least in (("num_plans", _LEAST_PLANS), ("most_rounds", _LEAST_ROUNDS), ("steps", 1)):
            if getattr(self, name) < least:
                raise CalibrationError(f"{name} is {getattr(self, name)}; fewer than {least} say nothing.")


def validate(
    subject: Subject, trial: Trial, *, on_progress: Callable[[int, int], None] | None = None
) -> tuple[Fidelity, dict[str, Record]]:
    """Predict and measure random plans and the search's pick; none of them is fitted to.

    The model is afterwards what it was.  Where ``subject`` has a folder on a disk, plans with chunks there are among
    them.  Where it has a world of several ranks, all of them call this and get the same, and the fastest plan of every
    mode is among the plans.  Gives the quiet Record of every plan of this rank beside what was found.

    Raises CalibrationError if ``trial`` makes no sense, its calibration was made on another machine or with other
    software, its minutes are too few, or the machine is too noisy; InfeasibleError if no plan keeps to the budget.
    """
    trial.check()
    if trial.calibration is not None:
        check_made_here(trial.calibration, subject)
    with subject.left_as_found(), Turns(subject, steps=trial.steps) as turns:
        return _Validation(subject, trial, turns, on_progress).run()


def check_made_here(calibration: Calibration, subject: Subject) -> None:
    """Raise CalibrationError unless ``calibration`` was made on this machine, with the software that is here."""
    here = subject.make_device().description
    if calibration.machine != here or calibration.hardware_name != subject.hardware.name:
        raise CalibrationError(
            f"the calibration was made on {calibration.machine}, which is not {here}: what is measured here says "
            f"nothing of it. Calibrate this machine: protwin calibrate"
        )
    software = software_versions()
    for name, version in calibration.software.items():
        if name in software and software[name] != version:
            raise CalibrationError(
                f"the calibration was made with {name} {version}, and here is {software[name]}, which may be faster or "
                f"slower. Calibrate anew: protwin calibrate"
            )


@dataclass
class _Validation:
    """One validation, from its first turn to what it finds."""

    subject: Subject
    trial: Trial
    turns: Turns
    on_progress: Callable[[int, int], None] | None
    begun_s: float = field(default_factory=time.perf_counter)
    notes: list[str] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    contention: Sequence[Contention] = ()
    """How lanes slow each other, for every fit."""
    optimizers: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every calibration: steps of optimizers other than AdamW."""
    thinking_s: float = 0.0
    """What a fit and a prediction of every drawn plan take: they come once more at the end."""

    def run(self) -> tuple[Fidelity, dict[str, Record]]:
        """Everything."""
        subject, trial = self.subject, self.trial
        chosen = subject.plans()
        fitted = {f"fitted {place}": plan for place, plan in enumerate(chosen)}
        control = f"fitted {len(chosen) // 2}"
        if trial.calibration is None:
            self._measure_machine()
        else:
            # Nothing is fitted: one plan alone tells what the machine does.
            fitted = {control: fitted[control]}
        self.turns.add(fitted)
        for name in fitted:
            self.turns.turn(name)
        thinking_s = time.perf_counter()
        first = self._calibration(fitted)
        self.thinking_s = time.perf_counter() - thinking_s
        judged, budget_bytes = self._judged(first, chosen)
        if not self.turns.add(judged):
            self.notes.append("Memory does not hold all trainings at once, so every turn began a training anew.")
        num_rounds = self._play(judged)
        seconds = {name: [seconds_of(burst) for burst in bursts] for name, bursts in self.turns.bursts.items()}
        drift = drift_frac({name: found[-num_rounds:] for name, found in seconds.items()})
        rounds = Rounds(subject.workload, self.turns.bursts, num_rounds)
        self._check_certain([rounds.steady_seconds(name) for name in judged], num_rounds)
        is_fitted = trial.calibration is None
        calibration = as_it_changed(self._calibration(fitted), rounds, fitted if is_fitted else None)
        self.notes += [] if rounds.change is None else [change_words(rounds.change, num_rounds)]
        self.notes += [] if is_fitted else transfer_notes(calibration, subject.workload.model_name)
        judgement = Judgement()
        for name in judged:
            judgement.add(subject, calibration, name, self.turns.bursts[name])
        found = Found(
            judgement=judgement,
            machine=calibration.machine,
            budget_bytes=budget_bytes,
            halves=[{name: quiet_seconds(seconds[name][half::2]) for name in judged} for half in (0, 1)],
            plain_s=tuple(self.plain_s),
            run={
                "drift_frac": drift,
                "change": rounds.change,
                "control_s": tuple(seconds[control][-num_rounds:]),
                "num_rounds": num_rounds,
                "seed": trial.seed,
                "seconds": time.perf_counter() - self.begun_s,
                "notes": tuple(self.notes),
            },
        )
        summary = subject.of_first(lambda: summary_of(subject, found))
        return summary, {name: quiet_record(bursts) for name, bursts in self.turns.bursts.items()}

    def _measure_machine(self) -> None:
        """What is fitted to no plan: how lanes slow each other, and steps of optimizers other than AdamW."""
        subject, seconds = self.subject, self.trial.slowdown_seconds
        self.contention = measure_slowdowns(
            subject.make_device(), seconds=seconds, disk_folder=subject.disk_folder, world=subject.world
        )
        if subject.optimizer is not Optimizer.ADAMW:
            on_host, on_device = subject.of_first(
                lambda: optimizer_costs(
                    subject.make_device(), subject.hardware_of_rank, seconds=min(_OPTIMIZER_SECONDS, seconds)
                )
            )
            self.optimizers = {
                "host_optimizer_factors": on_host.factors,
                "device_optimizer_factors": on_device.factors,
                "host_optimizer_tensor_s": on_host.tensor_s,
                "device_optimizer_tensor_s": on_device.tensor_s,
            }

    def _calibration(self, fitted: Mapping[str, Plan]) -> Calibration:
        """The one that is judged, or what the quiet bursts of ``fitted`` give; of all ranks, and the same on all."""
        subject = self.subject
        if self.trial.calibration is not None:
            return self.trial.calibration
        records = [quiet_record(self.turns.bursts[name]) for name in fitted]
        pairs = [pair for record in records for pair in pairs_of(subject.workload, record)]
        return subject.of_first(
            lambda: fit_calibration(
                pairs,
                subject.hardware,
                machine=subject.make_device().description,
                software=software_versions(),
                contention=self.contention,
                optimizers=self.optimizers,
            )
        )

    # -- plans -------------------------------------------------------------------------------------------------------

    def _judged(self, calibration: Calibration, fitted: Sequence[Plan]) -> tuple[dict[str, Plan], int]:
        """Plans to judge by, by name, and the budget of the search: as many as there is time for."""
        subject, trial = self.subject, self.trial
        draw = Draw(
            seed=trial.seed,
            device_budget_bytes=trial.device_budget_bytes,
            optimizer=subject.optimizer,
            has_disk=subject.measures_disk,
            num_ranks=subject.num_ranks,
            most_micro_batches=trial.most_micro_batches,
        )
        drawn = draw_plans(subject.workload, draw, number=trial.num_plans, without=fitted)
        if len(drawn) < trial.num_plans:
            self.notes.append(f"There are {len(drawn)} different plans, and {trial.num_plans} were asked for.")
        needs = [guaranteed_bytes(plan, subject.workload) for plan in drawn]
        budget_bytes = trial.device_budget_bytes or (min(needs) + max(needs)) // 2
        picks = subject.of_first(lambda: search_picks(subject, calibration, budget_bytes))
        number = subject.of_first(lambda: self._affordable(calibration, drawn, tuple(picks.values())))
        if number < len(drawn):
            self.notes.append(f"Time was enough for {number} of {len(drawn)} plans; give more minutes for all of them.")
        named = {
            f"{place}: {plan_words(plan, subject.workload)}": plan for place, plan in enumerate(drawn[:number], start=1)
        }
        return named | picks, budget_bytes

    def _affordable(self, calibration: Calibration, drawn: Sequence[Plan], picks: Sequence[Plan]) -> int:
        """How many of ``drawn`` there is time for, beside ``picks``.  Raises CalibrationError if too few."""
        minutes, turns = self.trial.minutes, self.turns
        if minutes is None:
            return len(drawn)

        begun_s = time.perf_counter()
        predicted_s = {
            plan.identity: simulate(plan, self.subject.workload, self.subject.hardware, calibration).iteration_s
            for plan in (*drawn, *picks)
        }
        self.thinking_s += time.perf_counter() - begun_s
        usual_s = {name: quiet_seconds([seconds_of(one) for one in bursts]) for name, bursts in turns.bursts.items()}
        a_turn = statistics.median(turns.spent_s[name] / usual_s[name] for name in usual_s)
        a_begin = statistics.median(turns.begin_s[name] / usual_s[name] for name in usual_s)
        left_s = self._left_s(minutes)

        def cost_s(plan: Plan) -> float:
            return predicted_s[plan.identity] * (a_begin + _USUAL_ROUNDS * a_turn)

        fixed_s = _USUAL_ROUNDS * sum(turns.spent_s.values()) + sum(map(cost_s, picks))
        need_s, number = fixed_s, 0
        for plan in drawn:
            need_s += cost_s(plan)
            if need_s > left_s:
                break
            number += 1
        if number < min(_LEAST_PLANS, len(drawn)):
            least_s = fixed_s + sum(map(cost_s, drawn[:_LEAST_PLANS])) + (60 * minutes - left_s)
            raise CalibrationError(
                f"{minutes:g} minutes are too few to say anything: {_LEAST_PLANS} plans of {_USUAL_ROUNDS} turns each "
                f"take about {format_duration(least_s)}. Give more minutes, or a smaller model or batch."
            )
        return number

    def _left_s(self, minutes: float) -> float:
        """What is left of the time for turns."""
        return (1 - _RESERVE_FRAC) * 60 * minutes - self.thinking_s - (time.perf_counter() - self.begun_s)

    # -- turns -------------------------------------------------------------------------------------------------------

    def _play(self, judged: Mapping[str, Plan]) -> int:
        """Rounds until the measurement is certain or time is over; gives how many."""
        subject, trial, turns = self.subject, self.trial, self.turns
        most = trial.most_rounds
        done = 0
        plain_step = subject.plain_step()

        def told() -> None:
            nonlocal done
            done += 1
            if self.on_progress is not None:
                self.on_progress(done, most * len(turns.names))

        for turn in range(most):
            begun_s = time.perf_counter()
            self._plain(plain_step)
            turns.play(random.Random(trial.seed + turn), told)
            round_s = time.perf_counter() - begun_s
            if subject.of_first(partial(self._is_over, turn + 1, round_s, judged)):
                return turn + 1
        return most

    def _is_over(self, num_rounds: int, round_s: float, judged: Mapping[str, Plan]) -> bool:
        """Raises CalibrationError if time is over before anything can be said."""
        minutes = self.trial.minutes
        left_s = float("inf")
        if minutes is not None:
            left_s = self._left_s(minutes)
        if num_rounds < _LEAST_ROUNDS:
            if left_s + 60 * (minutes or 0) < 0:
                raise CalibrationError(
                    f"{minutes:g} minutes are too few to say anything: a round of {len(self.turns.names)} plans takes "
                    f"{format_duration(round_s)}, far longer than the first turns did. Give more minutes."
                )
            return False
        if round_s > left_s:
            return True
        if num_rounds < _USUAL_ROUNDS:
            return False
        return self._uncertainty_frac([[seconds_of(b) for b in self.turns.bursts[name]] for name in judged]) < (
            _SETTLED_FRAC
        )

    def _uncertainty_frac(self, seconds: Sequence[Sequence[float]]) -> float:
        return statistics.median(uncertainty_frac(found) for found in seconds)

    def _check_certain(self, seconds: Sequence[Sequence[float]], num_rounds: int) -> None:
        """Raise CalibrationError if the machine is too noisy."""
        found = self._uncertainty_frac(seconds)
        if found > _LARGEST_FRAC:
            raise CalibrationError(
                f"the machine is too noisy to judge predictions: after {num_rounds} rounds the usual plan's iteration "
                f"is known to ±{found:.0%}, and {_LARGEST_FRAC:.0%} is the most that says anything. Let other programs "
                f"end, or give more minutes."
            )

    def _plain(self, step: Callable[[], None] | None) -> None:
        """Steps of the plain loop, which have their turn too; the first two do not count."""
        for number in range(0 if step is None else _PLAIN * self.trial.steps + 2):
            assert step is not None
            begun_s = time.perf_counter()
            step()
            self.plain_s += [time.perf_counter() - begun_s] if number >= 2 else []

"""How true predictions of one model are on one machine: what a validation finds, plan by plan and altogether."""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ...shared.basics.documents import Document, FrozenModel
from ...shared.basics.interval import Interval
from ...shared.schema.plan import Plan
from ...shared.schema.schedule import Lane, TaskKind


class PlanFidelity(FrozenModel):
    """One plan, predicted and measured."""

    name: str
    plan: Plan
    predicted_iteration_s: float
    iteration_interval_s: Interval | None = None
    """Where the measured iteration was expected; None if the prediction does not say."""
    measured_iteration_s: float
    """Mean of the quiet share of its bursts."""
    iteration_noise_frac: float
    """Of the measurement: how iterations of this plan scatter, as a median absolute deviation."""
    uncertainty_frac: NonNegativeFloat | None = None
    """Standard deviation of ``measured_iteration_s``, over it; None in files that do not say."""
    predicted_peak_bytes: int
    peak_interval_bytes: Interval | None = None
    """Where the measured peak was expected; None if the prediction does not say."""
    measured_peak_bytes: int
    guaranteed_peak_bytes: int
    retimed_peak_bytes: int | None = None
    """What the account of memory gives for the measured times of tasks: what it is off by is not the times' doing.
    None of several ranks, and in files that do not say."""
    predicted_collectives_s: float | None = None
    """Seconds of all tasks of an iteration that ranks do together; None for one rank."""
    measured_collectives_s: float | None = None

    @property
    def collectives_error_frac(self) -> float | None:
        """Signed, predicted over measured minus one; None for one rank."""
        if self.predicted_collectives_s is None or self.measured_collectives_s is None:
            return None
        return self.predicted_collectives_s / self.measured_collectives_s - 1

    @property
    def iteration_error_frac(self) -> float:
        """Signed, predicted over measured minus one."""
        return self.predicted_iteration_s / self.measured_iteration_s - 1

    @property
    def peak_error_frac(self) -> float:
        """Signed, predicted over measured minus one."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1

    @property
    def time_is_covered(self) -> bool | None:
        """Whether the measured iteration lies in its interval; None without one."""
        interval = self.iteration_interval_s
        return None if interval is None else interval.contains(self.measured_iteration_s)

    @property
    def peak_is_covered(self) -> bool | None:
        """Whether the measured peak lies in its interval; None without one."""
        interval = self.peak_interval_bytes
        return None if interval is None else interval.contains(self.measured_peak_bytes)


class KindFidelity(FrozenModel):
    """All tasks of one kind, over one iteration of every judged plan."""

    kind: TaskKind
    num_tasks: NonNegativeInt
    predicted_s: NonNegativeFloat
    """Durations summed, each from when the task could begin until it had ended."""
    measured_s: NonNegativeFloat
    critical_predicted_s: float
    """Of these, what lies on the critical path of its iteration."""
    critical_measured_s: float
    blame_frac: float
    """Signed: by how much of the measured iterations the prediction is off on the critical path with this kind.  Over
    all kinds they add up to the error of all iterations together."""


class MachineChange(FrozenModel):
    """Rounds in which the machine was another one than in the rest."""

    first_round: PositiveInt
    """Rounds count from 1."""
    last_round: PositiveInt
    lanes: dict[Lane, PositiveFloat]
    """Seconds of the tasks of a lane within these rounds, over those in the others; lanes that changed alone."""

    def __contains__(self, number: int) -> bool:
        return self.first_round <= number <= self.last_round


class Fidelity(Document):
    """All plans of one model on one machine."""

    KIND: ClassVar[str] = "fidelity"

    model: str
    machine: str
    plans: tuple[PlanFidelity, ...]
    budget_bytes: int
    """The search was given this much device memory; plans that may need more do not count for its regret."""
    mean_peak_error_frac: float
    worst_peak_error_frac: float
    mean_iteration_error_frac: float
    signed_mean_iteration_error_frac: float | None = None
    """Mean of the signed errors, below 0 where predictions are too fast; None in files that do not say."""
    worst_iteration_error_frac: float
    rank_correlation: float
    """Spearman's, of predicted iteration times and measured ones."""
    rank_correlation_beyond_noise: float | None = None
    """The same where plans that measurements cannot tell apart need no order; None if they tell none apart."""
    search_regret_frac: float
    """Measured time of the search's pick over that of the best plan within the budget, minus one.

    The best plan is chosen by one half of the measurements and timed by the other, both ways: the smallest of many
    noisy figures is smaller than any plan is fast.
    """
    median_noise_frac: float | None = None
    """Of the plans' ``iteration_noise_frac``; None in files that do not say, as what follows."""
    time_coverage_frac: float | None = None
    """Share of the measured iterations that lie in their 90 % intervals; None without intervals."""
    peak_coverage_frac: float | None = None
    """The same of peaks."""
    median_half_width_frac: float | None = None
    """Of the intervals of iterations, half of their width over the prediction."""
    mean_retimed_peak_error_frac: float | None = None
    """Mean error of the peaks that the account gives for the measured times."""
    num_over_guarantee: int | None = None
    """Plans whose measured peak was above the guaranteed one."""
    kinds: tuple[KindFidelity, ...] = ()
    """Kinds of tasks, the one to blame most first."""
    drift_frac: float | None = None
    """How far the machine's pace drifted from one round to the next: median absolute deviation over the median.
    Intervals allow for as much."""
    control_s: tuple[float, ...] = ()
    """Seconds of an iteration of one plan in every round: what the machine did meanwhile."""
    change: MachineChange | None = None
    """What the machine did for good or for a while, if it did: intervals then hold for it as it was and as it became;
    None if it did not, and in files that do not say."""
    num_rounds: int | None = None
    """Times that every plan had its turn."""
    seed: int | None = None
    """Of the plans that were drawn."""
    seconds: float | None = None
    """What the validation took."""
    notes: tuple[str, ...] = ()
    """What a reader should know: fewer plans than asked for, a machine that drifted."""
    plain_iteration_s: float | None = None
    """Median of a plain loop without a plan, everything on the device; None where none was measured."""
    plain_ratio: float | None = None
    """Measured iteration of the plan that the search picks without a budget, over that of the plain loop."""
    plain_ratio_in_budget: float | None = None
    """The same of the plan that it picks within the budget."""
    num_ranks: int = 1
    mean_collectives_error_frac: float | None = None
    worst_collectives_error_frac: float | None = None
    mode_regret_frac: float | None = None
    """Measured time of the fastest plan in the mode that the search finds fastest, over that of the fastest plan in
    whichever mode was measured to be faster, minus one; None for one rank."""

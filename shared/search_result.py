"""The search result: the best plan that was found, what is proven about it, and the plans next to it."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from .files import Document, FrozenModel
from .plan import Plan
from .record import Record


class PlanOutcome(FrozenModel):
    """What the search knows of one plan that fits."""

    plan: Plan
    iteration_s: PositiveFloat
    is_simulated: bool
    """Whether the simulator ran it; otherwise it was replayed by the same rules, beside many others, and the two agree
    to five digits."""
    guaranteed_peak_device_bytes: NonNegativeInt
    """What no timing of the plan's schedule can exceed."""
    pinned_host_bytes: NonNegativeInt
    host_bytes: NonNegativeInt
    """Host memory that is not pinned: optimizer state of offloaded chunks."""


class Certificate(FrozenModel):
    """What the search proves, and how.

    Every candidate of the space is in exactly one of the five counts below ``num_candidates``.
    """

    num_candidates: PositiveInt
    """Distinct plans in the space."""
    num_bounded_by_memory: NonNegativeInt
    """Left out since a lower bound of their device peak, or their host memory, exceeds its budget."""
    num_bounded_by_time: NonNegativeInt
    """Left out since a lower bound of their iteration time is too high to win."""
    num_simulated: PositiveInt
    num_infeasible_simulated: NonNegativeInt
    """Compiled, but the guaranteed peak exceeded the budget although its lower bound did not."""
    num_undecided: NonNegativeInt = 0
    """Left over where a cap ended the search early; then nothing is proven about them."""
    best_iteration_s: PositiveFloat
    """The shortest iteration of all simulated plans."""
    best_unsimulated_bound_s: NonNegativeFloat | None
    """No decided plan that fits and was not simulated has a shorter iteration; None if all of these were simulated."""
    tolerance_frac: NonNegativeFloat

    @property
    def is_certified(self) -> bool:
        """Whether every plan of the space was simulated or excluded by a bound."""
        return self.num_undecided == 0

    @property
    def shortest_possible_s(self) -> float:
        """No decided plan that fits has a shorter iteration."""
        bound_s = self.best_unsimulated_bound_s
        return self.best_iteration_s if bound_s is None else min(self.best_iteration_s, bound_s)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        decided = (
            self.num_bounded_by_memory
            + self.num_bounded_by_time
            + self.num_simulated
            + self.num_infeasible_simulated
            + self.num_undecided
        )
        if decided != self.num_candidates:
            raise ValueError(f"the counts add up to {decided}, not to num_candidates {self.num_candidates}")
        return self


class SearchResult(Document):
    """The outcome of one search."""

    KIND: ClassVar[str] = "search_result"

    model_name: str
    hardware_name: str
    device_budget_bytes: PositiveInt
    host_budget_bytes: NonNegativeInt
    plan: Plan
    prediction: Record
    certificate: Certificate
    alternatives: tuple[PlanOutcome, ...]
    """The next best plans that differ in chunk size, persistent chunks or checkpointed blocks, fastest first."""
    pareto: tuple[PlanOutcome, ...]
    """The front of iteration time against guaranteed device peak, of the plans that the search looked at closely.

    Fastest first; each is slower than those before it, and needs at least a hundredth less memory.
    """

    @property
    def gap_frac(self) -> float:
        """How much faster than ``plan`` any plan of the space could at most be, as a fraction of its time."""
        return max(0.0, 1 - self.certificate.shortest_possible_s / self.prediction.iteration_s)

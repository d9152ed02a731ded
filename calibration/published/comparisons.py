"""How far a comparison of two plans of different kinds is to be trusted: published pairs of runs, and measured plans.

The error of a comparison is e = log((predicted b / predicted a) / (measured b / measured a)), of seconds.  What two
runs have in common (clocks, fused kernels, an overhead of every operation) cancels.  So comparisons are truer than
times.  Errors are told as ``Uncertainty`` counts them, as a fraction of the longer time: 1 - exp(-|e|), with the sign
of e.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import Any, Final

import numpy as np

from ...shared.methods.runtime_profile import Runtime
from ...shared.schema.plan import ParallelMode, Plan
from .measured_runs import MEASURED_RUNS, MeasuredRun
from .run_predictions import PredictedRun
from .runs import DATA_PARALLEL, REPLICATED, SHARDED, Prediction, Quantity

COVERED_FRAC: Final = 0.8
"""Share of comparisons whose error an uncertainty is to cover.

Errors have either sign.  So of plans whose predicted gain equals the uncertainty about one in ten is no faster than the
simpler plan.
"""


class Place(StrEnum):
    """Where parameters and their state lie, simplest first."""

    RESIDENT = "resident"
    SHARDED = "sharded"
    OFFLOADED = "offloaded"


class Activations(StrEnum):
    """What becomes of saved activations, simplest first."""

    KEPT = "kept"
    CHECKPOINTED = "checkpointed"
    SWAPPED = "swapped"


@dataclass(frozen=True, slots=True)
class PlanForm:
    """The means that a plan uses, to whatever extent.

    Finer than ``PlanKind``, which orders plans for a recommendation: a sharded plan may checkpoint blocks or not.
    """

    place: Place
    activations: Activations

    @property
    def uses_host(self) -> bool:
        """As ``PlanKind.uses_host``."""
        return self.place is Place.OFFLOADED or self.activations is Activations.SWAPPED


class Difference(StrEnum):
    """In what two plans differ."""

    EXTENT = "in extent alone"
    """They use the same means."""
    ACTIVATIONS = "activations"
    """What becomes of activations; parameters lie at the same place."""
    PLACE = "place of parameters"
    """Where parameters lie, whatever becomes of activations."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One plan with both of its times."""

    name: str
    subject: str
    """Model, shape and machine: plans of one subject can be compared."""
    form: PlanForm
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two plans of one subject, the simpler one first."""

    first: Timed
    second: Timed

    @property
    def predicted_ratio(self) -> float:
        """Seconds of the second over seconds of the first."""
        return self.second.predicted_s / self.first.predicted_s

    @property
    def measured_ratio(self) -> float:
        """Seconds of the second over seconds of the first."""
        return self.second.measured_s / self.first.measured_s

    @property
    def error_frac(self) -> float:
        """Signed fraction of the longer time: negative where the second plan is predicted too fast."""
        error = math.log(self.predicted_ratio / self.measured_ratio)
        return math.copysign(-math.expm1(-abs(error)), error)

    @property
    def difference(self) -> Difference:
        """In what the plans differ."""
        if self.first.form.place is not self.second.form.place:
            return Difference.PLACE
        is_equal = self.first.form.activations is self.second.form.activations
        return Difference.EXTENT if is_equal else Difference.ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Spread:
    """The errors of some comparisons, as fractions of the longer time."""

    num: int
    mean: float
    """Of the sizes of the errors."""
    median: float
    """Likewise."""
    covering: float
    """The least size that ``COVERED_FRAC`` of the errors do not exceed."""
    low: float
    """The most negative error."""
    high: float

    @classmethod
    def of(cls, compared: Iterable[Comparison]) -> Spread:
        """Of at least one comparison."""
        errors = np.array([comparison.error_frac for comparison in compared])
        sizes = np.abs(errors)
        median, covering = np.quantile(sizes, [0.5, COVERED_FRAC], method="inverted_cdf")
        found = (float(error) for error in (sizes.mean(), median, covering, errors.min(), errors.max()))
        return cls(len(errors), *found)


def comparisons(timed: Sequence[Timed]) -> list[Comparison]:
    """All pairs of plans of one subject, the simpler plan first."""
    order = sorted(timed, key=lambda one: (_complexity(one.form), one.name))
    return [Comparison(a, b) for a, b in combinations(order, 2) if a.subject == b.subject]


def _complexity(form: PlanForm) -> tuple[int, int]:
    return list(Place).index(form.place), list(Activations).index(form.activations)


def published_comparisons(predicted: Mapping[str, PredictedRun]) -> tuple[list[Comparison], list[Comparison]]:
    """Pairs of published runs of one source, model, sequence length, machine and number of ranks, computed alike.

    First those that differ in their plan alone, then those whose micro-batches differ too: their seconds are those of a
    token.
    """
    at_one_shape = comparisons(timed_runs(predicted, _shape))
    known = {(pair.first.name, pair.second.name) for pair in at_one_shape}
    on_one_machine = comparisons(timed_runs(predicted, _machine))
    return at_one_shape, [pair for pair in on_one_machine if (pair.first.name, pair.second.name) not in known]


def timed_runs(predicted: Mapping[str, PredictedRun], subject: Callable[[MeasuredRun], str]) -> list[Timed]:
    """Published runs whose speed was measured, in seconds of a token."""
    return [
        Timed(
            name=run.id,
            subject=subject(run),
            form=form_of_run(run),
            predicted_s=predicted[run.id].iteration_s / run.num_tokens,
            measured_s=run.iteration_s / run.num_tokens,
        )
        for run in MEASURED_RUNS
        if run.iteration_s is not None
    ]


def form_of_run(run: MeasuredRun) -> PlanForm:
    """The means that a published run used."""
    is_sharded = run.parallel is ParallelMode.SHARDED
    uses_host = run.offloaded or run.host_stepped
    place = Place.OFFLOADED if uses_host else Place.SHARDED if is_sharded else Place.RESIDENT
    return PlanForm(place, Activations.CHECKPOINTED if run.checkpointed_frac else Activations.KEPT)


def _machine(run: MeasuredRun) -> str:
    trained = f"{run.dtype}, {run.autocast}, {run.lora_rank}, {run.lora_dropout}, {run.lora_targets}"
    trained += f", {run.quantized}, {run.compiled}, {run.float8}, {run.float8_gather}, {run.runtime is Runtime.FSDP2}"
    trained += f", {run.kernels}, {run.runtime.is_deepspeed}"
    where = f"{run.num_ranks} of {run.machine}, {run.network}, {run.changes}"
    return f"{run.source}: {run.model} ({trained}) at {run.sequence_length} tokens on {where}"


def _shape(run: MeasuredRun) -> str:
    return f"{_machine(run)}, {run.batch_size} x {run.micro_batches}"


def modes_of_r1(predictions: Iterable[Prediction], measured_s: Mapping[str, float]) -> list[Timed]:
    """R1's modes on four boards: of offloaded ones the plan that the run's own memory figures point to."""
    places = {DATA_PARALLEL: Place.RESIDENT, REPLICATED: Place.OFFLOADED, SHARDED: Place.OFFLOADED}
    chosen = [p for p in predictions if (p.row, p.quantity) == ("R1", Quantity.ITERATION) and p.case in places]
    # Where there is a variant, it comes last.
    found = {p.case: p.likely for p in sorted(chosen, key=lambda prediction: prediction.variant)}
    return [
        Timed(
            name=f"R1, {case}",
            subject="R1",
            form=PlanForm(places[case], Activations.CHECKPOINTED),
            predicted_s=likely_s,
            measured_s=measured_s[case],
        )
        for case, likely_s in found.items()
    ]


def timed_plans(fidelity: Iterable[Mapping[str, Any]]) -> list[Timed]:
    """Plans on one device that were predicted with a calibration and measured, from a result of bench-fidelity."""
    return [
        Timed(
            name=row["name"],
            subject=f"{model['model']} on {model['machine']}",
            form=_form_of_plan(Plan.model_validate(row["plan"])),
            predicted_s=row["predicted_iteration_s"],
            measured_s=row["measured_iteration_s"],
        )
        for model in fidelity
        for row in model["plans"]
    ]


def _form_of_plan(plan: Plan) -> PlanForm:
    """The form of a plan on one device: of what the host steps, the state lies there."""
    assert plan.parallel is ParallelMode.SINGLE
    place = Place.OFFLOADED if plan.n_buffer or plan.n_host_stepped else Place.RESIDENT
    if plan.n_swap:
        return PlanForm(place, Activations.SWAPPED)
    return PlanForm(place, Activations.CHECKPOINTED if plan.n_checkpoint else Activations.KEPT)

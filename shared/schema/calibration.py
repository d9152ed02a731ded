"""The calibration: how one machine differs from what the cost model says of it.

[Note: Kinds without runs]
Where no fitted run had a kind of tasks, one that does the same on the same lane counts: a forward for a teacher's, a
gather for a fetch of activations, CPU Adam for a sum of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from ..basics.documents import Document, FrozenModel
from .hardware import Hardware
from .optimizer import Optimizer
from .schedule import Lane, TaskKind

_MOST: Final = 1e6
"""Times, seconds and shares beyond it no machine measures, and arithmetic overflows."""
_MOST_SUM: Final = 1e40
"""Of products of seconds and bytes over many tasks."""
_ROUNDING: Final = 1e-6
"""Of sums: what their order moves them by."""
Times = Annotated[float, Field(gt=0, le=_MOST)]
"""How many times as much."""
Figure = Annotated[float, Field(ge=0, le=_MOST)]
"""Seconds, or a share."""
Sum = Annotated[float, Field(ge=0, le=_MOST_SUM)]
"""Of what cannot be negative."""
AnySum = Annotated[float, Field(ge=-_MOST_SUM, le=_MOST_SUM)]
"""Of seconds from which others were taken."""


class Factor(FrozenModel):
    """Measured over modelled seconds of one task kind."""

    value: Times = 1.0
    relative_std: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the value over itself, from the spread of the tasks that it was fitted to and of the runs
    that they are of: what slows a run down is in all of its tasks."""
    num_pairs: NonNegativeInt = 0


class Contention(FrozenModel):
    """How much slower each lane of a set runs while exactly these lanes run side by side."""

    lanes: tuple[Lane, ...] = Field(min_length=2)
    slowdowns: tuple[Times, ...]
    """One per lane, at least 1."""

    @model_validator(mode="after")
    def _matches(self) -> Self:
        if len(self.lanes) != len(self.slowdowns) or len(set(self.lanes)) != len(self.lanes):
            raise ValueError("slowdowns must name each lane once")
        if any(slowdown < 1 for slowdown in self.slowdowns):
            raise ValueError("a slowdown below 1 would make a lane faster in company than alone")
        return self


class MeanSeconds(FrozenModel):
    """What tasks took, in the mean."""

    seconds: Figure = 0.0
    num_tasks: Sum = 1.0
    """Of which earlier ones count in part."""


class Evidence(FrozenModel):
    """Sums over the tasks of one kind in all records, of which earlier ones count in part.

    Rows are what a task should take, 1, and the bytes that it is the first to read, all over the root of what it should
    take; tasks that should take nothing have sums of their own (``calibration/estimation/evidence.py``).
    """

    num_tasks: Sum = 0.0
    """Of those that should take something."""
    squares: Annotated[tuple[Sum, ...], Field(min_length=9, max_length=9)] = (0.0,) * 9
    """Products of every two columns, row by row of their matrix."""
    products: Annotated[tuple[AnySum, ...], Field(min_length=3, max_length=3)] = (0.0,) * 3
    """Of every column with the measured seconds, over the same root."""
    run_products: Annotated[tuple[AnySum, ...], Field(min_length=9, max_length=9)] = (0.0,) * 9
    """Sum over records of the products of every two of their own ``products``; all 0: unknown, as of files that were
    written before."""
    measured_square: Sum = 0.0
    """Squares of the measured seconds over the same root."""
    measured_s: Sum = 0.0
    """Measured seconds."""
    num_without_work: Sum = 0.0
    """Tasks that should take nothing."""
    without_work_s: Sum = 0.0
    """Their measured seconds."""
    without_work_square: Sum = 0.0
    """The squares of these."""
    known_precision: Annotated[tuple[Sum, ...], Field(min_length=3, max_length=3)] = (0.0,) * 3
    """One over the variance of what was known of each coefficient without sums."""
    known_values: Annotated[tuple[Sum, ...], Field(min_length=3, max_length=3)] = (0.0,) * 3
    """That times what was known."""

    @model_validator(mode="after")
    def _are_sums_of_products(self) -> Self:
        """Sums of products of the same numbers bound each other (Cauchy and Schwarz)."""
        size = range(3)
        own = [self.squares[4 * place] for place in size]
        most = 1 + _ROUNDING
        for i in size:
            for j in size:
                one, other = self.squares[3 * i + j], self.squares[3 * j + i]
                if abs(one - other) > _ROUNDING * max(one, other) or one * other > most * own[i] * own[j]:
                    raise ValueError("squares are not the products of the same columns")
            if self.products[i] ** 2 > most * own[i] * self.measured_square:
                raise ValueError("products do not belong to these squares and this measured_square")
        told = [self.run_products[4 * place] for place in size]
        for i in size:
            for j in size:
                one, other = self.run_products[3 * i + j], self.run_products[3 * j + i]
                is_even = abs(one - other) <= _ROUNDING * max(abs(one), abs(other))
                if not is_even or told[i] < 0 or one * other > most * told[i] * told[j]:
                    raise ValueError("run_products are not those of the products of runs")
        if _determinant(self.run_products) < -_ROUNDING * told[0] * told[1] * told[2]:
            raise ValueError("run_products are not those of the products of runs")
        if self.num_tasks > 0 and own[0] == 0:
            raise ValueError("tasks that should take something have no squares")
        if self.without_work_s**2 > most * self.num_without_work * self.without_work_square:
            raise ValueError("without_work_s does not belong to this without_work_square")
        return self


def _determinant(matrix: tuple[float, ...]) -> float:
    """Of 3 by 3 figures, row by row."""
    a, b, c, d, e, f, g, h, i = matrix
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)


class Calibration(Document):
    """Factors that make the simulator agree with one machine."""

    KIND: ClassVar[str] = "calibration"
    TABLES: ClassVar[str] = "tables.calibration:calibration_tables"

    hardware_name: str
    machine: str
    """The machine that was measured: processor or device, cores, memory."""
    software: dict[str, str] = {}
    hardware: Hardware | None = None
    """The description that factors are of: seconds by its figures, times these, are the machine's; None: unknown."""
    of_timed_phases: bool = True
    """Whether factors of compute were fitted to seconds of phases that were timed one by one on the machine."""
    of_modelled_phases: bool = False
    """Whether they were fitted to seconds that follow from operations and ``hardware``.  Both: to some of each."""
    factors: dict[TaskKind, Factor] = {}
    """Kinds that are absent have factor 1."""
    overhead_s: dict[TaskKind, Figure] = {}
    """Seconds added to every task of a kind: hooks, launches, thread hand-over."""
    overhead_std_s: dict[TaskKind, Figure] = {}
    """Standard deviation of each of these; of kinds that are absent a task's overhead is as unsure as its factor."""
    arrival_s_per_byte: dict[TaskKind, Figure] = {}
    """Seconds added to a task for every byte that it is the first to read since a copy brought it; absent: 0."""
    arrival_std_s_per_byte: dict[TaskKind, Figure] = {}
    """Standard deviation of each of these."""
    swapping: dict[TaskKind, MeanSeconds] = {}
    """Added to a task of a block in mode SWAP: each tensor that its forward saves is noted in Python, and each that its
    backward reads is made anew; absent: nothing."""
    evidence: dict[TaskKind, Evidence] = {}
    """What the coefficients were estimated from, for records to come; absent: they are all that is known."""
    contention: tuple[Contention, ...] = ()
    """Measured sets of lanes; sets that are absent are composed from what is known (``sim/costs/contention.py``)."""
    host_optimizer_factors: dict[Optimizer, Times] = {}
    """Measured over modelled seconds of a step on the host by itself; of AdamW, ``factors`` tell all."""
    device_optimizer_factors: dict[Optimizer, Times] = {}
    """The same of a step on the device."""
    host_optimizer_tensor_s: dict[Optimizer, Figure] = {}
    """Seconds that a step on the host takes for every tensor, however small, of optimizers that step one by one."""
    device_optimizer_tensor_s: dict[Optimizer, Figure] = {}
    """The same of a step on the device."""
    states: tuple[dict[Lane, Times], ...] = ()
    """States that the machine was in while it was measured: how many times as long as all else here says the tasks of a
    lane took in each; lanes that are absent did not change.  Empty: it was in one."""
    iteration_noise_frac: Figure = 0.0
    """Run-to-run spread of the measured iteration time: median absolute deviation over the median."""
    iteration_error_frac: Figure | None = None
    """Root mean square of the relative errors of iterations of runs that were left out of the fit, one plan at a time;
    None: unknown."""
    transfer_error_frac: Figure | None = None
    """Root mean square over models of the mean relative error of a model's iterations, each predicted by what was known
    from others; None: unknown."""
    num_transfers: NonNegativeInt = 0
    """Models that it was found from."""
    fitted_to: tuple[str, ...] = ()
    """Names of the workloads that the factors were fitted to."""
    num_runs: PositiveInt = 1

    @model_validator(mode="after")
    def _sets_are_distinct(self) -> Self:
        sets = [frozenset(entry.lanes) for entry in self.contention]
        if len(set(sets)) != len(sets):
            raise ValueError("contention names a set of lanes twice")
        return self

    def factor(self, kind: TaskKind) -> float:
        """The factor of a task kind, by [Note: Kinds without runs]; 1 where none was fitted."""
        found = self.factors.get(self.fitted_kind(kind))
        return found.value if found is not None else 1.0

    def overhead(self, kind: TaskKind) -> float:
        """Seconds added to every task of a kind; of kinds as ``factor`` says."""
        return self.overhead_s.get(self.fitted_kind(kind), 0.0)

    def arrival(self, kind: TaskKind) -> float:
        """Seconds added for every byte that has just come; of kinds as ``factor`` says."""
        return self.arrival_s_per_byte.get(self.fitted_kind(kind), 0.0)

    def swap_s(self, kind: TaskKind) -> float:
        """Seconds added to a task of a block in mode SWAP."""
        found = self.swapping.get(kind)
        return found.seconds if found is not None else 0.0

    def fitted_kind(self, kind: TaskKind) -> TaskKind:
        """The kind whose figures count for ``kind``: itself, or one that is like it ([Note: Kinds without runs])."""
        alike = _ALIKE.get(kind)
        return alike if alike is not None and kind not in self.factors else kind


_ALIKE: Final[Mapping[TaskKind, TaskKind]] = MappingProxyType(
    {
        TaskKind.TEACHER_FORWARD: TaskKind.FORWARD,
        TaskKind.LOSS: TaskKind.FORWARD,
        TaskKind.RECOMPUTE: TaskKind.FORWARD,
        TaskKind.ACTIVATION_FETCH: TaskKind.GATHER,
        TaskKind.ACTIVATION_OFFLOAD: TaskKind.GRADIENT_OFFLOAD,
        TaskKind.GRADIENT_ACCUMULATE: TaskKind.CPU_ADAM,
        TaskKind.GRADIENT_NORM: TaskKind.CPU_ADAM,
        TaskKind.PARAMETER_PROJECTION: TaskKind.GRADIENT_PROJECTION,
        TaskKind.HOST_PARAMETER_PROJECTION: TaskKind.HOST_GRADIENT_PROJECTION,
    }
)
"""What does the same on the same lane."""

"""How wrong a predicted time may be, and why: the sources that an interval is made of.

[Note: Sources of error]
A predicted duration is multiplied by what nobody knows: one factor for each *source*, log-normal, the same for every
task that it touches and for every plan on the machine.  Two plans share these factors, so that most of them cancels in
a comparison.  What is left has no task to belong to:

* the *model's error*, of each plan by itself: what the iteration is off by with the right factors.  A calibration knows
  it from the runs that it left out of its fit, one plan at a time (``Calibration.iteration_error_frac``): the root mean
  square of few errors, so that it scatters as Student's t with as many degrees of freedom.  The noise of those runs is
  in these errors, and is taken out;
* the *transfer*, of all plans for a workload that the calibration was not fitted to: measured, where it was fitted to
  three models or more, by leaving them out one at a time, and again Student's t;
* the *run*: what is measured is the typical iteration of one run, and another run measures another one.

A factor of compute is of one kind of seconds: of phases that were timed on the machine, or of operations by its
description.  Where the workload has seconds of the other kind, the factor says nothing of how far the two are apart:
that is a factor more, the same for all phases.

So the interval is one of the iteration time that a run of this plan will measure, not of single iterations, which
scatter more, nor of the mean over many runs, which scatters less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self

from ...shared.schema.calibration import Calibration
from ...shared.schema.hardware import DeviceKind, Hardware
from ...shared.schema.schedule import Lane, TaskKind
from ...shared.schema.workload import Workload
from ..costs.task_costs import OF_PHASES

Range = tuple[float, float]
"""True over predicted seconds: one case in twenty lies below the first, one in twenty above the second."""

_TAIL: Final = 1.6448536269514722
"""Standard deviations from the middle to the ends of the central 90 % of a normal distribution."""
DATA_SHEETS: Final[Mapping[Lane, Range]] = MappingProxyType(
    {
        # Kernels of an H100 are within 0.9 and 1.1 of their prediction (``make bench-sheets``); hosts that dispatch
        # slowly, kernels of older libraries and clocks under heat come on top.  Of the 213 published times of runs
        # whose parameters stay on devices 91 % are within these ends.
        Lane.COMPUTE: (0.85, 1.3),
        # PCIe and NVLink-C2C reach 75 to 95 % of their data sheet from pinned memory, less with several boards a root.
        Lane.H2D: (0.9, 1.6),
        Lane.D2H: (0.9, 1.6),
        # R5 of the published runs: 2.9 to 37 times; threads, sockets and which Adam decide.
        Lane.CPU_OPTIM: (0.8, 4.0),
        # NCCL's bus bandwidth over the links': 60 to 95 %, and copies into buffers that are not counted.
        Lane.COLLECTIVE: (0.9, 2.2),
        # Sequential figures of data sheets, against file systems and full disks.
        Lane.DISK: (0.8, 2.5),
    }
)
"""Of machines that nobody has measured.  The ends are ratios of measured to predicted times, rounded outwards; none is
fitted to single runs.  ``make published`` prints how many published runs the intervals contain."""
CPU_DEVICE: Final = (0.6, 2.0)
"""Of compute on a CPU that nobody has measured: one thread dispatches and computes, caches decide."""
MEASURED_PHASES: Final = (0.85, 1.5)
"""Of compute whose phases were timed on this very machine one by one, without a calibration: training meets other
caches, clocks and neighbours.  An estimate."""
UNMEASURED_KIND: Final = (0.7, 2.5)
"""Of kinds of tasks that no run of a calibration had, and that are like none that one had.  Plans with five to seven
swapped blocks took 1.25 to 1.6 times as long as predicted while no fitted run swapped (``make bench-fidelity``)."""
ALIKE_STD: Final = 0.15
"""Of a kind whose figures are those of another one ([Note: Kinds without runs] in ``shared/schema/calibration.py``), on
top of that one's.  Recomputation and forward, fitted each by itself, differ by up to a fifth."""
DATA_SHEET_PLAN_STD: Final = 0.06
"""Of one plan by itself, without a calibration: 80 % of 25 published pairs with and without checkpointing are within
10.1 %, that is 1.28 * sqrt(2) standard deviations."""
UNKNOWN_PLAN_STD: Final = 0.13
"""Of one plan by itself, of a calibration that does not say: the mean error of random plans of six models, each with
its own calibration of three runs, was 8 to 24 %, 12.6 % in the mean."""
TRANSFER_STD: Final = 0.10
"""Of all plans for a workload that a calibration of one or two models was not fitted to.  Factors of one kind differ by
up to a tenth between fits to different models on one machine. (``make bench-fidelity``)"""
FEWEST_MODELS: Final = 3
"""That a calibration must have been fitted to, for its errors of models left out to count: of two, each is predicted
by one other, which is not what predicts the third."""
RUN_NOISE: Final = 0.93
"""Standard deviation of what a run measures, over the median absolute deviation of its iterations: 1.48 makes a
standard deviation of it, 1.25 that of a median of one, and what disturbs a machine lasts: of all iterations of a run
about four are independent, which halves it.  Found in runs of ``make bench-fidelity``."""
MEMORY_MODEL: Final = (0.97, 1.06)
"""Measured over predicted peak of what is allocated, of workloads that were not run on the machine: three published
peaks of known plans are 1.01 to 1.03 times the prediction, those of eight LoRA runs 0.98 to 1.09, but for one."""


_MOST_STD: Final = 1.0
"""Of a coefficient that may as well be nothing, by definition."""


@dataclass(frozen=True)
class Source:
    """A factor that nobody knows, of every task of some kinds."""

    name: str
    low: float
    """One case in twenty is below: true over predicted."""
    high: float

    @classmethod
    def of_std(cls, name: str, std: float) -> Self:
        """A factor around 1 with this standard deviation of its logarithm."""
        return cls(name, math.exp(-_TAIL * std), math.exp(_TAIL * std))

    @property
    def log_mean(self) -> float:
        """Of its logarithm."""
        return (math.log(self.low) + math.log(self.high)) / 2

    @property
    def log_std(self) -> float:
        """Of its logarithm."""
        return (math.log(self.high) - math.log(self.low)) / (2 * _TAIL)


@dataclass(frozen=True, kw_only=True)
class ErrorModel:
    """Everything that a predicted time on one machine may be off by; see [Note: Sources of error]."""

    calibration: Calibration | None = None
    lanes: Mapping[Lane, Range]
    """Of kinds that no calibration has measured."""
    plan_std: float
    """The model's error, of each plan by itself."""
    plan_freedom: int | None = None
    """Errors that ``plan_std`` was found from; None: it is taken for known."""
    transfer_std: float = 0.0
    """Of all plans for one workload."""
    transfer_freedom: int | None = None
    """Models that ``transfer_std`` was found from; None: it is taken for known."""
    run_std: float = 0.0
    """Of what one run measures."""
    memory: Range = (1.0, 1.0)
    """Measured over predicted peak, apart from timing."""
    phases: Range | None = None
    """Of phases whose seconds the calibration's factors are not of ([Note: Sources of error]); None: they are."""

    @classmethod
    def of(cls, workload: Workload, hardware: Hardware, calibration: Calibration | None) -> Self:
        """What is known of ``workload`` on ``hardware``."""
        is_measured = workload.measured_on == hardware.name
        memory = MEMORY_MODEL if calibration is None and not is_measured else (1.0, 1.0)
        if calibration is None:
            compute = MEASURED_PHASES if is_measured else _modelled_compute(hardware)
            lanes = {**DATA_SHEETS, Lane.COMPUTE: compute}
            return cls(lanes=lanes, plan_std=DATA_SHEET_PLAN_STD, memory=memory)
        error_frac, run_std = calibration.iteration_error_frac, RUN_NOISE * calibration.iteration_noise_frac
        transfer_std, transfer_freedom = transfer_of(workload.model_name, calibration)
        return cls(
            calibration=calibration,
            lanes=dict.fromkeys(Lane, UNMEASURED_KIND),
            plan_std=UNKNOWN_PLAN_STD if error_frac is None else _without(error_frac, run_std),
            plan_freedom=None if error_frac is None else calibration.num_runs,
            transfer_std=transfer_std,
            transfer_freedom=transfer_freedom,
            run_std=run_std,
            memory=memory,
            phases=_other_phases(hardware, calibration, is_measured=is_measured),
        )

    def sources_of(self, kind: TaskKind) -> tuple[Source, ...]:
        """The factors that multiply a task of ``kind``; sources of one name are one."""
        return tuple(self._sources(kind))

    def _sources(self, kind: TaskKind) -> Iterator[Source]:
        known = self.calibration
        fitted = None if known is None else known.fitted_kind(kind)
        if known is None or fitted not in known.factors:
            # Copies in both directions go by one link.
            lane = Lane.H2D if kind.lane is Lane.D2H else kind.lane
            yield Source(f"{lane} of data sheets" if known is None else f"{lane} unmeasured", *self.lanes[lane])
            return
        assert fitted is not None
        if self.phases is not None and kind in OF_PHASES:
            yield Source("phases of another kind", *self.phases)
        yield Source.of_std(f"factor of {fitted}", min(known.factors[fitted].relative_std, _MOST_STD))
        if fitted is not kind:
            yield Source.of_std(f"{kind} as {fitted}", ALIKE_STD)

    def overhead_sources_of(self, kind: TaskKind) -> tuple[Source, ...]:
        """The factors of what a task of ``kind`` costs however small it is; those of its work unless it has others."""
        known = self.calibration
        fitted = None if known is None else known.fitted_kind(kind)
        if known is None or fitted is None or fitted not in known.overhead_std_s or not known.overhead(kind):
            return self.sources_of(kind)
        std = known.overhead_std_s[fitted] / known.overhead(kind)
        own = Source.of_std(f"overhead of {fitted}", min(std, _MOST_STD))
        return (own,) if fitted is kind else (own, Source.of_std(f"{kind} as {fitted}", ALIKE_STD))

    def arrival_source_of(self, kind: TaskKind) -> Source | None:
        """The factor of what bytes that have just come cost a task of ``kind``; None where they cost nothing."""
        known = self.calibration
        if known is None or not known.arrival(kind):
            return None
        fitted = known.fitted_kind(kind)
        std = known.arrival_std_s_per_byte.get(fitted, 0.0) / known.arrival(kind)
        return Source.of_std(f"arrivals of {fitted}", min(std, _MOST_STD))


def _modelled_compute(hardware: Hardware) -> Range:
    """Of compute whose seconds follow from operations and a description."""
    return CPU_DEVICE if hardware.device.kind is DeviceKind.CPU else DATA_SHEETS[Lane.COMPUTE]


def _other_phases(hardware: Hardware, calibration: Calibration, *, is_measured: bool) -> Range | None:
    """Of phases where they were timed and the factors are of modelled seconds, or the other way; None: alike."""
    low, high = _modelled_compute(hardware)
    if is_measured:
        return (1 / high, 1 / low) if calibration.of_modelled_phases else None
    return (low, high) if calibration.of_timed_phases else None


def _without(error_frac: float, run_std: float) -> float:
    """What is left of the errors of single runs without what a run itself scatters by: both vary by themselves."""
    return math.sqrt(max(0.0, error_frac**2 - run_std**2))


def transfer_of(model_name: str, calibration: Calibration) -> tuple[float, int | None]:
    """Standard deviation of the error that all plans for a model share, and how many errors it was found from.

    None for the second where it is stated instead of measured, or no such error is expected.
    """
    if model_name in calibration.fitted_to:
        return 0.0, None
    measured_frac = calibration.transfer_error_frac
    if measured_frac is None or len(calibration.fitted_to) < FEWEST_MODELS:
        return TRANSFER_STD, None
    return measured_frac, calibration.num_transfers

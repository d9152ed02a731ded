"""How much device memory to leave free: the memory of published runs beside predictions of it.

A plan whose expected need is the share 1 - m of the device runs if the true need is at most 1 / (1 - m) times the
expected one.  So a margin of m covers a run whose measured memory is at most 1 / (1 - m) times the predicted one.  That
is cautious: where errors do not grow with the plan, what was missed is compared with the device instead.

Plain loops tell of what a plan holds, since they hold what its account counts.  Runs of other systems tell of their
profiles besides, which a plan that is carried out here has no part in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...shared.methods.runtime_profile import Runtime
from .measured_runs import MEASURED_RUNS, MeasuredRun, MemoryKind
from .run_predictions import PredictedRun

_UNITS: Final = (2**30, 10**9, 2**20, 10**6)


@dataclass(frozen=True, slots=True)
class MemoryOfRun:
    """The memory of one published run, measured and predicted."""

    run: str
    """Its id, or the name of the figure."""
    kind: MemoryKind
    measured_bytes: int
    predicted_bytes: int
    """Of the same kind."""
    device_bytes: int
    differs: str | None
    """Why the run's memory is another one than that of the plan that is predicted; None where no reason is known."""
    system: Runtime = Runtime.OURS
    """Whose account it is."""

    @property
    def ratio(self) -> float:
        """Measured over predicted: above 1 where more was needed than expected."""
        return self.measured_bytes / self.predicted_bytes

    @property
    def least_ratio(self) -> float:
        """The same of the least that is published as ``measured_bytes``: 7.4 GiB may have been 7.35."""
        return (self.measured_bytes - half_digit_bytes(self.measured_bytes)) / self.predicted_bytes

    @property
    def is_of_plan(self) -> bool:
        """Whether it tells of what a plan holds: a plain loop that is not known to hold something else."""
        return self.system is Runtime.OURS and self.differs is None

    @property
    def missed_frac(self) -> float:
        """What was needed beyond the prediction, as a share of the device."""
        return (self.measured_bytes - self.predicted_bytes) / self.device_bytes


def memory_of_runs(predicted: Mapping[str, PredictedRun]) -> list[MemoryOfRun]:
    """Every run whose memory was published."""
    found = []
    for run in MEASURED_RUNS:
        if run.measured.memory is not None:
            kind, measured_bytes = run.measured.memory
            one = predicted[run.id]
            found.append(
                MemoryOfRun(
                    run.id,
                    kind,
                    measured_bytes,
                    memory_of_kind(one, kind),
                    one.device_bytes,
                    differs=run.memory_differs,
                    system=run.runtime,
                )
            )
    return found


def memory_of_kind(predicted: PredictedRun, kind: MemoryKind) -> int:
    """The predicted bytes of what a published memory counts.

    Allocated memory on CUDA comes as early and goes as late as in any timing: the guaranteed peak is expected.
    """
    match kind:
        case MemoryKind.ALLOCATED:
            return predicted.guaranteed_peak_bytes
        case MemoryKind.RESERVED:
            return predicted.reserved_bytes
        case MemoryKind.PROCESS:
            return predicted.needed_bytes


def half_digit_bytes(size_bytes: int) -> int:
    """Half of the last digit of a published size; at most 0.05 GiB, and 0 where it is no short figure of any unit."""
    for unit in _UNITS:
        for digits in (10, 100):
            last = unit / digits
            if abs(size_bytes - round(size_bytes / last) * last) <= 1:
                return int(last / 2)
    return 0


def quantiles_of_ratio(found: Iterable[MemoryOfRun], shares: Sequence[float]) -> list[float]:
    """The least ratios that these shares of the runs do not exceed."""
    return [float(ratio) for ratio in np.quantile([one.ratio for one in found], shares, method="inverted_cdf")]


def share_covered(found: Sequence[MemoryOfRun], margin_frac: float) -> float:
    """Share of the runs that a margin covers if errors grow with the plan, as far as published figures tell."""
    return sum(one.least_ratio <= 1 / (1 - margin_frac) for one in found) / len(found)


def share_within_device(found: Sequence[MemoryOfRun], margin_frac: float) -> float:
    """Share of the runs that a margin covers if errors do not grow with the plan."""
    return sum(one.missed_frac <= margin_frac for one in found) / len(found)


def num_refused(runs: Iterable[MeasuredRun], predicted: Mapping[str, PredictedRun], margin_frac: float) -> int:
    """Runs, all of which ran, whose expected need leaves less than ``margin_frac`` of the device free."""
    found = [predicted[run.id] for run in runs]
    return sum(one.needed_bytes > (1 - margin_frac) * one.device_bytes for one in found)

"""What is answered about a configuration file of another tool."""

from __future__ import annotations

from typing import ClassVar, Final

from pydantic import NonNegativeInt, PositiveInt

from ...shared.answers.search_result import Lack, SearchResult
from ...shared.basics.documents import Document, FrozenModel
from ...shared.foreign.asked_run import Reading
from ...shared.schema.record import Record

OWN_ROW: Final = "the run of the file"
"""What the run is called among the baselines of the search."""


class OtherReading(FrozenModel):
    """What is predicted where the run is read in another way."""

    name: str
    """The way, in words."""
    iteration_s: float
    guaranteed_peak_device_bytes: int


class Explanation(Document):
    """What a configuration file asks for, what that run takes, and what a plan of a search would do for it."""

    KIND: ClassVar[str] = "explanation"

    file: str
    reading: Reading
    settled: tuple[str, ...]
    """What the file does not say, and what was taken in its place, one sentence each."""
    differences: tuple[str, ...]
    """In what the plan of the prediction differs from the run, one sentence each."""
    configured: Record
    """The run as a plan here, predicted."""
    masters_bytes: NonNegativeInt = 0
    """Of float32 masters on every device that the prediction has and the run has not: its weights are 16 bits wide and
    stepped themselves."""
    lacking: tuple[Lack, ...] = ()
    """By how much the run does not fit, without these masters."""
    segments: str | None = None
    """Where the allocator's segments may not fit although what is allocated does: what happens, and what to do."""
    other_readings: tuple[OtherReading, ...] = ()
    """Where the file leaves open what a plan needs: the ends of what it may be."""
    found: SearchResult | None = None
    """What was searched within the same budgets; None where no plan fits, or where no search was asked for."""
    infeasible: str | None = None
    """Why no plan fits."""
    command: str
    """The command line that asks for the search."""
    num_ranks: PositiveInt

    @property
    def peak_bytes(self) -> int:
        """The run's device memory at the peak: that of the prediction, less masters that the run has not."""
        return self.configured.guaranteed_peak_device_bytes - self.masters_bytes

    @property
    def fits_as_plans_do(self) -> bool:
        """Whether the run fits as plans of the search do, which leave a margin if any can; false without a search."""
        return self.found is not None and any(one.fits for one in self.found.baselines if one.name == OWN_ROW)

    @property
    def speedup(self) -> float | None:
        """Tokens per second of the searched plan over those of the run; None without one, or where the run has none."""
        if self.found is None:
            return None
        return self.configured.iteration_s / self.found.prediction.iteration_s

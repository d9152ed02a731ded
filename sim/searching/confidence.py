"""How far predictions are trusted where they decide: the uncertainty of a comparison, and the margin of memory.

[Note: Uncertainty of a comparison]
Two plans of the same kind on the same machine do the same work in slightly different orders, and share nearly all of
the prediction's error.  Plans of different kinds use different parts of the machine (the device, the links, the host's
cores), whose errors are their own.  So a plan of a less simple kind is recommended only if it is faster than the
simplest one by more than the uncertainty; within a kind, the search's tolerance decides.

The figures come from pairs of runs that others have measured, and of the project's own: the error of the predicted
ratio of their times.  ``make published`` prints them.
"""

from __future__ import annotations

from typing import Final

from ...shared.schema.calibration import Calibration
from ...shared.schema.plan_kind import Uncertainty

DATA_SHEETS: Final = Uncertainty(device_frac=0.10, host_frac=0.26, source="data sheets")
"""Kept against checkpointed: 80 % of 25 published pairs stay within 10.1 %, of the 10 at equal micro-batches within
4.7 %.  None compares sharded plans with others at equal shape.  Offloaded against not: 5 of 7 pairs stay within 25.9 %;
the other two are DeepSpeed's, whose step overlaps with nothing (47.5 and 53.7 %)."""
CALIBRATED: Final = Uncertainty(device_frac=0.10, host_frac=0.10, source="calibrated")
"""80 % of 70 pairs of the bench of fidelity that differ in activations stay within 8.8 %, of 48 that differ in where
parameters lie within 9.0 %.  All of them ran on a CPU."""
NO_UNCERTAINTY: Final = Uncertainty(device_frac=0.0, host_frac=0.0, source="taken for exact")
"""With it the fastest plan is recommended, whatever it takes."""
DEFAULT_MARGIN_FRAC: Final = 0.05
"""Covers 9 of the 11 published peaks without a known difference by their ratio to the prediction, and all of them by
the share of the device that they exceed it by; of 112 runs that ran, it refuses 4 more than no margin does."""


def uncertainty_of(calibration: Calibration | None) -> Uncertainty:
    """What a comparison of predicted times is worth."""
    return DATA_SHEETS if calibration is None else CALIBRATED

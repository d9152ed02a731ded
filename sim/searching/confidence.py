"""How far predictions are trusted where they decide: the uncertainty of a comparison, and the margin of memory.

[Note: Uncertainty of a comparison]
Two plans of the same kind on the same machine do the same work in slightly different orders, and share nearly all of
the prediction's error.  Plans of different kinds use different parts of the machine (the device, the links, the host's
cores), whose errors are their own.  So a plan of a less simple kind is recommended only if it is faster than the
simplest one by more than the uncertainty; within a kind, the search's tolerance decides.

The figures come from pairs of runs that others have measured, and of the project's own: the error of the predicted
ratio of their times.  ``make published`` prints them.  A calibration that knows the errors of runs that it left out of
its fit has figures of its own: two plans are off by two such errors, each by itself, and by the factors of what one of
them uses and the other does not.

Both are for the choice between kinds, which is made before single plans are known.  Of the plans that an answer names,
each has the interval of its own time over that of the recommended one (``PlanOutcome.ratio_interval``).
"""

from __future__ import annotations

import math
from typing import Final

from ...shared.answers.plan_kind import Uncertainty
from ...shared.schema.calibration import Calibration
from ...shared.schema.schedule import Lane
from ..engine.error_sources import RUN_NOISE

DATA_SHEETS: Final = Uncertainty(device_frac=0.10, host_frac=0.26, source="data sheets")
"""Kept against checkpointed: 80 % of 10 published pairs stay within 5.3 %, of 26 whose micro-batches differ too within
8.5 %.  None compares sharded plans with others at equal shape.  In where parameters lie: 2 of 4 pairs stay within 18.5
%, a third within 25.4; the last is DeepSpeed's, whose host takes more than is known (36.3 %)."""
CALIBRATED: Final = Uncertainty(device_frac=0.12, host_frac=0.16, source="calibrated")
"""Of the bench of fidelity, 80 % of 522 pairs of which both or neither uses the host stay within 11.7 %, of 24 others
within 15.2 %.  All of them ran on a CPU, and most took plans drawn at random."""
NO_UNCERTAINTY: Final = Uncertainty(device_frac=0.0, host_frac=0.0, source="taken for exact")
"""With it the fastest plan is recommended, whatever it takes."""
DEFAULT_MARGIN_FRAC: Final = 0.05
"""Covers 19 of the 21 published peaks of plain loops without a known difference by their ratio to the prediction (one
of them, of 7.4 GiB, since it may have been 7.35), and all by the share of the device that they exceed it by; of 263
runs that ran, it refuses 2 more than no margin does."""


_COVERED: Final = 1.2815515655446004
"""Standard deviations that 80 % of a normal distribution lie within, as the figures above cover 80 % of pairs."""
_MOST_FRAC: Final = 0.5
"""No pair is said to be worth less."""
_OF_DEVICES: Final = frozenset({Lane.COMPUTE, Lane.COLLECTIVE})


def uncertainty_of(calibration: Calibration | None) -> Uncertainty:
    """What a comparison of predicted times is worth."""
    if calibration is None:
        return DATA_SHEETS
    if calibration.iteration_error_frac is None:
        return CALIBRATED
    of_run = RUN_NOISE * calibration.iteration_noise_frac
    own = math.sqrt(2) * math.hypot(calibration.iteration_error_frac, of_run)
    # Where one plan alone uses the host, what its lanes take has no counterpart that its errors cancel with.
    of_host = max(
        (factor.relative_std for kind, factor in calibration.factors.items() if kind.lane not in _OF_DEVICES),
        default=0.0,
    )
    return Uncertainty(
        device_frac=min(_MOST_FRAC, -math.expm1(-_COVERED * own)),
        host_frac=min(_MOST_FRAC, -math.expm1(-_COVERED * math.hypot(own, of_host))),
        source="calibrated, by the runs that were left out",
    )

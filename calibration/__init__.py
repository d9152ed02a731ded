"""Making the simulator agree with a machine: measuring it, fitting factors, laying predictions over measurements.

Importing it costs nothing: each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..shared.basics.lazy_face import lazy_face

if TYPE_CHECKING:
    from .fitting.budgeted import BudgetedSubject as BudgetedSubject
    from .fitting.calibrate import calibrate as calibrate
    from .fitting.fit import Pair as Pair
    from .fitting.fit import fit_calibration as fit_calibration
    from .fitting.replanning import Replanner as Replanner
    from .fitting.slowdowns import measure_slowdowns as measure_slowdowns
    from .fitting.subject import Subject as Subject
    from .fitting.updating import updated as updated
    from .one_call.plan import plan as plan
    from .one_call.train import train as train
    from .one_call.trained import Trained as Trained
    from .validation.fidelity import Fidelity as Fidelity
    from .validation.validate import Trial as Trial
    from .validation.validate import validate as validate

_HOMES = {
    "BudgetedSubject": "fitting.budgeted",
    "Fidelity": "validation.fidelity",
    "Pair": "fitting.fit",
    "Replanner": "fitting.replanning",
    "Subject": "fitting.subject",
    "Trained": "one_call.trained",
    "Trial": "validation.validate",
    "calibrate": "fitting.calibrate",
    "fit_calibration": "fitting.fit",
    "measure_slowdowns": "fitting.slowdowns",
    "plan": "one_call.plan",
    "train": "one_call.train",
    "updated": "fitting.updating",
    "validate": "validation.validate",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_face(__name__, _HOMES)

"""Looking for a better plan once the first steps have been measured.

Who looks is given by the caller: the runtime measures and changes plans, and knows no search.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...shared.basics.errors import ProtwinError
from ...shared.basics.progress import to_stderr
from ...shared.schema.plan import Plan
from ...shared.schema.record import Record
from .timed_iterations import LEAST_TIMED, WARM_UP

LEAST_STEPS = WARM_UP + LEAST_TIMED + 1
"""The first ones warm up, and the last one ends outside of what was measured."""

Replan = Callable[[Record], Plan | None]
"""From what was measured to a better plan; None: there is none, or nothing can be said.  May raise ProtwinError.

Where it has a function ``tell``, as ``protwin.calibration.Replanner`` may, that hears why a plan stays in spite of it.
"""


class Changing(Protocol):
    """A training that can be measured and can go on by another plan."""

    @property
    def num_iterations(self) -> int:
        """Completed iterations."""

    def record(self) -> Record:
        """What was measured.  Raises ProtwinError."""

    def change_plan(self, plan: Plan) -> None:
        """Go on by ``plan``.  Raises PlanError, with nothing changed."""


class Replanning:
    """Of one training, after ``after`` of its steps."""

    def __init__(self, after: int, replan: Replan, tell: Callable[[str], None] | None = None) -> None:
        """``tell`` hears why the plan stays where something stands against a change; None: standard error.

        Raises ProtwinError if ``after`` is too small for anything to be measured.
        """
        if after < LEAST_STEPS:
            raise ProtwinError(
                f"replan_after is {after}: {WARM_UP} steps warm up and {LEAST_TIMED} are the least to be timed. Give "
                f"{LEAST_STEPS} or more."
            )
        self._after = after
        self._replan = replan
        self._tell = tell or to_stderr

    def after_step(self, training: Changing) -> None:
        """A step has ended.  What stands against another plan is told, and training goes on by the one it has."""
        if training.num_iterations != self._after:
            return
        try:
            plan = self._replan(training.record())
            if plan is not None:
                training.change_plan(plan)
        except ProtwinError as error:
            self._tell(f"the plan stays as it is: {error}")

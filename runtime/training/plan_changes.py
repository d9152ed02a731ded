"""Parts of a training by one plan in the place of those by another ([Note: State on its way] in ``plan_change``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from ...shared.basics.errors import ProtwinError
from ...shared.schema.plan import Plan
from ..checkpoints.plan_change import CarriedState
from .assembly import Assembly, HeldModel, Parts


@dataclass(frozen=True, slots=True)
class ChangedParts:
    """What a training goes on with."""

    plan: Plan
    parts: Parts
    failure: ProtwinError | None = None
    """Why it is the plan that it had."""

    def check(self) -> None:
        """Raise what stood against the other plan."""
        if self.failure is not None:
            raise self.failure


def changed_parts(
    assemble: Callable[[Plan], Assembly], before: Plan, after: Plan, held: HeldModel, undo: ExitStack
) -> ChangedParts:
    """Undo the parts that hold the model by ``before``, whose lanes are idle, and build those by ``after``.

    If the device has no room for these after all, those by ``before`` are built again.  Raises what stands against
    that: the model has ordinary parameters then, and the optimizer's state is lost.
    """
    carried = CarriedState.taken(held.placed, held.state.optimizer)
    options = held.state.optimizer.options
    undo.close()
    try:
        found = ChangedParts(after, assemble(after).build())
    except ProtwinError as error:
        found = ChangedParts(before, assemble(before).build(), error)
    now = found.parts.held
    now.state.optimizer.options = options
    carried.place(now.placed, now.state.optimizer)
    return found

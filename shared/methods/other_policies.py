"""How other systems answer the compiler's questions: everything is gathered at once, nothing overlaps with a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

import numpy as np

from ..basics.errors import PlanError
from ..compile.family import Family
from ..compile.homes import Homes, visiting_bytes, widened_scalars
from ..compile.residency import Residency
from ..compile.sections import Sections
from ..compile.updates import Updates
from ..drafts.program import Draft, IntArray
from ..schema.schedule import TaskKind
from ..schema.workload import Phase
from ..verify.claim import Claim, reject
from ..verify.residency import check_gather_window
from ..verify.rules import Rule, Rules, Stage

_FLOAT32_BYTES: Final = 4


class RenewedAtOnce(Residency):
    """New values of what the host steps and the device keeps come before anything is computed."""

    def _renew(self) -> None:
        with self._at_start():
            super()._renew()
        self.draft.wait(np.full_like(self.renewals, self.sections.step_begin[0]), self.renewals)

    @contextmanager
    def _at_start(self) -> Iterator[None]:
        """Send what comes ahead of the first computation."""
        sent = self._send_position
        self._send_position = np.full_like(self.sections.begin_position, self.sections.begin_position[0] - 1)
        yield
        self._send_position = sent


class GatheredAtOnce(RenewedAtOnce):
    """All chunks are gathered when the step has ended, and nothing is computed before: each has a place of its own.

    So ZeRO-1 and ZeRO-2 gather what they have stepped (``all_gather_dp_groups`` in ``deepspeed/runtime/utils.py``).
    """

    _is_gathering = False

    def _gather(self) -> None:
        stays = self.stays
        first = np.flatnonzero(stays.earlier < 0)
        if len(first) < len(stays.chunk):
            raise PlanError(
                f"the plan has {self.family.n_buffer} places for {len(first)} chunks (n_buffer), but whoever gathers "
                f"all of them once per step has a place for each. Set n_buffer to {len(first)}."
            )
        self._is_gathering = True
        with self._at_start():
            super()._gather()
        self._is_gathering = False
        arrived = self.gathers.copy()
        arrived[self.exchanged] = self.exchanges
        self.draft.wait(np.full_like(arrived, self.sections.step_begin[0]), arrived)

    def _window(self, steps: IntArray) -> IntArray:
        window = super()._window(steps)
        return np.full_like(window, -1) if self._is_gathering else window


class SteppedAlone(Updates):
    """Nothing of the next iteration runs before the host has stepped everything."""

    def __init__(self, family: Family, draft: Draft, sections: Sections) -> None:
        super().__init__(family, draft, sections)
        begin = np.full_like(self.cpu_adams, sections.step_begin[0])
        draft.wait(begin, self.cpu_adams, is_previous=True)


class WidenedTogether(Updates):
    """Gradients of what the device steps are widened together, a number of scalars at most at a time."""

    num_widened: ClassVar[int]

    @property
    def widened_bytes(self) -> int:
        """With a float32 copy of the gradients."""
        stepped = ~self.family.leaves & self.family.facts.is_trainable
        scalars = int(widened_scalars(self.family)[stepped].sum())
        return super().widened_bytes + _FLOAT32_BYTES * min(scalars, self.num_widened)


class ZeroUpdates(WidenedTogether, SteppedAlone):
    """All of a parameter group (``step`` in DeepSpeed's stage_1_and_2.py)."""

    num_widened = 2**62


class Zero3Updates(WidenedTogether):
    """A sub-group (``sub_group_size`` in DeepSpeed's zero/config.py)."""

    num_widened = 10**9


class OffloadUpdates(Zero3Updates, SteppedAlone):
    """The same, and nothing overlaps with a step of the host."""


class MomentsVisit(Updates):
    """Moments are on the device for the step alone."""

    @property
    def widened_bytes(self) -> int:
        """With the moments of all that the device steps."""
        return super().widened_bytes + int(self._visiting_bytes.sum())

    @property
    def _visiting_bytes(self) -> IntArray:
        """(n,) moments of each chunk that the device steps."""
        stepped = ~self.family.leaves & self.family.facts.is_trainable
        found: IntArray = visiting_bytes(self.family)[stepped]
        return found

    def wire(self, homes: Homes) -> None:
        """Add what tasks read and write; moments come chunk by chunk."""
        super().wire(homes)
        levels = super().widened_bytes + self._visiting_bytes.cumsum()
        curve = tuple((place / len(levels), int(level)) for place, level in enumerate(levels, 1))
        self.draft.phases[int(self.device_adam[0])] = Phase(curve=curve)


def check_gathered_at_once(claim: Claim) -> None:
    """Every gather comes behind the last task of the iteration before, and ahead of the first computation."""
    begin, (adam,) = claim.steps[0][0], claim.tasks_of(TaskKind.DEVICE_ADAM)
    last = claim.steps[-1][-1]
    for gather in (*claim.tasks_of(TaskKind.GATHER), *claim.tasks_of(TaskKind.ALL_GATHER)):
        if not claim.before(gather.id, begin):
            reject(f"{gather.name} may run beside computations")
        if gather.chunk in claim.host_stepped:
            continue
        if not (claim.before(adam.id, gather.id, 1) or claim.before(last, gather.id, 1)):
            reject(f"{gather.name} may run before the iteration before has ended")


def check_stepped_alone(claim: Claim) -> None:
    """Every step of the host comes ahead of the next iteration's first computation."""
    begin = claim.steps[0][0]
    for step in claim.tasks_of(TaskKind.CPU_ADAM):
        if not claim.before(step.id, begin, 1):
            reject(f"{step.name} may run beside the next iteration")


def gathering_at_once(rules: Rules) -> tuple[Rule, ...]:
    """The rules of residency, for chunks that all come at once."""
    kept = tuple(rule for rule in rules.residency if rule.check is not check_gather_window)
    return (*kept, Rule(Stage.CHUNK_ORDER, check_gathered_at_once))


def stepping_alone(rules: Rules) -> tuple[Rule, ...]:
    """The rules of updates, where nothing overlaps with a step of the host."""
    return (*rules.updates, Rule(Stage.CHUNK_ORDER, check_stepped_alone))

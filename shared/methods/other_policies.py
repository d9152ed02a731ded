"""How other systems answer the compiler's questions: everything is gathered at once, nothing overlaps with a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import ClassVar, Final

import numpy as np

from ..basics.errors import PlanError
from ..compile.chunk_facts import integers
from ..compile.family import Family
from ..compile.homes import largest_with_master, visiting_bytes, widened_scalars
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
_FLOAT64_BYTES: Final = 8
_FLAT_BYTES: Final = 2
"""What has a float32 master is in 16 bits."""


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
    """Gradients of what the device steps are laid flat and then widened, a number of scalars at most at a time.

    The flat copy goes as soon as the float32 one is there (``_prepare_fp32_grad_for_sub_group`` in DeepSpeed's
    stage3.py, ``step`` in stage_1_and_2.py).  Before that, each gradient's norm is taken of a copy in float64
    (``get_grad_norm_direct`` in both), clipped or not.
    """

    num_widened: ClassVar[int]
    normed_in_parts: ClassVar[bool]
    """Whether norms are of each parameter's part, not of whole parameters in a rank's part of all."""

    @property
    def widened_bytes(self) -> int:
        """With a flat and a float32 copy of the gradients."""
        return max((super().widened_bytes, *accumulate(self._changes)))

    @property
    def phase_of_step(self) -> Phase | None:
        """Copy by copy."""
        changes = self._changes
        return Phase(curve=((1.0, self.widened_bytes),), changes=changes) if changes else super().phase_of_step

    @property
    def _changes(self) -> tuple[int, ...]:
        stepped = ~self.family.leaves & self.family.facts.is_trainable
        left, others_bytes = int(widened_scalars(self.family)[stepped].sum()), super().widened_bytes
        others = (others_bytes, -others_bytes) if others_bytes else ()
        normed_bytes = _FLOAT64_BYTES * min(left, self._most_normed)
        found = [normed_bytes, -normed_bytes] if left else []
        while left:
            count = min(left, self.num_widened)
            flat, wide = count * _FLAT_BYTES, count * _FLOAT32_BYTES
            found += (flat, wide, -flat, *others, -wide)
            left -= count
        return tuple(found)

    @property
    def _most_normed(self) -> int:
        """Scalars of the largest gradient of which a norm is taken."""
        family = self.family
        stepped = np.flatnonzero(~family.leaves & family.facts.is_trainable)
        divided = family.is_gathered[stepped] if self.normed_in_parts else np.zeros(len(stepped), dtype=np.bool_)
        sizes = integers(largest_with_master(family, chunk) for chunk in stepped.tolist())
        return int(np.where(divided, -(-sizes // family.facts.step.num_shards), sizes).max(initial=0))


class ZeroUpdates(WidenedTogether, SteppedAlone):
    """All of a parameter group (``step`` in DeepSpeed's stage_1_and_2.py)."""

    num_widened = 2**62
    normed_in_parts = False


class Zero3Updates(WidenedTogether):
    """A sub-group (``sub_group_size`` in DeepSpeed's zero/config.py)."""

    num_widened = 10**9
    normed_in_parts = True


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

    @property
    def phase_of_step(self) -> Phase | None:
        """Moments come chunk by chunk."""
        levels = super().widened_bytes + self._visiting_bytes.cumsum()
        curve = tuple((place / len(levels), int(level)) for place, level in enumerate(levels, 1))
        return Phase(curve=curve) if curve else None


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

"""A rule of the verifier, the rules of a training method by policy, and what ranks carry out together, each once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from ..layout.keeping import AS_PLANNED, Keeping
from ..schema.schedule import ChunkId, Section, TaskKind
from .claim import Claim, reject


class Stage(IntEnum):
    """When a rule is checked.  It may rely on everything that the rules of earlier stages state."""

    FORM = 0
    """Ids, names, counts: nothing can be looked up before."""
    PROGRAM = 1
    """What the compute lane runs."""
    CHUNKS = 2
    """Places of buffers, and single tasks on chunks."""
    ACTIVATIONS = 3
    """Single tasks on activations."""
    RANKS = 4
    """Single tasks that ranks carry out together."""
    DATA_FLOW = 5
    """From here on order: who uses a buffer before whom."""
    CHUNK_ORDER = 6
    """When chunks and their gradients come and go."""
    ACTIVATION_ORDER = 7
    """When activations leave and come back."""
    RANK_ORDER = 8
    """What collectives come before and after."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One statement about every schedule, which the docstring of ``check`` makes."""

    stage: Stage
    check: Callable[[Claim], None]
    """Raises ScheduleError where the statement does not hold."""
    kinds: tuple[TaskKind, ...] = ()
    """Task kinds that the rule answers for: tasks of these kinds are there exactly where it says, and do exactly what
    it says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a training method demands of its schedules, policy by policy.

    ``dataclasses.replace(FULL_TRAINING, updates=(*FULL_TRAINING.updates, Rule(...)))`` extends one policy.
    """

    sections: tuple[Rule, ...]
    """What computes, in which order."""
    residency: tuple[Rule, ...]
    """What lies where, when."""
    updates: tuple[Rule, ...]
    """What happens to a gradient until its parameter is new."""
    keeping: Keeping = AS_PLANNED
    """What lies otherwise than plans have it."""

    def in_order(self, *common: Rule) -> list[Rule]:
        """All rules by stage; within one stage the ``common`` ones first, then policy by policy."""
        return sorted((*common, *self.sections, *self.residency, *self.updates), key=lambda rule: rule.stage)

    def check_kinds(self, claim: Claim) -> None:
        """Raise ScheduleError unless some rule answers for every task's kind: no task goes unexamined."""
        answered = {kind for rule in self.in_order() for kind in rule.kinds}
        for task in claim.schedule.tasks:
            if task.kind not in answered:
                reject(f"{task.name} is of kind {task.kind}, for which no rule answers")


# -- collectives -------------------------------------------------------------------------------------------------

Meeting = tuple[TaskKind, ChunkId | None, Section | None, int]
"""A collective: kind, chunk or section, and micro-batch."""


def compare_meetings(claim: Claim, kinds: tuple[TaskKind, ...], expected: Iterable[Meeting]) -> None:
    """Raise ScheduleError unless the collectives of some kinds are the expected ones, each once.

    That every rank enters them in the same order needs no proof: all run one schedule, and it has one lane for them.
    """
    found = Counter((task.kind, task.chunk, task.section, task.micro_batch) for task in claim.tasks_of(*kinds))
    asked = Counter(expected)
    if found != asked:
        missing, extra = asked - found, found - asked
        reject(f"ranks do {_shown(extra)} too much and {_shown(missing)} too little together")


def _shown(meetings: Counter[Meeting]) -> str:
    shown = [
        f"{kind} {f'chunk {chunk}' if section is None else section} of micro-batch {micro_batch}"
        for kind, chunk, section, micro_batch in meetings
    ]
    return ", ".join(shown) or "nothing"

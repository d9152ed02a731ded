"""Metering of the CPU as a device: its ledger, which watches some iterations operation by operation (Note: Claims)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import torch

from ...shared.schema.schedule import Content, Task, TaskId
from ..devices.ledger import MemoryChange, MemoryLedger
from .iteration_memory import CountedMemory, Held, IterationMemory, Stretch, WatchedStretch
from .metering import METERED_ITERATIONS, Leaving, ListGradients, Metering, shapes_of

_KEPT: Final = 200
"""Iterations whose peaks are found when somebody asks for them."""
_NOTHING: Final = WatchedStretch({}, left_bytes=0, seconds=0.0, num_operations=0)


_Place = tuple[int, Hashable]
"""The number of a micro-batch in its iteration, and the shapes of its inputs."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """What a compute task holds beyond named allocations."""

    during_bytes: int
    """At most, while it runs."""
    after_bytes: int
    """When it has ended."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """A compute task begins or ends."""

    at_s: float
    task: Task
    shapes: Hashable
    """Of the micro-batch's inputs."""
    is_end: bool
    num_changes: int
    """Changes noted before it in this iteration."""
    num_operations: int
    held: Held
    """What operations hold, if the iteration is watched."""


class LedgerMetering(Metering):
    """The CPU's ledger, which watches the first iterations of every input shape and every ``meter_every``-th one.

    An iteration that nobody watches is watched from a later micro-batch on if inputs of its shapes never were there.
    """

    def __init__(
        self, ledger: MemoryLedger, meter_every: int | None, kept: Callable[[], Iterable[torch.Tensor]] = tuple
    ) -> None:
        """``kept`` lists what the model keeps in attributes, which is there before anybody watches."""
        self._ledger = ledger
        self._kept = kept
        self._meter_every = meter_every
        self._num_watched: dict[_Place, int] = {}
        self._counted: list[_Place] = []
        """Of the running iteration: the places that were watched in it."""
        self._micro_batch = 0
        """The number of the running one in its iteration."""
        self._claims: dict[Hashable, dict[TaskId, _Claim]] = {}
        self._claims_at_hand: dict[TaskId, _Claim] = {}
        """Claims of inputs of the present shapes."""
        self._shapes_of_iteration: Hashable = None
        self._shapes: Hashable = None
        """Of the running micro-batch's inputs."""
        self._claim_before_bytes: int | None = None
        """The claim between the iterations before the running one; None if none runs."""
        self._doing: dict[TaskId, str] = {}
        self._is_watching = False
        self._marks: list[_Mark] = []
        """Of the running iteration; ``end_iteration`` empties it."""
        self._first_watched = 0
        """The number of the first mark from which on the running iteration is watched."""
        self._staying: ListGradients = tuple
        """Gives the gradients that wait on the device."""
        self._stretches: dict[tuple[TaskId, bool], dict[Hashable, WatchedStretch]] = {}
        """What was watched last in each task (False) and after it (True), by the shapes of the inputs."""
        self._before: dict[Hashable, WatchedStretch] = {}
        """What operations hold between two iterations, by the shapes of the inputs of the second."""
        self._began: tuple[float, Held] | None = None
        """When the iteration before ended, and what was allocated by name then; None after a pause."""
        self._watched_peak_bytes = 0
        self._not_looked_at: deque[CountedMemory] = deque(maxlen=_KEPT)
        """Iterations that nobody watched, whose peaks have not been found yet."""

    @property
    def peak_bytes(self) -> int:
        """Highest level of all watched iterations so far, and of the latest others."""
        while self._not_looked_at:
            self._watched_peak_bytes = max(
                self._watched_peak_bytes, self._not_looked_at.popleft().over_time().peak_bytes
            )
        return self._watched_peak_bytes

    def begin_iteration(self, iteration: int, inputs: Sequence[torch.Tensor]) -> bool:
        """Start watching if the shapes are new, or it is time."""
        self._claim_before_bytes = self._ledger.claim_bytes
        shapes = self._shapes_of_iteration = self._take_shapes(inputs)
        self._micro_batch = 0
        is_due = self._meter_every is not None and iteration % self._meter_every == 0
        self._marks.clear()
        self._counted.clear()
        if self._num_seen >= METERED_ITERATIONS and not is_due:
            self._is_watching = False
            if self._began is None:
                self._begin_noting()
            return False
        self._watch(inputs)
        self._begin_noting()
        held = dict(self._ledger.watched)
        self._before[shapes] = WatchedStretch(held, left_bytes=held.get(None, 0), seconds=0.0, num_operations=0)
        return True

    @property
    def _num_seen(self) -> int:
        """How often inputs of the present shapes were watched in this place."""
        return self._num_watched.get((self._micro_batch, self._shapes), 0)

    def _count(self) -> None:
        place = self._micro_batch, self._shapes
        self._num_watched[place] = self._num_seen + 1
        self._counted.append(place)

    def _watch(self, inputs: Sequence[torch.Tensor]) -> None:
        """Watch every operation from now on.  Raises CpuOutOfMemoryError if ``inputs`` do not fit."""
        self._ledger.start_metering()
        self._is_watching, self._first_watched = True, len(self._marks)
        self._count()
        self._ledger.claim(0)
        self._ledger.adopt_inputs(inputs)
        self._ledger.adopt(self._kept(), Content.RESIDENT)
        # Of micro-batches that nobody watched.
        self._ledger.adopt(self._staying(), Content.GRADIENTS)
        self._ledger.reset_peak()

    def _begin_noting(self) -> None:
        _, named = self._ledger.take_changes()
        self._began = self._ledger.now_s, named

    def begin_micro_batch(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Claims go by the shapes of its own inputs; those that have none in this place are watched."""
        self._micro_batch += 1
        self._take_shapes(inputs)
        if self._is_watching:
            self._count()
            self._ledger.adopt_inputs(inputs)
        elif not self._num_seen:
            self._watch(inputs)
        return self._is_watching

    def _take_shapes(self, inputs: Sequence[torch.Tensor]) -> Hashable:
        shapes = self._shapes = shapes_of(inputs)
        self._claims_at_hand = self._claims.setdefault(shapes, {})
        return shapes

    def one_moment(self) -> AbstractContextManager[float]:
        """The ledger's."""
        return self._ledger.one_moment()

    def begin_task(self, task: Task) -> None:
        """Watched: begin a stretch.  Otherwise: claim what the task held when it was watched."""
        self._ledger.doing = self._doing.get(task.id) or self._doing.setdefault(task.id, f"running {task.name}")
        if self._is_watching:
            self._ledger.is_finding = True
            self._ledger.reset_watched_peak()
        else:
            self._ledger.claim(self._claim_of(task).during_bytes)
        self._mark(task, is_end=False)

    def end_task(self, task: Task, leaving: Leaving, staying: ListGradients) -> None:
        """Watched: what the task held beyond named allocations is its claim from now on.

        What leaves becomes a named allocation, which its offload frees: how long it stays differs from one iteration
        to the next.
        """
        self._staying = staying
        with self._ledger.one_moment():
            if self._is_watching:
                self._ledger.is_finding = False  # the loop may prepare its next batch from data on the host
                self._name(leaving)
                self._ledger.label(staying(), Content.GRADIENTS)
                claim = _Claim(self._ledger.watched_peak_bytes, self._ledger.watched_bytes)
                self._claims_at_hand[task.id] = claim
            else:
                self._ledger.claim(self._claim_of(task).after_bytes)
                if leaving:
                    self._name(leaving)
            self._mark(task, is_end=True)

    def _name(self, leaving: Leaving) -> None:
        for content, tensors in leaving.items():
            self._ledger.make_named(tensors, content)

    def _mark(self, task: Task, *, is_end: bool) -> None:
        ledger = self._ledger
        held = dict(ledger.watched) if self._is_watching else {}
        num_changes = len(ledger.changes or ())
        self._marks.append(_Mark(ledger.now_s, task, self._shapes, is_end, num_changes, ledger.num_operations, held))

    def _claim_of(self, task: Task) -> _Claim:
        """Of shapes that nobody has watched in this place, the largest of the others."""
        found = self._claims_at_hand.get(task.id)
        if found is None:
            others = [claims[task.id] for claims in self._claims.values() if task.id in claims]
            found = max(others, key=lambda claim: claim.during_bytes, default=_Claim(0, 0))
        return found

    # -- the iteration's memory --------------------------------------------------------------------------------------

    def end_iteration(self) -> IterationMemory | None:
        """The iteration's curve; see [Note: Curves of iterations that nobody watched] in ``iteration_memory``."""
        self._claim_before_bytes = None
        changes, named = self._ledger.take_changes()
        end_s, was_watched = self._ledger.now_s, self._is_watching
        if was_watched:
            self._note_stretches(changes, end_s)
            self._watched_peak_bytes = max(self._watched_peak_bytes, self._ledger.peak_bytes)
            self._stop_watching()
            self._ledger.claim(self._ledger.watched_bytes)
        began, self._began = self._began, (end_s, named)
        if began is None or not self._marks:
            return None
        memory = self._memory_since(began, changes, end_s)
        if not was_watched or self._first_watched:
            self._not_looked_at.append(memory)
        return memory

    def _note_stretches(self, changes: Sequence[MemoryChange], end_s: float) -> None:
        """What operations held, from each mark of the watched iteration to the next one."""
        left_bytes, watched = 0, self._marks[self._first_watched :]
        for mark, following in zip(watched, [*watched[1:], None], strict=False):
            if not mark.is_end:
                left_bytes = mark.held.get(None, 0)
            until_s = end_s if following is None else following.at_s
            until = len(changes) if following is None else following.num_changes
            last = self._ledger.num_operations if following is None else following.num_operations
            # What comes and goes at the very moment of the next mark belongs to what is held from there on.
            own = [c for c in changes[mark.num_changes : until] if not c.is_named and mark.at_s < c.at_s < until_s]
            stretch = WatchedStretch(
                held=mark.held,
                left_bytes=left_bytes,
                seconds=until_s - mark.at_s,
                num_operations=last - mark.num_operations,
                changes=tuple(
                    (c.at_s - mark.at_s, c.num_operations - mark.num_operations, c.content, c.more_bytes) for c in own
                ),
            )
            self._stretches.setdefault((mark.task.id, mark.is_end), {})[mark.shapes] = stretch

    def _memory_since(self, began: tuple[float, Held], changes: Sequence[MemoryChange], end_s: float) -> CountedMemory:
        begin_s, named = began
        before = self._before.get(self._shapes_of_iteration) or _largest(self._before.values())
        stretches = [Stretch(begin_s, self._marks[-1].task.name, before)]
        for mark in self._marks:
            of_shapes = self._stretches.get((mark.task.id, mark.is_end), {})
            found = of_shapes.get(mark.shapes) or _largest(of_shapes.values())
            stretches.append(Stretch(mark.at_s, mark.task.name, found))
        return CountedMemory(stretches, end_s, named, [change for change in changes if change.is_named])

    # -- ending ------------------------------------------------------------------------------------------------------

    def give_up_iteration(self) -> None:
        """As if it had not begun: it is watched again if it was, and the claim is what it was."""
        if self._is_watching:
            self._watched_peak_bytes = max(self._watched_peak_bytes, self._ledger.peak_bytes)
            for place in self._counted:
                self._num_watched[place] -= 1
        before_bytes = self._ledger.claim_bytes if self._claim_before_bytes is None else self._claim_before_bytes
        self.stop()
        self._ledger.claim(before_bytes)
        self._claim_before_bytes = None

    def stop(self) -> None:
        """Take the ledger off the thread's operations, note nothing and claim nothing for tasks that were."""
        self._stop_watching()
        self._ledger.claim(0)
        self._ledger.let_inputs_go()
        self._ledger.changes = None
        self._began = None

    def _stop_watching(self) -> None:
        self._is_watching = False
        self._ledger.stop_metering()


def _largest(stretches: Iterable[WatchedStretch]) -> WatchedStretch:
    """Of shapes that nobody has watched in a place, the one of the others that holds the most."""
    return max(stretches, key=lambda stretch: int(stretch.levels_bytes.max()), default=_NOTHING)

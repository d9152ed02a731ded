"""Which iterations have their memory watched, and what holds in the others.

[Note: Claims]
Watching every operation costs a few percent of an iteration, so it would disturb timings.  Shapes repeat, and equal
shapes allocate equally: the most that a compute task held in a watched iteration, beyond what is allocated by name, is
its *claim* in iterations of the same input shapes that nobody watches.  There the claim of the running task stands for
its operations, and the budget is enforced against claim plus named allocations.  From a task's end until the next one
begins the claim is what was left of it, since chunks may be gathered into what it gave back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ...shared.schema.record import Holding
from ...shared.schema.schedule import Content, Task, TaskId
from ..devices.device import TrainingDevice
from ..devices.ledger import MemoryLedger
from .recorder import MeteredMemory

Leaving = Mapping[Content, Sequence[torch.Tensor]]
ListGradients = Callable[[], Iterable[torch.Tensor]]
METERED_ITERATIONS: Final = 3
"""Iterations that are watched for every new shape of the model's inputs."""


class Metering(ABC):
    """Follows the device's memory through iterations."""

    peak_bytes: int = 0
    """Highest level of all watched iterations so far."""

    @abstractmethod
    def begin_iteration(self, iteration: int, inputs: Sequence[torch.Tensor]) -> bool:
        """An iteration begins on ``inputs``; says whether watching it disturbs its timing."""

    @abstractmethod
    def begin_micro_batch(self, inputs: Sequence[torch.Tensor]) -> None:
        """A later micro-batch of the iteration begins on ``inputs``."""

    @abstractmethod
    def begin_task(self, task: Task) -> None:
        """A compute task begins.  Raises the device's out-of-memory error if its claim does not fit."""

    @abstractmethod
    def end_task(self, task: Task, leaving: Leaving, staying: ListGradients) -> None:
        """The running compute task has ended.

        ``leaving`` is on its way to the host; ``staying()`` are the gradients that wait on the device.
        """

    @abstractmethod
    def end_iteration(self) -> MeteredMemory | None:
        """The iteration has ended; what was seen, if it was watched."""

    @abstractmethod
    def give_up_iteration(self) -> None:
        """The running iteration, if there is one, will not be completed: what was seen of it counts for nothing."""

    @abstractmethod
    def stop(self) -> None:
        """Stop watching, in whatever state.  Idempotent."""


def metering_of(device: TrainingDevice, meter_every: int | None) -> Metering:
    """The metering of a device: its ledger, or its allocator."""
    if device.ledger is not None:
        return LedgerMetering(device.ledger, meter_every)
    from .allocator_metering import AllocatorMetering

    return AllocatorMetering(device, meter_every)


def shapes_of(inputs: Sequence[torch.Tensor]) -> Hashable:
    """What iterations whose memory is equal have in common."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)


@dataclass(frozen=True, slots=True)
class _Claim:
    """What a compute task holds beyond named allocations."""

    during_bytes: int
    """At most, while it runs."""
    after_bytes: int
    """When it has ended."""


class LedgerMetering(Metering):
    """The CPU's ledger, which watches the first iterations of every input shape and every ``meter_every``-th one."""

    def __init__(self, ledger: MemoryLedger, meter_every: int | None) -> None:
        self._ledger = ledger
        self._meter_every = meter_every
        self._num_watched: dict[Hashable, int] = {}
        self._claims: dict[Hashable, dict[TaskId, _Claim]] = {}
        self._claims_at_hand: dict[TaskId, _Claim] = {}
        """Claims of inputs of the present shapes."""
        self._shapes_of_iteration: Hashable = None
        self._claim_before_bytes: int | None = None
        """The claim between the iterations before the running one; None if none runs."""
        self._doing: dict[TaskId, str] = {}
        self._is_watching = False
        self._tasks: list[tuple[int, str, int]] = []
        """(number of samples before it began, name, bytes that earlier operations left it) of every task of the
        watched iteration."""

    def begin_iteration(self, iteration: int, inputs: Sequence[torch.Tensor]) -> bool:
        """Start watching if the shapes are new, or it is time."""
        self._claim_before_bytes = self._ledger.claim_bytes
        shapes = self._shapes_of_iteration = self._take_shapes(inputs)
        seen = self._num_watched.get(shapes, 0)
        is_due = self._meter_every is not None and iteration % self._meter_every == 0
        if seen >= METERED_ITERATIONS and not is_due:
            return False
        self._num_watched[shapes] = seen + 1
        self._is_watching = True
        self._tasks.clear()
        self._ledger.claim(0)
        self._ledger.samples = []
        self._ledger.start_metering()
        self._ledger.adopt(inputs, Content.RESIDENT)
        self._ledger.reset_peak()
        return True

    def begin_micro_batch(self, inputs: Sequence[torch.Tensor]) -> None:
        """Claims go by the shapes of its own inputs."""
        self._take_shapes(inputs)
        if self._is_watching:
            self._ledger.adopt(inputs, Content.RESIDENT)

    def _take_shapes(self, inputs: Sequence[torch.Tensor]) -> Hashable:
        shapes = shapes_of(inputs)
        self._claims_at_hand = self._claims.setdefault(shapes, {})
        return shapes

    def begin_task(self, task: Task) -> None:
        """Watched: begin a stretch.  Otherwise: claim what the task held when it was watched."""
        self._ledger.doing = self._doing.get(task.id) or self._doing.setdefault(task.id, f"running {task.name}")
        if self._is_watching:
            self._tasks.append((len(self._ledger.samples or ()), task.name, self._ledger.alive.get(None, 0)))
            self._ledger.reset_watched_peak()
        else:
            self._ledger.claim(self._claim_of(task).during_bytes)

    def end_task(self, task: Task, leaving: Leaving, staying: ListGradients) -> None:
        """Watched: what the task held beyond named allocations is its claim from now on.

        What leaves becomes a named allocation, which its offload frees: how long it stays differs from one iteration
        to the next.
        """
        if self._is_watching:
            self._name(leaving)
            self._ledger.label(staying(), Content.GRADIENTS)
            claim = _Claim(self._ledger.watched_peak_bytes, self._ledger.watched_bytes)
            self._claims_at_hand[task.id] = claim
        else:
            self._ledger.claim(self._claim_of(task).after_bytes)
            if leaving:
                self._name(leaving)

    def _name(self, leaving: Leaving) -> None:
        for content, tensors in leaving.items():
            self._ledger.make_named(tensors, content)

    def _claim_of(self, task: Task) -> _Claim:
        """Of shapes that nobody has watched in this place, the largest of the others."""
        found = self._claims_at_hand.get(task.id)
        if found is None:
            others = [claims[task.id] for claims in self._claims.values() if task.id in claims]
            found = max(others, key=lambda claim: claim.during_bytes, default=_Claim(0, 0))
        return found

    def end_iteration(self) -> MeteredMemory | None:
        """The watched iteration's curve and peak."""
        self._claim_before_bytes = None
        if not self._is_watching:
            return None
        samples = self._ledger.samples or []
        peak_bytes = self._ledger.peak_bytes
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.stop()
        self._ledger.claim(self._ledger.watched_bytes)
        return MeteredMemory(samples, peak_bytes, *self._at_peak(samples))

    def give_up_iteration(self) -> None:
        """As if it had not begun: it is watched again if it was, and the claim is what it was."""
        if self._is_watching:
            self.peak_bytes = max(self.peak_bytes, self._ledger.peak_bytes)
            self._num_watched[self._shapes_of_iteration] -= 1
            self.stop()
        if self._claim_before_bytes is not None:
            self._ledger.claim(self._claim_before_bytes)
            self._claim_before_bytes = None

    def stop(self) -> None:
        """Take the ledger off the thread's operations."""
        self._is_watching = False
        self._ledger.stop_metering()
        self._ledger.samples = None

    def _at_peak(self, samples: Sequence[tuple[float, int]]) -> tuple[str, tuple[Holding, ...]]:
        """The task that ran at the peak, and what was alive: of what operations made, what earlier ones had left."""
        if not samples or not self._tasks:
            return "", ()
        place = max(range(len(samples)), key=lambda index: samples[index][1])
        at = next((task for task in reversed(self._tasks) if task[0] <= place), self._tasks[0])
        alive = dict(self._ledger.alive_at_peak)
        made_bytes = alive.pop(None, 0)
        left_bytes = min(made_bytes, at[2])
        alive[Content.ACTIVATIONS] = left_bytes
        holdings = [Holding(content=c, size_bytes=alive[c]) for c in Content if alive.get(c, 0) > 0]
        if made_bytes > left_bytes:
            holdings.append(Holding(content=None, size_bytes=made_bytes - left_bytes))
        return at[1], tuple(holdings)

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
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from ...shared.schema.schedule import Content, Task
from .iteration_memory import IterationMemory

Leaving = Mapping[Content, Sequence[torch.Tensor]]
ListGradients = Callable[[], Iterable[torch.Tensor]]
METERED_ITERATIONS: Final = 3
"""Iterations that are watched for every new shape of the model's inputs."""


class Metering(ABC):
    """Follows the device's memory through iterations."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Highest level of all iterations so far; of those that nobody watched, of the latest ones at least."""

    @abstractmethod
    def begin_iteration(self, iteration: int, inputs: Sequence[torch.Tensor]) -> bool:
        """An iteration begins on ``inputs``; says whether watching it disturbs its timing."""

    @abstractmethod
    def begin_micro_batch(self, inputs: Sequence[torch.Tensor]) -> bool:
        """A later micro-batch of the iteration begins on ``inputs``; says what ``begin_iteration`` says."""

    def one_moment(self) -> AbstractContextManager[Any]:
        """Within the block memory changes hands, at one moment."""
        return nullcontext()

    @abstractmethod
    def begin_task(self, task: Task) -> None:
        """A compute task begins.  Raises the device's out-of-memory error if its claim does not fit."""

    @abstractmethod
    def end_task(self, task: Task, leaving: Leaving, staying: ListGradients) -> None:
        """The running compute task has ended.

        ``leaving`` is on its way to the host; ``staying()`` are the gradients that wait on the device.
        """

    @abstractmethod
    def end_iteration(self) -> IterationMemory | None:
        """The iteration has ended; what is known of its memory."""

    @abstractmethod
    def give_up_iteration(self) -> None:
        """The running iteration, if there is one, will not be completed: what was seen of it counts for nothing."""

    @abstractmethod
    def stop(self) -> None:
        """Stop watching, in whatever state.  Idempotent."""


def shapes_of(inputs: Sequence[torch.Tensor]) -> Hashable:
    """What iterations whose memory is equal have in common."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)

"""Steps of CPU Adam that can be undone: which ones may begin, and what the latest of each chunk has overwritten.

[Note: Steps ahead]
CPU Adam steps a chunk as soon as its last gradients have arrived, long before the iteration is complete.  If it never
is, because memory ran out or somebody pressed Ctrl-C, these chunks are one step ahead of all others, and the model
belongs to no step.  So, where that is wanted, what a chunk and its optimizer's state held before their latest step is
kept on the host and given back.  That takes as much host memory again as the weights and the optimizer's state of
offloaded chunks, and a copy of both before each of their steps.  What the device steps in the end is not kept: it
waits until every chunk on the host has been stepped, after which nothing of the iteration can fail any more.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from typing import Any

import torch

from ..devices.lanes import Cancelled
from .chunk_optimizer import ChunkOptimizer


class StepGate:
    """Steps begin on a lane, iterations are given up by the compute thread; one of the two comes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[int, int] = {}
        """The latest step of every chunk, by its number."""
        self._first_refused: int | None = None

    def begin(self, chunk: int, number: int) -> None:
        """CPU Adam is about to step ``chunk`` for the iteration ``number``.  Raises Cancelled if that was given up."""
        with self._lock:
            if self._first_refused is not None and number >= self._first_refused:
                raise Cancelled("the iteration was given up")
            self._begun[chunk] = number

    def shut(self, number: int, *, may_have_begun: bool) -> list[int]:
        """Let no step of the iteration ``number`` begin any more; gives the chunks whose step has begun.

        If there are any, and ``may_have_begun`` is false, the gate stays open.
        """
        with self._lock:
            begun = sorted(chunk for chunk, latest in self._begun.items() if latest >= number)
            if may_have_begun or not begun:
                self._first_refused = number
            return begun

    def open(self) -> None:
        """The iteration begins anew."""
        with self._lock:
            self._first_refused = None
            self._begun.clear()


class LastStep:
    """What the optimizers of offloaded chunks and their weights held before their latest step."""

    def __init__(self) -> None:
        self._kept: dict[ChunkOptimizer, _Kept] = {}

    def before_step(self, optimizer: ChunkOptimizer) -> None:
        """``optimizer`` is about to step."""
        self._kept.setdefault(optimizer, _Kept()).take(optimizer)

    def take_back(self, optimizers: Iterable[ChunkOptimizer], *, num_completed: int) -> None:
        """Undo the latest step of those of ``optimizers`` that are ahead of ``num_completed`` iterations."""
        with torch.no_grad():
            for optimizer in optimizers:
                if optimizer.num_steps > num_completed:
                    self._kept[optimizer].give_back(optimizer)
                    optimizer.take_step_back()


class _Kept:
    """Of one optimizer.  Its tensors are made once and written before every step."""

    def __init__(self) -> None:
        self._weights: list[torch.Tensor] = []
        self._states: list[dict[str, Any]] = []
        self._options: list[dict[str, Any]] = []

    def take(self, optimizer: ChunkOptimizer) -> None:
        own = optimizer.stepped_tensors
        if not self._weights:
            self._weights = [torch.empty_like(tensor) for tensor in own]
            self._states = [{} for _ in optimizer.weights]
        for kept, tensor in zip(self._weights, own, strict=True):
            kept.copy_(tensor)
        for place, weight in enumerate(optimizer.weights):
            state = optimizer.optimizer.state.get(weight, {})
            self._states[place] = {key: _copied(value, self._states[place].get(key)) for key, value in state.items()}
        self._options = [_options_of(group) for group in optimizer.optimizer.param_groups]

    def give_back(self, optimizer: ChunkOptimizer) -> None:
        for kept, tensor in zip(self._weights, optimizer.stepped_tensors, strict=True):
            tensor.copy_(kept)
        for weight, kept_state in zip(optimizer.weights, self._states, strict=True):
            if not kept_state:
                optimizer.optimizer.state.pop(weight, None)
                continue
            state = optimizer.optimizer.state[weight]
            for key in state.keys() - kept_state.keys():
                del state[key]
            for key, value in kept_state.items():
                state[key] = _copied(value, state.get(key))
        for group, options in zip(optimizer.optimizer.param_groups, self._options, strict=True):
            group.update(options)


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copied(value, None) for key, value in group.items() if key != "params"}


def _copied(value: Any, into: Any) -> Any:
    """A copy of ``value``: in ``into`` if that is a tensor like it, else a new one."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if isinstance(into, torch.Tensor) and (into.shape, into.dtype) == (value.shape, value.dtype):
        return into.copy_(value)
    return value.detach().clone()

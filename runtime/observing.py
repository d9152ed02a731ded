"""What every section of an iteration does: its operations and its memory, seen by the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from ..shared.errors import WorkloadError
from ..shared.plan import ActivationMode
from ..shared.schedule import Section, TaskKind
from ..shared.workload import BlockId
from .batches import Batch, Loss, batch_tensors, loss_of
from .blocks import NamedBlock
from .ledger import MemoryLedger
from .operations import OperationTally, describe_operation
from .swapping import SwappableTally
from .tensors import storage_bytes, tensors_in
from .walk import SectionWalker

PhaseKey = tuple[TaskKind, Section]
_CURVE_STRETCHES: Final = 24
_FLOPS_PER_BYTE: Final = 10.0
"""Weighs an operation's arithmetic against its traffic when its share of a phase's time is estimated: the order of the
machine balance of CPUs and GPUs alike outside tensor cores.  It only places levels within a phase."""
_OPERATION_OVERHEAD: Final = 20_000.0
"""Bytes that an operation of no size counts for, for the same purpose."""


@dataclass
class Observation:
    """One section of one metered iteration."""

    start_bytes: int
    end_bytes: int = 0
    weights: list[float] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    adding_levels: list[int] = field(default_factory=list)
    """``levels``, had every gradient been added to one that was there before."""
    final_bytes: int = 0
    """Gradients that became final in this section so far, of parameters that had none when it began."""
    tally: OperationTally = field(default_factory=OperationTally)
    output_bytes: int = 0
    swappable_bytes: int = 0
    gradient_bytes: int = 0
    """Of parameters that had none when it began."""

    def curve(self) -> tuple[tuple[float, int], ...]:
        """The section's levels as at most ``_CURVE_STRETCHES`` stretches, each with its highest level."""
        return self._stretches(self.levels, self.end_bytes - self.start_bytes)

    def adding_curve(self) -> tuple[tuple[float, int], ...]:
        """``curve``, had every gradient been added to one that was there before; empty if none became final."""
        if self.gradient_bytes <= 0:
            return ()
        return self._stretches(self.adding_levels, self.end_bytes - self.start_bytes - self.gradient_bytes)

    def _stretches(self, levels: Sequence[int], net_bytes: int) -> tuple[tuple[float, int], ...]:
        if not levels:
            return ((1.0, net_bytes),) if net_bytes > 0 else ()
        total = sum(self.weights)
        stretches: list[tuple[float, int]] = []
        done = 0.0
        for weight, level in zip(self.weights, levels, strict=True):
            done += weight
            end = min(_CURVE_STRETCHES, int(_CURVE_STRETCHES * (done - weight / 2) / total) + 1) / _CURVE_STRETCHES
            if stretches and (stretches[-1][0] >= end or stretches[-1][1] == level):
                stretches[-1] = (max(stretches[-1][0], end), max(stretches[-1][1], level))
            else:
                stretches.append((end, level))
        stretches[-1] = (1.0, stretches[-1][1])
        return tuple(stretches)


class _Observer:
    """Splits a metered iteration into sections.

    A section's memory ends, and the next one's begins, with the next operation after the announcement: what the caller
    of a block holds until the block has returned, its input above all, goes with the block.
    """

    def __init__(self, ledger: MemoryLedger, model: nn.Module) -> None:
        self._ledger = ledger
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.sections: dict[PhaseKey, Observation] = {}
        self._current: Observation | None = None
        self._next: PhaseKey | None = None
        self._with_gradient: set[int] = set()
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
        ]
        ledger.before_operation = self._settle
        ledger.on_operation = self._operation

    def begin(self, kind: TaskKind, section: Section) -> None:
        self._settle()
        self._next = kind, section

    def end_backward(self) -> None:
        self._settle()
        self._end()

    def restart(self) -> None:
        """Forget what was seen: the next iteration counts."""
        self.sections.clear()
        self._with_gradient.clear()
        self._current = self._next = None

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _settle(self) -> None:
        """Begin the section that was announced."""
        key, self._next = self._next, None
        if key is not None:
            self._end()
            self._current = self.sections[key] = Observation(self._ledger.watched_bytes)
            self._current.gradient_bytes = -self._gradient_bytes()

    def _end(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.end_bytes = self._ledger.watched_bytes
            current.gradient_bytes += self._gradient_bytes()

    def _gradient_bytes(self) -> int:
        return storage_bytes(parameter.grad for parameter in self._parameters)

    def _operation(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        current = self._current
        if current is None:
            return
        operation = describe_operation(operator, args, kwargs, result)
        if operation is not None:
            current.tally.add(operation)
            weight = operation.flops / _FLOPS_PER_BYTE + operation.bytes_moved + _OPERATION_OVERHEAD
            current.weights.append(weight)
            level = self._ledger.watched_bytes - current.start_bytes
            current.levels.append(level)
            current.adding_levels.append(level - current.final_bytes)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """A gradient is final.  Were it added to another, both would be there until now, and then one of them."""
        current = self._current
        if current is None or id(parameter) in self._with_gradient:
            return
        self._with_gradient.add(id(parameter))
        if current.adding_levels:
            level = self._ledger.watched_bytes - current.start_bytes - current.final_bytes
            current.adding_levels[-1] = max(current.adding_levels[-1], level)
        current.final_bytes += storage_bytes([parameter.grad])


def observe_sections(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    blocks: Sequence[NamedBlock],
    mode: ActivationMode,
    on_iteration: Callable[[], None],
    *,
    passes: int,
) -> dict[PhaseKey, Observation]:
    """Metered iterations with every block in ``mode``; the last one counts.

    Real tensors take two, since the first may fill caches that the model keeps.
    """
    ledger = MemoryLedger()
    ledger.adopt([*model.parameters(), *model.buffers(), *batch_tensors(batch).values()])
    observer = _Observer(ledger, model)
    tallies = {index: SwappableTally(model) for index in range(len(blocks)) if mode is ActivationMode.KEEP}
    modes = [ActivationMode.SWAP if index in tallies else mode for index in range(len(blocks))]
    walker = SectionWalker(model, blocks, modes, observer, tallies)
    outputs = _OutputSizes(blocks)
    try:
        for _ in range(passes):
            observer.restart()
            with ledger.metering():
                value = loss_of(model, batch, loss)
                value.backward()  # type: ignore[no-untyped-call]
                del value
            for parameter in model.parameters():
                parameter.grad = None
            on_iteration()
    finally:
        walker.remove()
        observer.remove()
        outputs.remove()
    for index, size_bytes in enumerate(outputs.sizes):
        observation = observer.sections.get((TaskKind.FORWARD, BlockId(index)))
        if observation is None:
            raise WorkloadError(f"block {blocks[index].name} did not run in the model's forward. Name other blocks.")
        observation.output_bytes = size_bytes
        if index in tallies:
            observation.swappable_bytes = tallies[index].size_bytes
    return observer.sections


class _OutputSizes:
    """Bytes of the tensors that each block hands on, storages it was given itself left out."""

    def __init__(self, blocks: Sequence[NamedBlock]) -> None:
        self.sizes = [0] * len(blocks)
        self._handles = [
            block.module.register_forward_hook(self._measure(index), with_kwargs=True)
            for index, block in enumerate(blocks)
        ]

    def _measure(self, index: int) -> Callable[..., None]:
        def measure(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
            made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(output)}
            self.sizes[index] = sum(size for key, size in made.items() if key not in given)

        return measure

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

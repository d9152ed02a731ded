"""The tasks of the collective lane: what ranks make of their gradients together."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from functools import partial

import torch

from ...shared.schema.schedule import Content, Task, TaskKind
from ..chunks.chunk import DeviceChunk
from ..chunks.placed_model import PlacedModel
from ..devices.device import TrainingDevice
from ..model.nested_tensors import storage_bytes
from ..optimizers.non_finite import non_finite, refuse_of_ranks
from ..ranks.collectives import Collectives

Outgoing = MutableMapping[tuple[int, int, int], list[torch.Tensor | None]]
"""Gradients that have left their parameters, by iteration, micro-batch and chunk."""


class RankWork:
    """Averages gradients over ranks: those on their way to the host, and those that stay."""

    def __init__(
        self,
        placed: PlacedModel,
        device: TrainingDevice,
        collectives: Collectives,
        outgoing: Outgoing,
    ) -> None:
        """``outgoing`` has the gradients that leave."""
        self._placed = placed
        self._device = device
        self._collectives = collectives
        self._outgoing = outgoing
        self._staying: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        """Gradients that wait for the step on the device, by iteration and chunk: from ``lend`` (compute thread) to
        ``_average_staying`` (collective).  Taken when they are complete: stand-ins may be shown in their place soon."""

    def lend(self, task: Task, iteration: int) -> None:
        """The gradients that ``task`` adds up over ranks where they stay are complete."""
        assert task.chunk is not None
        chunk = self._placed.chunks[task.chunk]
        self._staying[iteration, task.chunk] = [parameter.grad for parameter in chunk.trainable]

    def work(self, task: Task, iteration: int) -> Callable[[], None]:
        """What the collective lane does for ``task``."""
        assert task.kind is TaskKind.ALL_REDUCE
        assert task.chunk is not None
        chunk = self._placed.chunks[task.chunk]
        if chunk.is_persistent:
            return partial(self._average_staying, chunk, iteration)
        return partial(self._average_leaving, chunk, (iteration, task.micro_batch, task.chunk))

    def _average_staying(self, chunk: DeviceChunk, iteration: int) -> None:
        gradients = self._staying.pop((iteration, chunk.chunk.id))
        own = list(gradients)

        def count(made: list[torch.Tensor]) -> None:
            if self._device.ledger is not None:
                self._device.ledger.adopt(made, Content.GRADIENTS)

        self._average(chunk, gradients, count)
        self._placed.receive(
            {
                parameter: gradient
                for parameter, before, gradient in zip(chunk.trainable, own, gradients, strict=True)
                if before is None and gradient is not None
            }
        )
        if self._placed.is_checking:
            self._placed.check_averaged(chunk.trainable, gradients)

    def _average_leaving(self, chunk: DeviceChunk, key: tuple[int, int, int]) -> None:
        def count(made: list[torch.Tensor]) -> None:
            if self._device.ledger is not None:
                for gradient in made:
                    self._device.ledger.allocate(storage_bytes([gradient]), "a gradient", Content.GRADIENTS)

        self._average(chunk, self._outgoing[key], count)

    def _average(
        self, chunk: DeviceChunk, gradients: list[torch.Tensor | None], count: Callable[[list[torch.Tensor]], None]
    ) -> None:
        """The means over ranks take the place of a chunk's ``gradients``; ``count`` is told of zeros that it makes.

        Raises NonFiniteGradientError, on all ranks, if one is not finite on any of them.
        """
        missing = self._agree(chunk, gradients)
        made = [zeros_like(chunk.trainable[place]) for place in missing]
        count(made)
        for place, zeros in zip(missing, made, strict=True):
            gradients[place] = zeros
        pairs = [(gradient, parameter) for gradient, parameter in zip(gradients, chunk.trainable, strict=True)]
        self._collectives.average([(gradient, like) for gradient, like in pairs if gradient is not None])

    def _agree(self, chunk: DeviceChunk, gradients: Sequence[torch.Tensor | None]) -> list[int]:
        """The places of gradients that other ranks have, but not this one.  Raises NonFiniteGradientError."""
        bad = frozenset(non_finite(gradients) if self._placed.is_checking else [])
        is_anywhere, not_finite = self._collectives.who_has(
            [gradient is not None for gradient in gradients], [place not in bad for place in range(len(gradients))]
        )
        found = [(self._placed.label_of(chunk.trainable[p]), rank) for p, rank in enumerate(not_finite)]
        refuse_of_ranks([(label, rank) for label, rank in found if rank is not None])
        return [place for place, there in enumerate(is_anywhere) if there and gradients[place] is None]

    def forget(self) -> None:
        """Let go of what has not been averaged."""
        self._staying.clear()


def zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros with the shape, the strides and the element type of ``parameter``, which may be away."""
    made = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device)
    return made.zero_()

"""Projections of what is stepped, chunk by chunk, where it lies ([Note: Subspaces], [Note: Order of projections])."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...shared.schema.schedule import ChunkId
from ...shared.schema.workload import SubspaceAxis
from ..osft.projection import project_
from .chunk import DeviceChunk


@dataclass(frozen=True, slots=True)
class _Pair:
    """A subspace of a chunk."""

    frozen: int
    """Which of ``DeviceChunk.parameters``."""
    trained: int
    """Which of ``DeviceChunk.trainable``."""
    axis: SubspaceAxis


class Projections:
    """Keeps what the chunks of a model train orthogonal to what they have frozen."""

    def __init__(self, chunks: Sequence[DeviceChunk], masters: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """``masters``: of narrower parameters that stay on the device."""
        self._chunks = {chunk.chunk.id: chunk for chunk in chunks}
        self._masters = masters
        self._pairs = {number: list(_pairs(chunk)) for number, chunk in self._chunks.items()}

    def project_staying_gradients(self) -> None:
        """The gradients that parameters of persistent chunks hold, on the compute thread."""
        for chunk, pair in self._staying():
            gradient = chunk.trainable[pair.trained].grad
            if gradient is not None:
                project_(gradient, chunk.parameters[pair.frozen], pair.axis)

    def project_leaving_gradients(self, number: ChunkId, gradients: Sequence[torch.Tensor | None]) -> None:
        """``gradients`` of the trainable parameters of a chunk that is on the device, on the compute thread."""
        chunk = self._chunks[number]
        for pair in self._pairs[number]:
            gradient = gradients[pair.trained]
            if gradient is not None:
                project_(gradient, chunk.parameters[pair.frozen], pair.axis)

    def project_staged_gradients(self, number: ChunkId, present: Sequence[bool]) -> None:
        """The sums of a chunk's gradients on the host; ``present`` says of which parameters there is one."""
        chunk = self._chunks[number]
        homes = chunk.stepped_values()
        for pair in self._pairs[number]:
            if present[pair.trained]:
                project_(chunk.staged[pair.trained], homes[pair.frozen], pair.axis)

    def project_staying_parameters(self) -> None:
        """The parameters of persistent chunks, behind their step, on the compute thread.

        Of a parameter with a master the master is projected, and then copied.
        """
        for chunk, pair in self._staying():
            parameter = chunk.trainable[pair.trained]
            target = parameter.data
            master = self._masters.get(parameter)
            _project_master(master, target, chunk.parameters[pair.frozen], pair.axis)

    def project_masters(self, number: ChunkId) -> None:
        """What the host has stepped of a chunk: its masters, and the narrower values that these are copied to."""
        chunk = self._chunks[number]
        homes = chunk.stepped_values()
        for pair in self._pairs[number]:
            weight, target = chunk.masters[pair.trained], chunk.targets[pair.trained]
            if target is None:
                _project_master(None, weight, homes[pair.frozen], pair.axis)
            else:
                _project_master(weight, target, homes[pair.frozen], pair.axis)

    def _staying(self) -> Iterator[tuple[DeviceChunk, _Pair]]:
        for number, chunk in self._chunks.items():
            if chunk.is_persistent:
                yield from ((chunk, pair) for pair in self._pairs[number])


def _project_master(
    master: torch.Tensor | None, target: torch.Tensor, frozen: torch.Tensor, axis: SubspaceAxis
) -> None:
    """Project ``target``, or the master that it is a copy of."""
    project_(target if master is None else master, frozen, axis)
    if master is not None:
        with torch.no_grad():
            target.copy_(master)


def _pairs(chunk: DeviceChunk) -> Iterator[_Pair]:
    place_of = {placed.index: place for place, placed in enumerate(chunk.chunk.parameters)}
    trainable = {id(parameter): place for place, parameter in enumerate(chunk.trainable)}
    for subspace in chunk.chunk.subspaces:
        trained = chunk.parameters[place_of[subspace.trained]]
        yield _Pair(place_of[subspace.frozen], trainable[id(trained)], subspace.axis)

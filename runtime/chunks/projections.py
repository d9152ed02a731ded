"""Projections of what is stepped, chunk by chunk, where it lies ([Note: Subspaces], [Note: Order of projections])."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...shared.layout.owners import Ownership, SentMatrix
from ...shared.schema.schedule import ChunkId, Content, TaskKind
from ...shared.schema.workload import Parameter, SubspaceAxis
from ..devices.device import TrainingDevice
from ..osft.exchange import Exchange
from ..osft.projection import project_
from ..ranks.collectives import Collectives
from .chunk import DeviceChunk, view_of
from .sharded_chunk import ShardedChunk


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


@dataclass(frozen=True, slots=True)
class _Stretch:
    """This rank's piece of a trained matrix that lies in parts."""

    chunk: ShardedChunk
    piece: int
    """Its number among the chunk's pieces."""


class OwnedProjections:
    """Projects the subspaces of chunks that lie in parts, of which this rank owns some.

    See [Note: Owners] in ``shared/layout/owners.py``.  Exchanges run on the thread of the collective lane, projections
    on the compute thread; the schedule has one after the other.
    """

    def __init__(self, chunks: Sequence[ShardedChunk], ownership: Ownership, device: TrainingDevice) -> None:
        """``chunks``: those of ``ownership``, on a rank of a group of as many."""
        group = chunks[0].between_steps
        rank, size = group.rank, group.num_ranks
        self._of = ownership
        self._device = device
        self._likes = {
            placed.index: parameter
            for chunk in chunks
            for placed, parameter in zip(chunk.chunk.parameters, chunk.parameters, strict=True)
        }
        self._frozen = Exchange(ownership.frozen, rank, size)
        self._gradients = Exchange(ownership.gradients, rank, size)
        self._stepped = Exchange(ownership.stepped, rank, size)
        self._together = Exchange((*ownership.frozen, *ownership.gradients), rank, size)
        """Frozen matrices and gradients at once."""
        self._own_frozen = [_own_frozen(chunks, ownership.parameters, one, rank) for one in ownership.frozen]
        self._own = [_own_piece(chunks, self._likes[one.index], one, rank) for one in ownership.gradients]
        self._room: dict[Content, torch.Tensor] = {}
        """What this rank owns, whole, while it is there: made and let go of by exchanges, or by the compute thread for
        them ([Note: Memory on one stream] in ``memory_events``)."""
        self._passing: dict[TaskKind, torch.Tensor] = {}
        """What passes in an exchange, as ``_room``."""
        self._counted: list[tuple[int, Content]] = []
        """What the device's account has of both."""

    # -- memory ------------------------------------------------------------------------------------------------------

    def make_room(self, kind: TaskKind) -> None:
        """Take the memory that an exchange allocates."""
        self._passing[kind] = self._memory(self._of.passing_bytes(self._sent(kind)))
        for content, size_bytes in self._making(kind):
            self._room[content] = self._memory(size_bytes)

    def let_go(self, kind: TaskKind) -> None:
        """Let go of what an exchange frees."""
        self._passing.pop(kind, None)
        for content in self._freeing(kind):
            self._room.pop(content, None)

    def forget(self) -> None:
        """Let go of everything; no lane runs any more."""
        self._room.clear()
        self._passing.clear()
        for size_bytes, content in self._counted:
            self._count(-size_bytes, content)
        self._counted.clear()

    def _memory(self, size_bytes: int) -> torch.Tensor:
        made = self._device.empty(size_bytes, "matrices of owners")
        if self._device.ledger is not None:
            # Counted by name, as the schedule has it.
            self._device.ledger.ignore([made])
        return made

    def _sent(self, kind: TaskKind) -> Sequence[SentMatrix]:
        if kind is TaskKind.GRADIENTS_TO_OWNERS:
            return *self._of.frozen, *self._of.gradients
        return self._of.gradients if kind is TaskKind.GRADIENTS_FROM_OWNERS else self._of.stepped

    def _making(self, kind: TaskKind) -> list[tuple[Content, int]]:
        """What lasts of what an exchange allocates."""
        if kind is TaskKind.GRADIENTS_TO_OWNERS:
            sizes = (self._of.whole_bytes(self._of.gradients), self._of.whole_bytes(self._of.frozen))
            return [(Content.OWNED_TRAINED, sizes[0]), (Content.OWNED_FROZEN, sizes[1])]
        is_out = kind is TaskKind.PARAMETERS_TO_OWNERS
        return [(Content.OWNED_TRAINED, self._of.whole_bytes(self._of.stepped))] if is_out else []

    def _freeing(self, kind: TaskKind) -> list[Content]:
        """What an exchange frees of what others have allocated."""
        if kind is TaskKind.GRADIENTS_FROM_OWNERS:
            return [Content.OWNED_TRAINED]
        is_last = kind is TaskKind.PARAMETERS_FROM_OWNERS
        return [Content.OWNED_TRAINED, Content.OWNED_FROZEN] if is_last else []

    def _count(self, size_bytes: int, content: Content) -> None:
        if self._device.ledger is None:
            return
        if size_bytes > 0:
            self._device.ledger.allocate(size_bytes, "matrices of owners", content)
        else:
            self._device.ledger.free(-size_bytes, content)

    def _begin(self, kind: TaskKind) -> None:
        """Count what an exchange allocates, and make it unless the compute thread has."""
        for content, size_bytes in (
            (Content.PASSING_PARTS, self._of.passing_bytes(self._sent(kind))),
            *self._making(kind),
        ):
            self._count(size_bytes, content)
            self._counted.append((size_bytes, content))
        if not self._device.runs_behind:
            self.make_room(kind)

    def _end(self, kind: TaskKind) -> None:
        gone = {Content.PASSING_PARTS, *self._freeing(kind)}
        for size_bytes, content in self._counted:
            if content in gone:
                self._count(-size_bytes, content)
        self._counted = [one for one in self._counted if one[1] not in gone]
        if not self._device.runs_behind:
            self.let_go(kind)

    # -- exchanges ---------------------------------------------------------------------------------------------------

    def exchange(self, kind: TaskKind, ranks: Collectives) -> None:
        """One of the exchanges of an iteration, with the ranks of the shard group."""
        self._begin(kind)
        passing = self._passing[kind]
        match kind:
            case TaskKind.GRADIENTS_TO_OWNERS:
                self._together.to_owners(
                    [*self._own_frozen, *self._own_gradients()], self._of_both, passing, ranks.exchange
                )
            case TaskKind.GRADIENTS_FROM_OWNERS:
                self._gradients.from_owners(self._whole_gradient, self._take_gradient, passing, ranks.exchange)
            case TaskKind.PARAMETERS_TO_OWNERS:
                self._stepped.to_owners(self._own_masters(), self._whole_stepped, passing, ranks.exchange)
            case _:
                assert kind is TaskKind.PARAMETERS_FROM_OWNERS
                self._stepped.from_owners(self._whole_stepped, self._take_master, passing, ranks.exchange)
        self._end(kind)

    def _own_gradients(self) -> list[torch.Tensor | None]:
        """None where no rank has a gradient: zeros take its place on the way."""
        return [None if own is None or not self._is_present(own) else own.chunk.staged[own.piece] for own in self._own]

    def _own_masters(self) -> list[torch.Tensor | None]:
        return [None if own is None else own.chunk.masters[own.piece] for own in self._own]

    @staticmethod
    def _is_present(own: _Stretch) -> bool:
        return bool(own.chunk.present) and own.chunk.present[own.piece]

    def _take_gradient(self, place: int, stretch: torch.Tensor) -> None:
        own = self._own[place]
        assert own is not None
        if self._is_present(own):
            own.chunk.staged[own.piece].view(torch.uint8).copy_(stretch)

    def _take_master(self, place: int, stretch: torch.Tensor) -> None:
        own = self._own[place]
        assert own is not None
        master, target = own.chunk.masters[own.piece], own.chunk.targets[own.piece]
        with torch.no_grad():
            master.view(torch.uint8).copy_(stretch)
            if target is not None:
                target.copy_(master)

    def _of_both(self, place: int) -> torch.Tensor:
        """Of frozen matrices and gradients together."""
        num_frozen = len(self._of.frozen)
        return self._whole_frozen(place) if place < num_frozen else self._whole_gradient(place - num_frozen)

    def _whole_frozen(self, place: int) -> torch.Tensor:
        return self._whole(Content.OWNED_FROZEN, self._frozen, self._of.frozen, place)

    def _whole_gradient(self, place: int) -> torch.Tensor:
        return self._whole(Content.OWNED_TRAINED, self._gradients, self._of.gradients, place)

    def _whole_stepped(self, place: int) -> torch.Tensor:
        return self._whole(Content.OWNED_TRAINED, self._stepped, self._of.stepped, place)

    def _whole(self, content: Content, of: Exchange, sent: Sequence[SentMatrix], place: int) -> torch.Tensor:
        begin = of.offsets[place]
        return self._room[content][begin : begin + sent[place].size_bytes]

    # -- projections -------------------------------------------------------------------------------------------------

    def project_gradients(self) -> None:
        """Those that this rank owns, on the compute thread."""
        self._project(self._gradients, self._of.gradients, self._whole_gradient)

    def project_parameters(self) -> None:
        """Parameters that this rank owns, or their masters, on the compute thread."""
        self._project(self._stepped, self._of.stepped, self._whole_stepped)

    def _project(self, of: Exchange, sent: Sequence[SentMatrix], whole: Callable[[int], torch.Tensor]) -> None:
        for place in of.owned:
            like = self._likes[sent[place].index]
            is_master = sent[place].item_bytes != like.element_size()
            values = view_of(whole(place), 0, like, torch.float32 if is_master else None)
            frozen = view_of(self._whole_frozen(place), 0, self._likes[self._of.frozen[place].index])
            project_(values, frozen, self._of.subspaces[place].axis)


def _own_frozen(
    chunks: Sequence[ShardedChunk], parameters: Sequence[Parameter], sent: SentMatrix, rank: int
) -> torch.Tensor | None:
    """This rank's stretch of a frozen matrix, where it lies for good."""
    for chunk in chunks:
        if chunk.chunk.id != sent.chunk:
            continue
        for name, _, first, scalars in chunk.own_scalars():
            if name == parameters[sent.index].name and scalars.numel():
                own = (first, first + scalars.numel())
                assert sent.ends[rank : rank + 2] == own, f"the parts of {name} differ"
                return scalars
    return None


def _own_piece(chunks: Sequence[ShardedChunk], parameter: torch.Tensor, sent: SentMatrix, rank: int) -> _Stretch | None:
    """This rank's piece of a trained matrix; None where it has none."""
    for chunk in chunks:
        if chunk.chunk.id != sent.chunk or not sent.bytes_of(rank):
            continue
        for piece, (other, stretch) in enumerate(zip(chunk.stepped, chunk.stepped_stretches, strict=True)):
            if other is parameter and stretch == slice(*sent.ends[rank : rank + 2]):
                return _Stretch(chunk, piece)
    assert not sent.bytes_of(rank), "parts differ"
    return None


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

"""The tasks of the collective lane: what ranks make of their gradients together."""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...shared.schema.schedule import OF_OWNERS, Content, Task, TaskId, TaskKind
from ..chunks.chunk import DeviceChunk
from ..chunks.clipping import Limited
from ..chunks.placed_model import PlacedModel
from ..chunks.sharded_chunk import ShardedChunk
from ..devices.device import TrainingDevice
from ..devices.lanes import WorkerLane
from ..model.nested_tensors import storage_bytes
from ..model.strides import copy_strided, in_memory_order
from ..optimizers.gradient_norms import ClippedNorm
from ..optimizers.non_finite import non_finite, refuse_of_ranks
from ..ranks.collectives import Collectives
from ..ranks.failures import let_go_of_groups, tell_failure

Outgoing = MutableMapping[tuple[int, int, int], list[torch.Tensor | None]]
"""Gradients that have left their parameters, by iteration, micro-batch and chunk."""


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory of the device that gradients are added up in, a tensor for each trained region of a chunk."""

    flats: list[torch.Tensor]
    """For those of all ranks' parts, one after the other."""
    parts: list[torch.Tensor]
    """For this rank's part of the sums."""


class RankWork:
    """Averages gradients over ranks: those on their way to the host, and those that stay."""

    def __init__(
        self,
        placed: PlacedModel,
        device: TrainingDevice,
        collectives: Collectives,
        outgoing: Outgoing,
        clipped: MutableMapping[tuple[int, Limited], ClippedNorm],
        *,
        norm_task: TaskId | None,
    ) -> None:
        """``outgoing`` has the gradients that leave; ``clipped`` gets the norms of all gradients, by iteration.

        ``norm_task`` adds up their parts, if ranks have parts of gradients.
        """
        self.norm_task = norm_task
        self.squares: dict[int, torch.Tensor] = {}
        """The sum of the squares of what this rank has of the gradients, by iteration: from the norm's task
        (cpu_optim) to ``_share_norm`` (collective)."""
        self.scattered: set[tuple[int, int, int]] = set()
        """The keys of ``outgoing`` that have this rank's part of gradients, added up: from ``_scatter`` (collective)
        to the offload (d2h)."""
        self._clipped = clipped
        self._leaving: threading.Thread | None = None
        """Closes groups when the lane is out of them."""
        self._placed = placed
        self._device = device
        self._collectives = collectives
        self._outgoing = outgoing
        self._share = 1 / collectives.world.num_ranks
        """Of one rank in a mean: sums are multiplied by it once."""
        self._rooms: dict[tuple[int, int, int], _Room] = {}
        """Memory that the compute thread has taken for what is flattened and added up, by iteration, micro-batch and
        chunk: from ``make_room`` (compute thread) to ``_scatter`` (collective).  Where streams run behind, alone
        ([Note: Memory on one stream] in ``memory_events``)."""
        self._parts: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        """This rank's parts of gradients that leave, added up within its shard group, by iteration, micro-batch and
        chunk: from ``_scatter`` to ``_replicate`` (both collective).  Of ranks in shard groups alone."""
        self._held: dict[tuple[int, TaskId], list[torch.Tensor]] = {}
        """What queued collectives still read and write, by iteration and task: from ``_scatter`` (collective) to
        ``let_go`` (compute thread).  Where streams run behind, alone."""
        self._staying: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        """Gradients that wait for the step on the device, by iteration and chunk: from ``lend`` (compute thread) to
        ``_average_staying`` (collective).  Taken when they are complete: stand-ins may be shown in their place soon."""

    def lend(self, task: Task, iteration: int) -> None:
        """The gradients that ``task`` adds up over ranks where they stay are complete."""
        assert task.chunk is not None
        chunk = self._placed.chunks[task.chunk]
        self._staying[iteration, task.chunk] = [parameter.grad for parameter in chunk.trainable]

    def make_room(self, task: Task, iteration: int) -> None:
        """On the compute thread: take the memory that ``task`` flattens gradients into and adds them up in."""
        assert task.chunk is not None
        chunk = self._placed.chunks[task.chunk]
        assert isinstance(chunk, ShardedChunk)
        self._rooms[iteration, task.micro_batch, task.chunk] = self._room(chunk, is_first=task.micro_batch == 0)

    def let_go(self, task: TaskId, iteration: int) -> None:
        """On the compute thread, which waits for ``task``: let go of what it has read."""
        self._held.pop((iteration, task), None)

    @staticmethod
    def _room(chunk: ShardedChunk, *, is_first: bool) -> _Room:
        return _Room(chunk.flats(), chunk.kept_parts() if chunk.is_on_device and is_first else chunk.parts())

    def work(self, task: Task, iteration: int) -> Callable[[], None]:
        """What the collective lane does for ``task``."""
        if task.kind in OF_OWNERS:
            assert self._placed.owned is not None
            return partial(self._placed.owned.exchange, task.kind, self._collectives.shard)
        if task.chunk is None:
            return partial(self._share_norm, iteration)
        chunk = self._placed.chunks[task.chunk]
        key = (iteration, task.micro_batch, task.chunk)
        if isinstance(chunk, ShardedChunk):
            if task.kind is TaskKind.ALL_GATHER:
                return partial(chunk.exchange, self._collectives.shard)
            if task.kind is TaskKind.ALL_REDUCE:
                return partial(self._replicate, chunk, key)
            return partial(self._scatter, chunk, key, task.id)
        if chunk.is_persistent:
            return partial(self._average_staying, chunk, iteration)
        return partial(self._average_leaving, chunk, key)

    def separate(self, error: BaseException, lane: WorkerLane | None) -> None:
        """No rank is to wait for this one any more: ``error`` has ended training here, and ``lane`` was cancelled.

        A group is closed when its thread is out of it: until then others may still be served.
        """
        world = self._collectives.world
        tell_failure(world.store, world.rank, error)
        let_go_of_groups(error)
        self._placed.separate()
        self._leaving = threading.Thread(target=self._leave, args=(lane,), name="protwin-leaving", daemon=True)
        self._leaving.start()

    def _leave(self, lane: WorkerLane | None) -> None:
        if lane is not None:
            lane.close()
        self._collectives.close()
        self._collectives.world.forget_groups()

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
            self._allocate(storage_bytes(made), Content.GRADIENTS)

        self._average(chunk, self._outgoing[key], count)

    def _scatter(self, chunk: ShardedChunk, key: tuple[int, int, int], task: TaskId) -> None:
        """Add a chunk's gradients up over ranks; this one's part of the mean leaves, or stays on the device."""
        gradients = self._outgoing[key]
        missing = self._agree(chunk, gradients)
        is_there = [gradient is not None or place in missing for place, gradient in enumerate(gradients)]
        keeps = chunk.is_on_device
        is_first = key[1] == 0
        parts_bytes = 0 if keeps and is_first else chunk.part_gradient_bytes
        flat_bytes = self._collectives.shard.num_ranks * chunk.part_gradient_bytes
        # Counted before anything is made: the budget may have no room.
        self._allocate(flat_bytes, Content.FLAT_GRADIENTS)
        try:
            self._allocate(parts_bytes, Content.REDUCED_GRADIENTS)
            try:
                runs_behind = self._device.runs_behind
                room = self._rooms.pop(key) if runs_behind else self._room(chunk, is_first=is_first)
                parts = room.parts
                if runs_behind:
                    # Before anything is queued: afterwards it would be too late for the first of them.
                    present = [gradient for gradient in gradients if gradient is not None]
                    self._held[key[0], task] = [*present, *room.flats, *parts]
                self._add_up(chunk, gradients, room)
                if keeps:
                    self._keep(chunk, parts, is_there, is_first=is_first)
                    del self._outgoing[key]
                else:
                    self._outgoing[key] = chunk.pieces_of(parts, is_there)
                    self.scattered.add(key)
                    if self._collectives.replica is not None:
                        self._parts[key] = parts
            finally:
                if key not in self.scattered:
                    self._free(parts_bytes, Content.REDUCED_GRADIENTS)
        finally:
            self._free(flat_bytes, Content.FLAT_GRADIENTS)

    def _add_up(self, chunk: ShardedChunk, gradients: list[torch.Tensor | None], room: _Room) -> None:
        """Fill the parts of ``room`` with this rank's of the means of ``gradients``, which go in the end.

        Of ranks in shard groups, with those of the sums over its group.  The gradients stay as long as the schedule
        says, although they have been laid flat: a device whose streams run behind cannot let them go earlier, and a
        stand-in for one needs no less memory than it.
        """
        flat = chunk.flattened(gradients, room.flats)
        for part, whole in zip(room.parts, flat, strict=True):
            self._collectives.shard.scatter(part, whole)
            if self._collectives.replica is None:
                part.mul_(self._share)
        size_bytes = storage_bytes(gradients)
        gradients.clear()
        self._free(size_bytes, Content.GRADIENTS)

    def _replicate(self, chunk: ShardedChunk, key: tuple[int, int, int]) -> None:
        """Add a part of a chunk's gradients up over shard groups, where it is: the mean over all ranks."""
        replica = self._collectives.replica
        assert replica is not None
        parts = chunk.kept_parts() if chunk.is_on_device else self._parts.pop(key)
        replica.add_up(parts)
        for part in parts:
            part.mul_(self._share)

    def _keep(
        self, chunk: ShardedChunk, parts: Sequence[torch.Tensor], is_there: Sequence[bool], *, is_first: bool
    ) -> None:
        """Parts stay on the device: the first micro-batch's where they are, and later ones' added to them."""
        if is_first:
            chunk.present = chunk.presence(is_there)
        else:
            chunk.add_parts(parts, is_there)

    def _share_norm(self, iteration: int) -> None:
        squares = self.squares.pop(iteration)
        # Shard groups have the same gradients, and so the same norm.
        self._collectives.shard.add_up([squares])
        self._clipped[iteration, None] = self._placed.clip_by(squares)

    def _allocate(self, size_bytes: int, content: Content) -> None:
        if self._device.ledger is not None:
            self._device.ledger.allocate(size_bytes, "what ranks add up", content)

    def _free(self, size_bytes: int, content: Content) -> None:
        if self._device.ledger is not None:
            self._device.ledger.free(size_bytes, content)

    def _average(
        self, chunk: DeviceChunk, gradients: list[torch.Tensor | None], count: Callable[[list[torch.Tensor]], None]
    ) -> None:
        """The means over ranks take the place of a chunk's ``gradients``; ``count`` is told of zeros that it makes.

        Raises NonFiniteGradientError, on all ranks, if one is not finite on any of them.
        """
        missing = self._agree(chunk, gradients)
        made: list[torch.Tensor] = []
        if missing:
            # Whoever consumes them is in the order of compute when they are freed.
            with self._device.in_compute_order():
                made = [zeros_like(chunk.trainable[place]) for place in missing]
        count(made)
        for place, zeros in zip(missing, made, strict=True):
            gradients[place] = zeros
        present = [gradient for gradient in gradients if gradient is not None]
        # Autograd gives a gradient the strides of its parameter; a hook may have exchanged it on one rank.
        ordered = [
            gradient if gradient.stride() == like.stride() else copy_strided(gradient, like)
            for gradient, like in zip(gradients, chunk.trainable, strict=True)
            if gradient is not None
        ]
        self._collectives.add_up([in_memory_order(gradient) for gradient in ordered])
        for gradient, summed in zip(present, ordered, strict=True):
            summed.mul_(self._share)
            if summed is not gradient:
                gradient.copy_(summed)

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
        """Let go of what has not been averaged; the lane has ended.  Where ranks part, wait until this one has left."""
        if self._leaving is not None:
            self._leaving.join()
        self._staying.clear()
        self._rooms.clear()
        self._parts.clear()
        self._held.clear()
        self.squares.clear()
        self.scattered.clear()


def zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros with the shape, the strides and the element type of ``parameter``, which may be away."""
    made = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device)
    return made.zero_()


def is_of_norm(task: Task) -> bool:
    """Whether it adds up the parts of the norm over ranks."""
    return task.kind is TaskKind.ALL_REDUCE and task.chunk is None

"""The ranks that share each sequence: a group of neighbours, in which the compute thread exchanges parts of tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ...shared.basics.errors import ScheduleError
from ..devices.device import TrainingDevice
from ..sequences.sharing import shared_sequences
from .collectives import Collectives
from .launch import by_rank
from .ordered_sums import is_ordered_here
from .world import World


class SequencePeers:
    """``Peers`` of this rank's sequence group.  The compute thread alone uses it, while lanes run.

    Each call raises RanksError as ``Collectives`` do.
    """

    def __init__(
        self,
        world: World,
        group: dist.ProcessGroup,
        pace: Callable[[float, int], None],
        stamp: Callable[[], Any],
    ) -> None:
        """``stamp`` gives a point in time of the device's stream (``TrainingDevice.stamp``)."""
        self._collectives = Collectives(world, group, pace)
        self._first = world.rank - self._collectives.rank
        self._stamp = stamp
        self._spans: list[tuple[Any, Any]] = []
        self.rank = self._collectives.rank
        self.num_ranks = self._collectives.num_ranks
        world.users.append(self.close)

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Row p of ``sent`` (P, n) goes to rank p; row p of ``received`` (P, n) comes from it.  Contiguous."""
        begin = self._stamp()
        sizes = [sent.nbytes // self.num_ranks] * self.num_ranks
        # A device's ledger sees neither: the library's own work, and copies for it (Note: Late threads).
        with torch.no_grad(), _disable_current_modes():
            ours, theirs = sent.view(-1).view(torch.uint8), received.view(-1).view(torch.uint8)
            if is_ordered_here(sent):
                own = torch.empty_like(theirs)
                self._collectives.exchange(own, ours.clone(), sizes, sizes)
                theirs.copy_(own)
            else:
                self._collectives.exchange(theirs, ours, sizes, sizes)
        self._spans.append((begin, self._stamp()))

    def add_up(self, value: torch.Tensor) -> None:
        """The sum over ranks, in their order, takes the place of ``value``, of no axis."""
        with torch.no_grad(), _disable_current_modes():
            self._collectives.add_up([value])

    def check_same(self, batch: Mapping[str, torch.Tensor | int]) -> None:
        """Raise ScheduleError, on all ranks of the group, unless all have the same numbers of these names."""
        with torch.no_grad(), _disable_current_modes():
            found = self._collectives.numbers(_checksum(batch))
        if len(set(found)) > 1:
            told = by_rank([f"checksum {number:08x}" for number in found], first=self._first)
            raise ScheduleError(
                f"ranks {self._first} to {self._first + self.num_ranks - 1} share sequences (sequence_ranks = "
                f"{self.num_ranks}), but were given different batches: {told}. Give each the batches of group "
                f"rank // {self.num_ranks}, whole."
            )

    def take_spans(self) -> list[tuple[Any, Any]]:
        """When exchanges since the last call began and ended, in the device's stamps."""
        found, self._spans = self._spans, []
        return found

    def close(self) -> None:
        """Let go of the group.  Idempotent."""
        self._collectives.close()


def _checksum(batch: Mapping[str, torch.Tensor | int]) -> int:
    """Of names, shapes, types and numbers.  It is taken on the host: the device has no memory for it."""
    found = 0
    for name, value in sorted(batch.items()):
        if isinstance(value, int):
            found = zlib.crc32(f"{name} {value}".encode(), found)
            continue
        found = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), found)
        found = zlib.crc32(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data, found)
    return found


@contextmanager
def sharing_sequences(model: nn.Module, world: World | None, device: TrainingDevice) -> Iterator[SequencePeers | None]:
    """Within the block, ranks of a sequence group share sequences of ``model``; None where each has its own."""
    group = None if world is None else world.sequence_group
    if world is None or group is None:
        yield None
        return
    peers = SequencePeers(world, group, device.pace_collective, device.stamp)
    del group
    try:
        with shared_sequences(model, peers):
            yield peers
    finally:
        peers.close()

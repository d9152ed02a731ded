"""Equal weights to begin with: rank 0's parameters, frozen ones too, and buffers become those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, TypeVar

import torch
import torch.distributed as dist

from ...shared.basics.errors import RanksError
from ..model.strides import in_memory_order, without_repeats
from .agreement import agreed
from .world import World

_T = TypeVar("_T")
_PIECE_BYTES: Final = 16 * 2**20
"""Bytes that are sent at once, so that gloo's own buffers stay small beside any model."""


def place_rank_0(world: World, tensors: Iterable[torch.Tensor]) -> None:
    """Let every one of ``tensors`` be rank 0's, bit for bit; to be called on all ranks.

    Shapes and element types are the same on all of them (``model_hash``).  Each tensor is written in place, and needs
    memory beside it only if its elements do not lie side by side: a copy.  Raises RanksError if a rank does not come.
    """
    with torch.no_grad():
        for tensor in tensors:
            own = without_repeats(tensor.detach())
            sent = own.contiguous()
            _broadcast(world, sent.view(-1))
            if sent is not own:
                own.copy_(sent)


class Wanted(Protocol):
    """Some scalars of one parameter, as they lie in memory."""

    @property
    def parameter(self) -> torch.Tensor:
        """It has values on rank 0; on other ranks nobody asks for them."""
        ...

    @property
    def place(self) -> torch.Tensor:
        """(n,) where they are to lie."""
        ...

    @property
    def stretches(self) -> Sequence[slice] | None:
        """Which of them each rank wants; None: all want all."""
        ...


class Rank0Values:
    """Gives all ranks the parameters of rank 0, which sends each of them what it wants and no more.

    Other ranks need no parameters of their own: theirs may be on the meta device.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def made(self, make: Callable[[], _T]) -> _T:
        """What ``make`` gives, once it has succeeded on all ranks."""
        return agreed(self._world, make)

    def fill(self, wanted: Sequence[Wanted]) -> None:
        """Send and receive, one parameter after the other.  Raises RanksError if a rank does not come."""
        for one in wanted:
            is_first = self._world.rank == 0
            hand_out(self._world, one, in_memory_order(one.parameter.detach()) if is_first else None)


def hand_out(world: World, one: Wanted, values: torch.Tensor | None, giver: int = 0) -> None:
    """Let every rank have what it wants of ``values`` (n,), which ``giver`` has; to be called on all ranks.

    They lie as the parameter does in memory; other ranks have None.  Raises RanksError if a rank does not come.
    """
    if one.stretches is None:
        if values is not None:
            one.place.copy_(values)
        _broadcast(world, one.place, giver)
    elif values is None:
        _receive(world, one.place, giver)
    else:
        for other, stretch in enumerate(one.stretches):
            if other != giver:
                _send(world, values[stretch], other)
        one.place.copy_(values[one.stretches[giver]])


def _broadcast(world: World, flat: torch.Tensor, giver: int = 0) -> None:
    source = dist.get_global_rank(world.control_group, giver)
    _in_pieces(flat, lambda piece: dist.broadcast(piece, src=source, group=world.control_group), writes=True)


def _send(world: World, flat: torch.Tensor, rank: int) -> None:
    group = world.control_group
    _in_pieces(flat, lambda piece: dist.send(piece, dist.get_global_rank(group, rank), group=group), writes=False)


def _receive(world: World, flat: torch.Tensor, giver: int) -> None:
    group = world.control_group
    _in_pieces(flat, lambda piece: dist.recv(piece, dist.get_global_rank(group, giver), group=group), writes=True)


def _in_pieces(flat: torch.Tensor, move: Callable[[torch.Tensor], object], *, writes: bool) -> None:
    """``move`` a contiguous (n,) tensor, as bytes on the host: gloo does not know every element type, nor device.

    ``writes``: whether that may change it.
    """
    data = flat.view(torch.uint8)
    for begin in range(0, data.numel(), _PIECE_BYTES):
        own = data[begin : begin + _PIECE_BYTES]
        piece = own.cpu()
        try:
            move(piece)
        except RuntimeError as error:
            raise RanksError(f"another rank ended while weights were sent: {error}.") from error
        if writes and piece is not own:
            own.copy_(piece)
